"""No object, however odd, ends or stalls the gate: the odd one is dealt with alone, and a good job passes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

import admission
from tests import jobs
from tests.cluster.api import Object
from tests.cluster.cluster import Cluster
from tests.cluster.gate import USER, Gate, account
from tests.cluster.namespaces import CONTROLLER, Namespace
from tests.cluster.waiting import unique

ELSEWHERE = "00000000-0000-0000-0000-000000000000"  # the UID of something that is not there


@pytest.fixture(scope="module", autouse=True)
def gate(cluster: Cluster) -> Iterator[Gate]:
    with cluster.controller("bad-objects") as running:
        yield running


@pytest.fixture(scope="module")
def roomy(cluster: Cluster) -> Iterator[Namespace]:
    """A namespace with quota for every job of this module."""
    with cluster.namespace(quota="100") as made:
        made.wait_served()
        yield made


@pytest.fixture(autouse=True)
def _the_gate_goes_on(gate: Gate, roomy: Namespace) -> Iterator[None]:
    """After each test a good job passes, by the same process."""
    pid = gate.pid
    yield
    job = jobs.submit(roomy, cpu="10m")
    jobs.wait_ready(roomy, job, "admission 1")
    assert (gate.pid, gate.exit_code) == (pid, None)
    assert "Traceback" not in "".join(gate.log)


def test_a_workload_without_a_status(roomy: Namespace) -> None:
    roomy.create(jobs.workload("no-status", queueName="no-queue"))  # as the watch first sees every Workload

    def bare() -> Object:
        workload = roomy.get("Workload", "no-status")
        workload.pop("status", None)
        return roomy.cluster.update(workload, "status")

    roomy.cluster.wait(bare, "it is written without a status")  # Kueue may have written in between
    jobs.poke(roomy, "no-status")


def test_sixteen_patches_and_ours_among_them(roomy: Namespace) -> None:
    """Sixteen are as many as there can be; Kueue adds one."""
    others: list[Object] = [{"manager": f"somebody.example/{n}"} for n in range(14)]
    job = jobs.submit(roomy, cpu="10m", patches=[*others[:7], jobs.counts("0", "1000000"), *others[7:]])
    jobs.wait_ready(roomy, job, "admission 1")
    assert len(roomy.get("TrainJob", job)["spec"]["runtimePatches"]) == 16


def test_counts_that_are_no_plain_numbers(roomy: Namespace) -> None:
    texts = ["", " 1", "1 ", "+1", "1e3", "0x1", "１", "null", "9" * 30, "\n", "'; drop", "x" * 10_000]
    patches = [counts for text in texts for counts in (jobs.counts(text, "1000000"), jobs.counts("0", text))]
    made = [roomy.create(jobs.trainjob(gated=False, cpu="10m", patches=[patch])) for patch in patches]
    for job in made:
        jobs.wait_message(roomy, job["metadata"]["name"], "the admission count is unreadable: ")


def test_a_patch_of_a_replicated_job_that_is_not_there(roomy: Namespace) -> None:
    """The API server takes it, and it has a count; JobSet refuses what Trainer makes of it, so nothing ever runs.

    Kueue 0.17 has a Workload for it, which is approved; 0.20 makes none.
    """
    patch = jobs.counts("0", "1000000")
    patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]["name"] = "absent"
    name: str = roomy.create(jobs.trainjob(cpu="10m", gated=False, patches=[patch]))["metadata"]["name"]
    later = jobs.submit(roomy, cpu="10m")
    jobs.wait_ready(roomy, later, "admission 1")
    assert roomy.pods(name) == []


def test_a_trainjobs_name_of_any_form(roomy: Namespace) -> None:
    """48 characters are what JobSet lets a TrainJob's pods have. By its patch each of these is dispatch's."""
    names = ["a", "a-1", "dj-1", "a" + "b" * 47, "dj-" + "0" * 26, "dj-" + "8" * 26 + "-s1"]
    for name in names:
        roomy.create(jobs.trainjob(name, cpu="10m", gated=False))
    for name in names:
        jobs.running(roomy, name, epoch="1000001")


def test_a_workloads_name_of_any_form(roomy: Namespace) -> None:
    names = ["1", "a.b-c.d", "0" * 253, ".".join(["x" * 63] * 3)]
    for name in names:
        roomy.create(jobs.workload(name, cpu="1m"))
    for name in names:
        roomy.cluster.wait(lambda name=name: state(roomy, name) == "Ready", f"{name} is approved")  # type: ignore[misc]


def state(namespace: Namespace, workload: str) -> str:
    """The state of a Workload's first check."""
    return str(namespace.get("Workload", workload)["status"]["admissionChecks"][0]["state"])


