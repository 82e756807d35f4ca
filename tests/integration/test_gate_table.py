"""The decision table of the gate (`admission.decide`), row by row, on the real control plane.

Most jobs are in one namespace with room for all. States that Kueue puts right at once are shown to the gate with a
TrainJob that is in no queue (`jobs.held_at_the_gate`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests import jobs
from tests.attempts import JOBSET_NAME, Attempts
from tests.cluster.api import Object
from tests.cluster.cluster import Cluster
from tests.cluster.gate import USER, Gate
from tests.cluster.namespaces import Namespace
from tests.cluster.waiting import wait

KEEP = "dispatch.test/keep"  # a finalizer: the object stays until the test lets it go
ELSEWHERE = "00000000-0000-0000-0000-000000000000"  # the UID of something that is not there
UNREADABLE = "the admission count is unreadable: "


@pytest.fixture(scope="module", autouse=True)
def gate(cluster: Cluster) -> Iterator[Gate]:
    with cluster.controller("table") as running:
        yield running


@pytest.fixture(scope="module")
def roomy(cluster: Cluster) -> Iterator[Namespace]:
    """A namespace with quota for every job of this module."""
    with cluster.namespace(quota="100") as made:
        made.wait_served()
        yield made


@contextlib.contextmanager
def paused(cluster: Cluster, component: str) -> Iterator[None]:
    cluster.pause(component)
    try:
        yield
    finally:
        cluster.resume(component)


@contextlib.contextmanager
def nothing_is_written(
    namespace: Namespace, name: str, *, reads: str = "", beside: Namespace | None = None
) -> Iterator[None]:
    """In the end the gate has looked at the Workload of this name, and its checks are as they were.

    Nor has the gate tried to write them in between. `reads`: a TrainJob that it reads before it decides.
    """
    cluster, since = namespace.cluster, namespace.cluster.audit_mark()
    before = namespace.get("Workload", name)["status"]["admissionChecks"]
    yield
    looked = cluster.audit_mark()
    jobs.wait_looked_at(namespace, name, beside=beside)
    if reads:
        wait_read(namespace, reads, looked)
    assert namespace.get("Workload", name)["status"]["admissionChecks"] == before
    assert writes(cluster, name, since) == []


def writes(cluster: Cluster, name: str, since: int) -> list[Object]:
    """The gate's writes, refused ones too, to objects of this name."""
    events = cluster.audit_events(USER, since=since)
    return [e for e in events if e["verb"] == "update" and e["objectRef"].get("name") == name]


def wait_read(namespace: Namespace, trainjob: str, since: int) -> None:
    """Returns when the gate has read a TrainJob, which it need not do when the Workload is finished."""

    def read() -> bool:
        events = namespace.cluster.audit_events(USER, since=since)
        gets = (e["objectRef"].get("name") for e in events if e["verb"] == "get")
        return trainjob in gets or jobs.condition(namespace.workload(trainjob), "Finished")

    namespace.cluster.wait(read, f"the gate reads {trainjob}")


def complained(gate: Gate, text: str, about: str) -> str:
    """The line of the log in which the gate asks for a person's help; it comes a moment after the message."""
    return logged(gate, "level=ERROR", text, about)


def logged(gate: Gate, *texts: str) -> str:
    """The first line of the log with all these texts, once it is there."""
    found = wait(lambda: [line for line in gate.log if all(t in line for t in texts)], f"the gate logs {texts}", 30)
    return found[0]


# --- rows 1 and 2: nothing to decide


def test_row_1_without_quota_nothing_is_written(roomy: Namespace) -> None:
    job = jobs.submit(roomy, cpu="101")
    workload = roomy.workload(job)
    with nothing_is_written(roomy, workload["metadata"]["name"]):
        assert not jobs.condition(workload, "QuotaReserved")
        assert jobs.check(roomy, job)["message"] == ""


def test_row_1_another_controllers_check_is_left_alone(cluster: Cluster) -> None:
    with cluster.namespace(check=False, extra_checks=["other"]) as namespace:
        namespace.activate()
        job = jobs.submit(namespace)
        cluster.wait(lambda: jobs.condition(namespace.workload(job), "QuotaReserved"), f"{job} has quota")
        workload, since = namespace.workload(job), cluster.audit_mark()
        passes(cluster, 2)
        assert [e["state"] for e in namespace.workload(job)["status"]["admissionChecks"]] == ["Pending"]
        assert writes(cluster, workload["metadata"]["name"], since) == []


