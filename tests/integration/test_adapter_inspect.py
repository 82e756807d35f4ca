"""Why a job is as it is, end to end: the evidence comes about as in life, as far as kwok's nodes can show it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import adapter
from adapter import Cause, Handle, State, Status
from tests import adapters, jobs
from tests.adapters import Call, World
from tests.cluster.api import ApiError, Object, path
from tests.cluster.cluster import Cluster
from tests.cluster.namespaces import KUEUE
from tests.cluster.waiting import WaitTimeout, unique

SMALL = {"requests": {"cpu": "1"}}


@pytest.fixture(name="kueue")
def _kueue(cluster: Cluster) -> Iterator[World]:
    """Kueue mode, without a check: what is admitted runs."""
    with adapters.world(cluster, "kueue", check=False) as made:
        yield made


@pytest.fixture(name="plain")
def _plain(cluster: Cluster) -> Iterator[World]:
    with adapters.world(cluster, "plain") as made:
        yield made


@pytest.fixture(name="node")
def _node(cluster: Cluster) -> Iterator[str]:
    """A node of the test's own, with room for one pod of one CPU: pods are placed on it by its host name."""
    name = f"node-{unique()}"
    cluster.nodes.create(name, cpu="1")
    yield name
    with contextlib.suppress(ApiError):  # a test deletes it
        cluster.nodes.delete(name)


def told(
    world: World, handle: Handle, state: State, cause: Cause | None, words: str = "", within: float = 60
) -> Status:
    """The job's status, once it is this."""
    status = adapter.Status(handle, State.QUEUED)

    def so() -> Status | None:
        nonlocal status
        status = world.backend.inspect(handle)
        return status if (status.state, status.cause) == (state, cause) and words in status.detail else None

    try:
        return world.cluster.wait(so, f"{handle.name} is {state} ({cause}): {words}", within, interval=0.05)
    except WaitTimeout as error:
        raise AssertionError(f"{error}: {status}") from error


def one_node(world: World, **changes: Any) -> Handle:
    """A job of one node, of one CPU, that was opened."""
    handle = world.backend.start(world.spec(**{"nodes": 1, "resources": SMALL, **changes}))
    world.backend.open(handle)
    return handle


def running(world: World, **changes: Any) -> tuple[Handle, Object]:
    """Such a job, and its pod that runs."""
    handle = one_node(world, **changes)
    (pod,) = world.running(handle, 1)
    return handle, pod


def failed(world: World, handle: Handle) -> None:
    world.wait(lambda: jobs.condition(world.trainjob(handle), "Failed"), f"{handle.name} has failed")


def go(world: World, pod: Object, code: int = 143) -> None:
    """A pod that is told to go ends, and is gone when the Job controller has seen that, as with a kubelet."""
    name, get = pod["metadata"]["name"], world.namespace.get
    world.wait(lambda: "deletionTimestamp" in get("Pod", name)["metadata"], f"{name} is to go")
    world.cluster.pods.fail(pod, code)
    tracking = "batch.kubernetes.io/job-tracking"
    world.wait(lambda: tracking not in get("Pod", name)["metadata"].get("finalizers", []), f"the end of {name} is seen")
    world.cluster.pods.unstick(pod)


def released(world: World, handle: Handle, instance: int) -> bool:
    """In plain mode only what stands still can be released."""
    try:
        world.backend.release(handle, instance)
    except adapter.Conflict:
        return False
    return True


def again(world: World) -> adapter.Backend:
    """Another backend: it knows only what the cluster still has."""
    return adapter.connect(world.settings)


# --- the program's end


