"""`open` and `inspect`: what they write, what they leave alone, and what they say."""

from __future__ import annotations

from typing import Any

import pytest

import adapter
from adapter import Conflict, Invalid, NotFound, ReadOnly, State, Unreachable
from tests import adapters
from tests.adapters import GATED_BY, HOLD, World
from tests.cluster.api import Object
from tests.cluster.cluster import Cluster

GATE = "dispatch.phpboyscout.uk/gate"


# --- open


def without_versions(obj: Object) -> dict[str, Any]:
    metadata = {k: v for k, v in obj["metadata"].items() if k not in ("resourceVersion", "managedFields", "generation")}
    return {**obj, "metadata": metadata, "status": None}


def test_open_changes_the_gate_and_nothing_else(world: World) -> None:
    """Kueue's own entry, those of other managers, finalizers and other people's annotations survive."""
    handle = world.started()
    before = world.trainjob(handle)
    before["metadata"]["annotations"]["example.org/note"] = "keep me"
    before["metadata"]["finalizers"] = ["example.org/keep"]
    before["spec"]["runtimePatches"].append({"manager": "example.org/other", "trainingRuntimeSpec": {}})
    before = world.cluster.update(before)
    world.backend.open(handle)
    after = world.trainjob(handle)
    expected = adapter.opened(before)
    assert expected is not None
    managers = [patch["manager"] for patch in after["spec"]["runtimePatches"]]
    assert managers == ["dispatch.phpboyscout.uk/adapter", "kueue.x-k8s.io/manager", "example.org/other"]
    if world.mode == "plain":  # in Kueue mode Kueue goes on at once, and writes its own entry and `suspend`
        assert without_versions(after) == without_versions(expected)
    assert after["metadata"]["annotations"]["example.org/note"] == "keep me"
    assert GATED_BY not in after["metadata"]["annotations"]
    assert GATE not in after["metadata"]["annotations"]
    world.running(handle)
    world.namespace.patch("TrainJob", handle.name, {"metadata": {"finalizers": None}})


def test_in_kueue_mode_the_adapter_never_changes_a_trainjobs_spec(
    kueue: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Object] = []
    update = adapter.update_trainjob

    def recorded(api: adapter.Connection, changed: Object) -> Object:
        answer = update(api, changed)  # it was made on the version of the object that the server had
        assert answer["metadata"]["generation"] == changed["metadata"]["generation"]
        written.append(changed)  # not one that conflicted: then it is made once more
        return answer

    monkeypatch.setattr(adapter, "update_trainjob", recorded)
    kueue.backend.stop(kueue.opened())
    assert len(written) == 2


def test_opening_twice_is_fine(world: World) -> None:
    handle = world.opened()
    mark = world.cluster.audit_mark()
    world.backend.open(handle)
    assert [e["verb"] for e in world.cluster.audit_events(world.user, since=mark)] == ["get"]


def test_opening_again_does_not_resume_what_somebody_suspended(plain: World) -> None:
    handle = plain.opened()
    plain.namespace.patch("TrainJob", handle.name, {"spec": {"suspend": True}})
    plain.wait(lambda: plain.namespace.pods(handle.name) == [], "its pods are gone")
    plain.backend.open(handle)
    assert plain.trainjob(handle)["spec"]["suspend"] is True


def test_a_held_job_that_is_opened_does_not_run(world: World) -> None:
    handle = world.started()
    world.annotate(handle, HOLD, "1")
    world.backend.open(handle)
    status = world.backend.inspect(handle)
    assert (status.state, status.hold) == (State.HELD, 1)
    assert GATED_BY not in world.trainjob(handle)["metadata"]["annotations"]
    if world.mode == "kueue":
        workload = world.namespace.workload(handle.name)
        assert workload["spec"]["active"] is False
        conditions = {c["type"]: c["status"] for c in workload["status"]["conditions"]}
        assert conditions.get("QuotaReserved") != "True"
    assert world.trainjob(handle)["spec"]["suspend"] is True
    assert world.namespace.pods() == []


def test_a_released_job_that_is_opened_runs(world: World) -> None:
    handle = world.started()
    world.annotate(handle, HOLD, "released-1")
    world.backend.open(handle)
    world.running(handle)


def test_a_handle_of_another_mode_is_a_conflict(kueue: World) -> None:
    handle = kueue.started()
    with pytest.raises(Conflict, match="it was started in Kueue mode: use the settings that it was started with"):
        kueue.connect(kueue=None).open(handle)
    other = kueue.connect(kueue=None).start(kueue.spec())
    with pytest.raises(Conflict, match="it was started in plain mode"):
        kueue.backend.open(other)


def test_a_handle_of_another_namespace_is_invalid(plain: World) -> None:
    handle = adapter.Handle("elsewhere", f"dj-{adapter.new_job()}-s1", "u")
    for operation in (plain.backend.open, plain.backend.stop, plain.backend.inspect):
        with pytest.raises(Invalid, match="the settings are for namespace"):
            operation(handle)


def test_a_job_that_is_gone_is_not_found(world: World) -> None:
    handle = world.started()
    world.namespace.delete("TrainJob", handle.name)
    for operation in (world.backend.open, world.backend.inspect):
        with pytest.raises(NotFound) as error:
            operation(handle)
        assert str(error.value).startswith(f"dispatch: not found: TrainJob {handle}: it was deleted")


