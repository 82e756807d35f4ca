"""TrainJobs as tests make them, and what a test asks of them: the adapter's shape (design: "What is created"), by hand.

The gate's tests need jobs that the adapter would never make, too: ungated, foreign, with odd counts.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.cluster.api import Object
from tests.cluster.cluster import Cluster
from tests.cluster.namespaces import Namespace
from tests.cluster.waiting import TRANSIENT, T, WaitTimeout, unique

GATE = "dispatch.phpboyscout.uk/start"
GATED_BY = "kueue.x-k8s.io/admission-gated-by"
ADMISSION, EPOCH = "dispatch.phpboyscout.uk/admission", "dispatch.phpboyscout.uk/epoch"
HOLD = "dispatch.phpboyscout.uk/hold"
MANAGER = "dispatch.phpboyscout.uk/adapter"
ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def new_name(submission: int = 1) -> str:
    """An object name of the adapter's form, another each time."""
    return f"dj-0{''.join(secrets.choice(ALPHABET) for _ in range(25))}-s{submission}"


def counts(admission: str, epoch: str) -> Object:
    """The adapter's patch of one replicated job `node` with these counts."""
    metadata = {"annotations": {ADMISSION: admission, EPOCH: epoch}}
    jobs = [{"name": "node", "template": {"spec": {"template": {"metadata": metadata}}}}]
    return {"manager": MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}


def trainjob(
    name: str | None = None,
    *,
    nodes: int = 1,
    cpu: str = "1",
    gated: bool = True,
    priority: str | None = None,
    runtime: str = "torch-distributed",
    patches: list[Object] | None = None,
    queue: str | None = "lq",
    **spec: Any,
) -> Object:
    """A TrainJob as the adapter creates it, at admission 0; `spec` are more fields of its spec."""
    name = name or new_name()
    submission = int(match[1]) if (match := re.fullmatch(r"dj-.*-s(\d+)", name)) else 1
    labels = {"kueue.x-k8s.io/queue-name": queue, "kueue.x-k8s.io/priority-class": priority}
    env = [
        {"name": "DISPATCH_EPOCH", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{EPOCH}']"}}},
        {
            "name": "DISPATCH_ADMISSION",
            "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{ADMISSION}']"}},
        },
    ]
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {
            "name": name,
            "labels": {key: value for key, value in labels.items() if value},
            "annotations": {GATED_BY: GATE} if gated else {},
        },
        "spec": {
            "runtimeRef": {"kind": "ClusterTrainingRuntime", "name": runtime},
            "trainer": {"numNodes": nodes, "env": env, "resourcesPerNode": {"requests": {"cpu": cpu}}},
            "runtimePatches": [counts("0", str(submission * 1_000_000))] if patches is None else patches,
            **spec,
        },
    }


def install(cluster: Cluster, runtime: Object, namespace: str = "") -> None:
    """Puts a runtime there, the cluster's or a namespace's; returns when Trainer's webhook has seen it.

    Until then that refuses its jobs.
    """
    name, kind = runtime["metadata"]["name"], runtime["kind"]
    cluster.api.apply(runtime, namespace or None)
    job = trainjob(queue=None, gated=False, runtimeRef={"kind": kind, "name": name})
    cluster.wait(
        lambda: cluster.api.create(job, namespace or "default", dry_run=True), f"Trainer knows the {kind} {name}"
    )


def own_runtime(namespace: Namespace, **jobset: Any) -> None:
    """Installs a TrainingRuntime `own` in a namespace; `jobset` are more fields of its JobSet's spec."""
    containers = [{"name": "node", "image": "registry.example/train:v1"}]
    job: Object = {"spec": {"template": {"spec": {"containers": containers}}}}
    job["metadata"] = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": "own"},
        "spec": {"template": {"spec": {"replicatedJobs": [{"name": "node", "template": job}], **jobset}}},
    }
    install(namespace.cluster, runtime, namespace.name)


@contextlib.contextmanager
def runtime(cluster: Cluster, change: Callable[[Object], None]) -> Iterator[str]:
    """A runtime of the test's own, by name: the stock one, after `change` has edited its JobSet's spec."""
    stock = cluster.get("ClusterTrainingRuntime", "torch-distributed")
    change(stock["spec"]["template"]["spec"])
    name = f"runtime-{unique()}"
    install(
        cluster,
        {"apiVersion": stock["apiVersion"], "kind": stock["kind"], "metadata": {"name": name}, "spec": stock["spec"]},
    )
    try:
        yield name
    finally:
        cluster.delete("ClusterTrainingRuntime", name)


def pod_of(jobset: Object) -> Object:
    """The pod spec of the replicated job `node`, in a JobSet's spec."""
    spec: Object = jobset["replicatedJobs"][-1]["template"]["spec"]["template"]["spec"]
    return spec