def test_one_rank_out_of_memory_is_the_cause_though_the_others_fail_of_it_later(plain: World) -> None:
    handle = plain.opened(nodes=3)
    first, *others = plain.running(handle, 3)
    for pod in others:
        plain.cluster.pods.stick(pod)  # the Job deletes them as soon as one fails
    plain.cluster.pods.oom(first)
    for pod in others:
        plain.cluster.pods.fail(pod, 1)
    failed(plain, handle)
    status = plain.backend.inspect(handle)
    assert (status.state, status.cause, status.exit_code) == (State.FAILED, Cause.OUT_OF_MEMORY, 137)
    assert status.rank == int(first["metadata"]["annotations"][adapter.RANK])
    assert "OOMKilled, exit code 137" in status.detail


def helped(jobset: Object) -> None:
    """One more replicated job. A Job is Failed when all its pods have ended, but the JobSet as soon as one Job is."""
    jobset["replicatedJobs"][0]["template"]["spec"]["backoffLimit"] = 0
    jobs.pod_of(jobset)["restartPolicy"] = "Never"
    helper = copy.deepcopy(jobset["replicatedJobs"][0])
    helper["name"] = "helper"
    del helper["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"]
    jobset["replicatedJobs"].insert(0, helper)


def reported_late(world: World) -> Status:
    """What `inspect` says of a job whose trainer ran out of memory before its helper failed, but was reported later."""
    with jobs.runtime(world.cluster, helped) as runtime:
        handle = world.backend.start(world.spec(runtime={"name": runtime}, nodes=1, resources=SMALL))
        world.backend.open(handle)
        helper, trainer = sorted(world.running(handle, 2), key=lambda pod: "-node-" in pod["metadata"]["name"])
        world.cluster.pods.stick(trainer)
        world.cluster.pods.fail(helper, 1)
        failed(world, handle)
        mark, found = world.cluster.audit_mark(), list[Status]()
        call = Call(lambda: found.append(world.backend.inspect(handle)))
        oom = {"reason": "OOMKilled", "exitCode": 137, "finishedAt": "2026-01-01T00:00:00Z"}

        def earlier(status: Object) -> None:
            status["containerStatuses"][0]["state"] = {"terminated": oom}
            status["phase"] = "Failed"

        def looked() -> bool:
            events = world.cluster.audit_events(world.user, since=mark)
            return any(event["objectRef"]["resource"] == "pods" for event in events)

        world.wait(looked, "it has looked at the pods")
        world.cluster.pods.status(trainer, earlier)
        assert call.wait() is None
        world.cluster.pods.unstick(trainer)
        return found[0]


def test_an_end_that_is_reported_after_the_failure_is_waited_for(plain: World) -> None:
    assert reported_late(plain).cause is Cause.OUT_OF_MEMORY


def test_counter_without_the_wait_a_follower_is_blamed(plain: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "unsettled", lambda *_: False)
    assert reported_late(plain).cause is Cause.PROGRAM


@pytest.mark.parametrize(("code", "reason"), [(3, "Error"), (137, "Error")])
def test_an_exit_code_is_the_programs_and_137_alone_is_not_out_of_memory(plain: World, code: int, reason: str) -> None:
    handle, pod = running(plain)
    plain.cluster.pods.end(pod, code, reason)
    status = told(plain, handle, State.FAILED, Cause.PROGRAM, f"Error, exit code {code}")
    assert (status.exit_code, status.rank, status.node) == (code, 0, pod["spec"]["nodeName"])


@pytest.mark.parametrize("mode", adapters.MODES)
def test_a_job_that_runs_too_long_is_timed_out(cluster: Cluster, mode: str) -> None:
    with adapters.world(cluster, mode, check=False) as world:
        handle = world.backend.start(world.spec(timeout=3, nodes=1, resources=SMALL))
        world.backend.open(handle)
        told(world, handle, State.FAILED, Cause.TIMEOUT, "DeadlineExceeded: TrainJob exceeded its active deadline")


def test_a_job_that_its_runtime_lets_run_for_so_long_only_is_timed_out(plain: World) -> None:
    def limited(jobset: Object) -> None:
        jobset["replicatedJobs"][0]["template"]["spec"]["activeDeadlineSeconds"] = 2

    with jobs.runtime(plain.cluster, limited) as runtime:
        told(plain, one_node(plain, runtime={"name": runtime}), State.FAILED, Cause.TIMEOUT, "Job was active longer")


