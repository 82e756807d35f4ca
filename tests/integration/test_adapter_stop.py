"""`stop` and `stop_job`: nothing of the job is left, it never starts again on the way, and what cannot go is named."""

from __future__ import annotations

import functools

import pytest

import adapter
from adapter import Conflict, NotFound, State, Unreachable
from tests import adapters, jobs
from tests.adapters import Call, World
from tests.cluster.api import Object


def uids(pods: list[Object]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


# --- nothing is left


def test_a_running_job_is_gone_with_all_that_belonged_to_it(world: World) -> None:
    handle = world.opened()
    kinds = [found.partition(" ")[0] for found in world.left(handle.job)]
    assert kinds == ["TrainJob", "JobSet", "Job", "Pod", "Pod"] + ["Workload"] * (world.mode == "kueue")
    world.backend.stop(handle)
    assert world.left(handle.job) == []
    assert world.pods_created() == 2


def test_a_job_that_was_never_opened_is_gone_too(world: World) -> None:
    handle = world.started()
    world.backend.stop(handle)
    assert world.left(handle.job) == []
    assert world.pods_created() == 0


def test_a_job_is_gone_when_it_is_stopped_right_after_its_start(world: World) -> None:
    for _ in range(5):
        handle = world.backend.start(world.spec())
        world.backend.stop(handle)
        assert world.left(handle.job) == []


def test_a_job_is_gone_when_it_is_stopped_right_after_it_was_opened(world: World) -> None:
    for _ in range(5):
        handle = world.backend.start(world.spec())
        world.backend.open(handle)
        world.backend.stop(handle)
        assert world.left(handle.job) == []


def test_a_queued_job_is_gone_too(kueue: World) -> None:
    first = kueue.opened(resources={"requests": {"cpu": "2"}})
    handle = kueue.backend.start(kueue.spec())
    kueue.backend.open(handle)
    kueue.state(handle, State.QUEUED)
    kueue.backend.stop(handle)
    assert kueue.left(handle.job) == []
    assert kueue.backend.inspect(first).state is State.RUNNING


@pytest.mark.parametrize("code", [0, 1])
def test_a_job_that_ended_is_cleaned_up_the_same_way(world: World, code: int) -> None:
    handle = world.opened()
    world.end(handle, code=code)
    assert world.backend.inspect(handle).state is (State.FAILED if code else State.SUCCEEDED)
    world.backend.stop(handle)
    assert world.left(handle.job) == []
    assert world.pods_created() == 2


def test_stopping_twice_is_fine(world: World) -> None:
    handle = world.opened()
    world.backend.stop(handle)
    world.backend.stop(handle)
    with pytest.raises(NotFound):
        world.backend.inspect(handle)


def test_a_stopped_job_can_be_submitted_again_under_the_next_number(world: World) -> None:
    handle = world.opened()
    world.backend.stop(handle)
    again = world.opened(job=handle.job, submission=2)
    assert {p.pod.startswith(again.name) for p in world.backend.inspect(again).pods} == {True}
    assert world.backend.find(handle.job) == (again,)


# --- gracefully, and for good


def test_the_trainjob_stays_until_its_pods_have_ended(world: World) -> None:
    handle = world.opened()
    pods = world.running(handle)
    world.cluster.pods.stick(pods[0])
    stopping = Call(lambda: world.backend.stop(handle))
    world.wait(lambda: uids(world.namespace.pods()) == uids(pods[:1]), "one pod is left")
    assert world.backend.inspect(handle).state is State.STOPPING
    assert world.trainjob(handle)["metadata"]["annotations"][adapters.HOLD] == "stop"
    with pytest.raises(Conflict, match="it is being stopped"):
        world.backend.open(handle)
    world.cluster.pods.unstick(pods[0])
    assert stopping.wait() is None
    assert world.left(handle.job) == []
    assert world.pods_created() == 2


@pytest.mark.parametrize("component", ["trainer", "jobset", "kueue", "kube-controller-manager"])
def test_a_job_does_not_start_again_when_a_controller_restarts_meanwhile(world: World, component: str) -> None:
    handle = world.opened()
    pods = world.running(handle)
    world.cluster.pods.stick(pods[0])
    stopping = Call(lambda: world.backend.stop(handle))
    world.wait(lambda: uids(world.namespace.pods()) == uids(pods[:1]), "one pod is left")
    world.cluster.kill(component)
    world.cluster.start(component)
    world.cluster.pods.unstick(pods[0])
    assert stopping.wait() is None
    assert world.left(handle.job) == []
    assert world.pods_created() == 2


def test_a_stopping_job_is_not_readmitted_when_somebody_activates_its_workload(kueue: World) -> None:
    handle = kueue.opened()
    pods = kueue.running(handle)
    kueue.cluster.pods.stick(pods[0])
    stopping = Call(lambda: kueue.backend.stop(handle))
    kueue.wait(lambda: uids(kueue.namespace.pods()) == uids(pods[:1]), "one pod is left")
    name = kueue.namespace.workload(handle.name)["metadata"]["name"]
    kueue.namespace.patch("Workload", name, {"spec": {"active": True}})
    kueue.wait(lambda: kueue.namespace.get("Workload", name)["spec"]["active"] is False, "it is inactive again")
    kueue.cluster.pods.unstick(pods[0])
    assert stopping.wait() is None
    assert kueue.pods_created() == 2


# --- what does not go


def test_a_pod_that_does_not_end_is_named_and_a_later_stop_finishes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = world.opened()
    pod, _ = world.running(handle)
    world.cluster.pods.stick(pod)
    adapters.impatient(monkeypatch)
    monkeypatch.setattr(adapter, "_grace", lambda _: 0.0)
    with pytest.raises(Unreachable) as error:
        world.backend.stop(handle)
    name, node = pod["metadata"]["name"], pod["spec"]["nodeName"]
    assert f"there is left: Pod {name} on {node}: see what keeps it, then stop the job again" in str(error.value)
    assert world.left(handle.job) == [f"Pod {name}"]
    world.cluster.pods.unstick(pod)
    world.backend.stop(handle)
    assert world.left(handle.job) == []


def test_stop_waits_as_long_as_the_pods_grace_period() -> None:
    pods = [{"spec": {"terminationGracePeriodSeconds": 30}}, {"metadata": {"deletionGracePeriodSeconds": 120}}]
    assert adapter._grace(pods) == 120


@pytest.mark.parametrize("component", ["kueue", "trainer"])
def test_nothing_is_deleted_while_a_webhook_is_away(
    kueue: World, monkeypatch: pytest.MonkeyPatch, component: str
) -> None:
    """A TrainJob that is deleted and was not suspended may start once more."""
    handle = kueue.opened()
    adapters.impatient(monkeypatch)
    kueue.cluster.kill(component)
    try:
        with pytest.raises(Unreachable, match=r"failed calling webhook .*: try again"):
            kueue.backend.stop(handle)
        assert len(kueue.running(handle)) == 2
    finally:
        kueue.cluster.start(component)
        monkeypatch.undo()
    kueue.backend.stop(handle)
    assert kueue.left(handle.job) == []
    assert kueue.pods_created() == 2


def test_a_workload_that_kueue_does_not_let_go_is_named(kueue: World, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = kueue.opened()
    name = kueue.namespace.workload(handle.name)["metadata"]["name"]
    keep = ["example.org/keep", "kueue.x-k8s.io/resource-in-use"]
    kueue.namespace.patch("Workload", name, {"metadata": {"finalizers": keep}})
    monkeypatch.setattr(adapter, "SETTLE", 5.0)
    with pytest.raises(Unreachable, match=f"there is left: Workload {name}: see what keeps it"):
        kueue.backend.stop(handle)
    kueue.namespace.patch("Workload", name, {"metadata": {"finalizers": None}})
    kueue.backend.stop(handle)
    assert kueue.left(handle.job) == []


def test_a_job_whose_runtime_was_deleted_can_be_stopped(world: World) -> None:
    """Trainer's webhook refuses every update of such a job, its suspension too."""
    jobs.own_runtime(world.namespace)
    handle = world.opened(runtime={"kind": "TrainingRuntime", "name": "own"})
    world.namespace.delete("TrainingRuntime", "own")
    world.backend.stop(handle)
    assert world.left(handle.job) == []
    assert world.pods_created() == 2


# --- what another has left behind


def test_what_is_left_of_a_deleted_trainjob_is_removed(plain: World) -> None:
    handle = plain.opened()
    plain.namespace.delete("TrainJob", handle.name, propagation="Orphan")
    plain.wait(lambda: not plain.namespace.find("TrainJob", handle.name), "the TrainJob is gone")
    plain.backend.stop(handle)
    assert plain.left(handle.job) == []
    assert plain.pods_created() == 2


def test_pods_without_a_job_are_removed(plain: World) -> None:
    handle = plain.opened()
    for kind, name in (("TrainJob", handle.name), ("JobSet", handle.name), ("Job", f"{handle.name}-node-0")):
        plain.namespace.delete(kind, name, propagation="Orphan")
        gone = functools.partial(plain.namespace.find, kind, name)
        plain.wait(lambda gone=gone: not gone(), f"{kind} is gone")  # type: ignore[misc]
    assert len(plain.namespace.pods(handle.name)) == 2
    plain.backend.stop(handle)
    assert plain.left(handle.job) == []


def test_a_successor_under_the_same_name_is_left_alone(world: World) -> None:
    spec = world.spec()
    old = world.backend.start(spec)
    world.backend.stop(old)
    new = world.backend.start(spec)
    world.backend.open(new)
    pods = world.running(new)
    with pytest.raises(NotFound, match=f"its name is another object's, {new.uid}, which was left alone"):
        world.backend.stop(old)
    assert uids(world.running(new)) == uids(pods)
    for operation in (world.backend.inspect, world.backend.open):
        with pytest.raises(NotFound, match="its name is another object's now"):
            operation(old)
    assert world.backend.find(spec.job) == (new,)


# --- all of a job


def test_a_job_is_stopped_with_all_its_submissions(world: World) -> None:
    first = world.opened()
    world.end(first)
    second = world.opened(job=first.job, submission=2)
    other = world.started()
    world.backend.stop_job(first.job)
    assert world.left(first.job) == []
    assert world.backend.inspect(other).state is State.GATED
    world.backend.stop_job(first.job)
    assert second.submission == 2


def test_a_submission_whose_trainjob_is_gone_is_stopped_with_the_job(plain: World) -> None:
    first = plain.opened()
    plain.namespace.delete("TrainJob", first.name, propagation="Orphan")
    plain.wait(lambda: not plain.namespace.find("TrainJob", first.name), "the TrainJob is gone")
    plain.backend.stop_job(first.job)
    assert plain.left(first.job) == []


def test_one_submission_that_cannot_go_does_not_keep_the_others(plain: World, monkeypatch: pytest.MonkeyPatch) -> None:
    first = plain.opened()
    pod, _ = plain.running(first)
    plain.cluster.pods.stick(pod)
    for one in plain.running(first):
        plain.cluster.pods.end(one, 1, "Error")
    plain.state(first, State.FAILED)
    second = plain.started(job=first.job, submission=2)
    plain.cluster.pods.status(pod, lambda status: status.update(phase="Running"))
    adapters.impatient(monkeypatch)
    monkeypatch.setattr(adapter, "_grace", lambda _: 0.0)
    with pytest.raises(Unreachable, match=pod["metadata"]["name"]):
        plain.backend.stop_job(first.job)
    assert plain.left(second.name) == []


def test_stop_asks_for_nothing_of_other_jobs_and_needs_only_its_role(world: World) -> None:
    handle, other = world.opened(nodes=1), world.started()
    (pod,) = world.running(handle, 1)
    mark = world.cluster.audit_mark()
    world.backend.stop(handle)
    for event in world.cluster.audit_events(world.user, since=mark):
        assert event["responseStatus"]["code"] != 403
        assert other.job not in event["requestURI"]
        assert handle.job in event["requestURI"] or handle.uid in event["requestURI"]
    assert pod["metadata"]["name"].startswith(handle.name)
