"""A controller that stands still ends, to be started again: one of its threads is stopped from outside, as by a fault.

The kernel's tracing can stop a single thread, which no signal can. Its pulse is made quick, so that a test need not
wait for two minutes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import sys
import time
from collections.abc import Iterator

import pytest

from tests import jobs
from tests.cluster.cluster import Cluster
from tests.cluster.gate import Gate
from tests.cluster.namespaces import Namespace
from tests.cluster.waiting import wait

PTRACE_DETACH, PTRACE_SEIZE, PTRACE_INTERRUPT, WALL = 17, 0x4206, 0x4207, 0x40000000
QUICK = {"STANDSTILL": 6}
_libc = ctypes.CDLL(None, use_errno=True)


def ptrace(request: int, thread: int) -> None:
    if _libc.ptrace(request, ctypes.c_long(thread), None, None):
        number = ctypes.get_errno()
        if number == 1:
            pytest.skip("stopping one thread of another process needs root, or kernel.yama.ptrace_scope=0")
        raise OSError(number, os.strerror(number))


@contextlib.contextmanager
def stopped(thread: int) -> Iterator[None]:
    """One thread of another process does not go on until the end of the block, or of its process."""
    ptrace(PTRACE_SEIZE, thread)
    try:
        ptrace(PTRACE_INTERRUPT, thread)
        os.waitpid(thread, WALL)  # it has stopped
        yield
    finally:
        if _libc.ptrace(PTRACE_DETACH, ctypes.c_long(thread), None, None):
            os.waitpid(thread, WALL)  # it has ended: that is first reported here, and to its parent after it


def threads(gate: Gate) -> list[int]:
    return sorted(int(task.name) for task in pathlib.Path(f"/proc/{gate.pid}/task").iterdir())


def settled(gate: Gate) -> list[int]:
    """Its threads, once all are there: the main one, then in the order in which they started."""
    wait(lambda: len(threads(gate)) >= 13, "the gate's threads are there")  # with the timer's
    return threads(gate)


def test_a_loop_that_stands_still_ends_the_process_and_is_named(cluster: Cluster) -> None:
    with cluster.controller(settings=QUICK) as gate:
        passes = settled(gate)[2]  # after the main thread and the elector: the one that lists and watches
        with stopped(passes):
            gate.wait_log("stands still for 6 s", timeout=60)
        assert gate.wait_end() == 1
        assert any("msg=ended loop=run_passes" in line for line in gate.log)
        assert any("in _watch" in line or "in _list" in line for line in gate.log)  # where it stood
        gate.start()  # as its kubelet would


def test_a_process_in_which_no_python_runs_any_more_ends_too(cluster: Cluster) -> None:
    with cluster.controller(settings=QUICK) as gate:
        settled(gate)
        with stopped(gate.pid):  # the main thread: nobody looks at the pulse
            gate.wait_log("Timeout (0:00:06)!", timeout=60)
        assert gate.wait_end() == 1


def test_a_process_that_was_stopped_as_a_whole_ends_when_it_goes_on(cluster: Cluster) -> None:
    with cluster.controller(settings=QUICK) as gate:
        gate.pause()
        until = time.monotonic() + 8
        cluster.wait(lambda: time.monotonic() > until, "longer than the pulse allows")
        gate.resume()
        assert gate.wait_end() == 1


# Starts a program whose standard error is a pipe that is full, and that nobody reads.
FULL = """
import os, sys
_, full = os.pipe()
os.set_inheritable(_, True)
os.set_blocking(full, False)
try:
    while True:
        os.write(full, b"x" * 4096)
except BlockingIOError:
    os.set_blocking(full, True)
os.dup2(full, 2)
os.execvp(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.parametrize("off", [False, True], ids=["goes on", "guard off"])
def test_a_log_that_nobody_takes_stops_nothing(cluster: Cluster, namespace: Namespace, off: bool) -> None:
    wrapper = [sys.executable, "-c", FULL]
    guards_off = ["stderr"] if off else []
    with cluster.controller("unread", leads=False, wrapper=wrapper, guards_off=guards_off) as gate:
        if off:
            lease = f"/proc/{gate.pid}/wchan"
            cluster.wait(lambda: "pipe_write" in pathlib.Path(lease).read_text(), "it waits for a reader of its log")
            job = jobs.submit(namespace)
            assert jobs.check(namespace, job)["state"] == "Pending"
            gate.kill()
            return
        namespace.wait_served()
        jobs.running(namespace, jobs.submit(namespace), epoch="1000001")
        assert gate.log == []
        gate.stop()
        assert gate.exit_code == 0


def test_a_candidate_and_an_idle_leader_do_not_stand_still(cluster: Cluster) -> None:
    settings = {"STANDSTILL": 10}  # a candidate looks at the Lease every 4.4 s at most
    with (
        cluster.controller("leader", settings=settings) as leader,
        cluster.controller("candidate", settings=settings, leads=False, lease=leader.lease) as candidate,
    ):
        until = time.monotonic() + 14
        cluster.wait(lambda: time.monotonic() > until, "more than the pulse allows")
        assert (leader.exit_code, candidate.exit_code) == (None, None)