def test_a_final_status_does_not_change_within_a_backend_and_another_says_what_is_left(plain: World) -> None:
    handle, pod = running(plain)
    plain.cluster.pods.fail(pod, 3)
    status = told(plain, handle, State.FAILED, Cause.PROGRAM)
    plain.namespace.delete("Pod", pod["metadata"]["name"], grace=0)
    plain.wait(lambda: not plain.namespace.pods(handle.name), "the pod is gone")
    assert plain.backend.inspect(handle) == status
    later = again(plain).inspect(handle)
    assert (later.state, later.cause) == (State.FAILED, Cause.UNKNOWN)
    assert "Job" in later.detail
    assert "BackoffLimitExceeded" in later.detail


def test_with_the_stock_runtime_the_evidence_goes_with_the_pod_and_the_cause_is_unknown(plain: World) -> None:
    handle, pod = running(plain, runtime={"name": "torch-distributed"})

    def restarted(status: Object) -> None:  # in place, until the Job has had enough and deletes the pod
        (container,) = status["containerStatuses"]
        oom = {"reason": "OOMKilled", "exitCode": 137, "finishedAt": "2026-01-01T00:00:00Z"}
        container |= {"restartCount": 7, "lastState": {"terminated": oom}}

    plain.cluster.pods.status(pod, restarted)
    failed(plain, handle)
    plain.wait(lambda: not plain.namespace.pods(handle.name), "the Job has deleted the pod")
    status = plain.backend.inspect(handle)
    assert (status.state, status.cause, status.exit_code) == (State.FAILED, Cause.UNKNOWN, None)
    assert "BackoffLimitExceeded" in status.detail


# --- what the cluster does to it


def test_a_preemption_is_told_while_it_happens_after_the_requeue_and_after_the_readmission(kueue: World) -> None:
    handle, pod = running(kueue)
    kueue.cluster.pods.stick(pod)
    other = jobs.preempt(kueue.namespace, handle.name, cpu="4")
    words = "Workload Evicted: Preempted: Preempted to accommodate a workload"
    status = told(kueue, handle, State.STOPPING, Cause.PREEMPTED, words)
    assert f"pods left: {pod['metadata']['name']}" in status.detail
    go(kueue, pod)
    status = told(kueue, handle, State.QUEUED, Cause.PREEMPTED, words)
    assert [(i.cause, i.count) for i in status.interruptions] == [(Cause.PREEMPTED, 1)]
    kueue.namespace.delete("TrainJob", other)
    status = told(kueue, handle, State.RUNNING, None)
    assert [(i.cause, i.count, i.detail) for i in status.interruptions] == [(Cause.PREEMPTED, 1, "Preempted")]


@contextlib.contextmanager
def placed(cluster: Cluster, node: str) -> Iterator[World]:
    """A world in which Kueue itself says on which node a pod runs, and this one is all that it has."""
    hostname = "kubernetes.io/hostname"
    topology = {"kind": "Topology", "metadata": {"name": node}, "spec": {"levels": [{"nodeLabel": hostname}]}}
    cluster.create({"apiVersion": KUEUE, **topology})
    flavor = {"nodeLabels": {hostname: node}, "topologyName": node}
    try:
        with adapters.world(cluster, "kueue", check=False, flavor_spec=flavor) as world:
            yield world
    finally:
        cluster.delete("Topology", node)


