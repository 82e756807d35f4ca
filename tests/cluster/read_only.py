"""Runs a program that can write to no file system: `-m tests.cluster.read_only PROGRAM ARGUMENT…`. As root, on Linux.

In a mount namespace of its own every mount is read-only, /tmp and /dev/shm as well. What was open before stays so: the
program's log.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import re
import sys
import tempfile

from .private_etc import CLONE_NEWNS, MS_BIND, MS_PRIVATE, MS_REC
from .supervisor import die_with

MS_RDONLY, MS_REMOUNT = 1, 32
KEPT = {"nosuid": 2, "nodev": 4, "noexec": 8, "noatime": 1024, "nodiratime": 2048, "relatime": 1 << 21}
_libc = ctypes.CDLL(None, use_errno=True)


def enter() -> None:
    """Moves this process into the namespace. Raises OSError."""
    _check(_libc.unshare(CLONE_NEWNS))
    _check(_libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        flags = sum(KEPT.get(option, 0) for option in fields[5].split(","))
        with contextlib.suppress(OSError):  # one that another mount hides; the look below is what counts
            _check(_libc.mount(None, point.encode(), None, MS_REMOUNT | MS_BIND | MS_RDONLY | flags, None))


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def main(argv: list[str]) -> None:
    """Never returns: becomes the program, or exits with a line that says what is wrong."""
    parent = os.getppid()
    enter()
    with contextlib.suppress(FileNotFoundError):  # no usable temporary directory: as it should be
        sys.exit(f"{tempfile.gettempdir()} can still be written to")
    die_with(parent)
    os.execv(argv[0], argv)  # noqa: S606  # a shell would add nothing


if __name__ == "__main__":
    main(sys.argv[1:])