def batch_job(name: str, *, cpu: str = "1", queue: str = "lq") -> Object:
    """A batch Job in a queue: a neighbour that is not dispatch's."""
    container = {"name": "c", "image": "example.invalid/any", "resources": {"requests": {"cpu": cpu}}}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": {"kueue.x-k8s.io/queue-name": queue}},
        "spec": {"suspend": True, "template": {"spec": {"containers": [container], "restartPolicy": "Never"}}},
    }


def submit(namespace: Namespace, job: Object | None = None, **options: Any) -> str:
    """Creates a gated job, sees it settled (AdmissionGated), opens it; returns its name.

    Kueue still writes to a Workload right after its creation; a job that has settled first is admitted in one go.
    """
    job = job or trainjob(**options)
    name: str = job["metadata"]["name"]
    namespace.create(job)
    wait = namespace.cluster.wait
    wait(
        lambda: condition(namespace.workload(name), "QuotaReserved", "False"),
        f"{name} is AdmissionGated",
        interval=0.05,
    )
    open_gate(namespace, name)
    return name


def open_gate(namespace: Namespace, name: str) -> None:
    """Takes the start gate off."""
    namespace.patch("TrainJob", name, {"metadata": {"annotations": {GATED_BY: None}}})


def condition(obj: Object, kind: str, status: str = "True") -> bool:
    """Whether an object's condition has this status."""
    conditions = obj.get("status", {}).get("conditions", [])
    return any(c["type"] == kind and c["status"] == status for c in conditions)


def check(namespace: Namespace, job: str) -> Object:
    """The gate's entry on a job's Workload: `state` and `message`."""
    entries: list[Object] = namespace.workload(job).get("status", {}).get("admissionChecks", [])
    found = [entry for entry in entries if entry["name"] == namespace.check]
    if not found:
        raise LookupError(f"the Workload of {job} does not list {namespace.check} yet")
    return found[0]


def workload_of(namespace: Namespace, job: str) -> Object:
    """A job's Workload, once there is one."""
    return namespace.cluster.wait(lambda: namespace.workload(job), f"{job} has a Workload", interval=0.01)


def wait_for(namespace: Namespace, job: str, until: Callable[[], T | None], what: str, timeout: float = 60) -> T:
    """Like `Cluster.wait`; with what it raises comes a note of what has become of the job."""
    try:
        return namespace.cluster.wait(until, what, timeout, interval=0.05)
    except WaitTimeout as error:
        error.add_note(as_it_is(namespace, job))
        raise


def as_it_is(namespace: Namespace, job: str) -> str:
    """What has become of a job, in one line, for the person who reads why a test failed."""
    try:
        told = {
            **{kind: told_of(namespace.find(kind, job)) for kind in ("TrainJob", "JobSet")},
            "Workload": told_of(namespace.workload(job)),
            "pods": [
                (pod["metadata"]["name"], pod["status"].get("phase"), pod["metadata"].get("deletionTimestamp"))
                for pod in namespace.pods(job)
            ],
        }
    except TRANSIENT as error:
        return f"{job} cannot be read: {error}"
    return f"{job}: {told}"


def told_of(obj: Object | None) -> Object:
    """What an object says: whether it may run, its conditions, and its admission checks."""
    spec, status = (obj or {}).get("spec", {}), (obj or {}).get("status", {})
    return {
        **{name: spec[name] for name in ("suspend", "active") if name in spec},
        **{c["type"]: f"{c['status']} {c['reason']}: {c['message']}" for c in status.get("conditions", [])},
        **{c["name"]: f"{c['state']}: {c['message']}" for c in status.get("admissionChecks", [])},
    }


def wait_message(namespace: Namespace, job: str, text: str, *, timeout: float = 30) -> Object:
    """Waits until the gate leaves the job Pending with a message that contains `text`; returns the entry."""

    def entry() -> Object | None:
        found = check(namespace, job)
        return found if found["state"] == "Pending" and text in found["message"] else None

    return wait_for(namespace, job, entry, f"the gate says {text!r} on {job}", timeout)


def running(namespace: Namespace, job: str, *, count: int = 1, epoch: str = "") -> list[Object]:
    """Waits for `count` running pods of a job that are not being deleted, of one epoch if it is given; returns them."""

    def pods() -> list[Object] | None:
        found = [
            pod
            for pod in namespace.pods(job)
            if pod["status"].get("phase") == "Running"
            and "deletionTimestamp" not in pod["metadata"]
            and epoch in ("", epoch_of(pod))
        ]
        return found if len(found) == count else None

    return wait_for(namespace, job, pods, f"{count} pods of {job} {epoch} run")


def epoch_of(pod: Object) -> str:
    """The epoch that a pod's program sees."""
    value: str = pod["metadata"].get("annotations", {}).get(EPOCH, "")
    return value


def epochs_of_living(namespace: Namespace, job: str) -> set[str]:
    """The epochs of a job's pods that may still run: two of them at once are the hazard."""
    return {epoch_of(pod) for pod in namespace.pods(job) if pod["status"].get("phase") not in ("Succeeded", "Failed")}