def test_a_node_that_is_gone_and_that_kueue_has_no_other_for(cluster: Cluster, node: str) -> None:
    with placed(cluster, node) as world:
        handle, pod = running(world)
        name = pod["metadata"]["name"]
        cluster.pods.stick(pod)
        cluster.nodes.delete(node)
        words = (
            "Workload Evicted: NodeFailures: Workload was evicted as there was no replacement for unhealthy node(s): "
        )
        status = told(world, handle, State.STOPPING, Cause.NODE_LOST, words + node)
        assert f"pods left: {name}" in status.detail
        world.wait(lambda: "deletionTimestamp" in world.namespace.get("Pod", name)["metadata"], f"{name} is to go")
        world.namespace.delete("Pod", name, grace=0)
        status = told(world, handle, State.QUEUED, Cause.NODE_LOST, words + node)
        assert [(i.cause, i.count, i.detail) for i in status.interruptions] == [(Cause.NODE_LOST, 1, "NodeFailures")]
        cluster.nodes.create(node, cpu="1")
        assert told(world, handle, State.RUNNING, None).interruptions == status.interruptions


def test_a_preemption_by_the_scheduler(cluster: Cluster, plain: World, node: str) -> None:
    selector = {"kubernetes.io/hostname": node}
    handle, pod = running(plain, nodeSelector=selector)
    cluster.pods.stick(pod)
    container = {"name": "c", "image": "example.invalid/any", "resources": SMALL}
    # A priority class that each cluster has; pods outside kube-system may use it.
    spec = {"priorityClassName": "system-cluster-critical", "nodeSelector": selector, "containers": [container]}
    plain.namespace.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "preemptor"}, "spec": spec})
    told(plain, handle, State.RUNNING, Cause.PREEMPTED, "PreemptionByScheduler")
    go(plain, pod)
    status = told(plain, handle, State.FAILED, Cause.PREEMPTED)  # the pod is gone, an Event tells
    assert "Event of Pod" in status.detail or "PreemptionByScheduler" in status.detail
    assert "Event of Pod" in again(plain).inspect(handle).detail


def test_an_eviction_through_the_api(plain: World) -> None:
    handle, pod = running(plain)
    plain.cluster.pods.stick(pod)
    name = pod["metadata"]["name"]
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    plain.cluster.api.request("POST", path("Pod", plain.namespace.name, name, "eviction"), eviction)
    told(plain, handle, State.RUNNING, Cause.EVICTED, "EvictionByEvictionAPI")
    go(plain, pod)
    failed(plain, handle)
    plain.wait(lambda: not plain.namespace.pods(handle.name), "the pod is gone")
    status = again(plain).inspect(handle)  # nothing is left that tells what disrupted the pod
    assert status.cause is Cause.UNKNOWN
    assert f"{name} has condition DisruptionTarget" in status.detail


def test_a_node_that_is_unreachable_then_gone(cluster: Cluster, plain: World, node: str) -> None:
    handle, pod = running(plain, nodeSelector={"kubernetes.io/hostname": node})
    cluster.pods.stick(pod)
    cluster.nodes.lose(node)
    status = told(plain, handle, State.RUNNING, Cause.NODE_LOST, f"node {node} has node.kubernetes.io/unreachable")
    assert (status.node, status.rank) == (node, 0)
    cluster.nodes.delete(node)
    told(plain, handle, State.RUNNING, Cause.NODE_LOST, f"node {node} is gone")
    plain.cluster.wait(lambda: jobs.condition(plain.trainjob(handle), "Failed"), "its pod is collected", 120)
    status = again(plain).inspect(handle)  # the pod went at once, and left no Event
    assert status.cause is Cause.UNKNOWN
    assert "has condition DisruptionTarget" in status.detail


def test_a_node_that_is_out_of_service(cluster: Cluster, plain: World, node: str) -> None:
    handle, pod = running(plain, nodeSelector={"kubernetes.io/hostname": node})
    cluster.pods.stick(pod)
    cluster.nodes.lose(node)
    cluster.nodes.taint(node, "node.kubernetes.io/out-of-service", "nodeshutdown", "NoExecute")
    told(plain, handle, State.RUNNING, Cause.NODE_LOST, "DeletionByTaintManager: Taint manager: deleting due to")


