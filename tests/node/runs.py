"""What real programs wrote (program.py), and whether two attempts of a job ran at one time."""

from __future__ import annotations

import itertools
import json
import pathlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """One process: what it saw, when it began, when it was last alive; `exit_code` is None when it did not end itself.

    Times are this machine's, in seconds since the epoch: the node has the same clock.
    """

    job: str
    pod: str
    epoch: str
    variables: dict[str, str]
    started: float
    last: float
    exit_code: int | None

    def overlaps(self, other: Run) -> bool:
        return self.started <= other.last and other.started <= self.last


def read(folder: pathlib.Path, job: str = "") -> list[Run]:
    """The runs of a job, or of all, in the order of their starts."""
    runs = []
    for file in folder.glob(f"{job}*.run"):
        # The last line may be half written, or, of a process that was killed, stay so.
        entries = [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if entries:
            first, last = entries[0], entries[-1]
            name, variables = first["pod"], first["variables"]
            runs.append(
                Run(
                    name.rpartition("-node-0-")[0],
                    name,
                    variables.get("DISPATCH_EPOCH", ""),
                    variables,
                    first["time"],
                    last["time"],
                    last.get("exit_code"),
                )
            )
    return sorted(runs, key=lambda run: run.started)


def overlaps(runs: list[Run]) -> list[tuple[Run, Run]]:
    """Pairs of different attempts of one job that were alive at one moment."""
    return [
        (a, b) for a, b in itertools.combinations(runs, 2) if a.job == b.job and a.epoch != b.epoch and a.overlaps(b)
    ]
