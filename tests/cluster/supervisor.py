"""The parent of every process of one test cluster: none of them outlives it, and it does not outlive its owner.

`python -m tests.cluster.supervisor DIR [OWNER_FD]` serves requests on the Unix socket DIR/supervisor.sock; `Processes`
is the other end. What it guarantees:

- Each child has the kernel's parent-death signal: kill the supervisor in any way, and every child is killed.
- While it has an owner (the process that holds the other end of OWNER_FD), the owner's end, SIGKILL included, ends
  everything. `disown` drops that tie: then only `shutdown` ends it.
- Whoever removes the folder ends it, too, within seconds: nothing could find it any more.
- A child that ends unasked is remembered with its exit code; nothing is restarted behind a test's back.
- The ports that it hands out stay reserved as long as it lives, so a component that was killed gets its own one back
  and clusters side by side never meet.
- The cgroup that it made is removed with the last process. Only its own SIGKILL leaves one behind: the next `shutdown`
  or `sweep`, of whatever folder, removes it.

It runs on the standard library alone and in one thread: the death signal of a child fires when the *thread* that
started it ends, not the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import pathlib
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from . import cgroups, kernel

ROOT = pathlib.Path(__file__).resolve().parents[2]
STATE, SOCKET, LOGS = "supervisor.json", "supervisor.sock", "logs"
FOLDER_CHECK = 5.0  # seconds between two looks at the folder, when nothing else happens
STOP_PATIENCE = 15.0  # seconds that a child gets to end after SIGTERM before it is killed
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)

Json = dict[str, Any]


class SupervisorError(Exception):
    """The supervisor refused a request, or is not there."""


@dataclass(frozen=True)
class Process:
    """One child as the supervisor sees it: `state` is running, paused, stopped (on request) or died (unasked)."""

    name: str
    pid: int
    state: str
    exit_code: int | None
    essential: bool
    log: pathlib.Path
    log_start: int  # where in its log this run of it begins


# --- a process's identity: its pid may be another's by now, its start time tells


def start_time(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None when there is none, or only a zombie."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces and parentheses
    return None if fields[0] in "ZX" else int(fields[19])


def die_with(parent: int) -> None:
    """Makes the kernel kill this process when the thread that started it ends. Survives exec, not a change of user."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() not in (parent, 0):  # it ended before the line above; 0 is a parent outside this PID namespace
        os._exit(1)


# --- the server


@dataclass
class _Child:
    argv: list[str]
    env: dict[str, str]
    essential: bool
    inside: str | None
    popen: subprocess.Popen[bytes]
    started: int | None
    log_start: int
    paused: bool = False
    asked: bool = False  # its end was asked for