def test_a_pod_that_stops_on_a_lost_node_says_so(cluster: Cluster, plain: World, node: str) -> None:
    handle, pod = running(plain, nodeSelector={"kubernetes.io/hostname": node})
    cluster.pods.stick(pod)
    cluster.nodes.lose(node)
    plain.namespace.patch("TrainJob", handle.name, {"spec": {"suspend": True}})
    told(plain, handle, State.STOPPING, Cause.NODE_LOST, f"pods left: {pod['metadata']['name']}")


def test_without_a_right_to_nodes_the_cause_says_that_the_taint_was_not_checked(
    cluster: Cluster, plain: World, node: str
) -> None:
    handle, pod = running(plain, nodeSelector={"kubernetes.io/hostname": node})
    cluster.pods.stick(pod)
    cluster.nodes.taint(node, "dispatch.test/away", effect="NoExecute")
    told(plain, handle, State.RUNNING, Cause.NODE_LOST, "(the node has no such taint)")
    cluster.delete("ClusterRoleBinding", f"dispatch-adapter-{plain.namespace.name}")
    told(plain, handle, State.RUNNING, Cause.NODE_LOST, "(the taint was not checked)")


def test_what_nobody_knows_yet_keeps_its_words(plain: World) -> None:
    handle, pod = running(plain)
    plain.cluster.pods.condition(pod, "DisruptionTarget", "True", "NeverHeardOf", "a new thing")
    told(plain, handle, State.RUNNING, Cause.UNKNOWN, "NeverHeardOf: a new thing")
    plain.cluster.pods.end(pod, 9, "NewEnd")
    told(plain, handle, State.FAILED, Cause.UNKNOWN, "NeverHeardOf: a new thing")


def test_pods_that_find_no_node(plain: World) -> None:
    handle = one_node(plain, nodeSelector={"kubernetes.io/hostname": "nowhere"})
    told(plain, handle, State.STARTING, Cause.NO_CAPACITY, "Unschedulable: 0/")


# --- what Kueue does to it


def test_a_job_that_waits_for_quota_and_one_that_can_never_fit(kueue: World) -> None:
    running(kueue)
    waits = one_node(kueue, resources={"requests": {"cpu": "4"}})
    told(kueue, waits, State.QUEUED, Cause.NO_CAPACITY, "waits for quota: ")
    never = one_node(kueue, resources={"requests": {"cpu": "5"}})
    told(kueue, never, State.QUEUED, Cause.NO_CAPACITY, "can never fit its queue as it is: ")


@pytest.mark.parametrize("policy", ["Hold", "HoldAndDrain"])
@pytest.mark.parametrize("kind", ["LocalQueue", "ClusterQueue"])
def test_a_queue_that_is_stopped(kueue: World, kind: str, policy: str) -> None:
    handle, _ = running(kueue)
    name = kueue.namespace.queue if kind == "LocalQueue" else kueue.namespace.cluster_queue
    kueue.namespace.patch(kind, name, {"spec": {"stopPolicy": policy}})
    later = one_node(kueue)
    told(kueue, later, State.QUEUED, Cause.QUEUE_STOPPED, f"{kind} {name}: stopPolicy {policy}")
    if policy == "Hold":
        assert kueue.backend.inspect(handle).state is State.RUNNING
    else:
        status = told(kueue, handle, State.QUEUED, Cause.QUEUE_STOPPED, f"Workload Evicted: {kind}Stopped")
        assert [(i.cause, i.detail) for i in status.interruptions] == [(Cause.QUEUE_STOPPED, f"{kind}Stopped")]


@pytest.mark.parametrize("kind", ["LocalQueue", "ClusterQueue"])
def test_a_queue_that_is_missing(kueue: World, kind: str) -> None:
    name = kueue.namespace.queue if kind == "LocalQueue" else kueue.namespace.cluster_queue
    kueue.namespace.delete(kind, name)
    kueue.wait(lambda: kueue.namespace.find(kind, name) is None, "it is gone")
    told(kueue, one_node(kueue), State.QUEUED, Cause.QUEUE_STOPPED, "Queue")


