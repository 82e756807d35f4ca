"""The gate when the API server refuses, loses answers, cuts or stalls connections, restarts, or is away.

It goes on by itself and loses nothing; how often it asks meanwhile is bounded, as its docstring says. What is bounded
is judged by the requests that arrived, never by how long something took.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from tests import jobs
from tests.cluster.api import Object
from tests.cluster.cluster import Cluster
from tests.cluster.gate import Gate, account
from tests.cluster.namespaces import Namespace
from tests.faults.proxy import Proxy, Request, Rule

WATCH, LIST, LEASE = r"/workloads\?.*watch=true", r"/workloads\?limit=", "/leases"
LOST = "dispatch-admission: lost the leader-election Lease"


@contextlib.contextmanager
def gate_behind(proxy: Proxy, cluster: Cluster, namespace: Namespace, **options: Any) -> Iterator[Gate]:
    """A gate that leads and serves the namespace, through the proxy; no second pass comes to its help."""
    kubeconfig = proxy.kubeconfig(account(cluster))
    with cluster.controller(kubeconfig=kubeconfig, **{"resync": "10m", **options}) as gate:
        namespace.wait_served()
        cluster.wait(lambda: proxy.open_requests("GET", WATCH), "the gate watches", interval=0.05)
        yield gate


def trainjobs(namespace: Namespace) -> str:
    """The requests for single TrainJobs of a namespace: other tests' may not all be gone yet."""
    return f"/{namespace.name}/trainjobs/"


def pods(namespace: Namespace) -> str:
    """The lists of a job's pods that an approval rests on."""
    return f"/namespaces/{namespace.name}/pods"


def states(namespace: Namespace) -> str:
    """The writes to Workloads of a namespace."""
    return f"/{namespace.name}/workloads/.*/status"


def reserved(namespace: Namespace, **options: Any) -> str:
    """A job that has quota; what the gate does with it is not waited for."""
    job = jobs.submit(namespace, **options)
    wait_reserved(namespace, job)
    return job


def gated(namespace: Namespace) -> str:
    """A job that only waits for its start gate to open."""
    job: str = namespace.create(jobs.trainjob())["metadata"]["name"]
    namespace.cluster.wait(lambda: jobs.condition(namespace.workload(job), "QuotaReserved", "False"), f"{job} is gated")
    return job


def wait_reserved(namespace: Namespace, job: str) -> None:
    namespace.cluster.wait(lambda: jobs.condition(namespace.workload(job), "QuotaReserved"), f"{job} has quota")


def wait_hits(rule: Rule, count: int, cluster: Cluster) -> list[Request]:
    """Waits until a rule was applied so often; returns the requests."""
    cluster.wait(lambda: len(rule.hits) >= count, f"{count} requests meet {rule.kind} {rule.status}", interval=0.02)
    return list(rule.hits)


def most(requests: list[Request], *, first: float = 0.1) -> int:
    """How many requests one loop makes at the very most in the time between these: it starts at 0.1 s, doubles to 5 s,
    and its jitter is half at least. One more, since they are noted a little after they were sent."""
    window, at, delay, count = requests[-1].at - requests[0].at, 0.0, first, 2
    while (at := at + delay / 2) <= window:
        count, delay = count + 1, min(2 * delay, 5.0)
    return count


def reads(namespace: Namespace) -> list[str]:
    """The three reads that a decision rests on."""
    return [trainjobs(namespace), f"/{namespace.name}/jobsets/", rf"/{namespace.name}/pods\?"]


def raises(proxy: Proxy, job: str) -> int:
    """How often a job's count was raised; conflicts with Trainer's and Kueue's own writes are none."""
    return len([r for r in proxy.requests("PUT", f"/trainjobs/{job}") if r.server_status == 200])


def assert_admitted_once(namespace: Namespace, job: str, admission: int = 1) -> None:
    """The job runs, with this admission count everywhere it is told."""
    running = jobs.running(namespace, job, epoch=str(1_000_000 + admission))
    assert jobs.admission_of(namespace, job) == admission
    entry = jobs.check(namespace, job)
    assert (entry["state"], entry["message"]) == ("Ready", f"admission {admission}")
    assert len(running) == len(namespace.pods(job))


# --- the watch