def passes(cluster: Cluster, count: int) -> None:
    """Returns when the gate has begun this many full passes."""
    since = cluster.audit_mark()

    def begun() -> bool:
        lists = [e["objectRef"]["resource"] for e in cluster.audit_events(USER, since=since) if e["verb"] == "list"]
        return lists.count("admissionchecks") > count

    cluster.wait(begun, f"{count} full passes", interval=0.3)


@pytest.mark.parametrize("by", ["preemption", "deactivation"])
def test_row_2_nothing_is_written_while_the_workload_is_being_evicted(
    by: str, cluster: Cluster, roomy: Namespace
) -> None:
    """While the evicted job's pods have not been told to go, Kueue keeps its quota, and its check is Pending again.

    reports.md: "A check state written while its Workload was being evicted left it stuck for good". That a state
    written then does outlive the eviction is shown by `test_gate_reports`.
    """
    with cluster.namespace() as namespace:
        job = jobs.submit(namespace)
        jobs.running(namespace, job, epoch="1000001")
        name = namespace.workload(job)["metadata"]["name"]
        with paused(cluster, "kube-controller-manager"):  # the Jobs stay active, so Kueue waits
            other = jobs.preempt(namespace, job, cpu="4") if by == "preemption" else ""
            if by == "deactivation":
                namespace.patch("Workload", name, {"spec": {"active": False}})
            cluster.wait(lambda: jobs.check(namespace, job)["state"] == "Pending", "the check is reset")
            with nothing_is_written(namespace, name, beside=roomy):
                workload = namespace.get("Workload", name)
                assert jobs.condition(workload, "Evicted")
                assert jobs.condition(workload, "QuotaReserved")
        if other:
            namespace.delete("TrainJob", other)
        else:
            namespace.patch("Workload", name, {"spec": {"active": True}})
        jobs.running(namespace, job, epoch="1000002")  # at once, by itself


@pytest.mark.parametrize("ended", ["Finished", "deleted"])
def test_row_2_nothing_is_written_to_a_workload_that_is_over(ended: str, roomy: Namespace) -> None:
    job = jobs.held_at_the_gate(roomy)
    roomy.patch("Workload", job, {"metadata": {"finalizers": [KEEP]}})
    if ended == "deleted":
        roomy.delete("Workload", job)
    else:
        workload = roomy.get("Workload", job)
        finished = {"type": "Finished", "status": "True", "reason": "Test", "message": "", "lastTransitionTime": now()}
        workload["status"]["conditions"].append(finished)
        roomy.cluster.update(workload, "status")
    with nothing_is_written(roomy, job):
        jobs.release(roomy, job)
    roomy.patch("Workload", job, {"metadata": {"finalizers": None}})


def now() -> str:
    return "2026-01-01T00:00:00Z"


# --- rows 3 and 3a: no TrainJob


def test_row_3_a_workload_of_nobody_is_approved(roomy: Namespace) -> None:
    """A batch Job's: `test_readmission.test_a_batch_job_passes_at_once`."""
    roomy.create(jobs.workload("nobodys"))

    def entry() -> Object | None:
        entries = roomy.get("Workload", "nobodys")["status"]["admissionChecks"]
        return entries[0] if entries[0]["state"] == "Ready" else None

    assert roomy.cluster.wait(entry, "it is approved")["message"] == "not dispatch's"


@pytest.mark.parametrize("owner", ["Workload", "nobody"])
def test_row_3a_a_workload_with_our_annotation_and_no_trainjob_waits(owner: str, gate: Gate, roomy: Namespace) -> None:
    """The shape of a variant that Kueue's concurrent admission makes: owned by the parent Workload."""
    parent = roomy.create(jobs.workload(f"parent-of-{owner.lower()}", cpu="1m"))
    name = f"of-{owner.lower()}"
    reference = jobs.controller(parent) if owner == "Workload" else None
    roomy.create(jobs.workload(name, reference, annotations={jobs.ADMISSION: "0"}))

    def entry() -> Object | None:
        entries: list[Object] = roomy.get("Workload", name)["status"]["admissionChecks"]
        return entries[0] if entries[0]["message"] else None

    found = roomy.cluster.wait(entry, "the gate says why it waits")
    assert (found["state"], found["message"]) == ("Pending", f"unsupported: owned by {owner}")
    assert complained(gate, "unsupported", name)


