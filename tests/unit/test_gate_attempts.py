"""The judge of the safety tests (`tests.attempts`): that it sees each violation, and none where there is none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests import jobs
from tests.attempts import JOBSET_NAME, Attempts

JOB = "dj-01arz3ndektsv4rrffq69g5fav-s1"


class Story:
    """Events of one job, numbered in their order as the API server numbers its writes."""

    def __init__(self) -> None:
        namespace: Any = SimpleNamespace(check="gate")
        self.seen, self._version = Attempts(namespace), 100

    def pod(self, name: str, epoch: str, *events: str) -> Story:
        """Events: Pending, Running, Succeeded, Failed, DELETED."""
        for event in events:
            pod = {
                "metadata": {
                    "uid": name,
                    "name": name,
                    "labels": {JOBSET_NAME: JOB},
                    "annotations": {jobs.EPOCH: epoch},
                },
                "spec": {},
                "status": {"phase": event if event != "DELETED" else "Running"},
            }
            self.seen._note_pod("DELETED" if event == "DELETED" else "MODIFIED", pod, self._next())
        return self

    def check(self, *states: tuple[str, str]) -> Story:
        """States of the gate's check, with their messages."""
        for state, message in states:
            workload = {
                "metadata": {"uid": "w", "ownerReferences": [{"name": JOB}]},
                "status": {"admissionChecks": [{"name": "gate", "state": state, "message": message}]},
            }
            self.seen._note_workload("MODIFIED", workload, self._next())
        return self

    def admit(self, admission: int) -> Story:
        return self.check(("Pending", ""), ("Ready", f"admission {admission}"))

    def count(self, *counts: int) -> Story:
        for count in counts:
            job = {"metadata": {"name": JOB}, "spec": {"runtimePatches": [jobs.counts(str(count), "0")]}}
            self.seen._note_trainjob("MODIFIED", job, self._next())
        return self

    def _next(self) -> int:
        self._version += 1
        return self._version


def test_two_attempts_one_after_the_other_are_no_violation() -> None:
    story = Story().count(0, 1).admit(1).pod("a", "1", "Pending", "Running", "DELETED")
    story.count(2, 3).admit(3).pod("b", "3", "Pending", "Running", "Succeeded", "DELETED")
    assert story.seen.violations() == []
    assert [pod.pod for pod in story.seen.pods()] == ["a", "b"]
    assert [approval.message for approval in story.seen.approvals(JOB)] == ["admission 1", "admission 3"]


def test_pods_of_one_attempt_may_run_side_by_side() -> None:
    story = Story().admit(1).pod("a", "1", "Running").pod("b", "1", "Running")
    assert story.seen.violations() == []


def test_an_overlap_is_seen() -> None:
    story = Story().pod("a", "1", "Running").pod("b", "2", "Running").pod("a", "1", "DELETED")
    assert [(a.pod, b.pod) for a, b in story.seen.overlaps()] == [("a", "b")]


def test_a_pod_that_has_failed_overlaps_nothing() -> None:
    story = Story().pod("a", "1", "Running", "Failed").pod("b", "2", "Running").pod("a", "1", "DELETED")
    assert story.seen.overlaps() == []


def test_an_approval_beside_a_pod_that_never_ran_is_early() -> None:
    story = Story().admit(1).pod("a", "1", "Pending").admit(2).pod("a", "1", "DELETED")
    assert [(approval.message, pod.pod) for approval, pod in story.seen.early()] == [("admission 2", "a")]


def test_an_epoch_seen_in_two_admissions_is_stale() -> None:
    story = Story().admit(1).pod("a", "1", "Running", "DELETED").admit(2).pod("b", "1", "Running")
    assert [(a.pod, b.pod) for a, b in story.seen.stale()] == [("a", "b")]


def test_a_second_approval_without_a_reset_between_is_doubled() -> None:
    story = Story().check(("Pending", ""), ("Ready", "admission 1"), ("Ready", "admission 2"))
    assert [approval.message for approval in story.seen.doubled()] == ["admission 2"]


def test_what_the_watch_begins_with_is_no_approval() -> None:
    assert Story().check(("Ready", "admission 1")).seen.approvals(JOB) == []


def test_a_count_that_jumps_or_falls_is_seen() -> None:
    assert Story().count(0, 1, 3).seen.lowered() == {JOB: [0, 1, 3]}
    assert Story().count(2, 1).seen.lowered() == {JOB: [2, 1]}