def test_a_watch_that_cannot_be_reopened_is_tried_again_with_back_off(
    cluster: Cluster, proxy: Proxy, namespace: Namespace
) -> None:
    with gate_behind(proxy, cluster, namespace) as gate:
        refused = [proxy.answer(status, "GET", WATCH, times=1) for status in (429, 500, 503)]
        odd = (b"", b'{"type":"MODIFIED","object":{"kind":"Workl', b"<html>a load balancer's page</html>\n")
        refused += [proxy.answer(200, "GET", WATCH, times=1, body=body) for body in odd]
        proxy.cut("GET", WATCH)
        job = reserved(namespace)
        assert_admitted_once(namespace, job)
        hits = [hit for rule in refused for hit in rule.hits]
        assert len(hits) == 6
        assert len(hits) <= most(hits)
        # it took the watch up where it was, and listed nothing again
        versions = [int(request.query["resourceVersion"]) for request in proxy.requests("GET", WATCH)]
        assert versions == sorted(versions)
        assert versions[0] > 0
        assert len(proxy.requests("GET", LIST)) == 1
        assert gate.exit_code is None


def test_without_back_off_it_would_hammer(cluster: Cluster, proxy: Proxy, namespace: Namespace) -> None:
    with (
        gate_behind(proxy, cluster, namespace, guards_off=["back-off"]),
        proxy.answer(503, "GET", WATCH) as refused,
    ):
        proxy.cut("GET", WATCH)
        hits = wait_hits(refused, 30, cluster)
        assert len(hits) > most(hits)


def test_an_event_that_is_cut_in_two_is_not_lost(cluster: Cluster, proxy: Proxy, namespace: Namespace) -> None:
    proxy.cut_after(700, "GET", WATCH)  # a Workload has some thousand bytes: no event ever passes whole
    with gate_behind(proxy, cluster, namespace):
        job = reserved(namespace)
        cluster.wait(lambda: len(proxy.requests("GET", WATCH)) > 2, "events are cut")
        assert jobs.check(namespace, job)["state"] == "Pending"
        proxy.clear()
        assert_admitted_once(namespace, job)


@pytest.mark.parametrize("event", ["null", '"text"', "{}", '{"type":"ERROR","object":"text"}'])
def test_an_event_that_is_none_is_survived(cluster: Cluster, proxy: Proxy, namespace: Namespace, event: str) -> None:
    with gate_behind(proxy, cluster, namespace) as gate:
        proxy.answer(200, "GET", WATCH, times=1, body=f"{event}\n".encode())
        proxy.cut("GET", WATCH)
        gate.wait_log("an event without an object")
        assert_admitted_once(namespace, reserved(namespace))


def gone_event() -> bytes:
    status = b'{"kind":"Status","status":"Failure","reason":"Expired","message":"too old","code":410}'
    return b'{"type":"ERROR","object":' + status + b"}\n"


@pytest.mark.parametrize(("status", "body"), [(410, None), (200, gone_event())], ids=["status", "event"])
def test_a_version_that_is_too_old_starts_a_pass_at_once(
    cluster: Cluster, proxy: Proxy, namespace: Namespace, status: int, body: bytes | None
) -> None:
    with gate_behind(proxy, cluster, namespace):
        with proxy.answer(503, "GET", WATCH) as refused:
            proxy.cut("GET", WATCH)
            job = reserved(namespace)
            wait_hits(refused, 2, cluster)
            proxy.answer(status, "GET", WATCH, times=1, body=body)
        assert_admitted_once(namespace, job)
        assert len(proxy.requests("GET", LIST)) == 2


def test_versions_that_are_always_too_old_do_not_make_it_hammer(
    cluster: Cluster, proxy: Proxy, namespace: Namespace
) -> None:
    with gate_behind(proxy, cluster, namespace):
        with proxy.answer(410, "GET", WATCH) as gone:
            proxy.cut("GET", WATCH)
            hits = wait_hits(gone, 5, cluster)
            assert len(hits) <= most(hits) + 1  # the first pass is at once
            assert_admitted_once(namespace, reserved(namespace))  # the passes find it
        cluster.wait(lambda: proxy.open_requests("GET", WATCH), "the gate watches again")


