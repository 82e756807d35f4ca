"""The few system calls that Python 3.11 has no name for: namespaces and mounts. Each raises OSError with what it tried.

Standard library only: the supervisor uses it.
"""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWNET = 0x00020000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC = 1, 2, 4, 8, 32, 4096, 16384
MS_PRIVATE = 1 << 18

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Gives the calling thread namespaces of its own; with CLONE_NEWPID, the processes that it starts from now on."""
    _check("unshare", _libc.unshare(flags))


def setns(pid: int | str, kind: str) -> None:
    """Moves the calling thread into the `mnt` or `net` namespace of a process; for `pid`, those that it starts."""
    path = f"/proc/{pid}/ns/{kind}"
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(f"setns {path}", _libc.setns(handle, 0))
    finally:
        os.close(handle)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """mount(2)."""
    arguments = [text.encode() or None for text in (source, target, kind)]
    _check(f"mount {source} on {target}", _libc.mount(*arguments, ctypes.c_ulong(flags), options.encode() or None))


def _check(what: str, result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
