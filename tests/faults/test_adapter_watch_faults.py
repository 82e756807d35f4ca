"""`watch` and `output` when connections are cut or stall, versions expire, and the API server is away."""

from __future__ import annotations

import itertools
import pathlib
import time
from collections.abc import Iterator

import pytest
import yaml

import adapter
from adapter import State, Unreachable
from tests import adapters
from tests.adapters import World
from tests.cluster.cluster import Cluster
from tests.faults.proxy import Proxy
from tests.faults.test_adapter_faults import through
from tests.integration.test_adapter_output import Lines
from tests.integration.test_adapter_watch import Statuses

WATCHES = ("GET", "watch=true")


@pytest.fixture(params=adapters.MODES)
def world(cluster: Cluster, request: pytest.FixtureRequest, proxy: Proxy, _gate: None) -> Iterator[World]:
    """Its backend goes through the proxy."""
    with adapters.world(cluster, request.param) as made:
        yield through(made, proxy)


@pytest.fixture
def plain(cluster: Cluster, proxy: Proxy) -> Iterator[World]:
    with adapters.world(cluster, "plain") as made:
        yield through(made, proxy)


def open_watches(world: World, proxy: Proxy) -> None:
    count = 3 if world.mode == "kueue" else 2
    world.wait(lambda: len(proxy.open_requests(*WATCHES)) == count, f"{count} watches are open")


def test_a_watch_survives_cuts_at_any_point(world: World, proxy: Proxy) -> None:
    """Each connection is cut after some bytes, in the middle of an event, and those that stay open now and then."""
    handle = world.started()
    for size in (1, 300, 3000, 20000):
        proxy.cut_after(size, *WATCHES, times=2)
    statuses = Statuses(world.backend.watch(handle))
    world.wait(lambda: statuses.seen, "it is told of")
    world.backend.open(handle)
    for _ in range(3):
        proxy.cut(*WATCHES)
        world.running(handle)
    world.wait(lambda: statuses.states()[-1] is State.RUNNING, "it is told of as running")
    proxy.cut(*WATCHES)
    world.end(handle)
    told = statuses.ended()
    order = [State.GATED, State.QUEUED, State.STARTING, State.RUNNING, State.SUCCEEDED]
    assert [state for state in order if state in statuses.states()] == statuses.states()
    assert all(a != b for a, b in itertools.pairwise(told))


def test_an_expired_version_is_listed_anew(world: World, proxy: Proxy) -> None:
    """What changed meanwhile arrives, and a job that went meanwhile is told of as stopped."""
    first, second = world.started(), world.started()
    with world.backend.watch() as watch:
        statuses = Statuses(watch)
        world.wait(lambda: len(statuses.seen) == 2, "they are told of")
        open_watches(world, proxy)
        gone = proxy.answer(410, *WATCHES, times=6)
        with proxy.lose_request(*WATCHES):
            proxy.cut(*WATCHES)
            world.connect(kubeconfig=str(world.cluster.kubeconfig)).stop(first)
            world.annotate(second, adapters.HOLD, "7")
        world.wait(lambda: statuses.states(first)[-1] is State.STOPPED, "the first has gone")
        world.wait(lambda: statuses.states(second)[-1] is State.HELD, "the second is held")
        assert gone.hits


