"""The real node's cgroups: the only thing of it that outlives its processes, so they are swept by name.

A cgroup is named after the supervisor that it belongs to, by pid and start time: whoever finds one can tell whether it
is still wanted. Version 1, also beside a `unified` folder, is what this was run on; the branches for version 2 were
written after its documentation and **have not been run**. Standard library only: the supervisor uses it.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import time

ROOT = pathlib.Path("/sys/fs/cgroup")
PREFIX = "dispatch-test-"
PATIENCE = 20.0  # seconds for the last processes to end


def name(pid: int, started: int | None) -> str:
    """The cgroup of a supervisor."""
    return f"{PREFIX}{pid}-{started}"


def version_2() -> bool:
    """Whether there is the one hierarchy of version 2, and nothing else."""
    return (ROOT / "cgroup.controllers").exists()


def hierarchies() -> list[pathlib.Path]:
    """Where a node's cgroup has to exist."""
    return [ROOT] if version_2() else sorted(tasks.parent for tasks in ROOT.glob("*/tasks"))


def make(cgroup: str) -> None:
    """Makes it in every hierarchy. Raises OSError where that is not allowed."""
    if version_2():  # not run, see above: refused with EBUSY while processes sit in a root that is a container's
        (ROOT / "cgroup.subtree_control").write_text("+cpu +cpuset +memory +pids")
    for hierarchy in hierarchies():
        made = hierarchy / cgroup
        made.mkdir(exist_ok=True)
        if version_2():
            continue
        for file in ("cpuset.cpus", "cpuset.mems"):  # empty at first, and then it takes no process
            if (made / file).exists() and not (made / file).read_text().strip():
                (made / file).write_text((hierarchy / file).read_text())


def remove(cgroup: str, patience: float = PATIENCE) -> list[pathlib.Path]:
    """Removes it and all below it, once its processes have ended; returns what could not be removed in time.

    In every folder there is: runc makes a cgroup under `unified`, too.
    """
    deadline = time.monotonic() + patience
    while True:
        left = [path for path in (ROOT / cgroup, *ROOT.glob(f"*/{cgroup}")) if path.is_dir()]
        for path in left:
            for folder, _, _ in os.walk(path, topdown=False):
                with contextlib.suppress(OSError):  # a process that ends still holds it
                    pathlib.Path(folder).rmdir()
        left = [path for path in left if path.is_dir()]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def owners() -> dict[str, tuple[int, int]]:
    """The cgroups that there are, and the pid and start time of the supervisor of each."""
    found = {}
    for path in (*ROOT.glob(f"{PREFIX}*"), *ROOT.glob(f"*/{PREFIX}*")):
        with contextlib.suppress(ValueError):
            pid, started = path.name.removeprefix(PREFIX).split("-")
            found[path.name] = (int(pid), int(started))
    return found
