"""`output` on real processes and a real kubelet: each numbered line once, whatever happens meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

import adapter
from adapter import Gap, Line
from tests import adapters, jobs
from tests.cluster.real_node import KUBELET, RealNode
from tests.cluster.waiting import unique
from tests.faults.proxy import Proxy
from tests.integration.test_adapter_output import Lines
from tests.node.site import INSIDE, Site, on

# Prints numbered lines of 100 bytes until it is told to end, and then `last`.
NUMBERED = f"""
import itertools, os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("terminated", flush=True)))
name = os.uname().nodename.rpartition("-node-0-")[0]
end, pace = pathlib.Path("{INSIDE}", name + ".end"), float(sys.argv[1])
for number in itertools.count():
    print(f"{{number:08}}" + "." * 91, flush=True)
    time.sleep(pace)
    if end.exists():
        break
print(f"last {{number:08}}", flush=True)
"""


SLOW = 0.05  # seconds: then a log is not rotated while a server restarts, however busy the machine is


@pytest.fixture
def lease(real_node: RealNode) -> Iterator[str]:
    """The Lease of a gate. One for each test: who restarts the API server may cost it its Lease."""
    name = f"lease-{unique()}"
    with real_node.cluster.controller("output", lease=name):
        yield name


@contextlib.contextmanager
def following(
    site: Site, lease: str, *command: str, proxy: Proxy | None = None
) -> Iterator[tuple[adapter.Handle, Lines]]:
    """A job that was opened, and what is read of it from before it has a pod; through the proxy, if there is one."""
    backend = site.backend(lease)
    if proxy:
        settings = {**site.settings(lease), "kubeconfig": str(proxy.kubeconfig(site.cluster.kubeconfig))}
        backend = adapters.unproven(settings)
    handle = backend.start(site.spec(command=["python", "-u", "-c", *command]))
    with backend.output(handle, follow=True) as output:
        lines = Lines(output)
        backend.open(handle)
        yield handle, lines


def numbers(lines: Lines) -> list[int]:
    return [int(text[:8]) for text in lines.texts if text[:8].isdigit()]


def check(lines: Lines, *, gaps: int = 0) -> int:
    """All numbers up to the last came in order and once, but for those in a gap; returns how many did."""
    found, end = numbers(lines), lines.texts[-1]
    assert found == sorted(set(found)), "doubled, or in another order"
    told = [item for item in lines.seen if isinstance(item, Gap)]
    assert len(told) == gaps, told
    if not gaps:
        assert found == list(range(int(end.removeprefix("last ")) + 1))
    return len(found)


def more(site: Site, lines: Lines, count: int) -> None:
    """Returns when so many more lines have come."""
    before = len(lines.seen)
    site.cluster.wait(lambda: len(lines.seen) >= before + count, f"{count} more lines come", 90)


def disturbed(site: Site, lease: str, disturb: Callable[[Lines], None], pace: float = 0.005) -> Lines:
    """What was read of a job that prints a line each `pace` seconds, disturbed in the middle."""
    with following(site, lease, NUMBERED, str(pace)) as (handle, lines):
        more(site, lines, 10)
        disturb(lines)
        more(site, lines, 100)
        site.end(handle.name)
        lines.ended()
    return lines


def test_a_log_is_followed_over_its_rotation(real_node: RealNode, site: Site, lease: str) -> None:
    logs = real_node.folder / "log/pods"

    def rotated(lines: Lines) -> None:
        def rotations() -> list[str]:
            return [str(file) for file in logs.glob(f"{site.namespace.name}_*/node/*.log.*")]

        site.cluster.wait(rotations, "the log was rotated", 60)
        more(site, lines, 3000)

    assert check(disturbed(site, lease, rotated, pace=0.002)) > 3000


def test_a_restart_of_the_api_server_loses_and_doubles_nothing(site: Site, lease: str) -> None:
    def restarted(_: Lines) -> None:
        site.cluster.kill("kube-apiserver")
        site.cluster.start("kube-apiserver")

    check(disturbed(site, lease, restarted, pace=SLOW))


def test_a_restart_of_the_kubelet_loses_and_doubles_nothing(site: Site, lease: str) -> None:
    def restarted(_: Lines) -> None:
        site.cluster.kill(KUBELET)
        site.cluster.start(KUBELET)
        site.cluster.nodes.wait_ready("real-0")

    check(disturbed(site, lease, restarted, pace=SLOW))


def test_what_was_rotated_away_meanwhile_is_told_with_its_bounds(real_node: RealNode, site: Site, lease: str) -> None:
    """While the API server is away, the log is rotated."""
    logs = real_node.folder / "log/pods"

    def rotated(_: Lines) -> None:
        site.cluster.kill("kube-apiserver")
        before = {*logs.glob(f"{site.namespace.name}_*/node/*.log.*")}
        try:
            site.cluster.wait(lambda: {*logs.glob(f"{site.namespace.name}_*/node/*.log.*")} - before, "rotated", 60)
        finally:
            site.cluster.start("kube-apiserver")

    lines = disturbed(site, lease, rotated, pace=0.002)
    check(lines, gaps=1)
    (at,) = [i for i, item in enumerate(lines.seen) if isinstance(item, Gap)]
    before, gap, after = lines.seen[at - 1 : at + 2]
    assert isinstance(before, Line)
    assert isinstance(gap, Gap)
    assert isinstance(after, Line)
    assert (gap.since, gap.until) == (before.time, after.time)
    assert "rotated" in gap.reason


# Prints a thousand lines, and ends badly some seconds later, twice; then it ends well.
RESTARTED = f"""
import os, pathlib, sys, time
runs = pathlib.Path("{INSIDE}", os.uname().nodename + ".count")
number = int(runs.read_text()) if runs.exists() else 0
runs.write_text(str(number + 1))
for line in range(1000):
    print(f"{{number * 1000 + line:08}}", flush=True)
