"""`hold` and `release`: wherever the job is, and whatever comes in between."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

import adapter
from adapter import Backend, Conflict, Handle, Invalid, StaleHold, State, Unreachable
from tests import adapters, jobs
from tests.adapters import HOLD, World
from tests.attempts import Attempts
from tests.cluster.api import Object


def held(world: World, handle: Handle, instance: int = 1) -> None:
    """Returns when it is held, and nothing of it runs."""
    status = world.state(handle, State.HELD)
    assert status.hold == instance
    world.wait(lambda: world.namespace.pods(handle.name) == [], "its pods are gone")


def waits(world: World, handle: Handle, instance: int = 1) -> None:
    """It is held, and stays so while another job of the same queue runs from its start to its end."""
    held(world, handle, instance)
    other = world.opened()
    world.end(other)
    held(world, handle, instance)


def epoch(world: World, handle: Handle) -> int:
    """That of its pods, once they run. In Kueue mode a number may be skipped: the gate met a conflict."""
    pods = world.running(handle)
    (found,) = {jobs.epoch_of(pod) for pod in pods}
    return int(found)


# --- wherever it is


def test_held_before_it_is_opened(world: World) -> None:
    handle = world.started()
    world.backend.hold(handle, 1)
    held(world, handle)
    world.backend.open(handle)
    waits(world, handle)
    world.backend.release(handle, 1)
    world.running(handle)


def test_held_and_released_before_it_is_opened(world: World) -> None:
    handle = world.started()
    world.backend.hold(handle, 1)
    world.backend.release(handle, 1)
    assert world.backend.inspect(handle).state is State.GATED
    world.backend.open(handle)
    assert epoch(world, handle) >= 1_000_001


def test_held_right_after_it_was_opened(world: World) -> None:
    """In Kueue mode there may be no Workload yet."""
    for _ in range(3):
        handle = world.backend.start(world.spec())
        world.backend.open(handle)
        world.backend.hold(handle, 1)
        held(world, handle)
    waits(world, handle)


def test_held_while_it_runs(world: World) -> None:
    with Attempts(world.namespace) as attempts:
        handle = world.opened()
        first = epoch(world, handle)
        world.backend.hold(handle, 1)
        waits(world, handle)
        world.wait(lambda: released(world, handle), "it can be released")
        assert epoch(world, handle) >= first + 1
        world.end(handle)
    assert attempts.overlaps() == []


def released(world: World, handle: Handle, instance: int = 1) -> bool:
    """In plain mode only what stands still can be released."""
    try:
        world.backend.release(handle, instance)
    except StaleHold:
        raise
    except Conflict:
        return False
    return True


def test_held_while_it_is_queued(kueue: World) -> None:
    first = kueue.opened(resources={"requests": {"cpu": "2"}})
    handle = kueue.backend.start(kueue.spec())
    kueue.backend.open(handle)
    kueue.state(handle, State.QUEUED)
    kueue.backend.hold(handle, 1)
    kueue.end(first)
    waits(kueue, handle)
    kueue.backend.release(handle, 1)
    assert epoch(kueue, handle) >= 1_000_001


def test_held_after_a_preemption(kueue: World) -> None:
    handle = kueue.opened(resources={"requests": {"cpu": "2"}}, priority="low")
    other = kueue.backend.start(kueue.spec(resources={"requests": {"cpu": "2"}}, priority="high"))
    kueue.backend.open(other)
    kueue.running(other)
    kueue.state(handle, State.QUEUED)
    kueue.backend.hold(handle, 1)
    kueue.end(other)
    waits(kueue, handle)
    kueue.backend.release(handle, 1)
    assert epoch(kueue, handle) >= 1_000_002


def test_a_hold_outlives_kueue(kueue: World, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = kueue.opened()
    kueue.cluster.kill("kueue")
    with monkeypatch.context() as patch:
        adapters.impatient(patch)
        with pytest.raises(Unreachable):
            kueue.backend.hold(handle, 1)
    kueue.cluster.start("kueue")
    kueue.backend.hold(handle, 1)
    held(kueue, handle)
    kueue.cluster.restart("kueue")
    waits(kueue, handle)
    kueue.backend.release(handle, 1)
    assert epoch(kueue, handle) >= 1_000_002


def test_a_hold_outlives_its_workload_and_the_gate_honours_it(kueue: World) -> None:
    handle = kueue.opened()
    kueue.backend.hold(handle, 1)
    held(kueue, handle)
    old = kueue.namespace.workload(handle.name)["metadata"]
    kueue.namespace.delete("Workload", old["name"])

    def new() -> Object | None:
        found = kueue.namespace.workload(handle.name)
        return found if found["metadata"]["uid"] != old["uid"] else None

    assert kueue.wait(new, "Kueue makes it anew")["spec"].get("active", True) is True
    jobs.wait_message(kueue.namespace, handle.name, "held: instance 1")
    waits(kueue, handle)
    kueue.backend.hold(handle, 1)
    assert kueue.namespace.workload(handle.name)["spec"]["active"] is False
    kueue.backend.release(handle, 1)
    assert epoch(kueue, handle) >= 1_000_002


# --- which instance


def test_instances_only_grow(world: World) -> None:
    handle = world.started()
    world.backend.hold(handle, 3)
    world.backend.hold(handle, 3)
    for call, instance, text in (
        (Backend.hold, 2, "hold instance 2: instance 3 is in place"),
        (Backend.release, 2, "release of hold instance 2: hold instance 3 is in place"),
        (Backend.release, 4, "release of hold instance 4: hold instance 3 is in place"),
    ):
        with pytest.raises(StaleHold, match=f"^dispatch: stale hold: TrainJob {handle.name}: {text}$"):
            call(world.backend, handle, instance)
    world.backend.release(handle, 3)
    world.backend.release(handle, 3)
    for instance in (2, 3):
        with pytest.raises(StaleHold, match=r"instance 3 was released already$"):
            world.backend.hold(handle, instance)
    with pytest.raises(StaleHold, match=r"no hold is in place$"):
        world.backend.release(handle, 4)
    world.backend.hold(handle, 4)
    with pytest.raises(StaleHold):
        world.backend.release(handle, 3)
    assert world.backend.inspect(handle).hold == 4


@pytest.mark.parametrize("instance", [0, -1, 10**18, True, "1"])
def test_an_instance_is_a_positive_number(plain: World, instance: int) -> None:
    handle = plain.started()
    for operation in (plain.backend.hold, plain.backend.release):
        with pytest.raises(Invalid, match="instance"):
            operation(handle, instance)


def test_what_has_ended_is_neither_held_nor_released(world: World) -> None:
    handle = world.opened()
    world.end(handle)
    for operation in (world.backend.hold, world.backend.release):
        with pytest.raises(Conflict, match="it has ended: start submission 2 instead"):
            operation(handle, 1)


def test_what_is_being_stopped_is_neither_held_nor_released(world: World) -> None:
    handle = world.started()
    world.annotate(handle, HOLD, "stop")
    for operation in (world.backend.hold, world.backend.release):
        with pytest.raises(Conflict, match="it is being stopped"):
            operation(handle, 1)


def test_what_kueue_has_given_up_is_not_released(kueue: World) -> None:
    handle = kueue.started()
    label = {"kueue.x-k8s.io/max-exec-time-seconds": "1"}
    kueue.namespace.patch("TrainJob", handle.name, {"metadata": {"labels": label}})
    kueue.wait(lambda: kueue.namespace.workload(handle.name)["spec"]["maximumExecutionTimeSeconds"], "Kueue knows")
    kueue.backend.open(handle)

    def given_up() -> bool:
        conditions = kueue.namespace.workload(handle.name)["status"]["conditions"]
        return any(c["type"] == "Evicted" and c["reason"].startswith("DeactivatedDueTo") for c in conditions)

    kueue.wait(given_up, "Kueue gives it up")
    kueue.backend.hold(handle, 1)
    with pytest.raises(Conflict, match="Kueue never takes it up again: DeactivatedDueToMaximumExecutionTimeExceeded"):
        kueue.backend.release(handle, 1)


# --- a crash in between


class Crash(BaseException):
    """The process ends here."""


def crash(*_: object) -> None:
    raise Crash


def test_a_crash_between_the_two_writes_of_a_hold_loses_nothing(kueue: World, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = kueue.opened()
    with monkeypatch.context() as patch:
        patch.setattr(adapter, "update_workload", crash)
        with pytest.raises(Crash):
            kueue.backend.hold(handle, 1)
    assert kueue.trainjob(handle)["metadata"]["annotations"][HOLD] == "1"
    kueue.running(handle)
    kueue.backend.hold(handle, 1)
    waits(kueue, handle)


def test_a_crash_between_the_two_writes_of_a_release_loses_nothing(
    kueue: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = kueue.opened()
    kueue.backend.hold(handle, 1)
    held(kueue, handle)
    with monkeypatch.context() as patch:
        patch.setattr(adapter, "update_trainjob", crash)
        with pytest.raises(Crash):
            kueue.backend.release(handle, 1)
    jobs.wait_message(kueue.namespace, handle.name, "held: instance 1")
    waits(kueue, handle)
    kueue.backend.release(handle, 1)
    assert epoch(kueue, handle) >= 1_000_002


def first(monkeypatch: pytest.MonkeyPatch, request: str, other: Callable[[], object]) -> None:
    """Another caller comes right before the next request of this kind."""
    send = getattr(adapter, request)

    def late(*arguments: object) -> object:
        monkeypatch.setattr(adapter, request, send)
        other()
        return send(*arguments)

    monkeypatch.setattr(adapter, request, late)


def test_a_new_hold_that_meets_a_release_stays_in_place(kueue: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes between the release's two writes."""
    handle = kueue.opened()
    kueue.backend.hold(handle, 1)
    held(kueue, handle)
    first(monkeypatch, "update_trainjob", lambda: kueue.connect().hold(handle, 2))
    with pytest.raises(StaleHold):
        kueue.backend.release(handle, 1)
    assert kueue.namespace.workload(handle.name)["spec"]["active"] is False
    held(kueue, handle, 2)


