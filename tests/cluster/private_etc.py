"""Runs a program that sees another folder as its /etc: `-m tests.cluster.private_etc FOLDER PROGRAM ARGUMENT…`.

Kueue reads its metrics certificate from /etc/kueue/metrics/certs, wherever it runs, and a test must not write there.
So it gets a mount namespace of its own in which FOLDER is mounted over /etc: as root directly, else within a user
namespace in which the user stays who it is. The mount is gone with the process. `FOLDER:PLACE` mounts it elsewhere: a
pod's credentials are below /var/run.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import sys

from .supervisor import die_with

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)


def enter(folder: str, place: str = "/etc") -> None:
    """Moves this process into the namespace. Raises OSError, with the step that failed."""
    user, group = os.geteuid(), os.getegid()
    _check("unshare", _libc.unshare(CLONE_NEWNS if user == 0 else CLONE_NEWNS | CLONE_NEWUSER))
    if user != 0:
        for file, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            pathlib.Path("/proc/self", file).write_text(text)
    _check("mount / as private", _libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    _check(f"mount {folder} on {place}", _libc.mount(folder.encode(), place.encode(), None, MS_BIND, None))


def fill(folder: pathlib.Path) -> None:
    """Puts into `folder` what a program that talks to the loopback looks for in /etc."""
    folder.mkdir(parents=True, exist_ok=True)
    user, group = os.getuid(), os.getgid()
    for name, text in {
        "hosts": "127.0.0.1 localhost\n",
        "resolv.conf": "",
        "nsswitch.conf": "hosts: files\n",
        "passwd": f"user:x:{user}:{group}::/:/bin/false\n",
        "group": f"group:x:{group}:\n",
    }.items():
        (folder / name).write_text(text)


def _check(what: str, result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def main(folder: str, argv: list[str]) -> None:
    """Never returns: becomes the program, or exits with a line that says what is missing."""
    parent = os.getppid()
    source, _, place = folder.partition(":")
    place = place or "/etc"
    try:
        enter(source, place)
    except OSError as error:
        sys.exit(
            f"a private {place} for {argv[0]} is not possible here ({error}); it needs root with CAP_SYS_ADMIN, or "
            "user namespaces for ordinary users: see the sysctls user.max_user_namespaces and "
            "kernel.apparmor_restrict_unprivileged_userns"
        )
    die_with(parent)  # once more: a user namespace changes the credentials, and that clears it
    os.execv(argv[0], argv)  # noqa: S606  # a shell would add nothing


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
