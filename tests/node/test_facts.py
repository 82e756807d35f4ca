"""How a job's end looks in life, for each way to end: recorded facts, compared with what is seen now (see facts.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests import jobs
from tests.cluster.api import Object, path
from tests.cluster.gate import Gate
from tests.cluster.real_node import FLAVOR, RealNode
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
    site.namespace.wait_served()
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


def compare(site: Site, name: str, job: str, moment: str) -> None:
    facts.check(name, moment, lambda: facts.of(site.namespace, job))


ENDS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "completed": (["--seconds=0"], {}),
    "exit-code": (["--seconds=0", "--exit-code=3"], {}),
    "out-of-memory": (["--allocate=200"], {}),
    # The container's own program goes on and ends by itself: the reason is OOMKilled all the same, not the exit code.
    "out-of-memory-in-a-child": (["--allocate=200", "--in-child", "--seconds=0", "--exit-code=1"], {}),
    "command-not-found": ([], {"command": ["/no/such/program"]}),
}


@pytest.mark.parametrize("name", ENDS)
def test_an_end_looks_as_recorded(site: Site, lease: str, name: str) -> None:
    options, more = ENDS[name]
    job = start(site, lease, *options, **more)
    site.cluster.wait(lambda: finished(site, job), f"{job} has ended")
    compare(site, name, job, "finished")


def test_a_job_that_runs_too_long_looks_as_recorded(site: Site, lease: str) -> None:
    job = start(site, lease, timeout=15)
    site.running(job)
    get = site.namespace.get
    site.cluster.wait(lambda: get("TrainJob", job)["status"]["jobsStatus"][0]["ready"] == 1, f"{job} is ready")
    site.cluster.wait(lambda: finished(site, job), f"{job} has ended")
    compare(site, "deadline", job, "finished")


WAITS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "image-not-there": ({"image": MISSING_IMAGE}, ["ErrImagePull", "ImagePullBackOff"]),
    "image-name-invalid": ({"image": "Not:A:Name"}, ["InvalidImageName"]),
    "configuration-missing": ({}, ["CreateContainerConfigError"]),
}


def without_its_map(pod: Object) -> None:
    pod["containers"][0]["envFrom"] = [{"configMapRef": {"name": MISSING_MAP}}]


@pytest.mark.parametrize("name", WAITS)
def test_a_pod_that_cannot_start_looks_as_recorded(real_node: RealNode, lease: str, name: str) -> None:
    more, reasons = WAITS[name]
    with on(real_node, change=without_its_map if name == "configuration-missing" else None) as site:
        job = start(site, lease, **more)
        for reason in reasons:

            def waits(reason: str = reason) -> bool:
                pod = site.namespace.pods(job)[0]
                return bool(pod["status"]["containerStatuses"][0]["state"]["waiting"]["reason"] == reason)

            site.cluster.wait(waits, f"{job} cannot start: {reason}", interval=0.05)
            compare(site, name, job, reason)


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
        site.give_up(job)
        compare(site, "preempted", job, "gone")
        site.end(other)
        site.running(job, "1000002")
        compare(site, "preempted", job, "running again")


def test_a_pod_that_is_evicted_looks_as_recorded(site: Site, lease: str) -> None:
    job = start(site, lease)
    (pod,) = site.running(job)
    name = pod["metadata"]["name"]
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    site.cluster.api.request("POST", path("Pod", site.namespace.name, name, "eviction"), eviction)
    site.cluster.wait(lambda: finished(site, job), f"{job} has ended")
    compare(site, "evicted-through-the-api", job, "finished")


def test_a_pod_that_fills_its_volume_looks_as_recorded(real_node: RealNode, lease: str) -> None:
    def limit(pod: Object) -> None:
        pod["volumes"].append({"name": "scratch", "emptyDir": {"sizeLimit": "1Mi"}})
        pod["containers"][0]["volumeMounts"].append({"name": "scratch", "mountPath": "/scratch"})

    with on(real_node, change=limit) as site:
        fill = "open('/scratch/full', 'wb').write(bytes(4 << 20)); import time; time.sleep(600)"
        job = start(site, lease, command=["python", "-c", fill])
        site.cluster.wait(lambda: finished(site, job), f"{job} has ended", 90)
        compare(site, "evicted-by-the-kubelet", job, "finished")


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
        facts.check("node-lost", "node", lambda: facts.of_the_node(site.namespace))
        # Whatever the API server says: it runs.
        (run,) = site.runs(job)
        site.cluster.wait(lambda: site.runs(job)[0].last > run.last, "the program still writes")

        real_node.recover()
        site.cluster.wait(lambda: finished(site, job), f"{job} has ended")
        compare(site, "node-lost", job, "back")
        assert site.runs(job)[0].exit_code is None
