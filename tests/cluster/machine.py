"""The real node's machine: namespaces of its own, in which containerd, the kubelet and all pods run.

`-m tests.cluster.machine FOLDER PAUSE` is started as process 1 of a new PID namespace. It arranges the rest and becomes
the program PAUSE, so when it ends, the kernel ends every process of the node, and what they had mounted and their
network go with them. What the machine looks like from inside:

- The mounts are its own. The file system is read-only, but for FOLDER; /run, /var/log, /var/lib/kubelet and
  /var/lib/cni are the node's. The kernel settings that a kubelet changes already have the values that it wants, in
  files over /proc/sys: the real ones are never touched.
- The network is its own, connected to nothing: loopback, where the API server's service address is too, and the bridge
  of the pods. A relay (relay.py) is the only way out, and leads to the API server only.

`-m tests.cluster.machine --try FOLDER` tries all of that, in namespaces that end with it, and prints what is refused.
"""

from __future__ import annotations

import fcntl
import os
import pathlib
import socket
import struct
import sys
from collections.abc import Callable

from . import cgroups, kernel, supervisor

BRIDGE, BRIDGE_ADDRESS, POD_RANGE = "pods", "198.18.1.1", "198.18.1.0/24"  # of the range that is nobody's (RFC 2544)
SERVICE_ADDRESS = "198.18.0.1"
# As the kubelet would set them (setupKernelTunables).
SETTINGS = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1_000_000,
    "kernel/keys/root_maxbytes": 25_000_000,
}
# Places that are fixed in containerd's and the kubelet's code, and the folders below FOLDER that are shown there.
PLACES = {"/var/log": "log", "/var/lib/kubelet": "kubelet", "/var/lib/cni": "cni-cache"}

SIOCSIFADDR, SIOCSIFNETMASK, SIOCGIFFLAGS, SIOCSIFFLAGS, SIOCBRADDBR = 0x8916, 0x891C, 0x8913, 0x8914, 0x89A0
SIOCSIFHWADDR, ARPHRD_ETHER, HARDWARE_ADDRESS = 0x8924, 1, b"\x02\0\0\0\0\x01"  # of nobody: a local one
IFF_UP = 1


def file_system(folder: pathlib.Path) -> None:
    """Gives this process the machine's view of the files. It has to be process 1 of its PID namespace, or one to be."""
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount(str(folder), str(folder), flags=kernel.MS_BIND)
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    kernel.mount("tmpfs", "/run", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755")
    for setting, value in SETTINGS.items():
        file = pathlib.Path("/run/settings", setting)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")
        kernel.mount(str(file), f"/proc/sys/{setting}", flags=kernel.MS_BIND)
    _copy_of_var_lib(pathlib.Path("/run/lib"))
    for place, ours in PLACES.items():
        (folder / ours).mkdir(exist_ok=True)
        kernel.mount(str(folder / ours), place, flags=kernel.MS_BIND)
    kernel.mount("none", "/", flags=kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY)


def _copy_of_var_lib(copy: pathlib.Path) -> None:
    """Shows all that is in /var/lib in a folder to which more can be added, and that folder as /var/lib."""
    real = pathlib.Path("/var/lib")
    for entry in real.iterdir():
        shown = copy / entry.name
        shown.parent.mkdir(exist_ok=True)
        if entry.is_symlink():
            shown.symlink_to(entry.readlink())
        elif entry.is_dir():
            shown.mkdir()
            kernel.mount(str(entry), str(shown), flags=kernel.MS_BIND | kernel.MS_REC)
        else:
            shown.touch()
            kernel.mount(str(entry), str(shown), flags=kernel.MS_BIND)
    for place in PLACES:
        if pathlib.Path(place).parent == real:
            (copy / pathlib.Path(place).name).mkdir(parents=True, exist_ok=True)
    kernel.mount(str(copy), str(real), flags=kernel.MS_BIND | kernel.MS_REC)


def network() -> None:
    """Gives this process the machine's network."""
    kernel.unshare(kernel.CLONE_NEWNET)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        _interface(control, "lo")
        _interface(control, "lo:0", SERVICE_ADDRESS, "255.255.255.255")
        fcntl.ioctl(control, SIOCBRADDBR, BRIDGE.encode() + b"\0")
        # Of its own: else it is one of a pod's, and when that one goes, the others send into the void for a minute.
        fcntl.ioctl(control, SIOCSIFHWADDR, struct.pack("16sH6s16x", BRIDGE.encode(), ARPHRD_ETHER, HARDWARE_ADDRESS))
        _interface(control, BRIDGE, BRIDGE_ADDRESS, "255.255.255.0")


def _interface(control: socket.socket, name: str, address: str = "", mask: str = "") -> None:
    """Sets an interface's address, and has it up."""
    for request, text in ((SIOCSIFADDR, address), (SIOCSIFNETMASK, mask)):
        if text:
            fcntl.ioctl(
                control, request, struct.pack("16sHH4s16x", name.encode(), socket.AF_INET, 0, socket.inet_aton(text))
            )
    flags = struct.unpack_from("16xH", fcntl.ioctl(control, SIOCGIFFLAGS, struct.pack("16s24x", name.encode())))[0]
    fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH22x", name.encode(), flags | IFF_UP))


# --- what is needed


def missing(folder: pathlib.Path) -> list[str]:
    """Why no machine can be had here; tries it in this process, which is of no use afterwards."""
    cgroup = cgroups.name(os.getpid(), supervisor.start_time(os.getpid()))
    steps: dict[str, Callable[[], None]] = {
        "a cgroup": lambda: cgroups.make(cgroup),
        "the kernel's log": lambda: os.close(os.open("/dev/kmsg", os.O_RDONLY)),
        "a PID namespace": lambda: kernel.unshare(kernel.CLONE_NEWPID),
        "a network with a bridge": network,
        "mounts of its own": lambda: file_system(folder),
        f"an overlay file system in {folder}": lambda: _overlay(folder),
    }
    reasons = []
    try:
        for what, step in steps.items():
            try:
                step()
            except OSError as error:
                reasons.append(f"{what} ({error})")
    finally:
        cgroups.remove(cgroup)
    return reasons


def _overlay(folder: pathlib.Path) -> None:
    """Mounts one, as containerd does for each container."""
    for name in ("lower", "upper", "work", "merged"):
        (folder / name).mkdir()
    options = ",".join(f"{name}dir={folder / name}" for name in ("lower", "upper", "work"))
    kernel.mount("overlay", str(folder / "merged"), "overlay", options=options)


def main(arguments: list[str]) -> None:
    if arguments[0] == "--try":
        for reason in missing(pathlib.Path(arguments[1])):
            print(reason)
        return
    folder, pause = arguments
    network()
    file_system(pathlib.Path(folder))
    os.execv(pause, [pause])  # noqa: S606  # a shell would add nothing


if __name__ == "__main__":
    main(sys.argv[1:])
