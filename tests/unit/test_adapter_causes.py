"""The causes of `adapter.classify`: its second table row by row, and the facts that were recorded on the real node."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import adapter
from adapter import Answer, Cause, Evidence, Fault, State, classify
from tests import causes
from tests.unit.test_adapter_classify import (
    _JSON,
    ADMITTED,
    EVICTED,
    HANDLE,
    NOW,
    Object,
    condition,
    trainjob,
    workload,
)

EPOCH, ADMISSION = "dispatch.phpboyscout.uk/epoch", "dispatch.phpboyscout.uk/admission"
RANK, RESTART = "batch.kubernetes.io/job-completion-index", "jobset.sigs.k8s.io/restart-attempt"
TRAINS = "jobset.sigs.k8s.io/replicatedjob-name"
FAILED = trainjob(condition("Failed", "FailedJobs", "first failed job: x"))
SUSPENDED = trainjob(suspend=True)
LOST_TAINT = {"spec": {"taints": [{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}]}}


def at(second: int) -> str:
    return f"2026-01-01T00:00:{second:02}Z"


def end(reason: str, code: int = 1, when: int = 10) -> Object:
    return {"terminated": {"reason": reason, "exitCode": code, "finishedAt": at(when)}}


def unknown_end() -> Object:
    return {"terminated": {"reason": "ContainerStatusUnknown", "exitCode": 137, "finishedAt": None}}


def waits(reason: str) -> Object:
    return {"waiting": {"reason": reason, "message": "so it is"}}


def disrupted(reason: str, when: int = 10) -> Object:
    return {**condition("DisruptionTarget", reason, "so it is"), "lastTransitionTime": at(when)}


def pod(
    state: Object | None = None,
    *conditions: Object,
    name: str = "p-0",
    epoch: str = "1000001",
    last: Object | None = None,
    restart: str = "0",
    phase: str = "",
    **status: Any,
) -> Object:
    """A pod on node n1 whose container is in this state."""
    state = state or {"running": {}}
    container = {"name": "node", "state": state, "lastState": last or {}}
    phases = {"running": "Running", "waiting": "Pending", "terminated": "Failed"}
    return {
        "metadata": {
            "name": name,
            "annotations": {EPOCH: epoch, RANK: name[-1]},
            "labels": {RESTART: restart, TRAINS: "node"},
        },
        "spec": {"nodeName": "n1"},
        "status": {
            "phase": phase or phases[next(iter(state))],
            "containerStatuses": [container],
            "conditions": list(conditions),
            **status,
        },
    }


def job(reason: str, message: str = "") -> Object:
    return {"metadata": {"name": "x-node-0"}, "status": {"conditions": [condition("Failed", reason, message)]}}


def event(reason: str, kind: str = "TrainJob", message: str = "so it is", **more: Any) -> Object:
    about = {"kind": kind, "name": "x", "uid": "u1"}
    return {"reason": reason, "message": message, "involvedObject": about, "lastTimestamp": at(30), **more}


def unready(reason: str = "") -> list[Object]:
    """The conditions of a pod on a node that does not answer."""
    return [condition("ContainersReady"), condition("Ready", reason, status="False")]


def evicted(reason: str, message: str = "so it is", *, active: bool = True) -> Object:
    return workload(condition("Evicted", reason, message), condition("QuotaReserved", status="False"), active=active)


def no_quota(reason: str, message: str) -> Object:
    return workload(condition("QuotaReserved", reason, message, status="False"))


DISRUPTED = job("PodFailurePolicy", "Pod ns/p-0 has condition DisruptionTarget matching FailJob rule at index 0")
UNSCHEDULABLE = condition("PodScheduled", "Unschedulable", "0/3 nodes are available", status="False")
WAITS = "couldn't assign flavors to pod set node: insufficient unused quota for cpu in flavor f, 1 more needed"
NEVER = "couldn't assign flavors to pod set node: insufficient quota for cpu in flavor f, 8 > maximum capacity (4)"
REJECTED = {"admissionChecks": [{"name": "c", "state": "Rejected", "message": "no nodes to be had"}]}

# Row, evidence, state, cause, and what the detail says of it.
ROWS: list[tuple[str, Evidence, State, Cause | None, str]] = [
    (
        "a",
        Evidence(FAILED, [pod(end("OOMKilled", 137))]),
        State.FAILED,
        Cause.OUT_OF_MEMORY,
        "OOMKilled, exit code 137",
    ),
    ("a", Evidence(FAILED, [pod(end("OOMKilled", 1))]), State.FAILED, Cause.OUT_OF_MEMORY, "OOMKilled, exit code 1"),
    ("a", Evidence(FAILED, [pod(last=end("OOMKilled"))]), State.FAILED, Cause.OUT_OF_MEMORY, "OOMKilled"),
    ("a", Evidence(FAILED, [pod(end("OOMKilled", 0))]), State.FAILED, Cause.OUT_OF_MEMORY, "OOMKilled, exit code 0"),
    ("a", Evidence(FAILED, seen=[pod(last=end("OOMKilled"))]), State.FAILED, Cause.OUT_OF_MEMORY, "OOMKilled"),
    (
        *("a", Evidence(trainjob(), [pod(waits("CrashLoopBackOff"), last=end("OOMKilled"))], ADMITTED)),
        *(State.STARTING, Cause.OUT_OF_MEMORY, "OOMKilled"),
    ),
    ("b", Evidence(trainjob(condition("Failed", "DeadlineExceeded"))), State.FAILED, Cause.TIMEOUT, "DeadlineExceeded"),
    ("b", Evidence(FAILED, jobs=[job("DeadlineExceeded")]), State.FAILED, Cause.TIMEOUT, "Job x-node-0: Deadline"),
    (
        *("b", Evidence(SUSPENDED, [], evicted("DeactivatedDueToMaximumExecutionTimeExceeded", active=False))),
        *(State.FAILED, Cause.TIMEOUT, "MaximumExecutionTimeExceeded"),
    ),
    (
        *("c", Evidence(trainjob(), [pod(None, disrupted("PreemptionByScheduler"))], ADMITTED)),
        *(State.RUNNING, Cause.PREEMPTED, "PreemptionByScheduler: so it is"),
    ),
    (
        *("c", Evidence(FAILED, jobs=[DISRUPTED], events=[event("Preempted", "Pod")])),
        *(State.FAILED, Cause.PREEMPTED, "Event of Pod x: Preempted: so it is"),
    ),
    ("c", Evidence(trainjob(), [pod()], EVICTED), State.STOPPING, Cause.PREEMPTED, "Evicted: Preempted: by u2; pods"),
    ("c", Evidence(SUSPENDED, [], EVICTED), State.QUEUED, Cause.PREEMPTED, "Evicted: Preempted: by u2"),
    (
        *("d", Evidence(trainjob(), [pod(None, disrupted("DeletionByTaintManager"))], ADMITTED)),
        *(State.RUNNING, Cause.NODE_LOST, "DeletionByTaintManager: so it is (the taint was not checked)"),
    ),
    (
        *("d", Evidence(FAILED, [pod(end("Error"), disrupted("DeletionByPodGC"))], nodes={"n1": None})),
        *(State.FAILED, Cause.NODE_LOST, "DeletionByPodGC: so it is (node n1 is gone)"),
    ),
    (
        *("d", Evidence(trainjob(), [pod(None, *unready())], ADMITTED, nodes={"n1": LOST_TAINT})),
        *(State.RUNNING, Cause.NODE_LOST, "node n1 has node.kubernetes.io/unreachable"),
    ),
    (
        *("d", Evidence(trainjob(hold="1"), [pod()], ADMITTED, nodes={"n1": None})),
        *(State.STOPPING, Cause.NODE_LOST, "pods left: p-0; pod p-0 on n1: node n1 is gone"),
    ),
    (
        *("d", Evidence(FAILED, jobs=[DISRUPTED], events=[event("TaintManagerEviction", "Pod", "Marking")])),
        *(State.FAILED, Cause.NODE_LOST, "TaintManagerEviction: Marking"),
    ),
    ("d", Evidence(SUSPENDED, [], evicted("NodeFailures")), State.QUEUED, Cause.NODE_LOST, "NodeFailures: so it is"),
    (
        *("e", Evidence(FAILED, [pod(end("Error", 137), reason="Evicted", message="disk full")])),
        *(State.FAILED, Cause.EVICTED, "pod p-0 on n1: Evicted: disk full"),
    ),
    (
        # Seen on a busy node: the kubelet lost sight of the container that it had just ended.
        *("e", Evidence(FAILED, [pod(unknown_end(), reason="Evicted", message="disk full")])),
        *(State.FAILED, Cause.EVICTED, "Evicted: disk full"),
    ),
    (
        *("e", Evidence(FAILED, [pod(end("Error", 143), disrupted("TerminationByKubelet"))])),
        *(State.FAILED, Cause.EVICTED, "TerminationByKubelet"),
    ),
    (
        *("e", Evidence(trainjob(), [pod(None, disrupted("EvictionByEvictionAPI"))], ADMITTED)),
        *(State.RUNNING, Cause.EVICTED, "EvictionByEvictionAPI"),
    ),
    *(
        ("f", Evidence(trainjob(), [pod(waits(reason))], ADMITTED), State.STARTING, Cause.IMAGE, f"{reason}: so it is")
        for reason in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName")
    ),
    *(
        ("g", Evidence(trainjob(), [pod(waits(reason))], ADMITTED), State.STARTING, Cause.CONFIG, f"{reason}: so it is")
        for reason in ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
    ),
    ("g", Evidence(FAILED, [pod(end("StartError", 128))]), State.FAILED, Cause.CONFIG, "StartError, exit code 128"),
    *(
        (
            *("g", Evidence(job, [], of_kueue, events=[event("TrainJobResourcesCreationFailed")])),
            *(state, Cause.CONFIG, "TrainJobResourcesCreationFailed: so it is"),
        )
        for state, job, of_kueue in (
            (State.STARTING, trainjob(uid="u1"), ADMITTED),
            (State.GATED, trainjob(uid="u1", gated=True, suspend=True), None),
            (State.QUEUED, trainjob(uid="u1", suspend=True), no_quota("Pending", WAITS)),
        )
    ),
    (
        *("h", Evidence(trainjob(), [pod(waits("ContainerCreating"), UNSCHEDULABLE)], ADMITTED)),
        *(State.STARTING, Cause.NO_CAPACITY, "Unschedulable: 0/3 nodes are available"),
    ),
    *(
        ("h", Evidence(SUSPENDED, [], no_quota(reason, WAITS)), State.QUEUED, Cause.NO_CAPACITY, "waits for quota: ")
        for reason in ("Pending", "WaitingForQuota", "ExceedsMaxQuota")
    ),
    *(
        ("h", Evidence(SUSPENDED, [], no_quota(reason, NEVER)), State.QUEUED, Cause.NO_CAPACITY, "can never fit")
        for reason in ("Pending", "ExceedsMaxQuota")
    ),
    (
        *("h", Evidence(SUSPENDED, [], no_quota("Pending", f"{WAITS}; {NEVER}"))),  # two pod sets
        *(State.QUEUED, Cause.NO_CAPACITY, "can never fit"),
    ),
    (
        *("i", Evidence(SUSPENDED, [], {"status": REJECTED})),
        *(State.QUEUED, Cause.REJECTED, "check c: Rejected: no nodes to be had"),
    ),
    (
        *("i", Evidence(SUSPENDED, [], evicted("DeactivatedDueToAdmissionCheck", "c refused", active=False))),
        *(State.FAILED, Cause.REJECTED, "DeactivatedDueToAdmissionCheck: c refused"),
    ),
    *(
        ("j", Evidence(SUSPENDED, [], no_quota(reason, text)), State.QUEUED, Cause.QUEUE_STOPPED, text)
        for reason, text in (
            ("Inadmissible", "LocalQueue lq is stopped"),
            ("Misconfigured", "LocalQueue lq doesn't exist"),
            ("Suspended", "ClusterQueue cq is inactive"),
            ("Inadmissible", "ClusterQueue cq is terminating or missing"),
        )
    ),
    *(
        ("j", Evidence(SUSPENDED, [], evicted(reason)), State.QUEUED, Cause.QUEUE_STOPPED, f"{reason}: so it is")
        for reason in ("ClusterQueueStopped", "LocalQueueStopped")
    ),
    ("k", Evidence(SUSPENDED, [], workload(active=False)), State.HELD, Cause.STOPPED, "inactive"),
    ("k", Evidence(SUSPENDED, [], evicted("Deactivated", active=False)), State.HELD, Cause.STOPPED, "Deactivated: so"),
    (
        *("k", Evidence(SUSPENDED, [], evicted("Preempted", active=False)), State.HELD, Cause.STOPPED),
        "Workload Evicted: Preempted: so it is; its Workload is inactive (spec.active)",
    ),
    ("l", Evidence(SUSPENDED, [], evicted("PodsReadyTimeout")), State.QUEUED, Cause.EVICTED, "PodsReadyTimeout: so"),
    (
        *("l", Evidence(trainjob(), [pod(waits("ErrImagePull"))], evicted("PodsReadyTimeout"))),
        *(State.STOPPING, Cause.IMAGE, "ErrImagePull: so it is; Workload Evicted: PodsReadyTimeout"),
    ),
    (
        *("l", Evidence(SUSPENDED, [], evicted("DeactivatedDueToRequeuingLimitExceeded", active=False))),
        *(State.FAILED, Cause.EVICTED, "RequeuingLimitExceeded: so it is"),
    ),
    ("l", Evidence(SUSPENDED, [], evicted("NeverHeardOf")), State.QUEUED, Cause.EVICTED, "NeverHeardOf: so it is"),
    ("m", Evidence(FAILED, [pod(end("Error", 3))]), State.FAILED, Cause.PROGRAM, "Error, exit code 3"),
    ("m", Evidence(FAILED, [pod(end("Error", 137))]), State.FAILED, Cause.PROGRAM, "Error, exit code 137"),
    ("n", Evidence(FAILED), State.FAILED, Cause.UNKNOWN, "FailedJobs: first failed job: x"),
    ("n", Evidence(FAILED, jobs=[DISRUPTED]), State.FAILED, Cause.UNKNOWN, "p-0 has condition DisruptionTarget"),
    ("n", Evidence(FAILED, [pod(None, disrupted("NeverHeardOf"))]), State.FAILED, Cause.UNKNOWN, "NeverHeardOf: so it"),
    ("n", Evidence(trainjob(), [pod(waits("NeverHeardOf"))], ADMITTED), State.STARTING, Cause.UNKNOWN, "NeverHeardOf"),
    ("n", Evidence(FAILED, [pod(end("Error"), reason="NeverHeardOf")]), State.FAILED, Cause.UNKNOWN, "NeverHeardOf"),
    ("n", Evidence(SUSPENDED, [], no_quota("Inadmissible", "of a kind")), State.QUEUED, Cause.UNKNOWN, "of a kind"),
    (
        *("n", Evidence(SUSPENDED, [], workload(condition("Finished", "FailedToStart", "no such flavor")))),
        *(State.FAILED, Cause.UNKNOWN, "FailedToStart: no such flavor"),
    ),
]


@pytest.mark.parametrize(("row", "evidence", "state", "cause", "words"), ROWS)
def test_row(row: str, evidence: Evidence, state: State, cause: Cause, words: str) -> None:
    verdict = classify(evidence)
    assert (verdict.state, verdict.cause) == (state, cause), f"row {row}: {verdict.detail}"
    assert words in verdict.detail


def test_every_row_of_the_docstring_is_tested_in_its_order() -> None:
    table = (classify.__doc__ or "").rpartition("row  evidence")[2]
    assert list(dict.fromkeys(row[0] for row in ROWS)) == re.findall(r"^    ([a-z]) {4}", table, re.MULTILINE)


def test_every_reason_that_the_docstring_names_is_tested_with_its_cause() -> None:
    table = (classify.__doc__ or "").rpartition("row  evidence")[2]
    words = set(re.findall(r"\b[A-Z][a-z]+[A-Z]\w+", table)) - {"TrainJob", "LocalQueue", "ClusterQueue"}
    tested = str([(row[1].pods, row[1].workload, row[1].trainjob, row[1].events) for row in ROWS])
    assert not {word for word in words if word not in tested}


# --- what has no cause


@pytest.mark.parametrize(
    "evidence",
    [
        Evidence(trainjob(), [pod()], ADMITTED),
        Evidence(trainjob(), [pod(last=end("OOMKilled"))], ADMITTED),  # its container was restarted, and runs
        Evidence(trainjob(), [pod(), pod(end("Completed", 0), name="p-1")], ADMITTED),
        Evidence(trainjob(), [pod(waits("ContainerCreating"))], ADMITTED),
        Evidence(trainjob(), [pod(), pod(end("OOMKilled"), name="p-1", epoch="1000000")], ADMITTED),
        Evidence(trainjob(), [pod(restart="1"), pod(end("OOMKilled"), name="p-1")], ADMITTED),
        Evidence(trainjob(suspend=True, hold="1"), [], evicted("Deactivated", active=False)),
        Evidence(trainjob(hold="1"), [pod()], evicted("Deactivated", active=False)),
        Evidence(trainjob(suspend=True, hold="stop"), [pod()], evicted("Deactivated", active=False)),
        Evidence(trainjob(suspend=True, hold="released-1"), [], evicted("Deactivated")),
        Evidence(SUSPENDED, [], workload(condition("DeactivationTarget", "AdmissionCheck"), active=False)),
        Evidence(SUSPENDED, [], no_quota("Pending", "a thing that is new")),
        Evidence(SUSPENDED),
        Evidence(trainjob(condition("Complete")), [pod(end("Error"))], ADMITTED),
        Evidence(None),
    ],
)
def test_there_is_no_cause_where_nothing_is_wrong_or_it_is_our_own_doing(evidence: Evidence) -> None:
    assert classify(evidence).cause is None


def test_what_kueue_says_and_the_adapter_does_not_know_is_kept() -> None:
    assert classify(Evidence(SUSPENDED, [], no_quota("NewReason", "a new thing"))).detail == "NewReason: a new thing"


def test_a_job_that_waits_for_the_gate_says_for_what() -> None:
    check = {"name": "c", "state": "Pending", "message": "waiting for 1 pods of the earlier attempt: p on n1"}
    reserved = {"status": {"conditions": [condition("QuotaReserved")], "admissionChecks": [check]}}
    verdict = classify(Evidence(SUSPENDED, [], reserved))
    assert (verdict.state, verdict.detail) == (State.QUEUED, f"check c: Pending: {check['message']}")


def test_a_preempted_job_that_has_quota_again_is_still_preempted_until_it_is_admitted() -> None:
    message = "Previously: Preempted to accommodate a workload"
    was = [condition(kind, "QuotaReserved", message, status="False") for kind in ("Evicted", "Preempted")]
    waits, left = {"status": {"conditions": [condition("QuotaReserved"), *was]}}, [pod()]
    assert classify(Evidence(SUSPENDED, [], waits)).cause is Cause.PREEMPTED
    assert classify(Evidence(SUSPENDED, left, waits)).cause is Cause.PREEMPTED
    other = {"status": {"conditions": [condition("QuotaReserved"), was[0]]}}  # of that only Kueue's words are left
    assert classify(Evidence(SUSPENDED, [], other)).cause is None
    admitted = {"status": {"conditions": [*ADMITTED["status"]["conditions"], *was]}}
    assert classify(Evidence(trainjob(), [pod()], admitted)).cause is None


def test_a_held_job_whose_quota_is_reserved_says_what_to_do() -> None:
    verdict = classify(Evidence(trainjob(suspend=True, hold="3"), [], workload(condition("QuotaReserved"))))
    assert (verdict.state, verdict.detail) == (State.HELD, "held, but its quota is reserved: hold again")


def test_a_job_that_is_admitted_but_still_suspended_says_so() -> None:
    verdict = classify(Evidence(SUSPENDED, [], ADMITTED))
    assert (verdict.state, verdict.detail) == (State.STARTING, "admitted, but the TrainJob is still suspended")


def test_a_job_that_runs_is_running_whatever_kubectl_prints() -> None:
    resumed = trainjob(condition("Suspended", "Resumed", status="False"))  # kubectl shows the condition's name
    assert classify(Evidence(resumed, [pod()], ADMITTED)).state is State.RUNNING


# --- which of several counts


def first(*pods: Object, **more: Any) -> tuple[Cause | None, str]:
    verdict = classify(Evidence(FAILED, pods, **more))
    return verdict.cause, str(verdict.pod and verdict.pod["metadata"]["name"])


def test_the_earliest_end_decides() -> None:
    oom, followers = pod(end("OOMKilled", 137, 10)), [pod(end("Error", 1, 11), name=f"p-{n}") for n in (1, 2)]
    assert first(*followers, oom) == (Cause.OUT_OF_MEMORY, "p-0")
    early = pod(end("Error", 1, 9), name="p-3")
    assert first(*followers, oom, early) == (Cause.PROGRAM, "p-3")


def test_a_deactivation_that_kueue_is_about_to_explain_is_nobodys() -> None:
    soon = workload(condition("Evicted", "Preempted"), condition("DeactivationTarget"), active=False)
    assert classify(Evidence(SUSPENDED, [], soon)).cause is Cause.PREEMPTED


def test_a_node_is_lost_from_when_it_is_said_to_be() -> None:
    """What the others do about it comes after it, what ended before does not."""
    waiting, after, before = (
        pod(None, *unready()),
        pod(end("Error", 1, 20), name="p-1"),
        pod(end("Error", 1, 4), name="p-1"),
    )
    taint = {"key": "node.kubernetes.io/unreachable", "timeAdded": at(5)}
    lost = {"n1": {"spec": {"taints": [taint]}}}
    after["spec"]["nodeName"] = before["spec"]["nodeName"] = "n2"
    assert first(waiting, after, nodes=lost) == (Cause.NODE_LOST, "p-0")
    assert first(waiting, before, nodes=lost) == (Cause.PROGRAM, "p-1")


def test_of_ends_in_the_same_second_the_table_decides() -> None:
    assert first(pod(end("Error"), name="p-1"), pod(end("OOMKilled"))) == (Cause.OUT_OF_MEMORY, "p-0")


def test_an_end_without_a_time_is_the_last() -> None:
    timeless = pod({"terminated": {"reason": "OOMKilled", "exitCode": 137}}, name="p-1")
    assert first(timeless, pod(end("Error"))) == (Cause.PROGRAM, "p-0")


def test_a_disruption_beats_the_exit_code_that_it_causes_and_no_other() -> None:
    assert first(pod(end("Error", 143, 20), disrupted("EvictionByEvictionAPI", 10)))[0] is Cause.EVICTED
    assert first(pod(end("Error", 143, 10), disrupted("EvictionByEvictionAPI", 10)))[0] is Cause.EVICTED
    assert first(pod(end("Error", 1, 10), disrupted("EvictionByEvictionAPI", 20)))[0] is Cause.PROGRAM


def test_the_kubelet_says_that_it_ends_a_pod_only_when_it_has() -> None:
    """Seen on the real node when a pod made room for a critical one: the condition came a second after the end."""
    preempted = pod(end("Error", 143, 10), disrupted("TerminationByKubelet", 11), reason="Preempting")
    followed = pod(end("Error", 1, 10), name="p-1")
    assert first(preempted) == (Cause.EVICTED, "p-0")
    assert first(preempted, followed) == (Cause.EVICTED, "p-0")


def deleted(pod: Object, when: int, grace: int = 0) -> Object:
    pod["metadata"] |= {"deletionTimestamp": at(when + grace), "deletionGracePeriodSeconds": grace}
    return pod


def test_an_exit_code_after_the_pod_was_deleted_is_not_the_programs_own() -> None:
    assert first(deleted(pod(end("Error", 143, 12)), 10, grace=30))[0] is Cause.UNKNOWN
    assert first(deleted(pod(end("Error", 1, 8)), 10, grace=30))[0] is Cause.PROGRAM
    assert first(deleted(pod(end("OOMKilled", 137, 12)), 10))[0] is Cause.OUT_OF_MEMORY
    assert first(deleted(pod(end("Error", 143)), 5), jobs=[job("DeadlineExceeded")])[0] is Cause.TIMEOUT


def test_counter_without_that_guard_the_program_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "_told_to_go", lambda _: ("~~", ""))
    assert first(deleted(pod(end("Error", 143, 12)), 10, grace=30))[0] is Cause.PROGRAM


def test_counter_without_the_attempt_an_earlier_ones_end_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = Evidence(trainjob(), [pod(), pod(end("OOMKilled"), name="p-1", epoch="1000000")], ADMITTED)
    assert classify(evidence).cause is None
    monkeypatch.setattr(adapter, "_attempt", lambda pods, _: list(pods))
    assert classify(evidence).cause is Cause.OUT_OF_MEMORY


def test_the_job_deletes_the_others_when_one_fails() -> None:
    assert first(deleted(pod(end("Error", 143, 10), name="p-1"), 10), pod(end("Error", 3, 10)))[0] is Cause.PROGRAM


def test_a_container_of_which_nothing_is_known_is_not_the_programs_own() -> None:
    verdict = classify(Evidence(FAILED, [pod(end("ContainerStatusUnknown", 137))]))
    assert (verdict.cause, verdict.exit_code) == (Cause.UNKNOWN, 137)
    assert "ContainerStatusUnknown, exit code 137" in verdict.detail


def test_a_preemption_beats_the_exit_code_that_it_causes() -> None:
    preempted = workload({**condition("Evicted", "Preempted", "by u2"), "lastTransitionTime": at(10)})
    assert first(pod(end("Error", 143, 12)), workload=preempted)[0] is Cause.PREEMPTED
    assert first(pod(end("Error", 1, 8)), workload=preempted)[0] is Cause.PROGRAM
    assert first(workload=preempted)[0] is Cause.PREEMPTED


def test_our_own_stop_is_no_cause_of_a_failure_and_somebody_elses_is() -> None:
    job = condition("Failed", "FailedJobs")
    assert classify(Evidence(trainjob(job, hold="stop"), [], evicted("Deactivated"))).cause is Cause.UNKNOWN
    assert classify(Evidence(trainjob(job), [], evicted("Deactivated"))).cause is Cause.STOPPED


def test_the_end_of_an_init_container_counts() -> None:
    status: Any = {"initContainerStatuses": [{"name": "model-initializer", "state": end("Error", 4)}]}
    verdict = classify(Evidence(FAILED, [pod(waits("PodInitializing"), **status)]))
    assert (verdict.cause, verdict.exit_code) == (Cause.PROGRAM, 4)
    assert "container model-initializer: Error, exit code 4" in verdict.detail


def test_an_event_of_another_object_of_its_name_does_not_count() -> None:
    job, events = trainjob(uid="u2"), [event("TrainJobResourcesCreationFailed")]
    assert classify(Evidence(job, [], ADMITTED, events=events)).cause is None


def test_an_event_from_before_the_resumption_does_not_count_once_there_is_a_jobset() -> None:
    job = trainjob({**condition("Suspended", "Resumed", status="False"), "lastTransitionTime": at(40)}, uid="u1")
    job["status"]["jobsStatus"] = [{"name": "node", "suspended": 1}]
    old, new = event("TrainJobResourcesCreationFailed"), event("TrainJobResourcesCreationFailed", lastTimestamp=at(50))
    assert classify(Evidence(job, [], ADMITTED, events=[old])).cause is None
    assert classify(Evidence(job, [], ADMITTED, events=[old, new])).cause is Cause.CONFIG


def test_a_taint_eviction_that_was_cancelled_is_none() -> None:
    cancelled = [event("TaintManagerEviction", "Pod", "Cancelling deletion of Pod ns/p-0")]
    assert classify(Evidence(FAILED, jobs=[DISRUPTED], events=cancelled)).cause is Cause.UNKNOWN


def test_events_that_may_not_be_read_are_named_as_such() -> None:
    verdict = classify(Evidence(FAILED, jobs=[DISRUPTED], read=frozenset({"jobs", "events"})))
    assert "its Events may not be read" in verdict.detail


def test_a_node_that_was_read_and_is_well_is_told() -> None:
    evidence = Evidence(FAILED, [pod(end("Error"), disrupted("DeletionByTaintManager"))], nodes={"n1": {"spec": {}}})
    assert "(the node has no such taint)" in classify(evidence).detail


def test_a_stopped_queue_says_who_stopped_it() -> None:
    queue = {"kind": "ClusterQueue", "metadata": {"name": "cq"}, "spec": {"stopPolicy": "Hold"}}
    queue["status"] = {"conditions": [condition("Active", "Stopped", "is stopped", status="False")]}
    evidence = Evidence(SUSPENDED, [], no_quota("Suspended", "ClusterQueue cq is inactive"), queues=[queue])
    assert "ClusterQueue cq: stopPolicy Hold; Stopped: is stopped" in classify(evidence).detail


# --- the status


def test_the_status_names_the_end_that_decided() -> None:
    pods = [pod(end("Error", 1, 20)), pod(end("OOMKilled", 137, 10), name="p-1")]
    status = adapter.status_of(HANDLE, Evidence(FAILED, pods), NOW)
    assert (status.exit_code, status.node, status.rank) == (137, "n1", 1)


def test_only_a_pod_that_trains_has_a_rank() -> None:
    helper = pod(end("Error", 3))
    helper["metadata"]["labels"][TRAINS] = "dataset-initializer"
    status = adapter.status_of(HANDLE, Evidence(FAILED, [helper]), NOW)
    assert (status.exit_code, status.node, status.rank) == (3, "n1", None)


def test_interruptions_are_those_of_all_admissions_but_for_holds() -> None:
    evictions = [
        {"reason": "Preempted", "underlyingCause": "", "count": 2},
        {"reason": "PodsReadyTimeout", "underlyingCause": "WaitForStart", "count": 1},
        {"reason": "Deactivated", "underlyingCause": "", "count": 4},
    ]
    of_kueue = {"status": {**ADMITTED["status"], "schedulingStats": {"evictions": evictions}}}
    status = adapter.status_of(HANDLE, Evidence(trainjob(), [pod()], of_kueue), NOW)
    assert [(i.cause, i.count, i.detail) for i in status.interruptions] == [
        (Cause.PREEMPTED, 2, "Preempted"),
        (Cause.EVICTED, 1, "PodsReadyTimeout/WaitForStart"),
    ]


def test_an_end_past_the_gate_stays_ungated() -> None:
    past = pod(end("Error"))
    past["metadata"]["annotations"][ADMISSION] = "0"
    assert adapter.status_of(HANDLE, Evidence(FAILED, [past]), NOW).ungated


# --- what else to read


def without_workload() -> Evidence:
    job = trainjob(name="dj-x", suspend=True)
    job["status"]["jobsStatus"] = [{"name": "node", "suspended": 1}]
    return Evidence(job)


@pytest.mark.parametrize(
    ("evidence", "wanted"),
    [
        (Evidence(trainjob(), [pod(None, condition("Ready"), condition("ContainersReady"))], ADMITTED), {}),
        (Evidence(trainjob(), [pod(None, *unready())], ADMITTED), {"nodes": ["n1"]}),
        (Evidence(trainjob(), [pod(None, disrupted("DeletionByPodGC"))], ADMITTED), {"nodes": ["n1"]}),
        (Evidence(trainjob(condition("Complete")), [pod(end("Completed", 0))], ADMITTED), {}),
        (Evidence(FAILED, [pod(end("Error"))]), {}),
        (Evidence(FAILED), {"jobs": [""]}),
        (Evidence(FAILED, read=frozenset({"jobs"})), {}),
        (Evidence(FAILED, jobs=[DISRUPTED], read=frozenset({"jobs"})), {"events": ["p-0"]}),
        (Evidence(trainjob(name="dj-x"), [], ADMITTED), {"events": ["dj-x", "dj-x-node-0"]}),
        (Evidence(trainjob(), [pod(waits("ContainerCreating"))], ADMITTED), {}),
        (Evidence(trainjob(name="dj-x", gated=True, suspend=True)), {"events": ["dj-x", "dj-x-node-0"]}),
        (Evidence(SUSPENDED, [], no_quota("Suspended", "ClusterQueue cq is inactive")), {"queues": ["lq"]}),
        (without_workload(), {"events": ["dj-x", "dj-x-node-0"]}),
        (dataclasses.replace(without_workload(), read=frozenset({"events"})), {}),
    ],
)
def test_only_what_may_tell_more_is_read(evidence: Evidence, wanted: dict[str, list[str]]) -> None:
    assert adapter.wants(evidence) == wanted


# --- the recorded facts

RECORDED = {
    ("command-not-found", "finished"): (State.FAILED, Cause.CONFIG),
    ("completed", "finished"): (State.SUCCEEDED, None),
    ("configuration-missing", "CreateContainerConfigError"): (State.STARTING, Cause.CONFIG),
    ("configuration-missing", "waiting"): (State.STARTING, Cause.CONFIG),
    ("deadline", "finished"): (State.FAILED, Cause.TIMEOUT),
    ("evicted-by-the-kubelet", "finished"): (State.FAILED, Cause.EVICTED),
    ("evicted-through-the-api", "finished"): (State.FAILED, Cause.UNKNOWN),  # nothing that is left tells by what
    ("exit-code", "finished"): (State.FAILED, Cause.PROGRAM),
    ("image-name-invalid", "InvalidImageName"): (State.STARTING, Cause.IMAGE),
    ("image-not-there", "ErrImagePull"): (State.STARTING, Cause.IMAGE),
    ("image-not-there", "ImagePullBackOff"): (State.STARTING, Cause.IMAGE),
    ("killed", "finished"): (State.FAILED, Cause.PROGRAM),
    ("node-lost", "lost"): (State.RUNNING, Cause.NODE_LOST),
    ("node-lost", "back"): (State.FAILED, Cause.UNKNOWN),  # the Events that tell it are not among the facts
    ("out-of-memory", "finished"): (State.FAILED, Cause.OUT_OF_MEMORY),
    ("out-of-memory-in-a-child", "finished"): (State.FAILED, Cause.OUT_OF_MEMORY),
    ("preempted-by-the-kubelet", "finished"): (State.FAILED, Cause.EVICTED),
    ("preempted", "terminating"): (State.STOPPING, Cause.PREEMPTED),
    ("preempted", "gone"): (State.QUEUED, Cause.PREEMPTED),
    ("preempted", "running again"): (State.RUNNING, None),
}
FACTS = {
    (file.stem, moment): facts
    for file in pathlib.Path("tests/node/recorded").glob("*.json")
    for moment, facts in json.loads(file.read_text()).items()
    if "TrainJob" in facts
}


def recorded(name: str, moment: str) -> Evidence:
    """Such facts as evidence. The record lacks the TrainJob's queue, and its counts, which are those of its pods."""
    facts = FACTS[name, moment]
    (job,), pods = facts["TrainJob"], facts.get("Pod", [])
    counts = trainjob(admission=pods[0]["metadata"]["annotations"][ADMISSION] if pods else "1")
    job["spec"]["runtimePatches"] = counts["spec"]["runtimePatches"]
    job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "lq"
    return Evidence(job, pods, facts["Workload"][0], facts.get("Job", []))


