"""The main story: a preempted job comes back only when every pod of its earlier attempt is gone."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize("attempts", [3])
def test_each_admission_has_a_greater_epoch(cluster: Cluster, namespace: Namespace, attempts: int) -> None:
    with cluster.controller():
        job = jobs.submit(namespace)
        for attempt in range(1, attempts + 1):
            jobs.running(namespace, job, epoch=str(1_000_000 + attempt))
            other = jobs.preempt(namespace, job, cpu="4")
            namespace.delete("TrainJob", other)
        jobs.running(namespace, job, epoch=str(1_000_001 + attempts))