@dataclass
class _Server:
    folder: pathlib.Path
    owner: int | None
    children: dict[str, _Child] = field(default_factory=dict)
    ports: dict[str, socket.socket] = field(default_factory=dict)
    cgroup: str = ""
    leaving: bool = False

    def serve(self) -> None:
        woken, waker = socket.socketpair()
        for end in (woken, waker):
            end.setblocking(False)
        signal.set_wakeup_fd(waker.fileno())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: setattr(self, "leaving", True))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with _listener(self.folder) as listener, selectors.DefaultSelector() as selector:
            self.record()
            selector.register(listener, selectors.EVENT_READ)
            selector.register(woken, selectors.EVENT_READ)
            if self.owner is not None:
                selector.register(self.owner, selectors.EVENT_READ)
            mine = self.folder.stat().st_ino
            while not self.leaving:
                ready = selector.select(FOLDER_CHECK)
                if not ready and not _is_same(self.folder, mine):
                    break
                for key, _ in ready:
                    if key.fileobj is listener:
                        self.answer(listener)
                    elif key.fileobj is woken:
                        woken.recv(4096)
                        self.record()
                    else:  # the owner never writes: its end of the pipe is closed
                        self.leaving = self.owner is not None
                        selector.unregister(key.fileobj)
            self.end_all()

    def answer(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.settimeout(10)
        # A client that went away in the middle is its own loss.
        with connection, contextlib.suppress(OSError, ValueError), connection.makefile("rwb") as stream:
            request: Json = json.loads(stream.readline())
            try:
                reply: Json = {"ok": getattr(self, "do_" + request.pop("do"))(**request)}
            except (SupervisorError, OSError, subprocess.SubprocessError, AttributeError, TypeError) as error:
                reply = {"error": str(error)}
            self.record()
            stream.write(json.dumps(reply).encode() + b"\n")

    def do_ports(self, names: list[str]) -> dict[str, int]:
        for name in names:
            if name not in self.ports:
                # Bound, never listening, and with SO_REUSEADDR, as Go's listeners are: Linux then lets a child listen
                # on it, and gives the port to nobody who asks for a free one.
                holder = socket.socket()
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                holder.bind(("127.0.0.1", 0))
                self.ports[name] = holder
        return {name: self.ports[name].getsockname()[1] for name in names}

    def do_cgroup(self) -> str:
        if not self.cgroup:
            self.cgroup = cgroups.name(os.getpid(), start_time(os.getpid()))
            cgroups.make(self.cgroup)
        return self.cgroup

    def do_start(
        self,
        name: str,
        argv: list[str] | None = None,
        env: dict[str, str] | None = None,
        essential: bool = True,
        inside: str | None = None,
    ) -> int:
        known = self.children.get(name)
        if known and known.popen.poll() is None:
            raise SupervisorError(f"{name} runs already, as process {known.popen.pid}")
        if argv is None:
            if known is None:
                raise SupervisorError(f"{name} was never started")
            argv, env, essential, inside = known.argv, known.env, known.essential, known.inside
        machine = self.child(inside).popen.pid if inside and inside != name else None
        me, environment = os.getpid(), env or {}

        def prepare() -> None:
            die_with(me)
            if machine:
                kernel.setns(machine, "net")
                kernel.setns(machine, "mnt")  # last: it hides this /proc

        with (self.folder / LOGS / f"{name}.log").open("ab") as log, _pid_namespace(inside, machine):
            log_start = log.tell()
            popen = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, **environment},
                start_new_session=True,  # a Ctrl-C at the terminal is for whoever started the cluster
                preexec_fn=prepare,  # noqa: PLW1509  # there is one thread
            )
        started = start_time(popen.pid)
        self.children[name] = _Child(argv, environment, essential, inside, popen, started, log_start)
        return popen.pid

    def do_stop(self, name: str, gently: bool = False) -> int | None:
        child = self.child(name)
        child.asked = True
        if child.popen.poll() is None:
            if gently:
                child.popen.send_signal(signal.SIGTERM)
                child.popen.send_signal(signal.SIGCONT)  # a paused process would never see the first
                self.wait([child], STOP_PATIENCE)
            child.popen.kill()
            self.wait([child])
        child.paused = False
        return child.popen.returncode

    def do_forget(self, name: str) -> None:
        self.do_stop(name)
        del self.children[name]

    def do_pause(self, name: str) -> None:
        self.child(name).popen.send_signal(signal.SIGSTOP)
        self.child(name).paused = True

    def do_resume(self, name: str) -> None:
        self.child(name).popen.send_signal(signal.SIGCONT)
        self.child(name).paused = False

    def do_status(self) -> list[Json]:
        return [
            {
                "name": name,
                "pid": child.popen.pid,
                "state": _state(child),
                "exit_code": child.popen.returncode,
                "essential": child.essential,
                "log_start": child.log_start,
            }
            for name, child in self.children.items()
        ]

    def do_disown(self) -> None:
        self.owner = None

    def do_shutdown(self) -> None:
        self.end_all()
        self.leaving = True

    def child(self, name: str) -> _Child:
        if name not in self.children:
            raise SupervisorError(f"there is no process {name}; there are {', '.join(self.children) or 'none'}")
        return self.children[name]

    def end_all(self) -> None:
        for child in self.children.values():  # nothing here is worth a clean end
            child.asked = True
            child.popen.kill()
        self.wait(list(self.children.values()))
        if self.cgroup and (left := cgroups.remove(self.cgroup)):
            print(f"these cgroups could not be removed: {', '.join(map(str, left))}", file=sys.stderr, flush=True)

    def wait(self, ended: list[_Child], timeout: float = math.inf) -> None:
        """Returns when these have ended, or the time is up.

        Meanwhile it buries any child: process 1 of a PID namespace only ends when the others in it are buried.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            running = [child for child in self.children.values() if child.popen.poll() is None]
            if not any(child in running for child in ended):
                return
            time.sleep(0.005)

    def record(self) -> None:
        """Writes down whom `down` must see gone, should this process itself be killed."""
        text = json.dumps(
            {
                "pid": os.getpid(),
                "started": start_time(os.getpid()),
                "children": [[c.popen.pid, c.started] for c in self.children.values() if c.popen.poll() is None],
            }
        )
        draft = self.folder / f"{STATE}.new"
        draft.write_text(text)
        draft.rename(self.folder / STATE)


@contextlib.contextmanager
def _pid_namespace(inside: str | None, machine: int | None) -> Iterator[None]:
    """What is started in this block is in the PID namespace of `machine`; without one, it is process 1 of a new one."""
    if inside is None:
        yield
        return
    try:
        if machine:
            kernel.setns(machine, "pid")
        else:
            kernel.unshare(kernel.CLONE_NEWPID)
        yield
    finally:
        kernel.setns("self", "pid")


def _is_same(folder: pathlib.Path, number: int) -> bool:
    try:
        return folder.stat().st_ino == number
    except FileNotFoundError:
        return False


def _state(child: _Child) -> str:
    if child.popen.poll() is None:
        return "paused" if child.paused else "running"
    return "stopped" if child.asked else "died"


@contextlib.contextmanager
def _short_path(folder: pathlib.Path) -> Iterator[str]:
    """The socket's path through an open folder: a socket's address holds 107 bytes, a test's folder may be longer."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/{SOCKET}"
    finally:
        os.close(handle)