def test_owner_references_with_hostile_names(cluster: Cluster, roomy: Namespace) -> None:
    """Nobody validates an owner's name. It must not lead a request anywhere but to a TrainJob.

    (An API version that nobody serves keeps the garbage collector and Kueue from removing the Workload.)
    """
    names = ["..", ".", "a/b", "../../../api/v1/namespaces", "a?b=c#d", "%2e%2e", "x" * 300, "Ä\n"]
    since, owned = cluster.audit_mark(), [f"owned-{unique()}" for _ in names]
    for name, workload in zip(names, owned, strict=True):
        reference = {"apiVersion": "trainer.kubeflow.org/v9", "kind": "TrainJob", "name": name, "uid": ELSEWHERE}
        roomy.create(jobs.workload(workload, {**reference, "controller": True}, cpu="1m"))
    for workload in owned:
        cluster.wait(lambda w=workload: jobs.condition(roomy.get("Workload", w), "QuotaReserved"), "it has quota")  # type: ignore[misc]
        jobs.poke(roomy, workload)
    jobs.wait_looked_at(roomy, owned[-1])
    assert [state(roomy, workload) for workload in owned] == ["Pending"] * len(owned)
    asked = [e["requestURI"] for e in cluster.audit_events(USER, since=since) if e["verb"] == "get"]
    assert [uri for uri in asked if "/trainjobs/" not in uri and "/leases/" not in uri and "/jobsets/" not in uri] == []
    assert [uri for uri in asked if not re.fullmatch(r"/apis/[a-z0-9./-]+", uri)] == []


def test_an_owner_that_does_not_control_is_none(roomy: Namespace) -> None:
    reference = {"apiVersion": "trainer.kubeflow.org/v9", "kind": "TrainJob", "name": "x", "uid": ELSEWHERE}
    roomy.create(jobs.workload("uncontrolled", reference, cpu="1m"))
    roomy.cluster.wait(lambda: state(roomy, "uncontrolled") == "Ready", "it is approved")


def test_a_workload_with_eight_checks_of_which_one_is_ours(cluster: Cluster, gate: Gate) -> None:  # noqa: ARG001
    """Eight are as many as a Workload can have. Ours is approved, the others are left as they are."""
    others = [f"other-{n}" for n in range(7)]
    with cluster.namespace(extra_checks=others) as namespace:
        namespace.activate()
        job = jobs.submit(namespace)
        jobs.wait_ready(namespace, job, "admission 1")
        workload = namespace.workload(job)
        entries = workload["status"]["admissionChecks"]
        assert len(entries) == 8
        assert {entry["state"] for entry in entries if entry["name"] != namespace.check} == {"Pending"}
        for entry in entries:
            entry["state"] = "Ready"
        cluster.update(workload, "status")
        jobs.running(namespace, job, epoch="1000001")


def test_two_of_our_checks_are_approved_in_one_write(cluster: Cluster, gate: Gate) -> None:  # noqa: ARG001
    with cluster.namespace() as namespace:
        second = f"{namespace.name}-second"
        kind = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "AdmissionCheck", "metadata": {"name": second}}
        cluster.create({**kind, "spec": {"controllerName": CONTROLLER}})
        checks = {"admissionChecks": [{"name": namespace.check}, {"name": second}]}
        cluster.patch("ClusterQueue", namespace.name, None, {"spec": {"admissionChecksStrategy": checks}})
        try:
            cluster.wait(lambda: jobs.condition(cluster.get("AdmissionCheck", second), "Active"), "both are served")
            since = cluster.audit_mark()
            job = jobs.submit(namespace)
            jobs.running(namespace, job, epoch="1000001")
            workload = namespace.workload(job)
            states = {e["name"]: (e["state"], e["message"]) for e in workload["status"]["admissionChecks"]}
            assert states == {namespace.check: ("Ready", "admission 1"), second: ("Ready", "admission 1")}
            writes = [
                e
                for e in cluster.audit_events(USER, since=since)
                if e["verb"] == "update" and e["objectRef"].get("name") == workload["metadata"]["name"]
            ]
            assert [e["responseStatus"]["code"] for e in writes].count(200) == 1
        finally:
            cluster.delete("AdmissionCheck", second)


def test_workloads_of_any_size_are_listed_in_pages_that_fit_into_memory(cluster: Cluster, roomy: Namespace) -> None:
    """Who may use a queue may fill a namespace with Workloads of half a MB; a hundred are asked for at once."""
    for number in range(30):
        workload = jobs.workload(f"large-{number}", queueName="no-queue")
        workload["spec"]["podSets"][0]["template"]["spec"]["containers"][0]["args"] = ["x" * 100_000] * 5
        roomy.create(workload)
    options = admission.Options(kubeconfig=str(account(cluster)))
    api = admission.connect(options)
    bounded = list(admission.list_workloads(api))
    api.PAGE_BYTES = 2**30
    unbounded = list(admission.list_workloads(api))
    names = [{admission.key_of(w) for items, _ in pages for w in items} for pages in (bounded, unbounded)]
    assert len(names[0] & {(roomy.name, f"large-{number}") for number in range(30)}) == 30
    assert names[0] == names[1]
    largest = [max(len(json.dumps(items)) for items, _ in pages) for pages in (bounded, unbounded)]
    assert largest[0] <= admission.Connection.PAGE_BYTES < largest[1]
    for number in range(30):
        roomy.delete("Workload", f"large-{number}")


def test_what_the_queue_keeps_of_a_workload_does_not_grow_with_it() -> None:
    queue = admission.WorkQueue()
    small, large = jobs.workload("small"), jobs.workload("large", padding="x" * admission.QUEUED_BYTES)
    for workload in (small, large):
        queue.put(("ns", workload["metadata"]["name"]), workload, urgent=True)
    assert queue.take() == (("ns", "small"), small)
    assert queue.take() == (("ns", "large"), None)  # to be read when its turn comes