def test_a_job_that_somebody_deactivated(kueue: World) -> None:
    handle, pod = running(kueue)
    kueue.cluster.pods.stick(pod)
    name = kueue.namespace.workload(handle.name)["metadata"]["name"]
    kueue.namespace.patch("Workload", name, {"spec": {"active": False}})
    told(kueue, handle, State.STOPPING, Cause.STOPPED, "Deactivated: ")
    go(kueue, pod)
    told(kueue, handle, State.HELD, Cause.STOPPED, "Deactivated: ")
    kueue.namespace.patch("Workload", name, {"spec": {"active": True}})
    told(kueue, handle, State.RUNNING, None)
    assert kueue.backend.inspect(handle).interruptions == ()


def test_a_job_that_kueue_lets_run_for_so_long_only(kueue: World) -> None:
    handle = kueue.started(nodes=1, resources=SMALL)
    label = {"kueue.x-k8s.io/max-exec-time-seconds": "2"}
    kueue.namespace.patch("TrainJob", handle.name, {"metadata": {"labels": label}})
    kueue.backend.open(handle)
    told(kueue, handle, State.FAILED, Cause.TIMEOUT, "DeactivatedDueToMaximumExecutionTimeExceeded: ")


@pytest.mark.parametrize("mode", adapters.MODES)
def test_our_own_hold_has_no_cause_at_any_time(cluster: Cluster, mode: str) -> None:
    with adapters.world(cluster, mode, check=False) as world:
        handle = world.started(nodes=1, resources=SMALL)
        world.backend.hold(handle, 6)
        assert told(world, handle, State.HELD, None, "hold instance 6").hold == 6
        world.backend.open(handle)
        told(world, handle, State.HELD, None, "hold instance 6")
        world.backend.release(handle, 6)
        (pod,) = world.running(handle, 1)
        assert told(world, handle, State.RUNNING, None).hold is None
        cluster.pods.stick(pod)
        world.backend.hold(handle, 7)
        assert told(world, handle, State.STOPPING, None, f"pods left: {pod['metadata']['name']}").hold == 7
        go(world, pod)
        assert told(world, handle, State.HELD, None, "hold instance 7").hold == 7
        world.wait(lambda: released(world, handle, 7), "it stands still")
        status = told(world, handle, State.RUNNING, None)
        assert (status.hold, status.interruptions) == (None, ())


UNREADY: dict[str, Any] = {
    "waitForPodsReady": {"timeout": "4s", "recoveryTimeout": "2s", "requeuingStrategy": {"backoffLimitCount": 0}}
}


def test_pods_that_are_not_ready_in_time(cluster: Cluster) -> None:
    with adapters.world(cluster, "kueue", check=False) as world, cluster.reconfigured("kueue", config=UNREADY):
        handle = one_node(world, nodeSelector={"kubernetes.io/hostname": "nowhere"})
        told(world, handle, State.STARTING, Cause.NO_CAPACITY, "Unschedulable")

        def over() -> bool:
            evicted = [
                c for c in world.namespace.workload(handle.name)["status"]["conditions"] if c["type"] == "Evicted"
            ]
            return bool(evicted) and not world.namespace.pods(handle.name) and "DueTo" in evicted[0]["reason"]

        world.wait(over, "it is deactivated, and its pods are gone")
        told(world, handle, State.FAILED, Cause.EVICTED, "RequeuingLimitExceeded")