@pytest.mark.parametrize("off", [False, True], ids=["noticed", "guard off"])
def test_a_silent_watch_is_noticed(cluster: Cluster, proxy: Proxy, namespace: Namespace, off: bool) -> None:
    silence = 1e6 if off else 3.0
    with gate_behind(proxy, cluster, namespace, settings={"Connection.SILENCE": silence}) as gate:
        with proxy.stall_open("GET", WATCH):
            watches = len(proxy.requests("GET", WATCH))
            job = reserved(namespace)
            if off:
                renewals = len(proxy.requests("PUT", LEASE))
                cluster.wait(lambda: len(proxy.requests("PUT", LEASE)) > renewals + 3, "6 s pass")
                assert len(proxy.requests("GET", WATCH)) == watches
                assert jobs.check(namespace, job)["state"] == "Pending"
                return
            gate.wait_log("msg=watch")
            assert_admitted_once(namespace, job)
        assert len(proxy.requests("GET", LIST)) == 1


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_silent_watch_is_noticed_within_75_seconds_and_an_idle_one_is_left_alone(
    cluster: Cluster, proxy: Proxy, namespace: Namespace
) -> None:
    with gate_behind(proxy, cluster, namespace) as gate:
        # The server sends a bookmark each minute, but none that is no newer than where the watch began: one change.
        gated(namespace)
        # Then nothing changes for three minutes.
        first = proxy.requests("GET", WATCH)[-1]

        def gaps() -> list[float]:
            return [later - before for before, later in itertools.pairwise(list(first.passed))]

        cluster.wait(lambda: len([gap for gap in gaps() if gap > 30]) >= 3, "three bookmarks pass", timeout=400)
        print(f"seconds between what passes on an idle watch: {[round(gap, 1) for gap in gaps()]}")
        assert max(gaps()) < 70
        assert proxy.open_requests("GET", WATCH) == [first]
        assert not [line for line in gate.log if "msg=watch" in line]
        with proxy.stall_open("GET", WATCH):
            last = first.passed[-1]
            job = reserved(namespace)
            cluster.wait(lambda: len(proxy.requests("GET", WATCH)) > 1, "the watch is opened again", timeout=100)
            took = proxy.requests("GET", WATCH)[1].at - last
            print(f"noticed after {took:.1f} s")
            assert took <= 75
            assert_admitted_once(namespace, job)


# --- reads


def test_a_read_is_repeated_with_back_off(cluster: Cluster, proxy: Proxy, namespace: Namespace) -> None:
    with gate_behind(proxy, cluster, namespace):
        for path in reads(namespace):
            for status in (500, 503):
                proxy.answer(status, "GET", path, times=1)
            proxy.cut_after(20, "GET", path, times=1)
            proxy.lose_request("GET", path, times=1)
            proxy.lose_answer("GET", path, times=1)
        job = reserved(namespace)
        assert_admitted_once(namespace, job)
        for path in reads(namespace):
            asked = proxy.requests("GET", path)[:6]
            assert [request.status for request in asked][:2] == [500, 503]
            assert [request.status for request in asked][3:] == [None, None, asked[5].server_status]
            assert len(asked) <= most(asked)
        assert raises(proxy, job) == 1


def test_nothing_is_repeated_sooner_than_the_server_asks(cluster: Cluster, proxy: Proxy, namespace: Namespace) -> None:
    with gate_behind(proxy, cluster, namespace):
        busy = proxy.answer(429, "GET", WATCH, times=2, headers={"Retry-After": "2"})
        proxy.cut("GET", WATCH)
        wait_hits(busy, 2, cluster)
        first, second = busy.hits
        assert second.at - first.at > 1.5  # 2, less what a busy machine may take to note the first
        busy = proxy.answer(429, "GET", trainjobs(namespace), times=2, headers={"Retry-After": "2"})
        job = reserved(namespace)
        assert_admitted_once(namespace, job)
        first, second = busy.hits
        third = proxy.requests("GET", trainjobs(namespace))[2]
        assert second.at - first.at > 1.5
        assert third.at - second.at > 1.5
        busy = proxy.answer(429, "PUT", trainjobs(namespace), times=2, headers={"Retry-After": "2"})
        assert_admitted_once(namespace, reserved(namespace))
        first, second = busy.hits
        assert second.at - first.at > 1.5


@pytest.mark.parametrize("answer", [{}, {"kind": "Status", "status": "Success"}, {"kind": "PodList", "items": []}])
def test_an_answer_that_is_no_list_is_no_proof_that_the_pods_are_gone(
    cluster: Cluster, proxy: Proxy, namespace: Namespace, answer: Object
) -> None:
    with gate_behind(proxy, cluster, namespace):
        odd = proxy.answer(200, "GET", pods(namespace), body=answer)
        job = reserved(namespace)
        wait_hits(odd, 2, cluster)
        assert jobs.check(namespace, job)["state"] == "Pending"
        assert jobs.admission_of(namespace, job) == 0
        odd.remove()
        assert_admitted_once(namespace, job)


