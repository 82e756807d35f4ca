"""How a job's end looks in life, for each way to end, and what the adapter makes of it.

Recorded facts, compared with what is seen now (see facts.py); the adapter sees them anew each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from adapter import Cause, Handle, State, Status
from tests import jobs
from tests.cluster import images
from tests.cluster.api import Object, path
from tests.cluster.gate import Gate
from tests.cluster.real_node import FLAVOR, NAME, RealNode
from tests.cluster.waiting import unique
from tests.node import facts
from tests.node.site import Site, execute, on

MISSING_IMAGE, MISSING_MAP = "registry.invalid/train:v1", "no-such-map"
# Pods leave a node that is lost at once, not after the five minutes that are usual.
AT_ONCE = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 0}
IMPATIENT: Object = {
    **FLAVOR,
    "tolerations": [
        *FLAVOR["tolerations"],
        *({"key": f"node.kubernetes.io/{key}", **AT_ONCE} for key in ("unreachable", "not-ready")),
    ],
}


@pytest.fixture(scope="module")
def lease(real_node: RealNode) -> Iterator[str]:
    """The Lease of a gate that serves every test here."""
    name = f"lease-{unique()}"
    with Gate(real_node.cluster, "facts", lease=name):
        yield name


def start(site: Site, lease: str, *options: str, **more: Any) -> str:
    """A job of the adapter's that was opened, by name: its objects carry all that the adapter puts there."""
    backend = site.backend(lease)
    handle = backend.start(site.spec(*options, **more))
    workload = site.namespace.workload
    site.cluster.wait(lambda: jobs.condition(workload(handle.name), "QuotaReserved", "False"), f"{handle} is gated")
    backend.open(handle)
    return handle.name


def finished(site: Site, job: str) -> bool:
    """Whether the TrainJob says that it has ended, and no pod of it lives."""
    trainjob = site.namespace.get("TrainJob", job)
    ended = jobs.condition(trainjob, "Complete") or jobs.condition(trainjob, "Failed")
    return ended and not jobs.epochs_of_living(site.namespace, job)


def told(site: Site, lease: str, job: str, state: State, cause: Cause | None, words: str = "") -> Status:
    """The job's status, which is this: from a backend that has seen nothing before."""
    handle = Handle(site.namespace.name, job, site.namespace.get("TrainJob", job)["metadata"]["uid"])
    status = site.backend(lease, read_only=True).inspect(handle)
    assert (status.state, status.cause) == (state, cause), status
    assert words in status.detail
    return status


def compare(site: Site, name: str, job: str, moment: str) -> None:
    facts.check(name, moment, lambda: facts.of(site.namespace, job))


def located(seen: Object) -> Object:
    """The same, had the kubelet looked at the container once more after killing it: a busy one may lose sight of it."""
    for pod in seen["Pod"]:
        for container in pod["status"].get("containerStatuses", []):
            end = container["state"].get("terminated", {})
            if end.get("reason") == "ContainerStatusUnknown":
                assert end["exitCode"] == 137
                known = {"exitCode": 137, "finishedAt": "TIME", "reason": "Error", "startedAt": "TIME"}
                container["state"]["terminated"] = known
    return seen


def uncounted(seen: Object) -> Object:
    """The same without Trainer's count of the Jobs, which may be from before it deletes the JobSet or from after."""
    for trainjob in seen["TrainJob"]:
        trainjob["status"].pop("jobsStatus", None)
    return seen


ENDS: dict[str, tuple[list[str], dict[str, Any], Cause | None, int | None]] = {
    "completed": (["--seconds=0"], {}, None, None),
    "exit-code": (["--seconds=0", "--exit-code=3"], {}, Cause.PROGRAM, 3),
    "out-of-memory": (["--allocate=200"], {}, Cause.OUT_OF_MEMORY, 137),
    # The container's own program goes on and ends by itself: the reason is OOMKilled all the same, not the exit code.
    "out-of-memory-in-a-child": (
        *(["--allocate=200", "--in-child", "--seconds=0", "--exit-code=1"], {}),
        *(Cause.OUT_OF_MEMORY, 1),
    ),
    "command-not-found": ([], {"command": ["/no/such/program"]}, Cause.CONFIG, 128),
}


@pytest.mark.parametrize("name", ENDS)
def test_an_end_looks_as_recorded(site: Site, lease: str, name: str) -> None:
    options, more, cause, code = ENDS[name]
    job = start(site, lease, *options, **more)
    site.cluster.wait(lambda: finished(site, job), f"{job} has ended")
    compare(site, name, job, "finished")
    status = told(site, lease, job, State.FAILED if cause else State.SUCCEEDED, cause)
    assert status.exit_code == code


RANKS = """
import os, time
if os.environ["JOB_COMPLETION_INDEX"] == "0":
    bytearray(200 << 20)
time.sleep(2)
raise SystemExit(1)
"""