def test_row_3a_a_concurrent_admission_variant_waits(cluster: Cluster) -> None:
    """Kueue's own variants, one for each flavor."""
    queues = cluster.get("CustomResourceDefinition", "clusterqueues.kueue.x-k8s.io")
    if "concurrentAdmissionPolicy" not in str(queues["spec"]):
        pytest.skip("this Kueue has no concurrent admission (it came with 0.18): run with a Kueue of the 0.20 line")
    policy = {"concurrentAdmissionPolicy": {"migration": {"mode": "RetainFirstAdmission"}}}
    with (
        cluster.reconfigured("kueue", feature_gates={"ConcurrentAdmission": True}),
        cluster.namespace(flavors=["a", "b"], settings=policy) as namespace,
    ):
        namespace.wait_served()
        # Ungated: Kueue copies the start gate to the variants, and does not take it off them with their parent's.
        job = jobs.trainjob(gated=False)
        namespace.create(job)

        def waiting() -> bool:
            found = [w for w in namespace.list("Workload") if owner_kind(w) == "Workload"]
            said = {(entry_of(w)["state"], entry_of(w)["message"]) for w in found}
            return len(found) == 2 and said == {("Pending", "unsupported: owned by Workload")}

        cluster.wait(waiting, "the gate says why both variants wait")
        assert namespace.pods(job["metadata"]["name"]) == []


def owner_kind(workload: Object) -> str:
    owners: list[Object] = workload["metadata"].get("ownerReferences", [])
    return str(owners[0]["kind"]) if owners else ""


def entry_of(workload: Object) -> Object:
    entries: list[Object] = workload["status"]["admissionChecks"]
    return entries[0]


# --- rows 4 to 6: a TrainJob that asks for nothing


@pytest.mark.parametrize("owner", ["gone", "another"])
def test_row_4_without_its_own_trainjob_nothing_is_written(owner: str, roomy: Namespace) -> None:
    """An API version that nobody serves keeps the garbage collector and Kueue from removing the Workload first."""
    trainjob = roomy.create(jobs.trainjob(queue=None, gated=False, suspend=True))
    name = jobs.new_name() if owner == "gone" else trainjob["metadata"]["name"]
    since = roomy.cluster.audit_mark()
    reference = jobs.controller(trainjob, apiVersion="trainer.kubeflow.org/v9", name=name, uid=ELSEWHERE)
    roomy.create(jobs.workload(f"of-{owner}", reference))
    wait_read(roomy, name, since)
    with nothing_is_written(roomy, f"of-{owner}", reads=name):
        workload = roomy.get("Workload", f"of-{owner}")
        assert jobs.condition(workload, "QuotaReserved")
        assert entry_of(workload)["message"] == ""


def test_row_5_a_trainjob_that_is_not_dispatchs_is_approved(roomy: Namespace) -> None:
    job = jobs.trainjob("somebodys", patches=[], gated=False, suspend=True)
    roomy.create(job)
    jobs.wait_ready(roomy, "somebodys", "not dispatch's")
    roomy.cluster.wait(lambda: roomy.pods("somebodys"), "it runs")


@pytest.mark.parametrize("ended", ["deleted", "Complete", "Failed"])
def test_row_6_nothing_is_written_when_the_trainjob_is_over(ended: str, roomy: Namespace) -> None:
    """Kueue 0.20 finishes the Workload of a TrainJob that is being deleted: there it is row 2 before long."""
    trainjob = jobs.trainjob(queue=None, gated=False, suspend=True)
    if ended == "Failed":
        trainjob["spec"]["activeDeadlineSeconds"] = 1
    job = jobs.held_at_the_gate(roomy, trainjob)
    if ended == "deleted":
        roomy.patch("TrainJob", job, {"metadata": {"finalizers": [KEEP]}})
        roomy.delete("TrainJob", job)
    else:
        roomy.patch("TrainJob", job, {"spec": {"suspend": False}})
        if ended == "Complete":
            jobs.running(roomy, job)
            jobs.finish(roomy, job)
        roomy.cluster.wait(lambda: jobs.condition(roomy.get("TrainJob", job), ended), f"{job} is {ended}")
    with nothing_is_written(roomy, job, reads=job):
        jobs.release(roomy, job)
    if ended == "deleted":
        roomy.patch("TrainJob", job, {"metadata": {"finalizers": None}})


