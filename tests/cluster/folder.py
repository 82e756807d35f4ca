"""The folder of one cluster: what may be in it. Nothing is removed from a folder in which no cluster was started."""

from __future__ import annotations

import pathlib
import shutil
import sys

from . import components, real_node, supervisor

KIND = "kind-cluster"  # the name of the kind cluster that was made for the folder
FILES = components.FILES | {supervisor.LOGS, supervisor.STATE, supervisor.SOCKET, KIND, real_node.NAME}


def unusable(folder: pathlib.Path) -> str:
    """Why no cluster can be started in a folder; empty when one can."""
    if not sys.platform.startswith("linux"):
        return "the test cluster needs Linux: the parent of its processes does, and so do those of a gate"
    if supervisor.running(folder):
        return f"a cluster runs in {folder} already: end it with `python3 -m tests.cluster down {folder}`"
    others = []
    if folder.exists():
        others = sorted(path.name for path in folder.iterdir() if path.name not in FILES or not is_ours(folder))
    if others:
        return f"{folder} holds other files ({', '.join(others[:3])}): give an empty folder, or a new one"
    if (folder / KIND).exists():
        return f"{folder} has a kind cluster still: end it with `python3 -m tests.cluster down {folder}`"
    return ""


def is_ours(folder: pathlib.Path) -> bool:
    """Whether a cluster was started in this folder."""
    return (folder / supervisor.LOGS / "supervisor.log").exists()


def empty(folder: pathlib.Path) -> None:
    """Makes a usable folder, without what an earlier cluster left."""
    _remove(folder, FILES)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)  # keys and tokens


def clear(folder: pathlib.Path) -> None:
    """Removes all but the logs, when a cluster was started here."""
    if is_ours(folder):
        _remove(folder, FILES - {supervisor.LOGS})


def _remove(folder: pathlib.Path, names: frozenset[str]) -> None:
    for name in names:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
