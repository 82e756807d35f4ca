"""The adapter when answers get lost, the server is busy, or somebody else is always quicker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import adapter
from adapter import Backend, Conflict, Handle, State, Unreachable
from tests import adapters
from tests.adapters import World
from tests.faults.proxy import Proxy, Request


@pytest.fixture
def world(world: World, proxy: Proxy) -> World:
    return world.through(proxy)


@pytest.fixture
def plain(plain: World, proxy: Proxy) -> World:
    return plain.through(proxy)


WRITES = [("POST", "/trainjobs"), ("PUT", "/trainjobs/"), ("PUT", "/workloads/"), ("DELETE", "/trainjobs/")]
FAULTS: dict[str, Callable[[Proxy, str, str], Any]] = {
    "the answer is lost": lambda proxy, method, path: proxy.lose_answer(method, path, times=1),
    "the answer is cut": lambda proxy, method, path: proxy.cut_after(40, method, path, times=1),
    "the request is lost": lambda proxy, method, path: proxy.lose_request(method, path, times=2),
    "the server is busy": lambda proxy, method, path: proxy.answer(
        429, method, path, times=2, headers={"Retry-After": "1"}
    ),
    "the server fails": lambda proxy, method, path: proxy.answer(500, method, path, times=2),
    "the server is not ready": lambda proxy, method, path: proxy.answer(503, method, path, times=2),
}


def whole_life(world: World) -> None:
    """One job, from its start to its stop."""
    spec = world.spec()
    handle = world.backend.start(spec)
    assert world.namespace.pods() == []
    world.backend.open(handle)
    world.running(handle)
    assert len(world.namespace.list("TrainJob")) == 1
    assert world.backend.start(spec) == handle
    world.backend.stop(handle)
    assert world.left(handle.job) == []
    assert world.pods_created() == 2


@pytest.mark.parametrize("fault", FAULTS)
def test_a_write_is_done_once_whatever_becomes_of_its_answer(world: World, proxy: Proxy, fault: str) -> None:
    """Each kind of write meets the fault, the first time it is made."""
    rules = [FAULTS[fault](proxy, method, path) for method, path in WRITES]
    whole_life(world)
    assert [bool(rule.hits) for rule in rules] == [True, True, world.mode == "kueue", True]


@pytest.mark.parametrize(
    "fault", ["the answer is lost", "the answer is cut", "the request is lost", "the server fails"]
)
def test_a_read_is_made_again(world: World, proxy: Proxy, fault: str) -> None:
    paths = [r"/clustertrainingruntimes/", r"/trainjobs/", r"/pods\?", r"/jobsets\?", r"/jobs\?", r"/workloads\?"]
    rules = [FAULTS[fault](proxy, "GET", path) for path in paths]
    whole_life(world)
    assert [bool(rule.hits) for rule in rules] == [True] * 5 + [world.mode == "kueue"]


@pytest.mark.parametrize("acted", [False, True])
def test_a_write_that_hangs_is_looked_up(world: World, proxy: Proxy, *, acted: bool) -> None:
    spec = world.spec()
    proxy.stall("POST", "/trainjobs", times=1, acted=acted)
    handle = world.backend.start(spec)
    assert world.backend.find(spec.job) == (handle,)


def test_a_write_that_arrives_late_changes_nothing(plain: World, proxy: Proxy) -> None:
    """An `open` that was given up arrives at the server when the job has long been stopped and started again."""
    spec = plain.spec()
    handle = plain.backend.start(spec)
    late: list[Request] = []
    with proxy.call(late.append, "PUT", "/trainjobs/"):
        plain.backend.open(handle)
    plain.backend.stop(handle)
    again = plain.backend.start(spec)
    api, path = plain.cluster.api, late[0].path
    with pytest.raises(Exception, match="409"):
        api.request("PUT", path, late[0].body)
    assert plain.backend.inspect(again).state is State.GATED


# --- somebody else writes, too


def test_a_conflict_is_decided_anew_on_the_fresh_object(world: World, proxy: Proxy) -> None:
    handle = world.started()
    notes = iter(range(100))

    def annotate(_: Request) -> None:
        world.annotate(handle, "example.org/note", str(next(notes)))

    rule = proxy.call(annotate, "PUT", "/trainjobs/", times=4)
    world.backend.open(handle)
    assert [request.status for request in proxy.requests("PUT", "/trainjobs/")] == [409] * 4 + [200]
    assert len(rule.hits) == 4
    assert world.trainjob(handle)["metadata"]["annotations"]["example.org/note"] == "3"
    world.running(handle)


def test_conflicts_without_an_end_are_a_conflict(plain: World, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = plain.started()
    adapters.impatient(monkeypatch)
    proxy.call(lambda request: plain.annotate(handle, "example.org/note", str(request.at)), "PUT", "/trainjobs/")
    with pytest.raises(Conflict, match="it kept changing meanwhile"):
        plain.backend.open(handle)
    assert plain.backend.inspect(handle).state is State.GATED
    assert plain.namespace.pods() == []


def test_a_hold_that_comes_at_the_last_moment_is_honoured(world: World, proxy: Proxy) -> None:
    """It is placed after `open` has read the job, and before it writes."""
    handle = world.started()
    proxy.call(lambda _: world.annotate(handle, adapters.HOLD, "1"), "PUT", "/trainjobs/", times=1)
    world.backend.open(handle)
    assert world.state(handle, State.HELD).hold == 1
    assert world.trainjob(handle)["spec"]["suspend"] is True
    assert world.namespace.pods() == []


def test_a_stop_that_comes_at_the_last_moment_is_honoured(world: World, proxy: Proxy) -> None:
    handle = world.started()
    proxy.call(lambda _: world.annotate(handle, adapters.HOLD, "stop"), "PUT", "/trainjobs/", times=1)
    with pytest.raises(Conflict, match="it is being stopped"):
        world.backend.open(handle)
    assert world.namespace.pods() == []


def test_a_job_that_is_replaced_at_the_last_moment_is_not_opened(plain: World, proxy: Proxy) -> None:
    spec = plain.spec()
    old = plain.started(job=spec.job)
    direct = plain.connect(kubeconfig=str(plain.cluster.kubeconfig))

    def replaced(_: Request) -> None:
        direct.stop(old)
        direct.start(spec)

    proxy.call(replaced, "PUT", "/trainjobs/", times=1)
    with pytest.raises(adapter.NotFound, match="its name is another object's now"):
        plain.backend.open(old)
    (new,) = plain.backend.find(spec.job)
    assert new.uid != old.uid
    assert plain.backend.inspect(new).state is State.GATED


def test_a_job_that_is_opened_between_two_reads_is_not_stopping(world: World, proxy: Proxy) -> None:
    """A status takes several reads: here its pods run that did not exist when the TrainJob was read."""
    handle = world.started()
    direct = world.connect(kubeconfig=str(world.cluster.kubeconfig))

    def opened(_: Request) -> None:
        direct.open(handle)
        world.running(handle)

    between = proxy.call(opened, "GET", r"/pods\?", times=1)
    assert world.backend.inspect(handle).state is State.RUNNING
    assert between.hits


def test_an_admission_between_two_reads_is_not_taken_for_the_one_before(kueue: World, proxy: Proxy) -> None:
    """Its quota was taken; it is admitted anew when its TrainJob has been read, and its Workload has not."""
    world = kueue.through(proxy)
    handle = world.opened()
    workload = world.namespace.workload(handle.name)["metadata"]["name"]
    world.running(handle)
    world.namespace.patch("Workload", workload, {"spec": {"active": False}})
    world.wait(lambda: not world.namespace.pods(handle.name), "its pods are gone")
    world.wait(lambda: world.trainjob(handle)["spec"]["suspend"], "it is suspended")

    def admitted(_: Request) -> None:
        world.namespace.patch("Workload", workload, {"spec": {"active": True}})
        world.running(handle)

    between = proxy.call(admitted, "GET", r"/workloads\?", times=1)
    status = world.backend.inspect(handle)
    assert (status.admission, status.state) == (2, State.RUNNING)
    assert between.hits


# --- a server that is away


@pytest.mark.parametrize("status", [429, 500, 503, 504])
def test_a_server_that_stays_broken_is_unreachable(
    plain: World, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    handle = plain.started()
    adapters.impatient(monkeypatch)
    proxy.answer(status)
    for call in operations(plain.backend, plain, handle):
        with pytest.raises(Unreachable, match=rf"^dispatch: unreachable: .*the proxy says {status}"):
            call()
    proxy.clear()
    assert plain.backend.inspect(handle).state is State.GATED


def test_a_job_that_cannot_be_suspended_now_is_not_deleted(
    world: World, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would start once more: the controllers' caches may be behind just when the server has been away."""
    handle = world.started()
    world.backend.open(handle)
    world.running(handle)
    adapters.impatient(monkeypatch)
    with proxy.answer(500, "PUT"), pytest.raises(Unreachable, match="the proxy says 500"):
        world.backend.stop(handle)
    assert proxy.requests("DELETE") == []
    assert len(world.running(handle)) == 2
    monkeypatch.undo()
    world.backend.stop(handle)
    assert world.left(handle.job) == []
    assert world.pods_created() == 2