@pytest.mark.parametrize(("name", "moment"), FACTS)
def test_what_was_recorded_on_the_real_node_is_told(name: str, moment: str) -> None:
    verdict = classify(recorded(name, moment))
    assert (verdict.state, verdict.cause) == RECORDED[name, moment], verdict.detail


# --- the mappings


def test_every_cause_says_whose_fault_it_is_whether_to_retry_and_what_to_do() -> None:
    for cause in Cause:
        assert (cause.fault in Fault, cause.retry in Answer) == (True, True)
        assert cause.sentence
        assert cause.advice
    assert (Cause.UNKNOWN.fault, Cause.UNKNOWN.retry) == (Fault.UNKNOWN, Answer.UNKNOWN)


def test_the_page_is_what_the_mappings_give() -> None:
    assert causes.PAGE.read_text() == causes.page(), "write it anew: python3 -m tests.causes"


# --- any evidence

EVIDENCE = {  # one of these is in the detail of each cause
    Cause.OUT_OF_MEMORY: "OOMKilled",
    Cause.TIMEOUT: "DeadlineExceeded|MaximumExecutionTimeExceeded",
    Cause.PREEMPTED: "PreemptionByScheduler|Preempted",
    Cause.NODE_LOST: "DeletionBy|NodeFailures|TaintManagerEviction|is gone|node.kubernetes.io/",
    Cause.EVICTED: "Evicted|TerminationByKubelet|EvictionByEvictionAPI",
    Cause.IMAGE: "ErrImagePull|ImagePullBackOff|InvalidImageName",
    Cause.CONFIG: "StartError|RunContainerError|CreateContainer|TrainJobResourcesCreationFailed",
    Cause.NO_CAPACITY: "Unschedulable|quota",
    Cause.REJECTED: "Rejected|DeactivatedDueToAdmissionCheck",
    Cause.QUEUE_STOPPED: "QueueStopped|Queue lq is stopped",
    Cause.STOPPED: "Deactivated|inactive",
    Cause.PROGRAM: "exit code -?[1-9]",
}
_REASONS = st.sampled_from(
    [
        *(*adapter._CAUSE_OF, *adapter._HARMLESS, *adapter._UNREADY),
        *("Error", "Completed", "New", ""),
    ]
)
_TIMES = st.none() | st.integers(0, 59).map(at)
_TYPES = ["Failed", "Suspended", "Evicted", "QuotaReserved", "Admitted", "DisruptionTarget", "PodScheduled", "Ready"]
_CONDITION = st.builds(
    lambda kind, reason, message, status, when: {
        **condition(kind, reason, message, status),
        "lastTransitionTime": when,
    },
    st.sampled_from([*_TYPES, "Finished", "ContainersReady", "DeactivationTarget"]),
    *(_REASONS, st.sampled_from(["", WAITS, NEVER, "LocalQueue lq is stopped"]), st.sampled_from(["True", "False"])),
    _TIMES,
)
_CONDITIONS = st.lists(_CONDITION, max_size=3)
_END = st.builds(
    lambda reason, code, when: {"terminated": {"reason": reason, "exitCode": code, "finishedAt": when}},
    *(_REASONS, st.integers(-1, 255), _TIMES),
)
_PODS = st.lists(
    st.builds(
        lambda state, last, conditions, name, epoch, reason: pod(
            state, *conditions, last=last, name=name, epoch=epoch, reason=reason
        ),
        *(st.just({"running": {}}) | _REASONS.map(waits) | _END, st.none() | _END, _CONDITIONS),
        *(st.sampled_from(["p-0", "p-1"]), st.sampled_from(["1000000", "1000001"]), _REASONS),
    ),
    max_size=3,
)
_CHECK = st.builds(
    lambda state: {"name": "c", "state": state, "message": "m"}, st.sampled_from(["Ready", "Pending", "Rejected"])
)
_ANY = st.builds(
    lambda job, pods, conditions, active, checks, jobs, events, nodes, seen: Evidence(
        job,
        pods,
        {"spec": {"active": active}, "status": {"conditions": conditions, "admissionChecks": checks}},
        jobs=[{"status": {"conditions": found}} for found in jobs],
        events=events,
        nodes=nodes,
        seen=seen,
    ),
    st.builds(
        lambda conditions, suspend, gated, hold: trainjob(
            *conditions, suspend=suspend, gated=gated, hold=hold, uid="u1"
        ),
        *(_CONDITIONS, st.booleans(), st.booleans(), st.sampled_from([None, "1", "released-1", "stop"])),
    ),
    *(_PODS, _CONDITIONS, st.booleans(), st.lists(_CHECK, max_size=2), st.lists(_CONDITIONS, max_size=2)),
    st.none() | st.lists(st.builds(event, _REASONS, st.sampled_from(["TrainJob", "Pod"])), max_size=2),
    st.none() | st.just({"n1": None}) | st.just({"n1": LOST_TAINT}) | st.just({"n1": {}}),
    _PODS,
)


