"""What a watch keeps of an object, and what a log line says."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

import adapter
from adapter import Gap, Handle, Line, State, Status

JOB = "01arz3ndektsv4rrffq69g5fav"
NAME = f"dj-{JOB}-s1"
AT = datetime.datetime(2026, 11, 29, 20, 0, 1, 123456, tzinfo=datetime.UTC)
HANDLE = Handle("n", NAME, "u")


@pytest.mark.parametrize(
    ("line", "is_rest"),
    [
        (b"2026-11-29T20:00:01.123456789Z text", False),
        (b"| 37% of an epoch", True),
        (b"", True),
        (b"unable to retrieve container logs for containerd://1", False),
        (b"failed to try resolving symlinks in path", False),
    ],
)
def test_what_is_left_of_a_line_is_told_from_a_line_and_from_the_kubelets_words(line: bytes, *, is_rest: bool) -> None:
    assert adapter.is_rest(line) is is_rest


@pytest.mark.parametrize(
    ("line", "time", "nanoseconds", "text"),
    [
        (b"2026-11-29T20:00:01.123456789Z text", AT, 789, "text"),
        (b"2026-11-29T22:00:01.123456000+02:00 a b ", AT, 0, "a b "),
        (b"2026-11-29T20:00:01Z ", AT.replace(microsecond=0), 0, ""),
        (b"2026-11-29T20:00:01.1Z \xff\x1b[0m\r", AT.replace(microsecond=100000), 0, "\udcff\x1b[0m\r"),
    ],
)
def test_a_lines_time_and_text(line: bytes, time: datetime.datetime, nanoseconds: int, text: str) -> None:
    assert adapter.stamped(line) == ((time, nanoseconds), text)


@pytest.mark.parametrize(
    "line", [b"", b"unable to retrieve container logs for containerd://0", b"2026-11-29 20:00:01 x"]
)
def test_what_has_no_time_is_no_line(line: bytes) -> None:
    with pytest.raises(adapter.NoAnswer):
        adapter.stamped(line)


def status(state: State, epoch: int | None) -> Status:
    return Status(HANDLE, state, epoch=epoch, final=state.final)


def test_how_far_a_job_has_come_in_its_epoch() -> None:
    stage, stages = (-1, 0), []
    for state, epoch in [
        (State.GATED, 1000000),
        (State.QUEUED, 1000001),
        (State.STARTING, 1000001),
        (State.RUNNING, 1000001),
        (State.STOPPING, 1000001),
        (State.QUEUED, 1000001),
        (State.QUEUED, 1000002),
        (State.STARTING, 1000002),
        (State.FAILED, 1000002),
    ]:
        stage = adapter.stage_of(status(state, epoch), stage)
        stages.append(stage[1])
    assert stages == [0, 0, 1, 2, 3, 4, 0, 1, 4]
    assert adapter.stage_of(status(State.STOPPED, None), stage) == (1000002, 4)


def metadata(kind: str, name: str, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "metadata": {"name": name, "labels": {adapter.JOB: JOB, adapter.SUBMISSION: "1"}, **more}}


def test_the_job_of_an_object() -> None:
    assert adapter.job_of("TrainJob", metadata("TrainJob", NAME)) == NAME
    assert adapter.job_of("TrainJob", metadata("TrainJob", "another")) == ""
    assert adapter.job_of("Pod", metadata("Pod", "any")) == NAME
    assert adapter.job_of("Pod", {"metadata": {"name": "any"}}) == ""
    owner = {"kind": "TrainJob", "name": NAME}
    assert adapter.job_of("Workload", {"metadata": {"name": "any", "ownerReferences": [owner]}}) == NAME
    assert adapter.job_of("Workload", {"metadata": {"name": "any", "ownerReferences": [{**owner, "name": "x"}]}}) == ""
    odds: list[object] = [None, [], {"metadata": []}, {"metadata": {"labels": 3, "ownerReferences": "x"}}]
    for odd in odds:
        assert [adapter.job_of(kind, odd) for kind in ("TrainJob", "Pod", "Workload")] == ["", "", ""]


def test_what_is_kept_says_the_same() -> None:
    """The verdict on a job does not change when what is never read is left out."""
    pod = {
        **metadata("Pod", "p", managedFields=[{"manager": "x"}]),
        "spec": {"containers": [{"name": "node"}], "nodeName": "n1", "volumes": []},
        "status": {"phase": "Running", "containerStatuses": [{"name": "node", "state": {"running": {}}}]},
    }
    kept = adapter.slim(pod)
    assert kept["spec"] == {"nodeName": "n1"}
    assert "managedFields" not in kept["metadata"]
    assert kept["status"] == pod["status"]
    assert adapter.slim({"a": [1, None, True, "x" * 1000]}) == {"a": [1, None, True, "x" * 1000]}


def container(state: str, restarts: int, last: str = "") -> dict[str, Any]:
    one = {"name": "node", "restartCount": restarts, "state": {state: {}}}
    one |= {"lastState": {last: {"exitCode": 1}}} if last else {}
    one["state"] = {state: {"exitCode": 1} if state == "terminated" else {}}
    return {"status": {"containerStatuses": [{"name": "sidecar", "state": {"running": {}}}, one]}}


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        ({}, (-1, False)),
        (container("waiting", 0), (-1, False)),
        (container("running", 0), (0, True)),
        (container("terminated", 0), (0, False)),
        (container("waiting", 2, "terminated"), (2, False)),
        (container("running", 3, "terminated"), (3, True)),
    ],
)
def test_which_container_has_run_last(pod: dict[str, Any], expected: tuple[int, bool]) -> None:
    assert adapter.container_of(pod) == expected


@pytest.mark.parametrize(
    ("pod", "first"),
    [
        ({}, 0),
        (container("running", 0), 0),
        (container("running", 1, "terminated"), 0),
        (container("terminated", 2, "terminated"), 1),
        (container("waiting", 0, "terminated"), 0),
        (container("waiting", 2, "terminated"), 2),
    ],
)
def test_the_log_of_one_container_before_is_served_while_none_is_waited_for(pod: dict[str, Any], first: int) -> None:
    assert adapter.served_of(pod) == (first, None)


def test_since_when_logs_are_served() -> None:
    pod = container("running", 1, "terminated")
    pod["status"]["containerStatuses"][1]["lastState"]["terminated"]["startedAt"] = "2026-11-29T20:00:01Z"
    assert adapter.served_of(pod) == (0, AT.replace(microsecond=0))


def test_of_pods_that_are_gone_those_of_the_latest_attempt_are_kept() -> None:
    def pod(epoch: str, restart: str) -> dict[str, Any]:
        return {"metadata": {"annotations": {adapter.EPOCH: epoch}, "labels": {adapter.RESTART: restart}}}

    pods = [pod("1000001", "3"), pod("1000002", "0"), pod("1000002", "1"), pod("1000002", "1")]
    assert adapter.latest_attempt(pods) == tuple(pods[2:])
    assert adapter.latest_attempt([]) == ()


def test_values_as_json() -> None:
    line = Line(0, 1, 0, AT, "text\udcff")
    assert line.to_json() == {
        "rank": 0,
        "admission": 1,
        "restart": 0,
        "time": "2026-11-29T20:00:01.123456Z",
        "text": "text\udcff",
    }
    assert Gap(None, 1, 0, AT, None, "why").to_json()["until"] is None


def test_a_line_for_a_person_is_harmless_for_the_terminal() -> None:
    assert adapter._summary(Line(3, 1, 0, AT, "a\x1b[2J\x07\r\tb\x9b\u202e\udcff ü 漢 🙂")) == (
        "3: a\\x1b[2J\\x07\\r\tb\\x9b\\u202e\\udcff ü 漢 🙂"
    )
    told = Status(HANDLE, State.FAILED, adapter.Cause.PROGRAM, "bad\x1b[0m", observed_at=AT, stale_since=AT)
    assert adapter._summary(told) == (
        f"2026-11-29T20:00:01Z {NAME} failed (program): bad\\x1b[0m [not heard of since 20:00:01]"
    )


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("5m", 300), ("1h30m", 5400), ("1d1s", 86401), ("0s", 0)])
def test_how_long_ago(text: str, seconds: int) -> None:
    before = datetime.datetime.now(datetime.UTC)
    assert abs((before - adapter._ago(text)).total_seconds() - seconds) < 5