def test_a_job_whose_hold_is_repeated_while_it_is_released_goes_on(
    kueue: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release comes between the hold's look at the TrainJob and its look at the Workload."""
    handle = kueue.opened()
    kueue.backend.hold(handle, 1)
    held(kueue, handle)
    first(monkeypatch, "list_workloads", lambda: kueue.connect().release(handle, 1))
    kueue.backend.hold(handle, 1)
    assert epoch(kueue, handle) >= 1_000_002


def test_guard_off_it_stays_inactive(kueue: World, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = kueue.opened()
    kueue.backend.hold(handle, 1)
    held(kueue, handle)

    def once(backend: Backend, handle: Handle) -> None:
        monkeypatch.undo()
        kueue.connect().release(handle, 1)
        backend._set_active(handle, False)

    monkeypatch.setattr(Backend, "_obey", once)
    kueue.backend.hold(handle, 1)
    assert kueue.namespace.workload(handle.name)["spec"]["active"] is False
    assert adapter.hold_of(kueue.trainjob(handle)) is None


def test_a_job_that_is_released_while_its_hold_is_repeated_goes_on(
    kueue: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hold comes between the release's two writes."""
    handle = kueue.opened()
    kueue.backend.hold(handle, 1)
    held(kueue, handle)
    first(monkeypatch, "update_trainjob", lambda: kueue.connect().hold(handle, 1))
    kueue.backend.release(handle, 1)
    assert epoch(kueue, handle) >= 1_000_002


def test_a_job_that_is_released_while_it_is_opened_runs(kueue: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The release comes right before the open's first write."""
    handle = kueue.started()
    kueue.backend.hold(handle, 1)
    first(monkeypatch, "update_workload", lambda: kueue.connect().release(handle, 1))
    kueue.backend.open(handle)
    assert epoch(kueue, handle) >= 1_000_001


def test_a_gated_job_that_is_held_anew_while_it_is_released_stays_active(
    kueue: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gated and inactive, Kueue would write its Workload again and again."""
    handle = kueue.started()
    kueue.backend.hold(handle, 1)
    first(monkeypatch, "update_trainjob", lambda: kueue.connect().hold(handle, 2))
    with pytest.raises(StaleHold):
        kueue.backend.release(handle, 1)
    assert kueue.namespace.workload(handle.name)["spec"].get("active", True) is True
    assert kueue.backend.inspect(handle).hold == 2


# --- Kueue's writes


def kueues_writes(world: World, handle: Handle, mark: int) -> int:
    """How often Kueue has written the job's Workload since."""
    name = world.namespace.workload(handle.name)["metadata"]["name"]
    events = world.cluster.audit_events("kueue", since=mark)
    return sum(
        event["verb"] in ("update", "patch") and event["objectRef"].get("name") == name
        for event in events
        if event.get("objectRef", {}).get("resource") == "workloads"
    )


@pytest.mark.parametrize("stage", ["gated", "opened while held", "held while it ran"])
def test_no_hold_makes_kueue_write_again_and_again(kueue: World, stage: str) -> None:
    handle = kueue.opened() if stage == "held while it ran" else kueue.started()
    kueue.backend.hold(handle, 1)
    if stage == "opened while held":
        kueue.backend.open(handle)

    def rests() -> bool:
        """Kueue 0.20 goes on for a moment, until it has seen that the gate is open."""
        mark = kueue.cluster.audit_mark()
        waits(kueue, handle)
        return kueues_writes(kueue, handle, mark) <= 2

    kueue.wait(rests, "Kueue does not write any more", timeout=300)


def test_guard_off_an_inactive_workload_that_is_gated_makes_it(kueue: World) -> None:
    """So a hold before `open` leaves the Workload active."""
    queues = kueue.cluster.get("CustomResourceDefinition", "clusterqueues.kueue.x-k8s.io")
    if "concurrentAdmissionPolicy" not in str(queues["spec"]):
        pytest.skip("Kueue 0.17 rests all the same: run with a Kueue of the 0.20 line")
    handle = kueue.started()
    kueue.backend.hold(handle, 1)
    kueue.backend._set_active(handle, False)
    for _ in range(3):
        mark = kueue.cluster.audit_mark()
        waits(kueue, handle)
        assert kueues_writes(kueue, handle, mark) > 10


# --- plain mode: one attempt at a time

OVERLAPPING = {"runtime": {"name": "torch-distributed"}}  # its Job does not wait for a pod that terminates


def test_a_release_in_plain_mode_waits_for_the_pods_of_the_attempt_before(plain: World) -> None:
    with Attempts(plain.namespace) as attempts:
        handle = plain.opened(**OVERLAPPING)
        pod, _ = plain.running(handle)
        plain.cluster.pods.stick(pod)
        plain.backend.hold(handle, 1)
        with pytest.raises(Conflict) as error:
            plain.backend.release(handle, 1)
        assert str(error.value).startswith(f"dispatch: conflict: TrainJob {handle}: ")
        plain.wait(lambda: len(plain.namespace.pods(handle.name)) == 1, "the other is gone")
        with pytest.raises(Conflict, match=f"pod {pod['metadata']['name']} on kwok-. has not ended: release it again"):
            plain.backend.release(handle, 1)
        plain.cluster.pods.unstick(pod)
        plain.wait(lambda: released(plain, handle), "it can be released")
        assert epoch(plain, handle) == 1_000_002
        plain.end(handle)
    assert attempts.overlaps() == []


def test_guard_off_a_release_in_plain_mode_overlaps(plain: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "unquiet", lambda *_: "")
    with Attempts(plain.namespace) as attempts:
        handle = plain.opened(**OVERLAPPING)
        pod, _ = plain.running(handle)
        plain.cluster.pods.stick(pod)
        plain.backend.hold(handle, 1)
        plain.wait(lambda: len(plain.namespace.pods(handle.name)) == 1, "the other is gone")
        plain.backend.release(handle, 1)
        plain.wait(lambda: len(plain.namespace.pods(handle.name)) == 3, "two pods more")
        jobs.running(plain.namespace, handle.name, count=2, epoch="1000002")
        plain.cluster.pods.unstick(pod)
    assert attempts.overlaps() != []


def test_a_job_that_is_released_at_once_is_released_when_it_stands_still(plain: World) -> None:
    with Attempts(plain.namespace) as attempts:
        handle = plain.opened(**OVERLAPPING)
        for instance in range(1, 6):
            plain.backend.hold(handle, instance)
            plain.wait(functools.partial(released, plain, handle, instance), "it can be released")
            assert epoch(plain, handle) == 1_000_001 + instance
    assert attempts.overlaps() == []