@given(_ANY)
def test_no_cause_is_without_its_evidence_in_the_detail(evidence: Evidence) -> None:
    verdict = classify(evidence)
    if verdict.cause not in (None, Cause.UNKNOWN):
        assert re.search(EVIDENCE[verdict.cause], verdict.detail), verdict


@given(_ANY)
def test_every_failure_has_a_cause_and_every_cause_a_detail(evidence: Evidence) -> None:
    verdict = classify(evidence)
    assert verdict.cause or verdict.state is not State.FAILED
    assert verdict.detail or not verdict.cause


@given(_ANY)
def test_whatever_it_wants_is_wanted_once(evidence: Evidence) -> None:
    wanted = adapter.wants(evidence)
    assert set(wanted) <= set(adapter.FURTHER)
    assert not adapter.wants(dataclasses.replace(evidence, read=frozenset(wanted)))


# --- what a person reads


def lines(evidence: Evidence) -> list[str]:
    return list(adapter._text(adapter.status_of(HANDLE, evidence, NOW)))


def test_a_person_reads_state_cause_sentence_next_step_attempts_and_pods() -> None:
    evictions = {"evictions": [{"reason": "Preempted", "underlyingCause": "", "count": 2}]}
    pods = [pod(end("OOMKilled", 137, 10)), pod(end("Error", 1, 11), name="p-1")]
    job = trainjob(condition("Failed", "FailedJobs"), hold="released-2")
    assert lines(Evidence(job, pods, {"status": {"schedulingStats": evictions}})) == [
        "state     failed (out-of-memory)",
        f"why       {Cause.OUT_OF_MEMORY.sentence}",
        "detail    pod p-0 on n1: container node: OOMKilled, exit code 137; FailedJobs",
        f"next      {Cause.OUT_OF_MEMORY.advice}, then start it as submission 2",
        "attempt   admission 1, restart 0, epoch 1000001; preempted 2 times (Preempted)",
        "pod       0 p-0 Failed on n1",
        "pod       1 p-1 Failed on n1",
    ]