# --- rows 7 to 9: left Pending


def replicated_job(name: str, annotations: Object) -> Object:
    return {"name": name, "template": {"spec": {"template": {"metadata": {"annotations": annotations}}}}}


def patch(*replicated_jobs: Object) -> Object:
    spec = {"template": {"spec": {"replicatedJobs": list(replicated_jobs)}}}
    return {"manager": jobs.MANAGER, "trainingRuntimeSpec": spec}


def annotated(admission: str, epoch: str) -> Object:
    return {jobs.ADMISSION: admission, jobs.EPOCH: epoch}


@pytest.fixture(scope="module")
def two_jobs(cluster: Cluster) -> Iterator[str]:
    """A runtime with two replicated jobs, `model-initializer` and `node`."""

    def add(jobset: Object) -> None:
        pod = {"spec": {"containers": [{"name": "model-initializer", "image": "example.invalid/any"}]}}
        other = {"name": "model-initializer", "replicas": 1, "template": {"spec": {"template": pod}}}
        jobset["replicatedJobs"].insert(0, other)

    with jobs.runtime(cluster, add) as name:
        yield name


@pytest.mark.parametrize(
    ("why", "patches"),
    [
        ("the TrainJob has no runtime patch of the adapter", []),
        ("the adapter's patch names no replicated job", [patch()]),
        (f"{jobs.ADMISSION} is 'missing'", [patch(replicated_job("node", {}))]),
        (f"{jobs.ADMISSION} is '01'", [jobs.counts("01", "1000001")]),
        (f"{jobs.ADMISSION} is '1000000'", [jobs.counts("1000000", "2000000")]),
        (f"{jobs.ADMISSION} is '-1'", [jobs.counts("-1", "999999")]),
        (f"{jobs.EPOCH} is '1000002' at admission 1", [jobs.counts("1", "1000002")]),
        (f"{jobs.EPOCH} is '1000000000001' at admission 1", [jobs.counts("1", "1000000000001")]),
        (
            f"{jobs.ADMISSION} is 'missing'",
            [patch(replicated_job("node", annotated("0", "1000000")), replicated_job("model-initializer", {}))],
        ),
        (
            "its replicated jobs differ",
            [
                patch(
                    replicated_job("node", annotated("1", "1000001")),
                    replicated_job("model-initializer", annotated("2", "1000002")),
                )
            ],
        ),
    ],
)
def test_row_7_a_job_whose_count_is_unreadable_waits(
    why: str, patches: list[Object], gate: Gate, roomy: Namespace, two_jobs: str
) -> None:
    job = jobs.submit(roomy, patches=patches, cpu="100m", runtime=two_jobs)
    entry = jobs.wait_message(roomy, job, "unreadable")
    assert entry["message"] == UNREADABLE + why
    assert complained(gate, why.partition(" is ")[0], job)
    assert roomy.pods(job) == []


def test_row_7a_a_job_that_runs_in_another_cluster_waits(gate: Gate, roomy: Namespace) -> None:
    job = jobs.submit(roomy, managedBy="kueue.x-k8s.io/multikueue", cpu="100m")
    entry = jobs.wait_message(roomy, job, "managed by")
    assert entry["message"] == "managed by kueue.x-k8s.io/multikueue: its pods cannot be seen"
    assert complained(gate, "managed by", job)


@pytest.mark.parametrize(
    ("hold", "message"),
    [("7", "held: instance 7"), ("stop", "being stopped"), ("who knows", "held: instance who knows")],
)
def test_row_8_a_held_job_waits_until_it_is_released(hold: str, message: str, roomy: Namespace) -> None:
    job = jobs.trainjob(cpu="100m")
    job["metadata"]["annotations"][jobs.HOLD] = hold
    name = jobs.submit(roomy, job)
    assert jobs.wait_message(roomy, name, message)["message"] == message
    assert roomy.pods(name) == []
    jobs.release(roomy, name)
    jobs.poke(roomy, roomy.workload(name)["metadata"]["name"])
    jobs.running(roomy, name, epoch="1000001")
    assert jobs.check(roomy, name)["message"] == "admission 1"


