"""Writes `docs/causes.md` from what the adapter says about its causes: `python3 -m tests.causes`."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Sequence

from adapter import Cause, classify

PAGE = pathlib.Path("docs/causes.md")
_HEAD = """# Why a job is as it is

A status has a state and, where the cluster tells, a cause: why the job is in that state, or what interrupted it.
`detail` holds the cluster's own words. Nothing is guessed: a failure that nothing explains is `unknown`, any other
state then has no cause.

`Cause` has the columns of this table as properties (`fault`, `retry`, `sentence`, `advice`). *Again* says whether it is
sensible to start the same spec once more when the job has ended of it.

| cause | what happened | whose fault | again | what to do |
|---|---|---|---|---|
"""
_EVIDENCE = """
## On what evidence

Only evidence of the current attempt counts. Of several ends the earliest decides, in the same second the one that comes
first here; what disrupts a pod beats the exit code that it causes.

| evidence | cause |
|---|---|
"""
_FOOT = """
A container's times are its node's, a disruption's are the control plane's: where the clocks differ, so may the order of
two ends. A node that does not answer counts from when its taint was set, about 40 s after its last word: what the other
ranks do about it later is its consequence.

`inspect` knows what the cluster still has. With Trainer's own runtimes a container is restarted in place six times,
then its pod is deleted, and what told the cause is gone with it: `unknown`. `examples/runtime.yaml` keeps a failed pod.
A pod that was evicted through the API, or whose node is gone, is deleted in any case: while it ends the cause can be
seen, later an Event tells it, for an hour, or nothing does.
"""


def page() -> str:
    """The page as it should be."""
    meanings = [(f"`{c}`", c.sentence, str(c.fault), str(c.retry), c.advice) for c in Cause]
    return _HEAD + _table(meanings) + _EVIDENCE + _table(_evidence()) + _FOOT


def _evidence() -> list[tuple[str, str]]:
    """The second table of `classify`: evidence, cause."""
    rows: list[tuple[str, str]] = []
    lines = (classify.__doc__ or "").rpartition("row  evidence")[2].splitlines()
    for line in lines[2:-2]:
        if match := re.fullmatch(r"    ([a-z]?) +(\S.*?)(?:  +(\S+))?", line):
            if match[1]:
                rows.append((match[2], f"`{match[3]}`"))
            else:
                rows[-1] = (f"{rows[-1][0]} {match[2]}", rows[-1][1])
    return rows


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    PAGE.write_text(page())