@pytest.mark.parametrize("status", [410, pytest.param(503, marks=pytest.mark.long)])
def test_a_pass_that_fails_is_logged_and_the_next_one_comes(
    cluster: Cluster, proxy: Proxy, namespace: Namespace, status: int
) -> None:
    with proxy.answer(status, "GET", LIST) as refused:
        kubeconfig = proxy.kubeconfig(account(cluster))
        with cluster.controller(kubeconfig=kubeconfig, resync="2s") as gate:  # a read is patient for 20 s, then:
            line = gate.wait_log('msg="full pass"')
            assert "level=ERROR" in line
            assert f"HTTP {status}" in line
            hits = wait_hits(refused, 3, cluster)
            assert len(hits) <= most(hits) + 2
            refused.remove()
            assert_admitted_once(namespace, reserved(namespace))


# --- writes


def test_a_write_that_is_refused_is_decided_anew(cluster: Cluster, proxy: Proxy, namespace: Namespace) -> None:
    with gate_behind(proxy, cluster, namespace):
        for one, other in ((409, 500), (429, 503)):
            proxy.answer(one, "PUT", trainjobs(namespace), times=1)
            proxy.answer(other, "PUT", states(namespace), times=1)
        job = reserved(namespace)
        assert_admitted_once(namespace, job)
        assert raises(proxy, job) == 1
        for path, refused in ((trainjobs(namespace), [409, 429]), (states(namespace), [500, 503])):
            writes = proxy.requests("PUT", path)
            assert [request.status for request in writes][:2] == refused
            assert writes[-1].status == 200
            assert len(writes) <= most(writes)


def test_a_lost_answer_to_the_raise_skips_one_number(cluster: Cluster, proxy: Proxy, namespace: Namespace) -> None:
    proxy.lose_answer("PUT", trainjobs(namespace), times=1)
    with gate_behind(proxy, cluster, namespace):
        job = reserved(namespace)
        assert_admitted_once(namespace, job, admission=2)
        assert raises(proxy, job) == 2


def test_an_answer_to_the_raise_that_never_comes_skips_one_number(
    cluster: Cluster, proxy: Proxy, namespace: Namespace
) -> None:
    proxy.stall("PUT", trainjobs(namespace), times=1, acted=True)
    with gate_behind(proxy, cluster, namespace):
        job = reserved(namespace)
        assert_admitted_once(namespace, job, admission=2)
        assert raises(proxy, job) == 2


def test_a_lost_answer_to_the_approval_changes_nothing(cluster: Cluster, proxy: Proxy, namespace: Namespace) -> None:
    with gate_behind(proxy, cluster, namespace) as gate:
        lost = proxy.lose_answer("PUT", states(namespace), times=1)
        job = reserved(namespace)
        assert_admitted_once(namespace, job)
        assert [request.server_status for request in lost.hits] == [200]
        # the next admission has the next number: nothing of the first is left over
        other = jobs.preempt(namespace, job, cpu="4")
        namespace.delete("TrainJob", other)
        assert_admitted_once(namespace, job, admission=2)
        assert raises(proxy, job) == 2
        assert gate.exit_code is None


def test_a_lost_request_to_approve_does_not_raise_again(cluster: Cluster, proxy: Proxy, namespace: Namespace) -> None:
    with gate_behind(proxy, cluster, namespace):
        proxy.lose_request("PUT", states(namespace), times=2)
        job = reserved(namespace)
        assert_admitted_once(namespace, job)
        assert raises(proxy, job) == 1


def test_lost_answers_to_the_lease_and_the_check_are_survived(
    cluster: Cluster, proxy: Proxy, namespace: Namespace
) -> None:
    proxy.lose_answer("POST", LEASE, times=1)
    proxy.lose_answer("PUT", LEASE, times=1)
    check = proxy.lose_answer("PUT", f"/admissionchecks/{namespace.name}/status", times=1)
    with gate_behind(proxy, cluster, namespace, resync="2s") as gate:
        assert_admitted_once(namespace, reserved(namespace))
        assert [request.server_status for request in check.hits] == [200]
        assert gate.exit_code is None
        assert not proxy.requests("PUT", f"/admissionchecks/{namespace.name}/status")[
            1:
        ]  # it was written: the next pass sees that