def admission_in(trainjob: Object) -> int | None:
    """The admission count on a TrainJob; None when it has none that can be read."""
    for patch in trainjob["spec"].get("runtimePatches", []):
        if patch["manager"] == MANAGER:
            try:
                job = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
                return int(job["template"]["spec"]["template"]["metadata"]["annotations"][ADMISSION])
            except (LookupError, ValueError):
                return None
    return None


def admission_of(namespace: Namespace, job: str) -> int:
    """The admission count on a TrainJob of this name."""
    admission = admission_in(namespace.get("TrainJob", job))
    assert admission is not None
    return admission


def preempt(namespace: Namespace, job: str, *, cpu: str) -> str:
    """Has a job of high priority take `cpu` from `job`; returns the other's name once `job` is evicted."""
    other = submit(namespace, cpu=cpu, priority="high")
    wait_for(namespace, job, lambda: condition(namespace.workload(job), "Evicted"), f"{job} is evicted")
    return other


def finish(namespace: Namespace, job: str) -> None:
    """Ends a running job: its pods succeed, and the TrainJob is Complete."""
    until = time.monotonic() + 30
    while not condition(namespace.get("TrainJob", job), "Complete"):
        for pod in namespace.pods(job):
            if pod["status"].get("phase") == "Running":
                namespace.cluster.pods.succeed(pod)
        namespace.cluster.wait(
            lambda: all(p["status"].get("phase") != "Running" for p in namespace.pods(job)), f"the pods of {job} end"
        )
        assert time.monotonic() < until, f"{job} does not complete"


# --- Workloads made by hand: what Kueue, left alone, shows only for a moment, or never


def workload(
    name: str, owner: Object | None = None, *, annotations: Object | None = None, cpu: str = "100m", **spec: Any
) -> Object:
    """A Workload in the queue that Kueue gives quota to like its own, with this owner reference."""
    container = {"name": "node", "image": "example.invalid/any", "resources": {"requests": {"cpu": cpu}}}
    template = {
        "metadata": {"annotations": annotations or {}},
        "spec": {"containers": [container], "restartPolicy": "Never"},
    }
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "Workload",
        "metadata": {"name": name, "ownerReferences": [owner] if owner else []},
        "spec": {"queueName": "lq", "podSets": [{"name": "node", "count": 1, "template": template}], **spec},
    }


def controller(obj: Object, **changes: Any) -> Object:
    """The reference that says that an object controls another."""
    meta = obj["metadata"]
    reference = {"apiVersion": obj["apiVersion"], "kind": obj["kind"], "name": meta["name"], "uid": meta["uid"]}
    return {**reference, "controller": True, **changes}


def held_at_the_gate(namespace: Namespace, job: Object | None = None) -> str:
    """A suspended TrainJob that the gate holds back (`hold` 1), returned by name; `release` lets it be decided anew.

    The TrainJob is in no queue, and its Workload is made by hand: so Kueue, which would put a TrainJob right at once,
    leaves it alone, and the gate can be shown a state for as long as a test looks.
    """
    job = job or trainjob(queue=None, gated=False, suspend=True)
    name: str = job["metadata"]["name"]
    job["metadata"]["annotations"][HOLD] = "1"
    namespace.create(workload(name, controller(namespace.create(job))))
    wait_message(namespace, name, "held: instance 1")
    return name


def release(namespace: Namespace, job: str, instance: int = 1) -> None:
    """What the adapter writes when it releases a hold."""
    namespace.patch("TrainJob", job, {"metadata": {"annotations": {HOLD: f"released-{instance}"}}})


def wait_ready(namespace: Namespace, job: str, message: str, *, timeout: float = 60) -> Object:
    """Waits until the gate has approved a job with a message that contains `message`; returns the entry."""

    def entry() -> Object | None:
        found = check(namespace, job)
        return found if found["state"] == "Ready" and message in found["message"] else None

    return wait_for(namespace, job, entry, f"the gate approves {job} with {message!r}", timeout)


def poke(namespace: Namespace, workload: str) -> None:
    """Changes a Workload, named itself, in a way that nobody minds: the gate looks at it now, not seconds later."""
    namespace.patch("Workload", workload, {"metadata": {"annotations": {"dispatch.test/poke": secrets.token_hex(4)}}})


def wait_looked_at(namespace: Namespace, name: str, *, beside: Namespace | None = None) -> None:
    """Returns when the gate has looked at a Workload, named itself, as it is now.

    The gate takes changes in their order: when a Workload that was made after this one's last change is approved, the
    gate has seen that change. (When it reads a TrainJob before it decides, the caller waits for that.) `beside` is
    where that other one is made, when the namespace itself has no quota for it.
    """
    poke(namespace, name)
    namespace = beside or namespace
    later = f"later-{secrets.token_hex(4)}"
    namespace.create(workload(later, cpu="1m"))

    def approved() -> bool:
        entries = namespace.get("Workload", later)["status"]["admissionChecks"]
        return any(entry["state"] == "Ready" for entry in entries if entry["name"] == namespace.check)

    namespace.cluster.wait(approved, "the gate approves what came later", interval=0.05)
    namespace.delete("Workload", later)
