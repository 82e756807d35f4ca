"""Leader election on a real Lease: who leads, from when on, and how leadership ends.

Candidates and the test share one machine's clock, so times in the Lease's record can be compared with the test's own.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import signal
import threading
from typing import Any

import pytest

from tests import jobs
from tests.cluster.api import Object
from tests.cluster.cluster import Cluster
from tests.cluster.gate import NAMESPACE, Gate, account
from tests.cluster.namespaces import Namespace
from tests.cluster.waiting import unique, wait
from tests.faults.proxy import Proxy, Request

LEASE = "/leases"
LOST = "dispatch-admission: lost the leader-election Lease"
HOUR = datetime.timedelta(hours=1)
QUICK = {"LEASE_DURATION": 8, "RENEW_DEADLINE": 6}  # in the same order as 15 and 10, where the order is what matters


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def written(moment: datetime.datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def record(cluster: Cluster, lease: str, namespace: str = NAMESPACE) -> Object:
    """What the Lease says."""
    spec: Object = cluster.get("Lease", lease, namespace)["spec"]
    return spec


def time_in(spec: Object, field: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(spec[field])


def held_by_another(cluster: Cluster, seconds: int, *, clock: datetime.timedelta = datetime.timedelta()) -> str:
    """A Lease that somebody else holds, whose clock is off by `clock`; returns its name."""
    name = f"lease-{unique()}"
    spec = {
        "holderIdentity": "another",
        "leaseDurationSeconds": seconds,
        "acquireTime": written(now() + clock),
        "renewTime": written(now() + clock),
        "leaseTransitions": 7,
    }
    lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}, "spec": spec}
    cluster.create(lease, NAMESPACE)
    return name


def change(cluster: Cluster, lease: str, **fields: Any) -> None:
    cluster.patch("Lease", lease, NAMESPACE, {"spec": fields})


def holder_is(cluster: Cluster, lease: str, identity: str, timeout: float = 90) -> Object:
    """Waits until `identity` holds the Lease; returns its record."""

    def spec() -> Object | None:
        found = record(cluster, lease)
        return found if found["holderIdentity"] == identity else None

    return cluster.wait(spec, f"{identity} holds {lease}", timeout, interval=0.05)


def candidate(cluster: Cluster, identity: str = "candidate", **options: Any) -> Gate:
    return cluster.controller(identity, **{"leads": False, **options})


def looked(proxy: Proxy, times: int) -> None:
    """Waits until the candidate behind the proxy has read the Lease so often."""
    wait(lambda: len(proxy.requests("GET", LEASE)) >= times, f"the candidate has looked {times} times", interval=0.05)


def lines(gate: Gate, text: str) -> list[str]:
    return [line for line in gate.log if text in line]


# --- the record


def test_the_record_is_as_client_go_writes_it(cluster: Cluster) -> None:
    with cluster.controller("first") as gate:
        spec = record(cluster, gate.lease)
        assert (spec["holderIdentity"], spec["leaseDurationSeconds"], spec["leaseTransitions"]) == ("first", 15, 0)
        for field in ("acquireTime", "renewTime"):
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", spec[field])
        later = cluster.wait(
            lambda: s if (s := record(cluster, gate.lease))["renewTime"] > spec["renewTime"] else None, "it renews"
        )
        assert later == {**spec, "renewTime": later["renewTime"]}


def test_what_others_have_written_into_the_lease_is_kept(cluster: Cluster) -> None:
    lease = held_by_another(cluster, 3600)
    # given up, as client-go does it when it is told to release on its end: nothing is waited for
    change(cluster, lease, holderIdentity="")
    cluster.patch("Lease", lease, NAMESPACE, {"metadata": {"annotations": {"kept": "yes"}}})
    with cluster.controller("next", lease=lease):
        found = cluster.get("Lease", lease, NAMESPACE)
        assert found["metadata"]["annotations"] == {"kept": "yes"}
        assert (found["spec"]["holderIdentity"], found["spec"]["leaseTransitions"]) == ("next", 8)


def test_the_flags_name_another_lease(cluster: Cluster, namespace: Namespace) -> None:
    arguments = ["--lease-namespace", namespace.name, "--lease-name=elsewhere"]
    with cluster.controller("mover", arguments=arguments) as gate:
        assert record(cluster, "elsewhere", namespace.name)["holderIdentity"] == "mover"
        assert cluster.find("Lease", gate.lease, NAMESPACE) is None


def test_a_missing_lease_namespace_is_logged_once_and_waited_for(cluster: Cluster, proxy: Proxy) -> None:
    name = f"later-{unique()}"
    arguments = ["-lease-namespace", name]
    with candidate(cluster, kubeconfig=proxy.kubeconfig(account(cluster)), arguments=arguments) as gate:
        cluster.wait(lambda: len(proxy.requests("POST", LEASE)) >= 2, "it has tried again")
        (line,) = lines(gate, "msg=lease")
        assert "level=ERROR" in line
        assert f'lease={name}/{gate.lease} error="namespaces \\"{name}\\" not found (HTTP 404)"' in line
        cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        gate.wait_log("msg=leading")
        cluster.delete("Namespace", name)


# --- when a candidate leads


def test_a_candidate_takes_over_when_the_leader_was_killed(
    cluster: Cluster, proxy: Proxy, namespace: Namespace
) -> None:
    with cluster.controller("first") as first:
        through = proxy.kubeconfig(account(cluster))
        with candidate(cluster, "second", lease=first.lease, kubeconfig=through) as second:
            namespace.wait_served()
            looked(proxy, 2)
            job = jobs.submit(namespace)
            jobs.running(namespace, job)
            # only the leader reconciles: the candidate has asked for nothing but the Lease
            assert all("/leases/" in request.path and request.method == "GET" for request in proxy.requests())

            first.kill()
            last = record(cluster, first.lease)
            spec = holder_is(cluster, first.lease, "second")
            passed = time_in(spec, "acquireTime") - time_in(last, "renewTime")
            print(f"the second led {passed.total_seconds():.1f} s after the first one's last renewal")
            assert passed.total_seconds() >= 15
            assert spec["leaseTransitions"] == 1
            second.wait_log("msg=leading")
            other = jobs.preempt(namespace, job, cpu="4")
            namespace.delete("TrainJob", other)
            jobs.running(namespace, job, epoch="1000002")
            assert lines(second, "msg=approved")


def test_with_the_election_off_two_lead(cluster: Cluster) -> None:
    with cluster.controller("first") as first, cluster.controller("second", lease=first.lease, guards_off=["lease"]):
        assert record(cluster, first.lease)["holderIdentity"] == "first"
        assert first.exit_code is None


def test_a_candidate_respects_the_duration_in_the_record(cluster: Cluster, proxy: Proxy) -> None:
    lease = held_by_another(cluster, 5)
    kubeconfig = proxy.kubeconfig(account(cluster))
    with candidate(cluster, lease=lease, kubeconfig=kubeconfig, settings={"LEASE_DURATION": 1}):  # its own is shorter
        # the holder lives: its record changes while the candidate looks on
        for looks in (1, 2):
            looked(proxy, looks)
            changed = now()
            change(cluster, lease, renewTime=written(changed))
        spec = holder_is(cluster, lease, "candidate")
        assert (time_in(spec, "acquireTime") - changed).total_seconds() >= 5
        assert spec["leaseTransitions"] == 8


@pytest.mark.long
def test_a_candidate_waits_for_40_seconds_when_the_record_says_so(cluster: Cluster, proxy: Proxy) -> None:
    lease = held_by_another(cluster, 40)
    with candidate(cluster, lease=lease, kubeconfig=proxy.kubeconfig(account(cluster))):
        looked(proxy, 7)  # for 20 s or so
        changed = now()
        change(cluster, lease, renewTime=written(changed))
        spec = holder_is(cluster, lease, "candidate", timeout=120)
        assert (time_in(spec, "acquireTime") - changed).total_seconds() >= 40


def test_by_its_own_duration_a_candidate_leads_beside_a_living_holder(cluster: Cluster) -> None:
    lease = held_by_another(cluster, 600)
    with candidate(cluster, lease=lease, settings={"LEASE_DURATION": 1}, guards_off=["record-duration"]):
        holder_is(cluster, lease, "candidate")  # ten minutes early


@pytest.mark.parametrize("clock", [-HOUR, HOUR], ids=["behind", "ahead"])
def test_the_holders_clock_does_not_matter(cluster: Cluster, clock: datetime.timedelta) -> None:
    created = now()
    lease = held_by_another(cluster, 4, clock=clock)
    with candidate(cluster, lease=lease):
        spec = holder_is(cluster, lease, "candidate")
        assert (time_in(spec, "acquireTime") - created).total_seconds() >= 4
        assert abs(time_in(spec, "renewTime") - now()) < HOUR / 2


def test_by_the_wall_clock_a_holder_whose_clock_is_behind_is_overthrown(cluster: Cluster) -> None:
    lease = held_by_another(cluster, 600, clock=-HOUR)
    with candidate(cluster, lease=lease, guards_off=["monotonic"]):
        holder_is(cluster, lease, "candidate")  # ten minutes early


# --- how leadership ends


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_stops_it_and_does_not_release_the_lease(cluster: Cluster, number: signal.Signals) -> None:
    with cluster.controller("leader") as gate:
        os.kill(gate.pid, number)
        assert gate.wait_end() == 0
        assert lines(gate, 'level=INFO msg="stopped leading" identity=leader')
        assert LOST not in gate.log
        assert record(cluster, gate.lease)["holderIdentity"] == "leader"


def test_a_candidate_stops_as_cleanly(cluster: Cluster, proxy: Proxy) -> None:
    lease = held_by_another(cluster, 600)
    with candidate(cluster, lease=lease, kubeconfig=proxy.kubeconfig(account(cluster))) as gate:
        looked(proxy, 1)
        assert gate.stop() == 0
        assert not lines(gate, "leading")


def test_it_exits_when_another_takes_the_lease(cluster: Cluster) -> None:
    with cluster.controller("leader") as gate:
        change(cluster, gate.lease, holderIdentity="usurper", renewTime=written(now()))
        assert gate.wait_end() == 1
        assert LOST in gate.log
        assert lines(gate, 'msg="stopped leading" identity=leader')
        assert record(cluster, gate.lease)["holderIdentity"] == "usurper"


@pytest.mark.parametrize("deadline", [6, 1e6], ids=["exits", "guard off"])
def test_it_exits_when_it_cannot_renew(cluster: Cluster, proxy: Proxy, namespace: Namespace, deadline: float) -> None:
    settings = {**QUICK, "RENEW_DEADLINE": deadline}
    with cluster.controller("first", kubeconfig=proxy.kubeconfig(account(cluster)), settings=settings) as first:
        namespace.wait_served()
        with candidate(cluster, "second", lease=first.lease) as second:
            proxy.stall(path=LEASE)  # the rest of the API answers
            if deadline == 6:
                assert first.wait_end() == 1
                assert LOST in first.log
                second.wait_log("msg=leading")
                ended, led = lines(first, "stopped leading")[0], lines(second, "msg=leading")[0]
                assert ended.split()[0] < led.split()[0]  # the times, of one clock
                return
            second.wait_log("msg=leading")
            # two lead: the first goes on, and listens to the server
            since = len(proxy.requests())
            cluster.wait(lambda: len(proxy.requests()) > since + 3, "the first makes its passes")
            assert first.exit_code is None


def test_a_leader_that_was_stopped_exits_and_its_late_write_is_refused(
    cluster: Cluster, proxy: Proxy, namespace: Namespace
) -> None:
    arrived, go = threading.Event(), threading.Event()

    def hold(_: Request) -> None:
        arrived.set()
        go.wait(120)

    with cluster.controller("first", kubeconfig=proxy.kubeconfig(account(cluster)), settings=QUICK) as first:
        namespace.wait_served()
        with candidate(cluster, "second", lease=first.lease) as second:
            late = proxy.call(hold, "PUT", f"/{namespace.name}/trainjobs/", times=1)
            job = jobs.submit(namespace)
            assert arrived.wait(60)
            first.pause()  # its raise is on the way
            stopped = now()
            second.wait_log("msg=leading")
            jobs.running(namespace, job, epoch="1000001")
            go.set()  # the raise arrives, after the other has raised
            cluster.wait(lambda: late.hits[0].server_status, "the late write is answered")
            assert late.hits[0].server_status == 409
            seen = len(proxy.requests())
            first.resume()
            assert first.wait_end() == 1
            print(f"it was stopped for {(now() - stopped).total_seconds():.0f} s")
            assert LOST in first.log
            for request in proxy.requests()[seen:]:
                if request.method != "GET":
                    assert json.loads(request.body)["metadata"]["resourceVersion"]
                    assert request.server_status in (None, 409)
            assert jobs.admission_of(namespace, job) == 1
            assert record(cluster, first.lease)["holderIdentity"] == "second"


def test_a_leader_that_was_stopped_for_too_long_does_not_renew(cluster: Cluster) -> None:
    with cluster.controller("leader", settings=QUICK) as gate:
        gate.pause()

        def old() -> Object | None:
            spec = record(cluster, gate.lease)
            return spec if (now() - time_in(spec, "renewTime")).total_seconds() > 7 else None

        last = cluster.wait(old, "the deadline is over")
        gate.resume()
        assert gate.wait_end() == 1
        assert LOST in gate.log
        assert record(cluster, gate.lease) == last  # nobody else has come, and still