def test_a_connection_that_stalls_silently_is_noticed(
    world: World, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After SILENCE seconds, which are fewer here."""
    monkeypatch.setattr(adapter.Connection, "SILENCE", 4.0)
    handle = world.started()
    statuses = Statuses(world.backend.watch(handle))
    open_watches(world, proxy)
    proxy.stall_open(*WATCHES)
    world.backend.open(handle)
    world.wait(lambda: statuses.states()[-1] is State.RUNNING, "it is told of all the same")
    world.end(handle)
    statuses.ended()


def test_without_the_bound_on_silence_a_stalled_connection_is_never_noticed(
    plain: World, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter.Connection, "SILENCE", 600.0)
    handle = plain.started()
    statuses = Statuses(plain.backend.watch(handle))
    open_watches(plain, proxy)
    proxy.stall_open(*WATCHES)
    plain.backend.open(handle)
    plain.running(handle)
    for _ in range(10):
        plain.state(handle, State.RUNNING)
    assert statuses.states() == [State.GATED]
    statuses.watch.close()


def test_the_silence_of_a_healthy_watch_is_neither_stale_nor_unreachable(
    plain: World, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter.Connection, "SILENCE", 2.0)
    plain.started()
    with plain.backend.watch(unreachable_after=1.5) as watch:
        statuses = Statuses(watch)
        plain.wait(lambda: len(proxy.requests(*WATCHES)) > 8, "its watches were reopened several times")
        assert statuses.is_alive()
        assert [status.stale_since for status in statuses.seen] == [None]


def test_a_server_that_is_away_is_told_and_then_raised(plain: World, proxy: Proxy) -> None:
    handle = plain.started()
    statuses = Statuses(plain.backend.watch(handle, unreachable_after=8))
    open_watches(plain, proxy)
    plain.wait(lambda: statuses.seen, "it is told of")
    with proxy.away():
        plain.wait(lambda: statuses.seen[-1].stale_since, "that it may be out of date is told")
        began = time.monotonic()
        with pytest.raises(Unreachable, match="no answer from the API server"):
            statuses.ended()
        assert time.monotonic() - began < 30
    assert [status.state for status in statuses.seen] == [State.GATED, State.GATED]
    assert statuses.seen[0].stale_since is None


def test_when_the_server_is_back_the_status_is_fresh_again(world: World, proxy: Proxy) -> None:
    handle = world.started()
    statuses = Statuses(world.backend.watch(handle))
    open_watches(world, proxy)
    world.wait(lambda: statuses.seen, "it is told of")
    with proxy.away():
        world.wait(lambda: statuses.seen[-1].stale_since, "it is stale")
    world.wait(lambda: statuses.seen[-1].stale_since is None, "it is fresh again")
    world.backend.open(handle)
    world.wait(lambda: statuses.states()[-1] is State.RUNNING, "it goes on")
    world.end(handle)
    statuses.ended()


def test_a_closed_watch_ends_while_the_server_is_away(plain: World, proxy: Proxy) -> None:
    handle = plain.started()
    statuses = Statuses(plain.backend.watch(handle))
    plain.wait(lambda: statuses.seen, "it is told of")
    proxy.stall()
    began = time.monotonic()
    statuses.watch.close()
    statuses.ended(10)
    assert time.monotonic() - began < 5


def lagging(kueue: World, cluster: Cluster) -> list[tuple[int | None, State]]:
    """What is told when the watch of TrainJobs stalls while the job is evicted and admitted again."""
    with Proxy(cluster) as proxy:
        world = through(kueue, proxy)
        handle = world.opened()
        statuses = Statuses(world.backend.watch(handle))
        open_watches(world, proxy)
        world.wait(lambda: statuses.seen, "it is told of")
        workload = world.namespace.workload(handle.name)["metadata"]["name"]
        with proxy.stall_open("GET", "/trainjobs.*watch=true"):
            world.namespace.patch("Workload", workload, {"spec": {"active": False}})
            world.wait(lambda: not world.namespace.pods(handle.name), "its pods are gone")
            world.namespace.patch("Workload", workload, {"spec": {"active": True}})
            world.running(handle)
            on = (State.STARTING, State.RUNNING)  # with the TrainJob as it was it does not seem to run
            world.wait(lambda: statuses.seen[-1].state in on and len(statuses.states()) > 2, "its next attempt is told")
        world.end(handle)
        return [(status.admission, status.state) for status in statuses.ended()]


def test_a_trainjob_that_lags_behind_takes_no_job_back(kueue: World, cluster: Cluster) -> None:
    told = lagging(kueue, cluster)
    assert told == sorted_by_stage(told)
    assert {admission for admission, _ in told} == {1, 2}


def test_without_reading_anew_it_would(kueue: World, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter._Watch, "_anew", lambda _watch, _handle, evidence: evidence)
    told = lagging(kueue, cluster)
    assert told != sorted_by_stage(told)


STAGES = [State.STARTING, State.RUNNING, State.STOPPING, State.HELD, State.QUEUED, State.SUCCEEDED]


def sorted_by_stage(told: list[tuple[int | None, State]]) -> list[tuple[int | None, State]]:
    """By admission; within one as it must go; before an admission starts it may be queued."""
    ordered: list[tuple[int | None, State]] = []
    for admission, group in itertools.groupby(told, key=lambda item: item[0]):
        items = list(group)
        waiting = list(itertools.takewhile(lambda item: item[1] in (State.QUEUED, State.HELD), items))
        ordered += waiting + sorted(items[len(waiting) :], key=lambda item: STAGES.index(item[1]))
        assert all(admission is None or admission >= (before or 0) for before, _ in ordered)
    return ordered


def test_a_rotated_token_is_read_again(plain: World, proxy: Proxy) -> None:
    """The old one is revoked: the next connection is refused, and then made with the one that the file has now."""
    file, name = pathlib.Path(plain.settings["kubeconfig"]), plain.namespace.name
    config = yaml.safe_load(file.read_text())

    def rotate() -> str:
        config["users"][0]["user"]["token"], secret = plain.cluster.revocable_token(name, adapters.ACCOUNT)
        file.write_text(yaml.safe_dump(config))
        return secret

    def refused() -> bool:
        proxy.cut(*WATCHES)
        return any(request.status == 401 for request in proxy.requests(*WATCHES))

    old, handle = rotate(), plain.started()
    statuses = Statuses(plain.connect().watch(handle))
    open_watches(plain, proxy)
    rotate()
    plain.cluster.delete("Secret", old, name)
    plain.wait(refused, "the old token is refused")  # the server trusts it for 10 s more
    plain.backend.open(handle)
    plain.end(handle)
    assert statuses.ended()[-1].state is State.SUCCEEDED


def test_a_restart_of_the_api_server_loses_no_change(plain: World, proxy: Proxy) -> None:
    handle = plain.opened()
    statuses = Statuses(plain.backend.watch(handle))
    lines = Lines(plain.backend.output(handle, follow=True))
    pod = plain.running(handle)[0]
    plain.cluster.pods.log(pod, "before")
    plain.wait(lambda: lines.texts == ["before"], "the line comes")
    with proxy.away():
        plain.cluster.kill("kube-apiserver")
        plain.cluster.start("kube-apiserver")
    plain.cluster.pods.log(pod, "after")
    plain.end(handle)
    assert lines.ended(90) == ["before", "after"]
    assert statuses.ended()[-1].state is State.SUCCEEDED
    assert statuses.states() == [State.RUNNING, State.SUCCEEDED]
