"""`output`: which lines it gives, in which order, and how it ends. How logs are kept on a node: tests/node."""

from __future__ import annotations

import datetime
import itertools
import threading

import pytest

import adapter
from adapter import Gap, Line, Live, State
from tests import adapters
from tests.adapters import Call, World
from tests.cluster.api import Object
from tests.cluster.cluster import Cluster


class Lines(threading.Thread):
    """What an output gives, in a thread of its own."""

    def __init__(self, output: Live[Line | Gap]) -> None:
        super().__init__(daemon=True)
        self.output, self.seen = output, list[Line | Gap]()
        self.error: adapter.DispatchError | None = None
        self.start()

    def run(self) -> None:
        try:
            for item in self.output:
                self.seen.append(item)
        except adapter.DispatchError as error:
            self.error = error

    @property
    def texts(self) -> list[str]:
        return texts(self.seen)

    def ended(self, timeout: float = 60) -> list[str]:
        self.join(timeout)
        assert not self.is_alive(), f"the output goes on after {self.texts}"
        if self.error:
            raise self.error
        return self.texts


def texts(items: object) -> list[str]:
    return [item.text if isinstance(item, Line) else f"GAP {item.reason}" for item in items]  # type: ignore[attr-defined]


def ranks(pods: list[Object]) -> dict[int, Object]:
    return {int(pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"]): pod for pod in pods}


def end_as_a_kubelet(world: World, pods: list[Object]) -> None:
    """Pods that are stuck, and told to go, end and go. Their logs can be read until then, and are."""
    for pod in pods:
        name = pod["metadata"]["name"]
        world.wait(lambda: "deletionTimestamp" in world.namespace.get("Pod", name)["metadata"], "it is told to go")  # noqa: B023
    mark = world.cluster.audit_mark()
    for pod in pods:
        world.cluster.pods.end(pod, 143, "Error")

    def read() -> bool:
        events = [e for e in world.cluster.audit_events(world.user, since=mark) if "/log?" in e["requestURI"]]
        return {e["objectRef"]["name"] for e in events if "follow=true" not in e["requestURI"]} >= {
            pod["metadata"]["name"] for pod in pods
        }

    world.wait(read, "their logs are read to their ends")
    for pod in pods:
        world.cluster.pods.unstick(pod)


def test_all_ranks_are_interleaved_by_time(plain: World) -> None:
    handle = plain.opened()
    pods = ranks(plain.running(handle))
    for number in range(6):
        plain.cluster.pods.log(pods[number % 2], f"line {number}")
    items = list(plain.backend.output(handle))
    assert texts(items) == [f"line {number}" for number in range(6)]
    assert [(item.rank, item.admission, item.restart) for item in items] == [(0, 1, 0), (1, 1, 0)] * 3
    times = [item.time for item in items if isinstance(item, Line)]
    assert times == sorted(times)
    assert times[0].tzinfo is datetime.UTC
    assert texts(plain.backend.output(handle, rank=1)) == ["line 1", "line 3", "line 5"]


def test_tail_and_since_leave_out_what_was_before(plain: World) -> None:
    handle = plain.opened()
    pods = ranks(plain.running(handle))
    for number in range(5):
        plain.cluster.pods.log(pods[number % 2], f"line {number}")
    assert texts(plain.backend.output(handle, tail=3)) == ["line 2", "line 3", "line 4"]
    assert texts(plain.backend.output(handle, tail=0)) == []
    assert texts(plain.backend.output(handle, tail=9, rank=0)) == ["line 0", "line 2", "line 4"]
    items = list(plain.backend.output(handle))
    assert isinstance(items[2], Line)
    assert texts(plain.backend.output(handle, since=items[2].time)) == ["line 2", "line 3", "line 4"]


def test_a_line_of_any_bytes_and_any_length_comes_through(plain: World) -> None:
    handle = plain.opened()
    pod = ranks(plain.running(handle))[0]
    long = "ä" * 300_000
    plain.cluster.pods.log(pod, f"{long}\n\x1b[31mred\x1b[0m\tünï\n\nlast")
    assert texts(plain.backend.output(handle, rank=0)) == [long, "\x1b[31mred\x1b[0m\tünï", "", "last"]


def test_following_starts_before_the_pods_exist_and_ends_with_the_job(world: World) -> None:
    handle = world.started()
    lines = Lines(world.backend.output(handle, follow=True))
    world.backend.open(handle)
    pods = ranks(world.running(handle))
    for number in range(4):
        world.cluster.pods.log(pods[number % 2], f"line {number}")
    world.wait(lambda: len(lines.seen) == 4, "the lines come while the job runs")
    world.cluster.pods.log(pods[0], "last")
    world.end(handle)
    assert sorted(lines.ended()) == ["last", "line 0", "line 1", "line 2", "line 3"]


def test_following_goes_on_from_what_is_there(plain: World) -> None:
    handle = plain.opened()
    pods = ranks(plain.running(handle))
    for number in range(4):
        plain.cluster.pods.log(pods[number % 2], f"line {number}")
    with plain.backend.output(handle, follow=True, tail=2) as output:
        lines = Lines(output)
        plain.wait(lambda: lines.texts == ["line 2", "line 3"], "the last lines come")
        plain.cluster.pods.log(pods[0], "line 4")
        plain.wait(lambda: lines.texts == ["line 2", "line 3", "line 4"], "the next one comes")
    assert lines.ended(5) == ["line 2", "line 3", "line 4"]


def test_following_without_what_is_there_starts_with_the_next_line(plain: World) -> None:
    handle = plain.opened()
    pod = ranks(plain.running(handle))[0]
    plain.cluster.pods.log(pod, "before")
    with plain.backend.output(handle, follow=True, tail=0, rank=0) as output:
        lines = Lines(output)
        numbers = itertools.count()

        def comes() -> list[str]:
            plain.cluster.pods.log(pod, f"after {next(numbers)}")
            return lines.texts

        plain.wait(comes, "a line comes")
    assert "before" not in lines.ended(5)


def test_following_goes_on_in_the_next_admission(kueue: World) -> None:
    """And tells nothing missing: the first pods were read to their ends."""
    handle = kueue.opened()
    lines = Lines(kueue.backend.output(handle, follow=True, rank=0))
    pod = ranks(kueue.running(handle))[0]
    kueue.cluster.pods.stick(pod)
    kueue.cluster.pods.log(pod, "first")
    kueue.wait(lambda: lines.texts == ["first"], "the line comes")
    workload = kueue.namespace.workload(handle.name)["metadata"]["name"]
    kueue.namespace.patch("Workload", workload, {"spec": {"active": False}})
    end_as_a_kubelet(kueue, [pod])
    kueue.wait(lambda: not kueue.namespace.pods(handle.name), "its pods are gone")
    kueue.namespace.patch("Workload", workload, {"spec": {"active": True}})
    kueue.cluster.pods.log(ranks(kueue.running(handle))[0], "second")
    kueue.end(handle)
    assert lines.ended() == ["first", "second"]
    assert [item.admission for item in lines.seen] == [1, 2]


def test_a_pod_that_goes_before_its_log_has_ended_is_told(plain: World) -> None:
    """A kubelet ends a log when its container has ended. One that is lost, like kwok's, does not."""
    handle = plain.opened()
    lines = Lines(plain.backend.output(handle, follow=True))
    pod = plain.running(handle)[0]
    plain.cluster.pods.log(pod, "line")
    plain.wait(lambda: lines.texts == ["line"], "the line comes")
    plain.backend.stop(handle)
    lines.ended()
    line, *gaps = lines.seen
    assert isinstance(line, Line)
    assert [(gap.since, gap.until) for gap in gaps if isinstance(gap, Gap) and gap.rank == line.rank] == [
        (line.time, None)
    ]
    assert all(isinstance(gap, Gap) and "it went before its log had ended" in gap.reason for gap in gaps)


def test_what_a_pod_printed_while_others_were_caught_up_with_is_told(
    plain: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was there of the first is read; who reads is not through with the second when the first is gone."""
    monkeypatch.setattr(adapter, "AHEAD", 2)
    handle = plain.opened()
    pods = ranks(plain.running(handle))
    plain.cluster.pods.log(pods[0], "first")
    for number in range(10):
        plain.cluster.pods.log(pods[1], f"line {number}")
    with plain.backend.output(handle, follow=True) as output:
        first = next(output)
        assert (first.rank, texts([first])) == (0, ["first"])
        plain.cluster.pods.log(pods[0], "last")
        plain.backend.hold(handle, 1)
        plain.state(handle, State.HELD)
        more = [next(output) for _ in range(12)]
    assert texts(item for item in more if isinstance(item, Line)) == [f"line {number}" for number in range(10)]
    (gap,) = [item for item in more if item.rank == 0]
    assert isinstance(gap, Gap)
    assert isinstance(first, Line)
    assert (gap.since, gap.until) == (first.time, None)


def test_following_a_job_that_is_stopped_ends(world: World) -> None:
    handle = world.opened()
    lines = Lines(world.backend.output(handle, follow=True))
    pods = world.running(handle)
    for pod in pods:
        world.cluster.pods.stick(pod)
    world.cluster.pods.log(pods[0], "line")
    world.wait(lambda: lines.texts == ["line"], "the line comes")
    stop = Call(lambda: world.backend.stop(handle))
    end_as_a_kubelet(world, pods)
    assert stop.wait() is None
    assert lines.ended() == ["line"]


def test_closing_it_ends_it(plain: World) -> None:
    handle = plain.opened()
    output = plain.backend.output(handle, follow=True)
    lines = Lines(output)
    plain.cluster.pods.log(plain.running(handle)[0], "line")
    plain.wait(lambda: lines.texts == ["line"], "the line comes")
    output.close()
    lines.ended(10)
    plain.wait(lambda: plain.namespace.name not in str(threading.enumerate()), "its threads end")


def test_closed_it_gives_nothing_more(plain: World) -> None:
    """Also of what has been read already."""
    handle = plain.opened()
    plain.cluster.pods.log(plain.running(handle)[0], "one\ntwo")
    output = plain.backend.output(handle)
    assert isinstance(next(output), Line)
    output.close()
    assert next(output, None) is None


def test_a_job_that_has_printed_nothing_yet_has_no_lines(world: World) -> None:
    handle = world.started()
    assert list(world.backend.output(handle)) == []
    assert world.backend.inspect(handle).state is State.GATED


@pytest.mark.parametrize("arguments", [{"tail": -1}, {"rank": "0"}, {"since": datetime.datetime(2026, 1, 1)}])  # noqa: DTZ001  # that is the point
def test_arguments_that_make_no_sense_are_invalid(plain: World, arguments: dict[str, object]) -> None:
    handle = plain.started()
    with pytest.raises(adapter.Invalid):
        plain.backend.output(handle, **arguments)  # type: ignore[arg-type]


def test_without_the_right_to_read_logs_it_is_unsupported(plain: World) -> None:
    handle = plain.opened()
    role = plain.namespace.get("Role", "dispatch-adapter")
    rules = [rule for rule in role["rules"] if rule["resources"] != ["pods/log"]]
    plain.namespace.patch("Role", "dispatch-adapter", {"rules": rules})

    def refused(*, follow: bool) -> bool:
        try:
            list(plain.backend.output(handle, follow=follow, tail=1))
        except adapter.Unsupported as error:
            return "not permitted to get pods/log" in str(error)
        return False

    plain.wait(lambda: refused(follow=False), "the API server knows of the change")
    assert refused(follow=True)


def test_the_reason_is_the_one_that_capabilities_gave(cluster: Cluster) -> None:
    with adapters.world(cluster, "plain", without="get pods/log") as world:
        backend = adapters.prove(world)
        handle = backend.start(world.spec())
        reason = backend.capabilities()[adapter.Capability.OUTPUT_READ].reason
        assert reason == "not permitted to get pods/log"
        with pytest.raises(adapter.Unsupported, match=f": {reason}"):
            backend.output(handle)