print("last", f"{{number * 1000 + line:08}}" if number == 2 else "")
time.sleep(float(sys.argv[1]))
sys.exit(number < 2)
"""


def test_the_containers_of_a_pod_are_read_one_after_the_other(real_node: RealNode, lease: str) -> None:
    """Trainer's stock runtime restarts a container that fails, after ten seconds, and twenty."""
    with on(real_node, stock=True) as site, following(site, lease, RESTARTED, "0") as (_, lines):
        lines.ended(120)
    check(lines)
    assert numbers(lines) == list(range(3000))


PODS = r"/pods\?.*watch=true"  # the watch of pods


def restarted_unseen(site: Site, handle: adapter.Handle, state: str, times: int = 1) -> None:
    """Returns when the container was restarted, and is `running`, or has ended again: `waiting` for the next start."""

    def restarted() -> bool:
        statuses = [pod["status"].get("containerStatuses", []) for pod in site.namespace.pods(handle.name)]
        containers = [container for found in statuses for container in found]
        return [(c["restartCount"], *c["state"]) for c in containers] == [(times, state)]

    site.cluster.wait(restarted, "its container was restarted", 60)


def test_a_container_that_was_restarted_unseen_is_not_taken_for_the_one_before(real_node: RealNode, lease: str) -> None:
    """The watch of pods stalls while it is restarted. What is left of the log of the one before can still be read."""
    with on(real_node, stock=True) as site, Proxy(site.cluster) as proxy:
        with following(site, lease, RESTARTED, "3", proxy=proxy) as (handle, lines):
            site.cluster.wait(lambda: len(lines.seen) > 0, "it prints", 60)
            with proxy.stall("GET", PODS):
                restarted_unseen(site, handle, "waiting")
            lines.ended(120)
        check(lines)
        assert numbers(lines) == list(range(3000))


def test_the_container_before_is_read_though_the_server_is_busy(real_node: RealNode, lease: str) -> None:
    """The watch of pods stalls from before its start until it was restarted."""
    with on(real_node, stock=True) as site, Proxy(site.cluster) as proxy:
        busy = proxy.answer(503, "GET", "/log.*previous=true", times=2)
        with following(site, lease, RESTARTED, "8", proxy=proxy) as (handle, lines):
            with proxy.stall("GET", PODS):
                restarted_unseen(site, handle, "running")
            lines.ended(120)
        assert len(busy.hits) == 2
        check(lines)
        assert numbers(lines) == list(range(3000))


def test_of_a_container_whose_successor_has_ended_too_a_gap_tells(real_node: RealNode, lease: str) -> None:
    """The watch of pods stalls from before its start. Until the third starts, the kubelet serves the second alone."""
    with on(real_node, stock=True) as site, Proxy(site.cluster) as proxy:
        with following(site, lease, RESTARTED, "1", proxy=proxy) as (handle, lines):
            with proxy.stall("GET", PODS):
                restarted_unseen(site, handle, "waiting")
            lines.ended(120)
        check(lines, gaps=1)
        assert numbers(lines) == list(range(1000, 3000))
        gap, first, *_ = lines.seen
        assert isinstance(gap, Gap)
        assert isinstance(first, Line)
        assert (gap.since, gap.until) == (None, first.time)
        assert "restarted" in gap.reason
        gap, *rest = site.backend(lease).output(handle)
        assert isinstance(gap, Gap)
        assert rest == lines.seen[-len(rest) :]  # the second may be gone by now


