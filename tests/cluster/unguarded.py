"""Runs the gate with a guard switched off: `python -m tests.cluster.unguarded GUARD… -- ARGUMENT…`.

A test that shows that a guard prevents something runs the same scenario through this, and sees it happen.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import admission


def _lease(module: Any) -> None:
    """Leads at once and for ever: for tests with two leaders."""
    module.Elector.run = lambda elector: (elector._events.put(module.LEADING), threading.Event().wait())


# Each takes the module and replaces one guard in it.
GUARDS: dict[str, Callable[[Any], None]] = {
    "old-pods": lambda module: setattr(module, "remains", lambda _: False),  # row 11
    "lease": _lease,
}


def main(argv: list[str]) -> int:
    """The gate's own exit code."""
    end = argv.index("--")
    for name in argv[:end]:
        GUARDS[name](admission)
    return admission.main(argv[end + 1 :])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
