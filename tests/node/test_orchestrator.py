"""examples/orchestrator.py sees a real program through, killed in the middle."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

from tests.cluster import supervisor
from tests.cluster.waiting import wait
from tests.node.site import Site

SCRIPT = "examples/orchestrator.py"


def test_an_orchestrator_that_is_killed_sees_its_job_through(site: Site, tmp_path: pathlib.Path) -> None:
    lease = f"lease-{site.namespace.name}"
    config, spec, record = (tmp_path / name for name in ("config.json", "job.json", "record.json"))
    config.write_text(json.dumps({**site.settings(lease), "kubeconfig": str(site.cluster.kubeconfig)}))
    spec.write_text(json.dumps(site.spec().to_json()))

    def orchestrator() -> subprocess.Popen[str]:
        argv = [sys.executable, SCRIPT, *map(str, (config, spec, record))]
        environment = {**os.environ, "PYTHONPATH": str(supervisor.ROOT)}
        return subprocess.Popen(
            argv, cwd=supervisor.ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    with site.cluster.controller(lease=lease):
        site.namespace.wait_served()
        with orchestrator() as first:
            job = wait(lambda: f"dj-{json.loads(record.read_text())['job']}-s1", "the job has a name")
            site.running(job, "1000001")
            first.kill()
        (run,) = site.runs(job)
        wait(lambda: site.runs(job)[0].last > run.last, "the program runs on")

        with orchestrator() as second:
            site.end(job)
            printed, _ = second.communicate(timeout=60)
        assert printed == "succeeded\n"
        (run,) = site.runs()
        assert (run.epoch, run.exit_code) == ("1000001", 0)
        assert json.loads(record.read_text())["outcome"] == "succeeded"
        assert site.namespace.list("TrainJob") == []
