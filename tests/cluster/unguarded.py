"""Runs the gate with a guard switched off: `python -m tests.cluster.unguarded GUARD… -- ARGUMENT…`.

A test that shows that a guard prevents something runs the same scenario through this, and sees it happen. A constant
gets another value with `NAME=NUMBER` in the place of a guard (`Connection.SILENCE=5`), so that a test need not wait.
"""

from __future__ import annotations

import dataclasses
import datetime
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import admission


def _lease(module: Any) -> None:
    """Leads at once and for ever: for tests with two leaders."""
    module.Elector.run = lambda elector: (elector._events.put(module.LEADING), threading.Event().wait())


def _read_lease(module: Any, change: Callable[[dict[str, Any]], None]) -> None:
    """Lets the elector see another record than the Lease's."""
    read = module.read_lease

    def read_changed(*arguments: Any) -> Any:
        lease = read(*arguments)
        if lease:
            change(lease["spec"])
        return lease

    module.read_lease = read_changed


def _record_duration(module: Any) -> None:
    """A candidate judges by its own duration instead of the record's."""
    _read_lease(module, lambda spec: spec.update(leaseDurationSeconds=module.LEASE_DURATION))


def _monotonic(module: Any) -> None:
    """A candidate judges by the wall clock: what is over by it counts as given up."""

    def judge(spec: dict[str, Any]) -> None:
        age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(spec["renewTime"])
        if age.total_seconds() > spec["leaseDurationSeconds"]:
            spec["holderIdentity"] = ""

    _read_lease(module, judge)


def _on_any_version(module: Any, function: str, read: Callable[[Any, Any], Any]) -> None:
    """A write overwrites whatever is there by now: it carries the latest version, not the one decided on."""
    write = getattr(module, function)

    def overwrite(api: Any, obj: dict[str, Any]) -> Any:
        version = read(api, obj)["metadata"]["resourceVersion"]
        return write(api, {**obj, "metadata": {**obj["metadata"], "resourceVersion": version}})

    setattr(module, function, overwrite)


def _trainjob_version(module: Any) -> None:
    _on_any_version(module, "update_trainjob", lambda api, obj: module.read_trainjob(api, *module.key_of(obj)))


def _workload_version(module: Any) -> None:
    _on_any_version(module, "update_workload_status", lambda api, obj: module.read_workload(api, module.key_of(obj)))


def _renew(module: Any) -> None:
    """A refused token is not read again at once."""
    begin = module.Connection.__init__
    module.Connection.__init__ = lambda connection, client, _: begin(connection, client)


def _raise_once(module: Any) -> None:
    """Decides as if it did not know of its own raise."""
    decide = module.decide
    module.decide = lambda facts: decide(dataclasses.replace(facts, raised=None))


def _stderr(module: Any) -> None:
    """Waits for whoever reads its log."""
    module.os = types.SimpleNamespace(**{**vars(module.os), "set_blocking": lambda *_: None})
    module.select = types.SimpleNamespace(**{**vars(module.select), "select": lambda *_: None})


# Each takes the module and replaces one guard in it.
GUARDS: dict[str, Callable[[Any], None]] = {
    "old-pods": lambda module: setattr(module, "remains", lambda _: False),  # row 11
    "raise-once": _raise_once,  # row 13
    "lease": _lease,
    "record-duration": _record_duration,
    "monotonic": _monotonic,
    "trainjob-version": _trainjob_version,
    "workload-version": _workload_version,
    "renew": _renew,
    "stderr": _stderr,
    "back-off": lambda module: setattr(module, "FAILED_AGAIN", (0.0, 0.0)),
}


def _set(constant: str, value: float) -> None:
    owner: Any = admission
    *path, name = constant.split(".")
    for step in path:
        owner = getattr(owner, step)
    setattr(owner, name, type(getattr(owner, name))(value))  # there has to be one


def main(argv: list[str]) -> int:
    """The gate's own exit code."""
    end = argv.index("--")
    for name in argv[:end]:
        constant, given, value = name.partition("=")
        if given:
            _set(constant, float(value))
        else:
            GUARDS[name](admission)
    return admission.main(argv[end + 1 :])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