def test_what_a_retry_mends_is_to_be_started_again_when_it_is_over() -> None:
    over = Evidence(FAILED, [pod(end("Error"), disrupted("PreemptionByScheduler"))])
    assert "next      start it as submission 2" in lines(over)
    assert f"next      {Cause.PREEMPTED.advice}" in lines(Evidence(SUSPENDED, [], EVICTED))


def test_a_job_that_waits_for_somebody_says_for_what() -> None:
    assert "next      open it" in lines(Evidence(trainjob(gated=True, suspend=True)))
    held = lines(Evidence(trainjob(suspend=True, hold="3")))
    assert held[:3] == ["state     held", "detail    hold instance 3", "next      release it"]


def test_a_job_that_is_well_needs_no_advice() -> None:
    assert lines(Evidence(trainjob(), [pod()], ADMITTED)) == [
        "state     running",
        "attempt   admission 1, restart 0, epoch 1000001",
        "pod       0 p-0 Running on n1",
    ]


def test_a_pod_past_the_gate_is_warned_of() -> None:
    past = pod(epoch="1000000")
    past["metadata"]["annotations"][ADMISSION] = "0"
    assert any(line.startswith("warning   ") for line in lines(Evidence(trainjob(admission="0"), [past], ADMITTED)))


# --- how long a cause is waited for


