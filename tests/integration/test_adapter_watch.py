"""`watch`: what it tells, in which order, and how it ends."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time

import pytest

import adapter
from adapter import Cause, Handle, Live, State, Status
from tests import jobs
from tests.adapters import World


class Statuses(threading.Thread):
    """What a watch tells, in a thread of its own."""

    def __init__(self, watch: Live[Status]) -> None:
        super().__init__(daemon=True)
        self.watch, self.seen = watch, list[Status]()
        self.error: adapter.DispatchError | None = None
        self.start()

    def run(self) -> None:
        try:
            for status in self.watch:
                self.seen.append(status)
        except adapter.DispatchError as error:
            self.error = error

    def states(self, handle: Handle | None = None) -> list[State]:
        """The states it told, without repetition."""
        told = [status.state for status in self.seen if handle in (None, status.handle)]
        return [state for i, state in enumerate(told) if i == 0 or told[i - 1] is not state]

    def ended(self, timeout: float = 60) -> list[Status]:
        self.join(timeout)
        assert not self.is_alive(), f"the watch goes on after {self.states()}"
        if self.error:
            raise self.error
        return self.seen


def without_time(status: Status) -> Status:
    return dataclasses.replace(status, observed_at=None)


def test_a_job_is_told_of_from_its_gate_to_its_end(world: World) -> None:
    handle = world.started()
    statuses = Statuses(world.backend.watch(handle))
    world.wait(lambda: statuses.states() == [State.GATED], "the status now comes at once")
    world.backend.open(handle)
    world.running(handle)
    world.wait(lambda: statuses.states()[-1] is State.RUNNING, "it runs")
    world.end(handle)
    told = statuses.ended()
    expected = [State.GATED, State.QUEUED, State.STARTING, State.RUNNING, State.SUCCEEDED]
    assert [s for s in expected if s in statuses.states()] == statuses.states()
    assert told[-1].final
    assert without_time(told[-1]) == without_time(world.backend.inspect(handle))
    assert all(without_time(a) != without_time(b) for a, b in itertools.pairwise(told))


def test_a_job_that_has_ended_is_told_of_once(world: World) -> None:
    handle = world.opened()
    world.end(handle)
    assert [status.state for status in world.backend.watch(handle)] == [State.SUCCEEDED]


def test_a_job_that_is_deleted_meanwhile_is_stopped(world: World) -> None:
    handle = world.opened()
    statuses = Statuses(world.backend.watch(handle))
    world.wait(lambda: statuses.states() == [State.RUNNING], "it is told of")
    world.backend.stop(handle)
    statuses.ended()
    assert statuses.states()[-1] is State.STOPPED
    assert State.STOPPING in statuses.states()


def test_an_end_that_inspect_has_told_is_told_though_the_job_is_deleted(world: World) -> None:
    """Before anybody has asked the watch."""
    handle = world.opened()
    with world.backend.watch(handle) as watch:
        assert not next(watch).final
        world.end(handle)
        ended = world.state(handle, State.SUCCEEDED)
        world.namespace.delete("TrainJob", handle.name)
        world.wait(lambda: world.namespace.find("TrainJob", handle.name) is None, "it is gone")
        assert list(watch)[-1] == ended


def test_a_job_that_is_not_there_is_not_found(world: World) -> None:
    handle = world.started()
    world.backend.stop(handle)
    with pytest.raises(adapter.NotFound):
        world.backend.watch(handle)


def test_a_watch_of_all_jobs_tells_of_each_also_of_one_that_comes(world: World) -> None:
    first = world.started()
    with world.backend.watch() as watch:
        statuses = Statuses(watch)
        world.wait(lambda: statuses.states(first) == [State.GATED], "the first is told of")
        second = world.opened()
        world.wait(lambda: statuses.states(second)[-1:] == [State.RUNNING], "the second is told of")
        world.end(second)
        world.wait(lambda: statuses.states(second)[-1:] == [State.SUCCEEDED], "and its end")
        world.backend.stop(first)
        world.wait(lambda: statuses.states(first)[-1:] == [State.STOPPED], "and the first's")
        world.backend.stop(second)
    statuses.ended(5)
    assert {status.handle for status in statuses.seen} == {first, second}
    assert statuses.states(second)[-1] is State.SUCCEEDED


def test_a_successor_under_the_same_name_is_told_of_by_its_own_handle(world: World) -> None:
    spec = world.spec()
    first = world.backend.start(spec)
    with world.backend.watch() as watch:
        statuses = Statuses(watch)
        world.wait(lambda: statuses.states(first), "it is told of")
        world.backend.stop(first)
        second = world.backend.start(spec)
        world.wait(lambda: statuses.states(second)[-1:] == [State.GATED], "its successor is told of")
        assert statuses.states(first)[-1] is State.STOPPED


def test_closing_it_from_another_thread_ends_it(world: World) -> None:
    world.started()
    watch = world.backend.watch()
    statuses = Statuses(watch)
    world.wait(lambda: statuses.seen, "it is told of")
    watch.close()
    statuses.ended(10)
    assert next(watch, None) is None
    world.wait(lambda: not threads(world), "its threads end")


def test_a_connection_that_comes_back_while_it_is_looked_at_does_no_harm(
    plain: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread notes whether there is one: no two looks need to be alike."""
    looks = itertools.cycle([time.monotonic() + 60, None])
    monkeypatch.setattr(adapter._Kind, "lost", property(lambda _: next(looks), lambda *_: None), raising=False)
    handle = plain.opened()
    with plain.backend.watch(handle) as watch:
        statuses = Statuses(watch)
        plain.end(handle)
        assert statuses.ended()[-1].state is State.SUCCEEDED