def test_a_rank_out_of_memory_is_the_cause_though_the_others_exit_later(site: Site, lease: str) -> None:
    third = {"requests": {"cpu": "30m"}, "limits": {"memory": "64Mi"}}
    job = start(site, lease, command=["python", "-c", RANKS], nodes=3, resources=third)
    site.cluster.wait(lambda: jobs.condition(site.namespace.get("TrainJob", job), "Failed"), f"{job} has failed")
    status = told(site, lease, job, State.FAILED, Cause.OUT_OF_MEMORY, "OOMKilled, exit code 137")
    assert status.rank == 0


def test_between_restarts_in_place_the_last_end_is_the_cause(real_node: RealNode, lease: str) -> None:
    with on(real_node, stock=True) as site:
        job = start(site, lease, "--allocate=200")

        def backs_off() -> bool:
            waiting = site.namespace.pods(job)[0]["status"]["containerStatuses"][0]["state"].get("waiting", {})
            return bool(waiting.get("reason") == "CrashLoopBackOff")

        site.cluster.wait(backs_off, "its container is to be restarted", interval=0.05)
        told(site, lease, job, State.STARTING, Cause.OUT_OF_MEMORY, "OOMKilled, exit code 137")


def test_a_job_that_runs_too_long_looks_as_recorded(site: Site, lease: str) -> None:
    job = start(site, lease, timeout=15)
    site.running(job)
    get = site.namespace.get
    site.cluster.wait(lambda: get("TrainJob", job)["status"]["jobsStatus"][0]["ready"] == 1, f"{job} is ready")
    site.cluster.wait(lambda: finished(site, job), f"{job} has ended")
    facts.check("deadline", "finished", lambda: uncounted(facts.of(site.namespace, job)))
    told(site, lease, job, State.FAILED, Cause.TIMEOUT, "DeadlineExceeded")


WAITS: dict[str, tuple[dict[str, Any], list[str], Cause]] = {
    "image-not-there": ({"image": MISSING_IMAGE}, ["ErrImagePull", "ImagePullBackOff"], Cause.IMAGE),
    "image-name-invalid": ({"image": "Not:A:Name"}, ["InvalidImageName"], Cause.IMAGE),
    "configuration-missing": ({}, ["CreateContainerConfigError"], Cause.CONFIG),
}


def without_its_map(pod: Object) -> None:
    pod["containers"][0]["envFrom"] = [{"configMapRef": {"name": MISSING_MAP}}]


@pytest.mark.parametrize("name", WAITS)
def test_a_pod_that_cannot_start_looks_as_recorded(real_node: RealNode, lease: str, name: str) -> None:
    more, reasons, cause = WAITS[name]
    with on(real_node, change=without_its_map if name == "configuration-missing" else None) as site:
        job = start(site, lease, **more)
        for reason in reasons:

            def waits(reason: str = reason) -> bool:
                pod = site.namespace.pods(job)[0]
                return bool(pod["status"]["containerStatuses"][0]["state"]["waiting"]["reason"] == reason)

            site.cluster.wait(waits, f"{job} cannot start: {reason}", interval=0.05)
            compare(site, name, job, reason)
        told(site, lease, job, State.STARTING, cause)


def test_a_program_that_is_killed_looks_as_recorded(real_node: RealNode, lease: str) -> None:
    """137 without OOMKilled. Its PID namespace is the pod's: in one of its own it is process 1, which none can kill."""

    def share(pod: Object) -> None:
        pod["shareProcessNamespace"] = True

    with on(real_node, change=share) as site:
        job = start(site, lease)
        (pod,) = site.running(job)
        execute(site.cluster, pod, "python", "-c", KILL)
        site.cluster.wait(lambda: finished(site, job), f"{job} has ended")
        compare(site, "killed", job, "finished")
        told(site, lease, job, State.FAILED, Cause.PROGRAM, "Error, exit code 137")


KILL = """
import os, pathlib, signal
for entry in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    if b"program.py" in entry.read_bytes():
        os.kill(int(entry.parent.name), signal.SIGKILL)
"""


def test_a_preempted_job_looks_as_recorded(real_node: RealNode, lease: str) -> None:
    with on(real_node, grace=60) as site:
        job = start(site, lease, "--ignore-sigterm")
        site.running(job)
        other = site.submit(priority="high")
        site.cluster.wait(lambda: jobs.condition(site.namespace.workload(job), "Evicted"), f"{job} is evicted")
        site.running(other)
        compare(site, "preempted", job, "terminating")
        told(site, lease, job, State.STOPPING, Cause.PREEMPTED, "pods left: ")
        site.give_up(job)
        compare(site, "preempted", job, "gone")
        told(site, lease, job, State.QUEUED, Cause.PREEMPTED)
        site.end(other)
        site.running(job, "1000002")
        compare(site, "preempted", job, "running again")
        status = told(site, lease, job, State.RUNNING, None)
        assert [(i.cause, i.count) for i in status.interruptions] == [(Cause.PREEMPTED, 1)]