def test_an_api_that_is_not_served_is_unsupported(plain: World, proxy: Proxy) -> None:
    handle = plain.started()
    proxy.answer(404, path="/apis/trainer", body=b"404 page not found\n", headers={"Content-Type": "text/plain"})
    for call in operations(plain.backend, plain, handle):
        with pytest.raises(adapter.Unsupported, match="the cluster does not serve this API: install Trainer"):
            call()


def test_a_job_survives_a_restart_of_the_api_server_in_the_middle(world: World, proxy: Proxy) -> None:
    handle = world.backend.start(world.spec())
    meanwhile_restarted(world, proxy, lambda: world.backend.open(handle))
    with world.cluster.controller():  # the other one may have lost its Lease, and is started again by nobody here
        world.running(handle)
    meanwhile_restarted(world, proxy, lambda: world.backend.stop(handle))
    assert world.left(handle.job) == []
    assert world.pods_created() == 2


def meanwhile_restarted(world: World, proxy: Proxy, operation: Callable[[], None]) -> None:
    """The operation is under way, or called again, while the server goes and comes back, as behind a load balancer."""
    call = adapters.Call(operation)
    with proxy.away():
        world.cluster.kill("kube-apiserver")
        world.cluster.start("kube-apiserver")
    while (error := call.wait()) is not None:
        assert isinstance(error, Unreachable)  # on a slow machine it takes longer than the adapter waits
        call = adapters.Call(operation)


def test_a_submission_that_others_always_write_does_not_keep_the_others(
    plain: World, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = plain.opened()
    plain.end(first)
    second = plain.started(job=first.job, submission=2)
    adapters.impatient(monkeypatch)
    with proxy.answer(409, "PUT", f"/trainjobs/{second.name}"), pytest.raises(Conflict, match=second.name):
        plain.backend.stop_job(first.job)
    assert [handle.submission for handle in plain.backend.find(first.job)] == [2]


def operations(backend: Backend, world: World, handle: Handle) -> list[Callable[[], object]]:
    return [
        lambda: backend.start(world.spec()),
        lambda: backend.open(handle),
        lambda: backend.find(handle.job),
        backend.list,
        lambda: backend.inspect(handle),
        lambda: backend.stop(handle),
        lambda: backend.stop_job(handle.job),
    ]