def test_dropping_it_ends_it(world: World) -> None:
    handle = world.started()
    for status in world.backend.watch(handle):
        assert status.state is State.GATED
        break
    world.wait(lambda: not threads(world), "its threads end")


def threads(world: World) -> list[str]:
    return [t.name for t in threading.enumerate() if world.namespace.name in t.name]


def test_an_event_has_only_its_own_job_classified_and_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    handles = [world.started() for _ in range(3)]
    classified: list[str] = []
    original = adapter.status_of

    def counted(handle: Handle, *rest: object) -> Status:
        classified.append(handle.name)
        return original(handle, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(adapter, "status_of", counted)
    with world.backend.watch() as watch:
        statuses = Statuses(watch)
        world.wait(lambda: len(statuses.seen) == 3, "each is told of")
        assert sorted(classified) == sorted(handle.name for handle in handles)
        classified.clear()
        world.annotate(handles[0], "example.org/note", "changed")
        world.wait(lambda: classified, "the event came")
        world.annotate(handles[1], "example.org/note", "changed")
        world.wait(lambda: handles[1].name in classified, "another came")
        assert sorted(classified) == sorted([handles[0].name, handles[1].name])
        assert len(statuses.seen) == 3


def test_one_connection_for_each_kind(world: World) -> None:
    for _ in range(2):
        world.started()
    mark = world.cluster.audit_mark()
    with world.backend.watch() as watch:
        next(watch)
        kinds = {"trainjobs", "pods"} | ({"workloads"} if world.mode == "kueue" else set())

        def watches() -> list[str]:
            events = [e for e in world.cluster.audit_events(world.user, since=mark) if e["verb"] == "watch"]
            return sorted(event["objectRef"]["resource"] for event in events)

        world.wait(lambda: set(watches()) >= kinds, "it watches")
        assert watches() == sorted(kinds)


def test_a_probe_is_not_told_of(world: World) -> None:
    handle = world.started()
    world.namespace.patch("TrainJob", handle.name, {"metadata": {"labels": {adapter.PROBE: "true"}}})
    other = world.started()
    with world.backend.watch() as watch:
        assert next(watch).handle == other


def test_a_pods_end_that_was_seen_serves_when_the_pod_is_gone(plain: World) -> None:
    """Who comes later cannot know it."""
    handle = plain.opened()
    with plain.backend.watch(handle) as watch:
        statuses = Statuses(watch)
        plain.wait(lambda: statuses.seen, "it is told of")
        plain.cluster.pause("trainer")  # so that the pod goes before the TrainJob has failed
        pod = plain.cluster.pods.oom(plain.namespace.pods(handle.name)[0])
        (job,) = plain.namespace.list("Job")
        plain.wait(
            lambda: jobs.condition(plain.namespace.get("Job", job["metadata"]["name"]), "Failed"), "the Job fails"
        )
        plain.namespace.delete("Pod", pod["metadata"]["name"])
        plain.wait(lambda: plain.namespace.find("Pod", pod["metadata"]["name"]) is None, "the pod is gone")
        plain.cluster.resume("trainer")
        told = statuses.ended()[-1]
    assert (told.state, told.cause, told.exit_code) == (State.FAILED, Cause.OUT_OF_MEMORY, 137)
    assert plain.backend.inspect(handle) == told
    assert plain.connect().inspect(handle).cause is not Cause.OUT_OF_MEMORY