def test_a_preempted_job_that_its_job_fails_by_exit_code_is_not_the_programs_failure(
    real_node: RealNode, lease: str
) -> None:
    """A rule by exit code, and a finalizer that has the Job controller see the pod's end: see test_attempts.py.

    The JobSet takes note only when it is resumed: then the failure is another admission's, and nothing of that tells.
    """
    with on(real_node, exit_code_rule=True) as site:
        job = start(site, lease)
        (pod,) = site.running(job)
        name, finalizers = pod["metadata"]["name"], pod["metadata"]["finalizers"]
        site.namespace.patch("Pod", name, {"metadata": {"finalizers": [*finalizers, "dispatch.test/seen"]}})
        other, get = site.submit(priority="high"), site.namespace.get
        site.cluster.wait(lambda: jobs.condition(get("Job", f"{job}-node-0"), "FailureTarget"), "the Job has seen it")
        site.namespace.patch("Pod", name, {"metadata": {"finalizers": []}})
        site.cluster.wait(lambda: not site.namespace.pods(job), "the pod is gone")
        told(site, lease, job, State.QUEUED, Cause.PREEMPTED, "Workload Evicted: Preempted: ")
        site.end(other)
        site.cluster.wait(lambda: jobs.condition(get("TrainJob", job), "Failed"), f"{job} has failed")
        told(site, lease, job, State.FAILED, Cause.UNKNOWN, "failed with exit code 143 matching FailJob rule")


def test_a_pod_that_is_evicted_looks_as_recorded(site: Site, lease: str) -> None:
    job = start(site, lease)
    (pod,) = site.running(job)
    name = pod["metadata"]["name"]
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    site.cluster.api.request("POST", path("Pod", site.namespace.name, name, "eviction"), eviction)
    site.cluster.wait(lambda: finished(site, job), f"{job} has ended")
    compare(site, "evicted-through-the-api", job, "finished")
    told(site, lease, job, State.FAILED, Cause.UNKNOWN, f"{name} has condition DisruptionTarget")


def test_a_pod_that_fills_its_volume_looks_as_recorded(real_node: RealNode, lease: str) -> None:
    def limit(pod: Object) -> None:
        pod["volumes"].append({"name": "scratch", "emptyDir": {"sizeLimit": "1Mi"}})
        pod["containers"][0]["volumeMounts"].append({"name": "scratch", "mountPath": "/scratch"})

    with on(real_node, change=limit) as site:
        fill = "open('/scratch/full', 'wb').write(bytes(4 << 20)); import time; time.sleep(600)"
        job = start(site, lease, command=["python", "-c", fill])
        site.cluster.wait(lambda: finished(site, job), f"{job} has ended", 90)
        facts.check("evicted-by-the-kubelet", "finished", lambda: located(facts.of(site.namespace, job)))
        told(site, lease, job, State.FAILED, Cause.EVICTED, "Evicted: Usage of EmptyDir volume")


def test_a_pod_that_makes_room_for_a_critical_one_looks_as_recorded(site: Site, lease: str) -> None:
    job = start(site, lease)
    site.running(job)
    all_of_it = {"requests": {"cpu": site.cluster.get("Node", NAME)["status"]["allocatable"]["cpu"]}}
    container = {"name": "c", "image": images.PYTHON, "command": ["sleep", "600"], "resources": all_of_it}
    spec = {"priorityClassName": "system-node-critical", "nodeName": NAME, "containers": [container]}
    site.namespace.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "critical"}, "spec": spec})
    site.cluster.wait(lambda: finished(site, job), f"{job} has ended")
    compare(site, "preempted-by-the-kubelet", job, "finished")
    told(site, lease, job, State.FAILED, Cause.EVICTED, "TerminationByKubelet: Pod was preempted by Kubelet")


def test_a_lost_node_looks_as_recorded_and_comes_back(real_node: RealNode, lease: str) -> None:
    with on(real_node, grace=2, flavor_spec=IMPATIENT) as site:
        job = start(site, lease)
        (pod,) = site.running(job)
        real_node.lose()
        site.cluster.wait(
            lambda: "deletionTimestamp" in site.namespace.get("Pod", pod["metadata"]["name"])["metadata"],
            "the pod is told to go",
        )
        compare(site, "node-lost", job, "lost")
        told(site, lease, job, State.RUNNING, Cause.NODE_LOST, "node.kubernetes.io/unreachable")
        facts.check("node-lost", "node", lambda: facts.of_the_node(site.namespace))
        # Whatever the API server says: it runs.
        (run,) = site.runs(job)
        site.cluster.wait(lambda: site.runs(job)[0].last > run.last, "the program still writes")

        real_node.recover()
        site.cluster.wait(lambda: finished(site, job), f"{job} has ended")
        compare(site, "node-lost", job, "back")
        told(site, lease, job, State.FAILED, Cause.NODE_LOST, "TaintManagerEviction: Marking for deletion")
        assert site.runs(job)[0].exit_code is None
