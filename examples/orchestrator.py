"""Submits one job and sees it through. Kill it at any point and start it again: it goes on where it was.

orchestrator.py CONFIG SPEC RECORD: of the spec, a job.json, "job" is replaced; RECORD is the file that it lives by.
"""

import json
import sys
from pathlib import Path

import adapter


def run(config: str, spec_file: str, record: Path) -> adapter.State:
    backend = adapter.connect(config)
    known = json.loads(record.read_text()) if record.exists() else {}
    if "job" not in known:  # the name is chosen, and kept, before anything is created under it
        known = keep(record, {"job": adapter.new_job()})
    if "outcome" not in known:
        spec = adapter.JobSpec.from_json({**json.loads(Path(spec_file).read_text()), "job": known["job"]})
        handle = backend.start(spec)
        backend.open(handle)  # both do nothing where it has been done
        *_, status = backend.watch(handle)
        known = keep(record, {**known, "outcome": status.state, "detail": status.detail})
    backend.stop_job(known["job"])  # the outcome is on record: what is left of the job can go
    return adapter.State(known["outcome"])


def keep(record: Path, known: dict[str, str]) -> dict[str, str]:
    new = record.with_suffix(".new")
    new.write_text(json.dumps(known))
    new.replace(record)  # whole or not at all
    return known


if __name__ == "__main__":
    print(run(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