@pytest.mark.parametrize(
    ("job", "pods", "waited"),
    [
        (FAILED, [], True),
        (FAILED, [pod(end("Error")), pod(name="p-1")], True),
        (FAILED, [pod(end("Error")), pod(end("Error"), name="p-1")], False),
        (FAILED, [pod(end("Error")), pod(name="p-1", epoch="1000000")], False),
        (trainjob(condition("Failed", "DeadlineExceeded")), [pod()], False),
        (trainjob(condition("Complete")), [pod()], False),
        (trainjob(), [pod()], False),
    ],
)
def test_a_cause_is_waited_for_while_pods_end_or_nothing_tells(job: Object, pods: list[Object], waited: bool) -> None:
    job = json.loads(json.dumps(job))
    for found in job["status"]["conditions"]:
        found["lastTransitionTime"] = "2025-12-31T23:59:58Z"
    assert adapter.unsettled(Evidence(job, pods), NOW) == waited


@pytest.mark.parametrize("when", ["2025-12-31T23:58:00Z", "", "a while ago", None, 7])
def test_a_failure_of_long_ago_or_without_a_time_is_not_waited_for(when: Any) -> None:
    job = trainjob({**condition("Failed", "FailedJobs"), "lastTransitionTime": when})
    assert not adapter.unsettled(Evidence(job), NOW)