def test_pods_that_are_not_ready_in_time_are_tried_again(cluster: Cluster) -> None:
    later = {"waitForPodsReady": {"timeout": "4s", "requeuingStrategy": {"backoffBaseSeconds": 600}}}
    with adapters.world(cluster, "kueue", check=False) as world, cluster.reconfigured("kueue", config=later):
        handle = one_node(world, nodeSelector={"kubernetes.io/hostname": "nowhere"})
        status = told(world, handle, State.QUEUED, Cause.EVICTED, "Workload Evicted: PodsReadyTimeout: ")
        (was,) = status.interruptions
        assert (was.cause, was.count, was.detail) == (Cause.EVICTED, 1, "PodsReadyTimeout/WaitForStart")


def test_pods_that_are_not_ready_in_time_tell_why_while_they_are_there(cluster: Cluster) -> None:
    def waits(status: Object) -> None:
        (container,) = status["containerStatuses"]
        container |= {"ready": False, "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
        status["conditions"] = [{**c, "status": "False"} if "Ready" in c["type"] else c for c in status["conditions"]]

    with adapters.world(cluster, "kueue", check=False) as world, cluster.reconfigured("kueue", config=UNREADY):
        handle, pod = running(world)
        world.wait(lambda: jobs.condition(world.namespace.workload(handle.name), "PodsReady"), "its pods are ready")
        cluster.pods.stick(pod)
        cluster.pods.status(pod, waits)
        told(world, handle, State.FAILED, Cause.IMAGE, "ImagePullBackOff: no such image; Workload Evicted: ", within=90)


@contextlib.contextmanager
def at_a_check(cluster: Cluster) -> Iterator[tuple[World, Callable[[Handle, str, str], None]]]:
    """A world whose queue has a check of somebody else's, and that one's verdict on a job."""
    with adapters.world(cluster, "kueue", check=False, extra_checks=("other",)) as world:
        world.namespace.activate()

        def decide(handle: Handle, state: str, message: str) -> None:
            workload = world.namespace.workload(handle.name)
            (check,) = workload["status"]["admissionChecks"]
            check |= {"state": state, "message": message}
            name = workload["metadata"]["name"]
            world.namespace.patch("Workload", name, {"status": workload["status"]}, subresource="status")

        yield world, decide


def test_a_job_that_a_check_rejects(cluster: Cluster) -> None:
    with at_a_check(cluster) as (world, decide):
        handle = one_node(world)
        check = world.namespace.checks[0]
        told(world, handle, State.QUEUED, None, f"check {check}: Pending: ")
        decide(handle, "Rejected", "no machines to be had")
        status = told(world, handle, State.FAILED, Cause.REJECTED, "DeactivatedDueToAdmissionCheck")
        assert status.final


def test_a_job_that_a_check_sends_back(cluster: Cluster) -> None:
    with at_a_check(cluster) as (world, decide):
        handle = one_node(world)
        told(world, handle, State.QUEUED, None, f"check {world.namespace.checks[0]}: Pending: ")
        decide(handle, "Ready", "")
        (pod,) = world.running(handle, 1)
        cluster.pods.stick(pod)
        other = one_node(world, resources={"requests": {"cpu": "4"}})
        told(world, other, State.QUEUED, Cause.NO_CAPACITY, "waits for quota")
        decide(handle, "Retry", "the machines went away")
        told(world, handle, State.STOPPING, Cause.EVICTED, "Workload Evicted: AdmissionCheck: ")
        go(world, pod)
        told(world, handle, State.QUEUED, Cause.EVICTED, "Workload Evicted: AdmissionCheck: ")
        world.namespace.delete("TrainJob", other.name)
        told(world, handle, State.QUEUED, None, "Pending: Reset to Pending after eviction. Previously: Retry")
        decide(handle, "Ready", "")
        status = told(world, handle, State.RUNNING, None)
        assert [(i.cause, i.count, i.detail) for i in status.interruptions] == [(Cause.EVICTED, 1, "AdmissionCheck")]


def test_a_job_that_is_admitted_but_cannot_be_resumed(cluster: Cluster) -> None:
    """Without its runtime no update of a TrainJob is accepted: Kueue cannot resume it."""
    with at_a_check(cluster) as (world, decide), jobs.runtime(cluster, lambda _: None) as runtime:
        handle = one_node(world, runtime={"name": runtime})
        told(world, handle, State.QUEUED, None, "Pending")
        cluster.delete("ClusterTrainingRuntime", runtime)
        decide(handle, "Ready", "")
        told(world, handle, State.STARTING, None, "admitted, but the TrainJob is still suspended")
        cluster.create({**cluster.get("ClusterTrainingRuntime", "torch-distributed"), "metadata": {"name": runtime}})


def test_the_gates_wait_is_told(cluster: Cluster) -> None:
    with adapters.world(cluster, "kueue") as world, cluster.controller():
        world.namespace.wait_served()
        handle, pod = running(world)
        cluster.pods.stick(pod)
        other = jobs.preempt(world.namespace, handle.name, cpu="4")
        world.namespace.delete("TrainJob", other)
        status = told(world, handle, State.STOPPING, Cause.PREEMPTED, "waiting for 1 pods of the earlier attempt")
        assert "Workload Preempted: Previously: Preempted to accommodate" in status.detail
        assert (status.admission, status.ungated) == (1, False)
        go(world, pod)
        assert told(world, handle, State.RUNNING, None).admission == 2


# --- what never comes to run


@pytest.mark.parametrize("mode", adapters.MODES)
def test_a_jobset_that_is_refused_is_told_by_an_event_only(cluster: Cluster, mode: str) -> None:
    def impossible(jobset: Object) -> None:
        jobset["successPolicy"] = {"operator": "All", "targetReplicatedJobs": ["nothing"]}

    with jobs.runtime(cluster, impossible) as runtime, adapters.world(cluster, mode, check=False) as world:
        handle = world.backend.start(world.spec(runtime={"name": runtime}, nodes=1, resources=SMALL))
        told(world, handle, State.GATED, Cause.CONFIG, "TrainJobResourcesCreationFailed")
        world.backend.open(handle)
        told(world, handle, State.STARTING, Cause.CONFIG, "TrainJobResourcesCreationFailed")
        role = world.namespace.get("Role", "dispatch-adapter")
        role["rules"] = [rule for rule in role["rules"] if rule["resources"] != ["events"]]
        cluster.update(role)
        told(world, handle, State.STARTING, None, "its Events may not be read")


def test_pods_that_may_not_be_made_are_told_by_an_event(plain: World) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    plain.cluster.api.request("POST", f"/api/v1/namespaces/{plain.namespace.name}/resourcequotas", quota)
    told(plain, one_node(plain), State.STARTING, Cause.UNKNOWN, "exceeded quota: none")


# --- the rest of the status


def test_a_running_job_is_running_though_kubectl_says_suspended(plain: World) -> None:
    handle, _ = running(plain)
    assert plain.trainjob(handle)["status"]["conditions"][-1]["type"] == "Suspended"  # what its column STATE shows
    told(plain, handle, State.RUNNING, None)


def test_a_pod_past_the_gate_is_ungated(kueue: World) -> None:
    """The queue does not list the gate's check."""
    handle, pod = running(kueue)
    assert kueue.backend.inspect(handle).ungated
    kueue.cluster.pods.succeed(pod)
    assert kueue.state(handle, State.SUCCEEDED).ungated


@pytest.mark.parametrize("mode", adapters.MODES)
def test_a_job_that_is_well_takes_no_more_reads_than_its_parts(cluster: Cluster, mode: str) -> None:
    with adapters.world(cluster, mode, check=False) as world:
        handle, _ = running(world)
        mark = cluster.audit_mark()
        assert world.backend.inspect(handle).state is State.RUNNING
        read = [(e["verb"], e["objectRef"]["resource"]) for e in cluster.audit_events(world.user, since=mark)]
        parts = [("get", "trainjobs"), ("list", "pods"), ("list", "workloads")]
        assert read == parts[: 2 if mode == "plain" else 3]