def test_a_read_only_backend_reads_and_does_not_write(world: World) -> None:
    handle = world.started()
    backend = adapter.connect(world.settings, read_only=True)
    assert backend.inspect(handle).state is State.GATED
    assert backend.find(handle.job) == (handle,)
    calls: list[tuple[Any, Any]] = [
        (backend.start, world.spec()),
        (backend.open, handle),
        (backend.stop, handle),
        (backend.stop_job, handle.job),
    ]
    for write, argument in calls:
        with pytest.raises(ReadOnly, match=r"^dispatch: read-only: "):
            write(argument)


def test_a_client_of_the_callers_own_works(cluster: Cluster, world: World) -> None:
    del world.settings["kubeconfig"]
    backend = adapters.prove(world, api_client=cluster.admin)
    handle = backend.start(world.spec())
    assert backend.inspect(handle).state is State.GATED


# --- inspect


def test_inspect_finds_a_job_that_start_has_just_returned(world: World) -> None:
    for _ in range(20):
        assert world.backend.inspect(world.backend.start(world.spec())).state is State.GATED


def test_a_jobs_states_from_its_start_to_its_success(world: World) -> None:
    handle = world.started()
    seen = [world.backend.inspect(handle).state]
    world.backend.open(handle)

    def running() -> bool:
        seen.append(world.backend.inspect(handle).state)
        return seen[-1] is State.RUNNING

    world.wait(running, "it runs")
    assert seen[0] is State.GATED
    order = [State.QUEUED, State.STARTING, State.RUNNING]
    assert sorted(seen[1:], key=order.index) == seen[1:]
    assert [p.rank for p in world.backend.inspect(handle).pods] == [0, 1]
    world.end(handle)
    status = world.backend.inspect(handle)
    assert (status.state, status.final) == (State.SUCCEEDED, True)


def test_a_program_that_fails_makes_the_job_fail_and_no_pod_is_tried_again(world: World) -> None:
    handle = world.opened()
    pod, _ = world.running(handle)
    world.cluster.pods.fail(pod, 3)
    status = world.state(handle, State.FAILED)
    assert status.final
    assert "FailedJobs" in status.detail
    assert len([p for p in status.pods if p.phase == "Failed"]) >= 1


def test_a_job_without_quota_is_queued_and_says_what_kueue_says(kueue: World) -> None:
    kueue.opened(resources={"requests": {"cpu": "2"}})
    handle = kueue.backend.start(kueue.spec())
    kueue.backend.open(handle)
    kueue.wait(lambda: "insufficient" in kueue.state(handle, State.QUEUED).detail, "Kueue says why")


def test_a_preempted_job_is_stopping_then_queued(kueue: World) -> None:
    handle = kueue.opened(resources={"requests": {"cpu": "2"}}, priority="low")
    pod, _ = kueue.running(handle)
    kueue.cluster.pods.stick(pod)
    other = kueue.backend.start(kueue.spec(resources={"requests": {"cpu": "2"}}, priority="high"))
    kueue.backend.open(other)
    assert pod["metadata"]["name"] in kueue.state(handle, State.STOPPING).detail
    kueue.cluster.pods.unstick(pod)
    assert kueue.state(handle, State.QUEUED).pods == ()


def test_a_workload_that_somebody_deactivated_is_held(kueue: World) -> None:
    handle = kueue.opened()
    name = kueue.namespace.workload(handle.name)["metadata"]["name"]
    kueue.namespace.patch("Workload", name, {"spec": {"active": False}})
    status = kueue.state(handle, State.HELD)
    assert (status.hold, status.final) == (None, False)


def test_a_job_that_runs_past_the_gate_is_ungated(cluster: Cluster) -> None:
    with adapters.world(cluster, "kueue", check=False) as world:
        handle = world.opened()
        status = world.backend.inspect(handle)
        assert (status.state, status.ungated, status.admission) == (State.RUNNING, True, 0)


def test_a_deleted_job_is_stopping_while_it_is_there(plain: World) -> None:
    handle = plain.started()
    plain.namespace.patch("TrainJob", handle.name, {"metadata": {"finalizers": ["example.org/keep"]}})
    plain.namespace.delete("TrainJob", handle.name)
    assert plain.backend.inspect(handle).state is State.STOPPING
    with pytest.raises(Conflict, match="it is being stopped"):
        plain.backend.open(handle)
    plain.namespace.patch("TrainJob", handle.name, {"metadata": {"finalizers": None}})


def test_an_api_server_that_is_away_is_unreachable_and_says_nothing_about_the_job(
    cluster: Cluster, plain: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = plain.opened()
    adapters.impatient(monkeypatch)
    cluster.kill("kube-apiserver")
    try:
        for operation in (plain.backend.inspect, plain.backend.open, plain.backend.stop):
            with pytest.raises(Unreachable, match=r"^dispatch: unreachable: .*no answer from the API server"):
                operation(handle)
    finally:
        cluster.start("kube-apiserver")
    plain.state(handle, State.RUNNING)
