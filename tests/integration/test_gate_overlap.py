"""Two attempts of one job never run side by side, whatever ended the first; without the guard they do.

Each scenario leaves a pod of the first attempt behind that cannot go, and lets Kueue give the job its quota back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests import jobs
from tests.attempts import Attempts
from tests.cluster.api import Object
from tests.cluster.cluster import Cluster
from tests.cluster.namespaces import Namespace
from tests.cluster.waiting import unique

POOL = "dispatch.test/pool"


@pytest.fixture(scope="module", params=[True, False], ids=["guarded", "unguarded"])
def guarded(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[bool]:
    """A gate runs, with its guard or without it."""
    with cluster.controller("overlap", guards_off=[] if request.param else ["old-pods"]):
        yield request.param


def both_attempts(
    namespace: Namespace, job: str, old: Object, free: Callable[[], None], *, guarded: bool, again: str = "1000002"
) -> None:
    """Sees the second attempt come: with the guard, when `free` has let the old pod go, without it, at once."""
    if guarded:
        name, node = old["metadata"]["name"], old["spec"]["nodeName"]
        entry = jobs.wait_message(namespace, job, "waiting for", timeout=60)
        assert entry["message"] == f"waiting for 1 pods of the earlier attempt: {name} on {node}"
        assert [pod["metadata"]["name"] for pod in namespace.pods(job)] == [name]
        free()
    jobs.running(namespace, job, epoch=again)


def judged(attempts: Attempts, *, guarded: bool) -> None:
    if guarded:
        assert attempts.violations() == []
    else:
        assert attempts.overlaps()
        assert attempts.early()


def test_after_a_preemption_with_a_long_grace_period(guarded: bool, cluster: Cluster, namespace: Namespace) -> None:
    """reports.md: "An old pod with a 120 s grace period: the new attempt starts after the last of the old has ended".

    A kubelet gives the pod that time; here it is stuck until the test lets it go.
    """

    def patient(jobset: Object) -> None:
        jobs.pod_of(jobset)["terminationGracePeriodSeconds"] = 120

    with Attempts(namespace) as attempts, jobs.runtime(cluster, patient) as runtime:
        job = jobs.submit(namespace, runtime=runtime)
        (old,) = jobs.running(namespace, job)
        cluster.pods.stick(old)
        namespace.delete("TrainJob", jobs.preempt(namespace, job, cpu="4"))
        period = cluster.wait(
            lambda: namespace.get("Pod", old["metadata"]["name"])["metadata"]["deletionGracePeriodSeconds"],
            "the pod is told to go",
        )
        assert period == 120
        both_attempts(namespace, job, old, lambda: cluster.pods.unstick(old), guarded=guarded)
    judged(attempts, guarded=guarded)


def test_after_a_hold_by_deactivation(guarded: bool, cluster: Cluster, namespace: Namespace) -> None:
    with Attempts(namespace) as attempts:
        job = jobs.submit(namespace)
        (old,) = jobs.running(namespace, job)
        cluster.pods.stick(old)
        workload = namespace.workload(job)["metadata"]["name"]
        namespace.patch("Workload", workload, {"spec": {"active": False}})
        cluster.wait(lambda: jobs.condition(namespace.workload(job), "QuotaReserved", "False"), "its quota is taken")
        namespace.patch("Workload", workload, {"spec": {"active": True}})
        both_attempts(namespace, job, old, lambda: cluster.pods.unstick(old), guarded=guarded)
    judged(attempts, guarded=guarded)


def test_after_its_runtime_was_edited(guarded: bool, cluster: Cluster, namespace: Namespace) -> None:
    """Kueue derives a Workload's pod sets from the runtime as it is now, not from the copy that Trainer took.

    So when the image in a runtime changes under a running job, the Workload fits no more at the TrainJob's next
    reconcile: Kueue stops the job, deletes the Workload, and at once has a new one, of the same name, with quota.
    """
    with Attempts(namespace) as attempts, jobs.runtime(cluster, lambda _: None) as runtime:
        job = jobs.submit(namespace, runtime=runtime)
        (old,) = jobs.running(namespace, job)
        cluster.pods.stick(old)
        before = namespace.workload(job)["metadata"]
        edited = cluster.get("ClusterTrainingRuntime", runtime)
        jobs.pod_of(edited["spec"]["template"]["spec"])["containers"][0]["image"] = "example.invalid/another"
        cluster.update(edited)
        namespace.patch("TrainJob", job, {"metadata": {"annotations": {"dispatch.test/poke": "now"}}})
        cluster.wait(lambda: namespace.workload(job)["metadata"]["uid"] != before["uid"], "Kueue has a new Workload")
        both_attempts(namespace, job, old, lambda: cluster.pods.unstick(old), guarded=guarded)
        assert namespace.workload(job)["metadata"]["name"] == before["name"]
    judged(attempts, guarded=guarded)


@pytest.fixture
def pool(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Two nodes for one job alone: the name of the pool, which begins their names, and the runtime that uses it."""
    name = f"pool-{unique()}"

    def pooled(jobset: Object) -> None:
        jobs.pod_of(jobset).update(nodeSelector={POOL: name}, tolerations=[{"key": POOL, "operator": "Exists"}])

    nodes = [f"{name}-{suffix}" for suffix in "ab"]
    for node in nodes:
        cluster.nodes.create(node, labels={POOL: name}, taints=[{"key": POOL, "value": name, "effect": "NoSchedule"}])
    with jobs.runtime(cluster, pooled) as runtime:
        yield name, runtime
    for node in nodes:
        if cluster.find("Node", node):
            cluster.nodes.delete(node)


@pytest.mark.parametrize(
    "freed_by", ["out-of-service taint", pytest.param("deletion of the node", marks=pytest.mark.long)]
)
def test_on_a_lost_node(
    freed_by: str, guarded: bool, cluster: Cluster, namespace: Namespace, pool: tuple[str, str]
) -> None:
    """reports.md: "A pod on a lost node stays Terminating for ever": the gate names it, and opens when it is freed.

    Kubernetes frees it when the node is deleted (within a minute) or tainted out-of-service (within 20 s).
    """
    if not guarded and freed_by == "deletion of the node":
        pytest.skip("without the guard nothing needs to be freed: the variant with the taint shows it")
    with Attempts(namespace) as attempts:
        job = jobs.submit(namespace, runtime=pool[1])
        (old,) = jobs.running(namespace, job)
        node = old["spec"]["nodeName"]
        assert node.startswith(pool[0])
        cluster.nodes.lose(node)
        namespace.delete("TrainJob", jobs.preempt(namespace, job, cpu="4"))

        def free() -> None:
            if freed_by == "out-of-service taint":
                cluster.nodes.taint(node, "node.kubernetes.io/out-of-service", "nodeshutdown", "NoExecute")
            else:
                cluster.nodes.delete(node)
            cluster.wait(lambda: namespace.find("Pod", old["metadata"]["name"]) is None, "the pod is freed", 120)

        both_attempts(namespace, job, old, free, guarded=guarded)
    judged(attempts, guarded=guarded)
