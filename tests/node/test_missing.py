"""Where a real node cannot run, its tests are skipped, and say what is missing and how to get it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.cluster import cgroups, supervisor

CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21

AS_SOMEBODY = "import os; from tests.cluster import real_node; os.setuid(65534); print(real_node.missing())"
WITHOUT = """
import ctypes, os, sys
for capability in sys.argv[1:]:
    ctypes.CDLL(None).prctl(24, int(capability), 0, 0, 0)  # PR_CAPBSET_DROP
code = "from tests.cluster import real_node; print(real_node.missing())"
os.execv(sys.executable, [sys.executable, "-c", code])  # with what is left
"""

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can give up being root: run the tests with sudo -E"
)


def missing(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=supervisor.ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def orphans() -> set[str]:
    """The cgroups whose owner has ended. Those of other tests' nodes, which come and go, have one that runs."""
    return {name for name, (pid, started) in cgroups.owners().items() if supervisor.start_time(pid) != started}


def test_without_root_it_says_that_it_needs_root() -> None:
    assert missing(AS_SOMEBODY) == (
        "a real node needs root: run this with sudo -E, in a virtual machine, or in a privileged container"
    )


@pytest.mark.parametrize(
    ("capability", "needed"),
    [
        (CAP_SYS_ADMIN, "mounts of its own"),
        (CAP_SYS_ADMIN, "a network with a bridge"),
        (CAP_NET_ADMIN, "a network with a bridge"),
    ],
)
def test_without_a_capability_it_says_what_it_cannot_have(capability: int, needed: str) -> None:
    before = orphans()
    reason = missing(WITHOUT, str(capability))
    assert reason.startswith("a real node cannot run here, as it cannot have ")
    assert f"{needed} (" in reason
    assert "Operation not permitted" in reason
    assert "a container with --privileged and a volume" in reason
    assert orphans() - before == set()