# --- the server away


def test_away_for_less_than_the_renew_deadline_it_goes_on(cluster: Cluster, proxy: Proxy, namespace: Namespace) -> None:
    with gate_behind(proxy, cluster, namespace) as gate:
        job = gated(namespace)
        with proxy.away():
            jobs.open_gate(namespace, job)
            wait_reserved(namespace, job)
            gate.wait_log("msg=lease")  # the first renewal that failed: some 8 s are left
        assert_admitted_once(namespace, job)
        assert gate.exit_code is None
        assert len([line for line in gate.log if "msg=leading" in line]) == 1
        assert len(proxy.requests("GET", LIST)) == 1


@pytest.mark.parametrize("fault", ["away", "refusing", "stalling"])
def test_away_for_longer_it_exits_and_starts_anew(
    cluster: Cluster, proxy: Proxy, namespace: Namespace, fault: str
) -> None:
    faults: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
        "away": proxy.away,
        "refusing": lambda: proxy.answer(503),
        "stalling": proxy.stall,
    }
    deadline = 10 if fault == "away" else 6
    with gate_behind(proxy, cluster, namespace, settings={"RENEW_DEADLINE": deadline}) as gate:
        with faults[fault]():
            job = reserved(namespace)
            assert gate.wait_end() == 1
            assert [line for line in gate.log if line.endswith('level=INFO msg="stopped leading" identity=gate')]
            assert LOST in gate.log
        renewals = proxy.requests("", LEASE)
        renewed = [request.at for request in renewals if request.status in (200, 201)]
        assert len([request for request in renewals if request.at > renewed[-1]]) <= 7  # one each 2 s, for 10 s
        gate.start()  # its own Lease: there is nothing to wait for
        assert_admitted_once(namespace, job)


def test_a_restart_of_the_api_server_is_survived(cluster: Cluster, proxy: Proxy, namespace: Namespace) -> None:
    # How long a restart takes is the machine's business, so the deadline is out of the way here.
    with gate_behind(proxy, cluster, namespace, settings={"RENEW_DEADLINE": 300}) as gate:
        job = jobs.submit(namespace)
        (pod,) = jobs.running(namespace, job)
        cluster.pods.stick(pod)
        other = jobs.preempt(namespace, job, cpu="4")
        namespace.delete("TrainJob", other)
        jobs.wait_message(namespace, job, "waiting for 1 pods")
        cluster.kill("kube-apiserver")
        gate.wait_log("msg=lease")
        cluster.start("kube-apiserver")
        cluster.pods.unstick(pod)
        assert_admitted_once(namespace, job, admission=2)
        assert_admitted_once(namespace, reserved(namespace))
        assert gate.exit_code is None
        assert len([line for line in gate.log if "msg=leading" in line]) == 1


@pytest.mark.long
def test_a_paused_api_server_costs_the_lease_and_no_job(cluster: Cluster, namespace: Namespace) -> None:
    with cluster.controller() as gate:
        namespace.wait_served()
        job = jobs.submit(namespace)
        jobs.running(namespace, job)
        cluster.pause("kube-apiserver")
        assert gate.wait_end() == 1
        cluster.resume("kube-apiserver")
        assert LOST in gate.log
        gate.start()
        other = jobs.preempt(namespace, job, cpu="4")
        namespace.delete("TrainJob", other)
        assert_admitted_once(namespace, job, admission=2)


def test_a_kubeconfig_that_is_half_written_just_when_it_is_read_again_is_read_later(
    cluster: Cluster, proxy: Proxy, namespace: Namespace
) -> None:
    """It is read again when the server refuses the token. The client's loader trips over what it has then."""
    file = proxy.kubeconfig(account(cluster))
    whole = yaml.safe_load(file.read_text())
    with cluster.controller(kubeconfig=file, resync="10m"):
        namespace.wait_served()
        cluster.wait(lambda: proxy.open_requests("GET", WATCH), "the gate watches", interval=0.05)
        file.write_text(yaml.safe_dump({**whole, "users": [None]}))
        refused = proxy.answer(401, times=6)
        proxy.cut("GET", WATCH)
        job = jobs.submit(namespace)
        wait_hits(refused, 6, cluster)
        file.write_text(yaml.safe_dump(whole))
        jobs.running(namespace, job, epoch="1000001")
