"""Which cluster tests run on: an existing one, one that runs on this machine (local), or one in Docker (kind)."""

from __future__ import annotations

import os
import pathlib
import shutil

from . import existing, kind, local
from .cluster import Cluster
from .local import Progress, quiet

NAMES = ("local", "kind")  # those that start something
EXISTING = "existing"


def choose(named: str | None = None) -> str:
    """The provider of tests: the one that is named, else the cluster of $DISPATCH_TEST_KUBECONFIG, else a new one."""
    return to_start(named) if named or not os.environ.get(existing.VARIABLE) else EXISTING


def to_start(named: str | None = None) -> str:
    """The provider of a new cluster: the one that is named, else kind where there are docker and kind and no go."""
    if named:
        return named
    return "kind" if shutil.which("docker") and shutil.which("kind") and not shutil.which("go") else "local"


def start(folder: pathlib.Path, provider: str, *, progress: Progress = quiet) -> Cluster:
    """A cluster whose files are in `folder`, owned by this process: `down` it, or `disown` it. Raises ClusterError."""
    if provider == EXISTING:
        return existing.start(folder)
    if provider == "kind":
        return kind.start(folder, progress=progress)
    return local.start(folder, progress=progress)


def attach(folder: pathlib.Path) -> Cluster:
    """The cluster that was started in `folder`. Raises ClusterError when none runs there."""
    return kind.attach(folder) if kind.is_here(folder) else local.attach(folder)


def down(folder: pathlib.Path, cluster: Cluster | None = None) -> None:
    """Ends the cluster of `folder`, of whatever provider; an existing one only loses its gates. May be repeated."""
    if kind.is_here(folder):
        kind.down(folder, cluster)
    else:
        local.down(folder, cluster)