def test_containers_that_were_all_read_leave_no_gap(real_node: RealNode, lease: str) -> None:
    """It is read from the second container on, and nothing can be read from before that ends until the third runs."""
    with on(real_node, stock=True) as site, Proxy(site.cluster) as proxy:
        settings = {**site.settings(lease), "kubeconfig": str(proxy.kubeconfig(site.cluster.kubeconfig))}
        backend = adapters.unproven(settings)
        handle = backend.start(site.spec(command=["python", "-u", "-c", RESTARTED, "10"]))
        backend.open(handle)
        restarted_unseen(site, handle, "running")
        with backend.output(handle, follow=True) as output:
            lines = Lines(output)
            site.cluster.wait(lambda: f"{1999:08}" in lines.texts, "the second container's lines come", 60)
            with proxy.stall("GET", "/pods"):
                restarted_unseen(site, handle, "running", 2)
            lines.ended(120)
        check(lines)
        assert numbers(lines) == list(range(3000))


# A line that takes longer to end than a second, as that of a progress bar; the next is printed when it is told to end.
LONG = f"""
import os, pathlib, sys, time
end = pathlib.Path("{INSIDE}", os.uname().nodename.rpartition("-node-0-")[0] + ".end")
print("x" * 100_000, end="", flush=True)
time.sleep(2)
print(" end")
print("after", flush=True)
while not end.exists():
    time.sleep(0.1)
print("last")
"""


def test_a_line_that_was_begun_long_before_its_end_is_no_obstacle(site: Site, lease: str) -> None:
    """Asked for what came since the second of the next line, the kubelet sends what is left of it without a time."""
    long = "x" * 100_000 + " end"
    with Proxy(site.cluster) as proxy, following(site, lease, LONG, proxy=proxy) as (handle, lines):
        site.cluster.wait(lambda: len(lines.seen) == 2, "its first lines come", 60)
        proxy.cut("GET", "/log\\?")
        site.cluster.wait(lambda: proxy.open_requests("GET", "/log\\?"), "it is read on", 60)
        since = next(item.time for item in lines.seen if isinstance(item, Line) and item.text == "after")
        (again,) = Lines(site.backend(lease).output(handle, since=since.replace(microsecond=0))).ended()[-1:]
        site.end(handle.name)
        assert lines.ended() == [long, "after", "last"]
    assert again == "after"


def test_the_next_admission_is_followed_and_the_first_to_its_end(site: Site, lease: str) -> None:
    with following(site, lease, NUMBERED, "0.005") as (handle, lines):
        more(site, lines, 10)
        site.preempt(handle.name)
        site.cluster.wait(lambda: lines.texts.count(f"{0:08}" + "." * 91) == 2, "the second attempt prints", 90)
        site.end(handle.name)
        lines.ended()
    end = lines.texts.index("terminated")
    for part, admission in ((lines.seen[:end], 1), (lines.seen[end + 1 : -1], 2)):
        found = [(item.admission, int(item.text[:8])) for item in part if isinstance(item, Line)]
        assert found == [(admission, number) for number in range(len(found))]
    # The kubelet may lose sight of a container that has ended before it has served all: only then more was possible.
    gaps = [(item.since, item.until) for item in lines.seen if isinstance(item, Gap)]
    assert gaps in ([], [(lines.seen[end].time, None)])  # type: ignore[union-attr]


ODD = r"""
import sys
out = sys.stdout.buffer
out.write(b"x" * 100_000 + b"\n" + bytes(range(128, 256)) + b"\n\n\x1b[2Jred\n" + b"no end")
"""


def test_any_bytes_come_through(site: Site, lease: str) -> None:
    with following(site, lease, ODD) as (handle, lines):
        texts = lines.ended()
        expected = ["x" * 100_000, bytes(range(128, 256)).decode(errors="surrogateescape"), "", "\x1b[2Jred"]
        assert texts == [*expected, "no end"]
        backend = site.backend(lease)
        assert Lines(backend.output(handle)).ended() == texts
        assert texts[1].encode(errors="surrogateescape") == bytes(range(128, 256))
        assert jobs.condition(site.namespace.get("TrainJob", handle.name), "Complete")


def test_without_the_guard_lines_are_doubled(site: Site, lease: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was printed in the second of the last line is served once more."""
    read = adapter._Log._read

    def forgetful(log: adapter._Log, **options: bool) -> Iterator[object]:
        log._recent.clear()
        if log._last:
            log._last = (log._last[0].replace(microsecond=0), -1)
        yield from read(log, **options)

    monkeypatch.setattr(adapter._Log, "_read", forgetful)

    def restarted(_: Lines) -> None:
        site.cluster.kill("kube-apiserver")
        site.cluster.start("kube-apiserver")

    with pytest.raises(AssertionError, match="doubled"):
        check(disturbed(site, lease, restarted))
