"""The table of `adapter.classify`: its rows in their order, in both modes, and what holds for any JSON."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import adapter
from adapter import Cause, Evidence, Handle, State, Verdict, classify

Object = dict[str, Any]
NAME = "dj-01arz3ndektsv4rrffq69g5fav-s1"
HANDLE = Handle("team-a", NAME, "u1")
NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
DELETED: dict[str, Any] = {"deletionTimestamp": "2026-01-01T00:00:00Z"}


def condition(kind: str, reason: str = "", message: str = "", status: str = "True") -> Object:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def trainjob(
    *conditions: Object,
    queued: bool = True,
    suspend: bool = False,
    gated: bool = False,
    hold: str | None = None,
    admission: str = "1",
    **metadata: Any,
) -> Object:
    annotations = {"dispatch.phpboyscout.uk/hold": hold} if hold is not None else {}
    if gated:
        annotations["kueue.x-k8s.io/admission-gated-by"] = "dispatch.phpboyscout.uk/start"
    counts = {
        "dispatch.phpboyscout.uk/admission": admission,
        "dispatch.phpboyscout.uk/epoch": str(1_000_000 + int(admission)),
    }
    job = {"name": "node", "template": {"spec": {"template": {"metadata": {"annotations": counts}}}}}
    patch = {"template": {"spec": {"replicatedJobs": [job]}}}
    return {
        "metadata": {
            "labels": {"kueue.x-k8s.io/queue-name": "lq"} if queued else {},
            "annotations": annotations,
            **metadata,
        },
        "spec": {
            "suspend": suspend,
            "runtimePatches": [{"manager": "dispatch.phpboyscout.uk/adapter", "trainingRuntimeSpec": patch}],
        },
        "status": {"conditions": list(conditions)},
    }


def workload(*conditions: Object, active: bool = True) -> Object:
    return {"spec": {"active": active}, "status": {"conditions": list(conditions)}}


def pod(
    state: str = "running", *, epoch: str = "1000001", phase: str = "Running", name: str = "p", **more: Any
) -> Object:
    annotations = {"dispatch.phpboyscout.uk/epoch": epoch, "dispatch.phpboyscout.uk/admission": epoch[-1]}
    return {
        "metadata": {"name": name, "annotations": {**annotations, **more.pop("annotations", {})}, **more},
        "spec": {"nodeName": "n1"},
        "status": {"phase": phase, "containerStatuses": [{"name": "node", "state": {state: {}}}]},
    }


ADMITTED = workload(condition("QuotaReserved"), condition("Admitted"))
WAITING = workload(condition("QuotaReserved", "Pending", "couldn't assign flavors", status="False"))
EVICTED = workload(condition("Evicted", "Preempted", "by u2"), condition("Admitted", status="False"))
PLAIN: dict[str, Any] = {"queued": False}


@pytest.mark.parametrize(
    ("row", "evidence", "state"),
    [
        (1, Evidence(None), State.STOPPED),
        (2, Evidence(trainjob(condition("Complete"), **DELETED)), State.STOPPING),
        (2, Evidence(trainjob(hold="1", **DELETED)), State.STOPPING),
        (3, Evidence(trainjob(condition("Complete")), [pod()], ADMITTED), State.SUCCEEDED),
        (3, Evidence(trainjob(condition("Complete"), hold="stop")), State.SUCCEEDED),
        (4, Evidence(trainjob(condition("Failed")), [pod()], ADMITTED), State.FAILED),
        (5, Evidence(trainjob(suspend=True), [], workload(condition("Finished", "FailedToStart"))), State.FAILED),
        (5, Evidence(trainjob(suspend=True), [], workload(condition("Evicted", "DeactivatedDueToX"))), State.FAILED),
        (6, Evidence(trainjob(hold="1"), [pod()], ADMITTED), State.STOPPING),
        (6, Evidence(trainjob(gated=True), [pod()], WAITING), State.STOPPING),
        (6, Evidence(trainjob(), [pod()], EVICTED), State.STOPPING),
        (6, Evidence(trainjob(suspend=True), [pod()], WAITING), State.STOPPING),
        (6, Evidence(trainjob(suspend=True, **PLAIN), [pod(phase="Pending")]), State.STOPPING),
        (6, Evidence(trainjob(), [pod()], workload(condition("Admitted"), active=False)), State.STOPPING),
        (6, Evidence(trainjob(hold="stop", suspend=True, **PLAIN)), State.STOPPING),
        (6, Evidence(trainjob(hold="stop", gated=True)), State.STOPPING),
        (7, Evidence(trainjob(hold="1", gated=True, suspend=True), [], WAITING), State.HELD),
        (7, Evidence(trainjob(hold="1", suspend=True, **PLAIN), [pod(phase="Succeeded")]), State.HELD),
        (7, Evidence(trainjob(hold="?", suspend=True, **PLAIN)), State.HELD),
        (7, Evidence(trainjob(suspend=True), [], workload(active=False)), State.HELD),
        (8, Evidence(trainjob(gated=True, suspend=True), [], WAITING), State.GATED),
        (8, Evidence(trainjob(gated=True, suspend=True, **PLAIN)), State.GATED),
        (9, Evidence(trainjob(), [pod("waiting", name="q"), pod()], ADMITTED), State.RUNNING),
        (9, Evidence(trainjob(hold="released-1", **PLAIN), [pod()]), State.RUNNING),
        (10, Evidence(trainjob(), [pod("waiting")], ADMITTED), State.STARTING),
        (10, Evidence(trainjob(), [pod(epoch="1000000")], ADMITTED), State.STARTING),
        (10, Evidence(trainjob(), [pod("terminated")], ADMITTED), State.STARTING),
        (10, Evidence(trainjob(suspend=True), [], ADMITTED), State.STARTING),
        (10, Evidence(trainjob(**PLAIN)), State.STARTING),
        (
            11,
            Evidence(trainjob(), [], workload(condition("Evicted", "Preempted"), condition("Admitted"))),
            State.QUEUED,
        ),
        (11, Evidence(trainjob(suspend=True), [], WAITING), State.QUEUED),
        (11, Evidence(trainjob(suspend=True), [pod(phase="Failed")], EVICTED), State.QUEUED),
        (11, Evidence(trainjob(suspend=True)), State.QUEUED),
        (11, Evidence(trainjob(suspend=True, **PLAIN)), State.QUEUED),
    ],
)
def test_row(row: int, evidence: Evidence, state: State) -> None:
    assert classify(evidence).state is state, f"row {row}"


def test_every_row_of_the_docstring_is_tested_in_its_order() -> None:
    rows = next(mark.args[1] for mark in test_row.pytestmark)  # type: ignore[attr-defined]
    stated = [
        line.split()[0]
        for line in (classify.__doc__ or "").splitlines()
        if line.split()[:1] and line.split()[0].isdigit()
    ]
    assert list(dict.fromkeys(str(row) for row, _, _ in rows)) == stated


def test_a_failure_says_what_the_cluster_said_and_guesses_no_cause() -> None:
    verdict = classify(Evidence(trainjob(condition("Failed", "FailedJobs", "first failed job: x"))))
    assert (verdict.cause, verdict.detail) == (Cause.UNKNOWN, "FailedJobs: first failed job: x")


def test_a_condition_without_words_is_still_true() -> None:
    assert classify(Evidence(trainjob({"type": "Failed", "status": "True"}))).detail == "Failed"


def test_a_queued_job_says_what_kueue_says() -> None:
    assert classify(Evidence(trainjob(suspend=True), [], WAITING)).detail == "Pending: couldn't assign flavors"


def test_a_stopping_job_names_the_pods_that_are_left() -> None:
    assert classify(Evidence(trainjob(hold="1"), [pod()], WAITING)).detail == "pods left: p"
    assert classify(Evidence(trainjob(hold="stop", suspend=True, **PLAIN), [pod()])).detail == "pods left: p"


@pytest.mark.parametrize(("hold", "word"), [("1", "hold"), ("stop", "stop")])
def test_a_job_that_was_only_marked_says_what_to_repeat(hold: str, word: str) -> None:
    """Who held or stopped it was killed before the second write."""
    words = f"its Workload is still active: {word} it again"
    assert classify(Evidence(trainjob(hold=hold), [pod()], ADMITTED)).detail == f"{words}; pods left: p"
    inactive = workload(condition("Admitted"), active=False)
    assert classify(Evidence(trainjob(hold=hold), [pod()], inactive)).detail == "pods left: p"


def test_a_job_that_somebody_suspended_says_how_to_resume_it() -> None:
    words = "suspended by somebody else: hold it, then release it"
    assert classify(Evidence(trainjob(suspend=True, **PLAIN))).detail == words


def test_a_job_without_a_workload_says_so() -> None:
    """A WorkloadPriorityClass that is not there: Kueue makes none, and from 0.20 on an Event tells."""
    nothing = Evidence(trainjob(suspend=True, name="x", uid="u1"), events=(), read=frozenset({"events"}))
    assert classify(nothing) == Verdict(State.QUEUED, None, "Kueue has made no Workload of it yet")
    about = {"kind": "TrainJob", "name": "x", "uid": "u1"}
    event = {"reason": "WorkloadPriorityClassNotFound", "message": "not found", "involvedObject": about}
    told = classify(dataclasses.replace(nothing, events=[event]))
    words = "Event of TrainJob x: WorkloadPriorityClassNotFound: not found"
    assert (told.cause, told.detail) == (Cause.UNKNOWN, f"Kueue has made no Workload of it yet; {words}")


# --- the status


def test_a_status_has_the_counts_and_the_pods_by_rank() -> None:
    rank = "batch.kubernetes.io/job-completion-index"
    labels = {"jobset.sigs.k8s.io/restart-attempt": "2", "jobset.sigs.k8s.io/replicatedjob-name": "node"}
    restart: dict[str, Any] = {"labels": labels}
    pods = [pod(name="b", annotations={rank: "1"}, **restart), pod(name="a", annotations={rank: "0"}, **restart)]
    status = adapter.status_of(HANDLE, Evidence(trainjob(), pods, ADMITTED), NOW)
    assert (status.state, status.admission, status.epoch, status.restart) == (State.RUNNING, 1, 1_000_001, 2)
    assert [(p.rank, p.pod, p.node, p.phase) for p in status.pods] == [
        (0, "a", "n1", "Running"),
        (1, "b", "n1", "Running"),
    ]
    assert not status.ungated


def test_a_pod_past_the_gate_is_ungated_in_kueue_mode_only() -> None:
    past = [pod(epoch="1000000")]
    assert adapter.status_of(HANDLE, Evidence(trainjob(admission="0"), past, ADMITTED), NOW).ungated
    assert not adapter.status_of(HANDLE, Evidence(trainjob(queued=False), past), NOW).ungated


@pytest.mark.parametrize("queued", [True, False])
def test_a_line_about_an_ungated_job_warns(queued: bool) -> None:
    status = adapter.status_of(HANDLE, Evidence(trainjob(queued=queued), [pod(epoch="1000000")]), NOW)
    assert adapter._summary(status).endswith(" [ungated: the readmission gate was not asked]") is queued


def test_a_status_is_final_when_its_state_is() -> None:
    assert adapter.status_of(HANDLE, Evidence(trainjob(condition("Failed"))), NOW).final
    assert not adapter.status_of(HANDLE, Evidence(trainjob()), NOW).final


def test_a_statuss_json_is_camel_case_with_rfc_3339_times() -> None:
    status = adapter.status_of(HANDLE, Evidence(trainjob(), [pod()], ADMITTED), NOW).to_json()
    assert status["handle"] == {"namespace": "team-a", "name": NAME, "uid": "u1"}
    assert status["observedAt"] == "2026-01-01T00:00:00.000000Z"
    assert status["pods"] == [{"rank": None, "pod": "p", "node": "n1", "phase": "Running"}]
    assert {"exitCode", "staleSince", "ungated", "interruptions"} <= set(status)


# --- any JSON

_NAMES = st.sampled_from(
    ["metadata", "spec", "status", "conditions", "type", "reason", "labels", "annotations", "runtimePatches", "state"]
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=4),
    max_leaves=12,
)
_OBJECT = st.dictionaries(st.sampled_from(["metadata", "spec", "status"]), _JSON)


_OBJECTS = st.lists(_OBJECT, max_size=3)


@given(st.none() | _OBJECT, st.none() | _OBJECT, st.lists(_OBJECTS, min_size=5, max_size=5))
def test_any_json_has_a_state(job: Object | None, of_kueue: Object | None, more: list[list[Object]]) -> None:
    pods, jobs, queues, events, seen = more
    evidence = Evidence(job, pods, of_kueue, jobs, queues, {"n": None}, events, seen)
    assert adapter.status_of(HANDLE, evidence, NOW).state is classify(evidence).state
    assert set(adapter.wants(evidence)) <= set(adapter.FURTHER)
    assert adapter.unsettled(evidence, NOW) in (True, False)