@contextlib.contextmanager
def _listener(folder: pathlib.Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener, _short_path(folder) as path:
        (folder / SOCKET).unlink(missing_ok=True)
        listener.bind(path)
        listener.listen(16)
        yield listener


# --- the client


class Processes:
    """Starts and ends the processes of one cluster, through its supervisor. Thread-safe."""

    def __init__(self, folder: pathlib.Path, popen: subprocess.Popen[bytes] | None = None, pipe: int | None = None):
        self.folder = folder
        self._popen, self._pipe = popen, pipe

    @classmethod
    def launch(cls, folder: pathlib.Path) -> Self:
        """Starts a supervisor in `folder`, owned by this process until `disown`."""
        (folder / LOGS).mkdir(parents=True, exist_ok=True)
        theirs, ours = os.pipe()
        with (folder / LOGS / "supervisor.log").open("ab") as log:
            popen = subprocess.Popen(
                [sys.executable, "-m", "tests.cluster.supervisor", str(folder), str(theirs)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                pass_fds=[theirs],
                start_new_session=True,
            )
        os.close(theirs)
        processes = cls(folder, popen, ours)
        deadline = time.monotonic() + 20
        while True:
            try:
                processes.status()
            except SupervisorError as error:
                if popen.poll() is not None or time.monotonic() > deadline:
                    raise SupervisorError(
                        f"the supervisor did not start: {tail(folder / LOGS / 'supervisor.log')}"
                    ) from error
                time.sleep(0.02)
            else:
                return processes

    def call(self, do: str, **arguments: object) -> Any:
        """One request. Raises SupervisorError when it is refused or nobody answers."""
        try:
            with socket.socket(socket.AF_UNIX) as client, _short_path(self.folder) as path:
                client.settimeout(60)
                client.connect(path)
                with client.makefile("rwb") as stream:
                    stream.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
                    stream.flush()
                    line = stream.readline()
        except OSError as error:
            raise SupervisorError(f"no supervisor answers in {self.folder}: {error}") from error
        if not line:
            raise SupervisorError(f"the supervisor in {self.folder} ended during the request")
        reply = json.loads(line)
        if "error" in reply:
            raise SupervisorError(reply["error"])
        return reply["ok"]

    def ports(self, *names: str) -> dict[str, int]:
        """A loopback port for each name, the same one each time."""
        ports: dict[str, int] = self.call("ports", names=names)
        return ports

    def cgroup(self) -> str:
        """The name of the cgroup, in every hierarchy, that goes with this supervisor."""
        cgroup: str = self.call("cgroup")
        return cgroup

    def start(
        self,
        name: str,
        argv: list[str] | None = None,
        env: dict[str, str] | None = None,
        *,
        essential: bool = True,
        inside: str | None = None,
    ) -> int:
        """Starts a process and returns its pid; without `argv`, the one that ran under this name before.

        When an essential one ends unasked, the cluster is broken and every wait says so. `inside` names a process in
        whose PID, mount and network namespaces it runs, or itself: then it is process 1 of a PID namespace of its own.
        """
        pid: int = self.call("start", name=name, argv=argv, env=env, essential=essential, inside=inside)
        return pid

    def kill(self, name: str) -> int | None:
        """SIGKILL; returns its exit code once it is gone."""
        code: int | None = self.call("stop", name=name)
        return code

    def stop(self, name: str) -> int | None:
        """SIGTERM, and SIGKILL should it not end; returns its exit code once it is gone."""
        code: int | None = self.call("stop", name=name, gently=True)
        return code

    def forget(self, name: str) -> None:
        """SIGKILL, should it still run; `status` does not list it any more. Its log stays."""
        self.call("forget", name=name)

    def pause(self, name: str) -> None:
        """SIGSTOP: it keeps its connections, and does nothing."""
        self.call("pause", name=name)

    def resume(self, name: str) -> None:
        """SIGCONT."""
        self.call("resume", name=name)

    def status(self) -> list[Process]:
        """Every process that was ever started here, in order of its first start."""
        return [Process(**p, log=self.folder / LOGS / f"{p['name']}.log") for p in self.call("status")]

    def disown(self) -> None:
        """From now on the cluster outlives this process."""
        self.call("disown")
        self._close()

    def shutdown(self) -> None:
        """Ends everything; returns when every process is gone, the supervisor too. May be called again."""
        shutdown(self.folder)
        self._close()
        if self._popen is not None:
            self._popen.wait(timeout=20)

    def _close(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None


def running(folder: pathlib.Path) -> bool:
    """Whether a supervisor, or anything that one left behind, runs for this folder."""
    return bool(_alive(_recorded(folder)))


def shutdown(folder: pathlib.Path) -> None:
    """Ends what runs for `folder`, by recorded pid and start time, and returns when it is gone."""
    with contextlib.suppress(SupervisorError):
        Processes(folder).call("shutdown")
    deadline = time.monotonic() + 20
    asked = time.monotonic() + 5
    recorded = _recorded(folder)
    while alive := _alive(recorded):
        if time.monotonic() > deadline:
            raise SupervisorError(f"these processes of {folder} do not end: {', '.join(map(str, alive))}")
        if time.monotonic() > asked or alive[0] != recorded[0][0]:  # stuck, or only children are left
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    for name in (STATE, SOCKET):
        (folder / name).unlink(missing_ok=True)
    sweep()


def sweep() -> None:
    """Removes the cgroups of supervisors that were killed, of whatever folder."""
    for cgroup, (pid, started) in cgroups.owners().items():
        if start_time(pid) != started:
            cgroups.remove(cgroup)


def _recorded(folder: pathlib.Path) -> list[tuple[int, int | None]]:
    try:
        state = json.loads((folder / STATE).read_text())
    except FileNotFoundError:
        return []
    return [(state["pid"], state["started"]), *map(tuple, state["children"])]


def _alive(recorded: list[tuple[int, int | None]]) -> list[int]:
    return [pid for pid, started in recorded if started is not None and start_time(pid) == started]


def tail(log: pathlib.Path, start: int = 0, lines: int = 15) -> str:
    """The end of a process's log, from `start` on; very long lines are cut."""
    text = log.read_bytes()[start:].decode(errors="replace").splitlines() if log.exists() else []
    return "\n".join(line[:1000] for line in text[-lines:]) or "(its log is empty)"


if __name__ == "__main__":
    _Server(pathlib.Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None).serve()