def corrupted(value: Any, place: int, junk: object) -> tuple[Any, int]:
    """A copy of JSON with junk in the place of what comes at `place` in it; how many places it had."""
    if place == 0:
        return junk, 1
    count = 1
    if isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        value = value.copy()
        for key in keys:
            value[key], size = corrupted(value[key], place - count, junk)
            count += size
    return value, count


@given(_ANY, st.lists(st.tuples(st.integers(0, 400), _JSON), min_size=1, max_size=4))
def test_evidence_with_junk_in_any_place_has_a_state(evidence: Evidence, junk: list[tuple[int, Any]]) -> None:
    objects = [evidence.trainjob, evidence.workload, *evidence.pods, *evidence.seen, *evidence.jobs]
    parts: Any = [*objects, *(evidence.events or ())]
    for place, value in junk:
        parts, _ = corrupted(parts, place + 1, value)
    job, of_kueue, *rest = [part if isinstance(part, dict) else {} for part in parts] if len(parts) > 1 else [{}, {}]
    broken = Evidence(job, rest[:3], of_kueue, rest, rest, evidence.nodes, rest, rest)
    assert adapter.status_of(HANDLE, broken, NOW).cause is classify(broken).cause
    assert set(adapter.wants(broken)) <= set(adapter.FURTHER)
    adapter.unsettled(broken, NOW)