def test_row_9_a_trainjob_that_is_not_suspended_waits(roomy: Namespace) -> None:
    job = jobs.held_at_the_gate(roomy)
    roomy.patch("TrainJob", job, {"spec": {"suspend": False}})
    jobs.release(roomy, job)
    jobs.poke(roomy, job)
    assert jobs.wait_message(roomy, job, "not suspended")["message"] == "the TrainJob is not suspended"
    jobs.running(roomy, job, epoch="1000000")  # Trainer started it past the gate, which did not raise its number

    roomy.patch("TrainJob", job, {"spec": {"suspend": True}})
    jobs.wait_ready(roomy, job, "admission 1")  # within five seconds, by itself
    assert roomy.pods(job) == []


def test_row_9_kueue_suspends_again_what_a_user_resumes_and_the_gate_waits_for_the_pods(
    cluster: Cluster, roomy: Namespace
) -> None:
    job = jobs.trainjob(cpu="100m")
    job["metadata"]["annotations"][jobs.HOLD] = "1"
    name = jobs.submit(roomy, job)
    jobs.wait_message(roomy, name, "held: instance 1")
    with Attempts(roomy) as attempts:
        roomy.patch("TrainJob", name, {"spec": {"suspend": False}})
        cluster.wait(lambda: roomy.get("TrainJob", name)["spec"]["suspend"], "Kueue suspends it again")
        jobs.release(roomy, name)
        jobs.poke(roomy, roomy.workload(name)["metadata"]["name"])
        jobs.running(roomy, name, epoch="1000001")
    assert attempts.violations() == []


# --- rows 10 to 13


def test_row_10_a_jobset_that_counts_active_jobs_is_waited_for(cluster: Cluster, roomy: Namespace) -> None:
    """Seen when Trainer's copy of the counts, which Kueue goes by, is older than JobSet's own."""
    job = jobs.trainjob(cpu="100m")
    roomy.create(job)
    name: str = job["metadata"]["name"]
    cluster.wait(lambda: jobs.condition(roomy.get("JobSet", name), "Suspended"), "the JobSet is suspended")
    with paused(cluster, "jobset"):
        counts = {"name": "node", "ready": 0, "succeeded": 0, "failed": 0, "active": 1, "suspended": 0}
        roomy.patch("JobSet", name, {"status": {"replicatedJobsStatus": [counts]}}, subresource="status")
        jobs.open_gate(roomy, name)
        assert jobs.wait_message(roomy, name, "JobSet")["message"] == "the JobSet still runs"
    jobs.running(roomy, name, epoch="1000001")  # JobSet has put it right


def wait_looked_again(cluster: Cluster, job: str) -> None:
    """Returns when the gate has read a JobSet twice from now on."""
    since = cluster.audit_mark()

    def read_twice() -> bool:
        events = [e["objectRef"] for e in cluster.audit_events(USER, since=since)]
        return len([e for e in events if (e["resource"], e.get("name")) == ("jobsets", job)]) >= 2

    cluster.wait(read_twice, f"the gate reads the JobSet {job}")


def test_row_10_a_jobset_that_is_not_suspended_is_waited_for(cluster: Cluster, roomy: Namespace) -> None:
    job = jobs.held_at_the_gate(roomy)
    roomy.create(pod(f"{job}-old", job))
    jobs.release(roomy, job)
    jobs.wait_message(roomy, job, "waiting for 1 pods")
    with Attempts(roomy) as attempts:
        with paused(cluster, "trainer"):  # it would suspend it again
            roomy.patch("JobSet", job, {"spec": {"suspend": False}})
            jobs.running(roomy, job, count=2)
            jobs.poke(roomy, job)
            assert jobs.wait_message(roomy, job, "JobSet")["message"] == "the JobSet still runs"
            wait_looked_again(cluster, job)
        cluster.wait(lambda: len(roomy.pods(job)) == 1, "Trainer suspends it again")
        jobs.wait_message(roomy, job, "waiting for 1 pods")  # whose pod keeps it, an admin must be told
        roomy.delete("Pod", f"{job}-old")
        jobs.wait_ready(roomy, job, "admission 1")
    assert attempts.early() == []


