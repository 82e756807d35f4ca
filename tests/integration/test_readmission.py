"""The main story: a preempted job comes back only when every pod of its earlier attempt is gone."""

from __future__ import annotations

import contextlib

import pytest

import admission
from tests import jobs
from tests.cluster.cluster import Cluster
from tests.cluster.namespaces import Namespace


def preempted_with_a_stuck_pod(namespace: Namespace) -> tuple[str, str]:
    """A job of two pods is admitted, and preempted while one of them hangs Terminating; then quota comes back.

    Returns the job and the pod that hangs.
    """
    job = jobs.submit(namespace, nodes=2)
    first, second = jobs.running(namespace, job, count=2, epoch="1000001")
    namespace.cluster.pods.stick(first)
    other = jobs.preempt(namespace, job, cpu="4")
    jobs.running(namespace, other)
    namespace.delete("TrainJob", other)
    namespace.cluster.wait(lambda: jobs.condition(namespace.workload(job), "QuotaReserved"), f"{job} has quota again")
    assert namespace.find("Pod", second["metadata"]["name"]) is None
    name: str = first["metadata"]["name"]
    assert namespace.get("Pod", name)["metadata"]["deletionTimestamp"]
    return job, name


def test_the_gate_waits_for_the_old_pod_and_names_it(cluster: Cluster, namespace: Namespace) -> None:
    with cluster.controller() as gate:
        job, old = preempted_with_a_stuck_pod(namespace)

        entry = jobs.wait_message(namespace, job, "waiting for")
        node = namespace.get("Pod", old)["spec"]["nodeName"]
        assert entry["message"] == f"waiting for 1 pods of the earlier attempt: {old} on {node}"
        assert [pod["metadata"]["name"] for pod in namespace.pods(job)] == [old]
        assert jobs.admission_of(namespace, job) == 1

        cluster.pods.unstick(namespace.get("Pod", old))
        jobs.running(namespace, job, count=2, epoch="1000002")
        entry = jobs.check(namespace, job)
        assert (entry["state"], entry["message"]) == ("Ready", "admission 2")
        raised = [line for line in gate.log if "raised the admission count" in line and job in line]
        assert [line.rpartition(" ")[2] for line in raised] == ["admission=1", "admission=2"]


def test_without_the_guard_two_attempts_run_side_by_side(cluster: Cluster, namespace: Namespace) -> None:
    with cluster.controller(guards_off=["old-pods"]):
        job, old = preempted_with_a_stuck_pod(namespace)
        jobs.running(namespace, job, count=2, epoch="1000002")
        assert namespace.get("Pod", old)["status"]["phase"] == "Running"
        assert jobs.epochs_of_living(namespace, job) == {"1000001", "1000002"}


def test_a_batch_job_passes_at_once(cluster: Cluster, namespace: Namespace) -> None:
    with cluster.controller():
        namespace.create(jobs.batch_job("neighbour"))
        entry = cluster.wait(
            lambda: entry if (entry := jobs.check(namespace, "neighbour"))["state"] == "Ready" else None,
            "the batch job is approved",
        )
        assert entry["message"] == "not dispatch's"
        cluster.wait(lambda: jobs.condition(namespace.workload("neighbour"), "Admitted"), "it is admitted")


def test_an_old_version_of_the_workload_does_not_raise_again(cluster: Cluster) -> None:
    """After the approval a version from before it may still be in the queue. A second check keeps the job suspended."""
    with cluster.namespace(extra_checks=["other"]) as namespace:
        namespace.activate()
        job = jobs.submit(namespace)
        reserved = cluster.wait(
            lambda: w if jobs.condition(w := namespace.workload(job), "QuotaReserved") else None, f"{job} has quota"
        )
        gate = admission.Gate(admission.Connection(cluster.admin), resync=30)
        gate._claim_checks()
        key = admission.key_of(reserved)

        def approved() -> bool:
            with contextlib.suppress(admission.ApiError):  # Kueue may still write to it
                gate._reconcile(key, namespace.workload(job))
            return bool(jobs.check(namespace, job)["state"] == "Ready")

        cluster.wait(approved, f"{job} is approved")
        with pytest.raises(admission.ApiError, match="HTTP 409"):
            gate._reconcile(key, reserved)
        assert jobs.admission_of(namespace, job) == 1

        gate._raised.clear()  # without the memory of its own raise, the number would go on
        with pytest.raises(admission.ApiError, match="HTTP 409"):
            gate._reconcile(key, reserved)
        assert jobs.admission_of(namespace, job) == 2


@pytest.mark.parametrize("attempts", [3])
def test_each_admission_has_a_greater_epoch(cluster: Cluster, namespace: Namespace, attempts: int) -> None:
    with cluster.controller():
        job = jobs.submit(namespace)
        for attempt in range(1, attempts + 1):
            jobs.running(namespace, job, epoch=str(1_000_000 + attempt))
            other = jobs.preempt(namespace, job, cpu="4")
            namespace.delete("TrainJob", other)
        jobs.running(namespace, job, epoch=str(1_000_001 + attempts))
