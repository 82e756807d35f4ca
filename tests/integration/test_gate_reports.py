"""What people reported of other controllers, each as a scenario in which the gate stands.

Other rows of that list are shown elsewhere: nothing is written during an eviction (`test_gate_table`, row 2); the only
Rejected is exhaustion (row 12); pods on a lost node, and pods with a long grace period (`test_gate_overlap`); silent
watches, tokens and Leases (`tests/faults`).
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator

import pytest

from tests import jobs
from tests.attempts import Attempts
from tests.cluster.api import Object
from tests.cluster.cluster import Cluster
from tests.cluster.gate import Gate
from tests.cluster.namespaces import Namespace

RANK = "batch.kubernetes.io/job-completion-index"


@pytest.fixture
def gate(cluster: Cluster) -> Iterator[Gate]:
    with cluster.controller("reports") as running:
        yield running


@pytest.mark.usefixtures("gate")
def test_a_preempted_job_waits_for_its_leader_pod(cluster: Cluster, namespace: Namespace) -> None:
    """ "A preempted JobSet was readmitted while its leader pod still terminated: wrong placement, two attempts"."""
    with Attempts(namespace) as attempts:
        job = jobs.submit(namespace, nodes=3)
        pods = jobs.running(namespace, job, count=3)
        leader = next(pod for pod in pods if pod["metadata"]["labels"][RANK] == "0")
        cluster.pods.stick(leader)
        namespace.delete("TrainJob", jobs.preempt(namespace, job, cpu="4"))
        name, node = leader["metadata"]["name"], leader["spec"]["nodeName"]
        jobs.wait_message(namespace, job, f"waiting for 1 pods of the earlier attempt: {name} on {node}")
        cluster.pods.unstick(leader)
        jobs.running(namespace, job, count=3, epoch="1000002")
    assert attempts.violations() == []


@pytest.mark.usefixtures("gate")
def test_a_pod_that_ends_in_its_grace_period_is_waited_for_and_then_does_not_count(
    cluster: Cluster, namespace: Namespace
) -> None:
    """The program saves its last checkpoint and ends by itself; the Pod object stays for a while."""
    with Attempts(namespace) as attempts:
        job = jobs.submit(namespace)
        (old,) = jobs.running(namespace, job)
        cluster.pods.stick(old)
        namespace.delete("TrainJob", jobs.preempt(namespace, job, cpu="4"))
        jobs.wait_message(namespace, job, "waiting for 1 pods")
        cluster.pods.succeed(old)
        jobs.running(namespace, job, epoch="1000002")
        assert namespace.get("Pod", old["metadata"]["name"])["metadata"]["deletionTimestamp"]
    assert attempts.violations() == []


def test_a_state_written_during_an_eviction_outlives_it(cluster: Cluster, namespace: Namespace) -> None:
    """ "A check state written while its Workload was being evicted": why the gate writes nothing then (row 2).

    Here no gate runs, and the test writes Ready as a careless controller would. Kueue resets the checks when it evicts,
    not when the eviction is over: so what is written in between stands at the next reservation, and the job is admitted
    at once, beside the pods of its earlier attempt. Seen on Kueue 0.17 and 0.20.
    """
    namespace.activate()
    job = jobs.submit(namespace)
    cluster.wait(lambda: jobs.condition(namespace.workload(job), "QuotaReserved"), "it has quota")
    write_ready(namespace, job)
    (old,) = jobs.running(namespace, job)
    cluster.pods.stick(old)
    cluster.pause("kube-controller-manager")  # the Jobs stay active, so that the eviction takes a while
    try:
        other = jobs.preempt(namespace, job, cpu="4")
        cluster.wait(lambda: jobs.check(namespace, job)["state"] == "Pending", "Kueue resets the check")
        write_ready(namespace, job)
        assert jobs.condition(namespace.workload(job), "Evicted")
    finally:
        cluster.resume("kube-controller-manager")
    cluster.wait(lambda: jobs.condition(namespace.workload(job), "QuotaReserved", "False"), "its quota is taken")
    assert jobs.check(namespace, job)["state"] == "Ready"
    namespace.delete("TrainJob", other)
    cluster.wait(lambda: len(namespace.pods(job)) == 2, "two attempts exist")
    assert namespace.get("Pod", old["metadata"]["name"])["metadata"]["deletionTimestamp"]


def write_ready(namespace: Namespace, job: str) -> None:
    """What a controller does that does not look at the conditions."""

    def write() -> Object:
        workload = namespace.workload(job)
        entry = next(e for e in workload["status"]["admissionChecks"] if e["name"] == namespace.check)
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        entry.update(state="Ready", message="by the test", lastTransitionTime=now)
        return namespace.cluster.update(workload, "status")

    namespace.cluster.wait(write, "the state is written", interval=0.05)  # Kueue may have written in between


@pytest.mark.usefixtures("gate")
def test_a_runtime_that_is_edited_while_its_job_waits_costs_the_place_and_not_the_safety(
    cluster: Cluster, namespace: Namespace
) -> None:
    """Kueue deletes a reserved Workload whose job changed, and makes a new one: the gate starts over with that one.

    Facts seen on Kueue 0.17 and 0.20: the new Workload has the old one's name, another UID, and its check is Pending
    with no message. Should its quota be gone meanwhile, it queues anew.
    """
    with Attempts(namespace) as attempts, jobs.runtime(cluster, lambda _: None) as runtime:
        job = jobs.submit(namespace, runtime=runtime)
        (old,) = jobs.running(namespace, job)
        cluster.pods.stick(old)
        namespace.delete("TrainJob", jobs.preempt(namespace, job, cpu="4"))
        jobs.wait_message(namespace, job, "waiting for 1 pods")
        before = namespace.workload(job)["metadata"]

        edited = cluster.get("ClusterTrainingRuntime", runtime)
        jobs.pod_of(edited["spec"]["template"]["spec"])["containers"][0]["image"] = "example.invalid/another"
        cluster.update(edited)
        namespace.patch("TrainJob", job, {"metadata": {"annotations": {"dispatch.test/poke": "now"}}})
        cluster.wait(lambda: namespace.workload(job)["metadata"]["uid"] != before["uid"], "Kueue has a new Workload")
        assert namespace.workload(job)["metadata"]["name"] == before["name"]

        jobs.wait_message(namespace, job, "waiting for 1 pods")
        cluster.pods.unstick(old)
        jobs.running(namespace, job, epoch="1000002")
    assert attempts.violations() == []


def test_a_gate_that_was_away_decides_at_once_when_it_is_back(cluster: Cluster, namespace: Namespace) -> None:
    """While no gate runs everything waits, and nothing is lost: neither the place in the queue nor the count."""
    with Attempts(namespace) as attempts:
        with cluster.controller("first") as gate:
            job = jobs.submit(namespace)
            (old,) = jobs.running(namespace, job)
            gate.kill()
            cluster.pods.stick(old)
            namespace.delete("TrainJob", jobs.preempt(namespace, job, cpu="4"))
            cluster.wait(lambda: jobs.condition(namespace.workload(job), "QuotaReserved"), "it has quota again")
            assert jobs.check(namespace, job)["state"] == "Pending"
        with cluster.controller("second"):
            jobs.wait_message(namespace, job, "waiting for 1 pods")
            cluster.pods.unstick(old)
            jobs.running(namespace, job, epoch="1000002")
    assert attempts.violations() == []