def test_row_11_pods_that_remain_are_counted_and_three_are_named(cluster: Cluster, roomy: Namespace) -> None:
    """Whatever their owner: JobSet's label says whose they are. Those that have ended do not count."""
    job = jobs.held_at_the_gate(roomy)
    for name in "abcde":
        roomy.create(
            pod(f"{job}-{name}", job, **({"nodeSelector": {"dispatch.test/nowhere": "x"}} if name == "c" else {}))
        )
    a, b, _, d, e = (f"{job}-{name}" for name in "abcde")
    cluster.wait(lambda: len(running(roomy, job)) == 4, "four of them run")
    nodes = {p["metadata"]["name"]: p["spec"]["nodeName"] for p in running(roomy, job)}
    cluster.pods.fail(roomy.get("Pod", e))
    jobs.release(roomy, job)
    jobs.poke(roomy, job)
    said = "waiting for 4 pods of the earlier attempt: "
    assert jobs.wait_message(roomy, job, said)["message"] == (
        f"{said}{a} on {nodes[a]}, {b} on {nodes[b]}, {job}-c on no node, …"
    )

    cluster.pods.succeed(roomy.get("Pod", a))
    said = "waiting for 3 pods of the earlier attempt: "
    assert jobs.wait_message(roomy, job, said)["message"] == (
        f"{said}{b} on {nodes[b]}, {job}-c on no node, {d} on {nodes[d]}"
    )
    for name in (b, f"{job}-c", d):
        roomy.delete("Pod", name)
    jobs.wait_ready(roomy, job, "admission 1")
    assert {p["metadata"]["name"] for p in roomy.pods(job)} == {a, e}


def pod(name: str, job: str, **spec: Any) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {JOBSET_NAME: job}},
        "spec": {"containers": [{"name": "c", "image": "example.invalid/any"}], **spec},
    }


def running(namespace: Namespace, job: str) -> list[Object]:
    return [p for p in namespace.pods(job) if p["status"].get("phase") == "Running"]


def test_row_12_a_job_whose_count_is_exhausted_is_rejected_and_never_starts(gate: Gate, roomy: Namespace) -> None:
    """reports.md: "A rejection during an eviction was ignored": this is the gate's only one, and none is under way."""
    job = jobs.submit(roomy, patches=[jobs.counts("999999", "1999999")], cpu="100m")
    wait = roomy.cluster.wait
    wait(lambda: roomy.workload(job)["spec"]["active"] is False, "Kueue deactivates it")
    wait(lambda: jobs.condition(roomy.workload(job), "QuotaReserved", "False"), "its quota is free")
    assert roomy.pods(job) == []
    assert jobs.admission_of(roomy, job) == 999_999
    line = logged(gate, "msg=rejected", job)
    assert 'reason="the admission count is exhausted"' in line


def test_row_13_the_last_admission_there_is_is_granted(roomy: Namespace) -> None:
    """Also when the approval meets a conflict after the raise, as it often does for a job without a start gate."""
    patches = [jobs.counts("999998", "1999998")]
    made = [roomy.create(jobs.trainjob(patches=patches, cpu="100m", gated=False)) for _ in range(5)]
    for job in made:
        jobs.running(roomy, job["metadata"]["name"], epoch="1999999")


def test_row_13_admission_and_epoch_are_raised_in_every_replicated_job(
    gate: Gate, roomy: Namespace, two_jobs: str
) -> None:
    counts = annotated("4", "3000004")
    patches = [patch(replicated_job("node", counts), replicated_job("model-initializer", counts))]
    job = jobs.submit(roomy, patches=patches, cpu="100m", runtime=two_jobs)
    pods = jobs.running(roomy, job, count=2, epoch="3000005")
    assert {p["metadata"]["annotations"][jobs.ADMISSION] for p in pods} == {"5"}
    assert jobs.check(roomy, job)["message"] == "admission 5"
    lines = [line for line in gate.log if job in line and "msg=conflict" not in line]
    assert [line.partition("msg=")[2] for line in lines] == [
        f'"raised the admission count" trainjob={roomy.name}/{job} admission=5',
        f'approved workload={roomy.name}/{roomy.workload(job)["metadata"]["name"]} reason="admission 5"',
    ]
