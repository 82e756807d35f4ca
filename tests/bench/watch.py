"""Figures of the adapter's live views, printed as a table: `python -m tests.bench.watch [--jobs 1000] [--pods 4]`.

The many jobs and their pods are objects that no controller and no node acts on. Run by hand; asserted nowhere.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import adapter
from tests import adapters
from tests.bench.gate import in_parallel, progress
from tests.cluster import local
from tests.cluster.api import Object
from tests.cluster.cluster import Cluster
from tests.cluster.namespaces import Namespace

Figure = tuple[str, str, str]  # what, measured, aim
WATCHER = """
import json, sys, time
import adapter
classified = []
original = adapter.status_of
def counted(handle, *rest):
    classified.append(handle.name)
    return original(handle, *rest)
adapter.status_of = counted
for status in adapter.connect(json.loads(sys.argv[1]), read_only=True).watch():
    print(json.dumps([time.time(), status.handle.name, status.detail, len(status.pods), len(classified)]), flush=True)
"""


def main() -> int:
    """Prints the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.watch", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--pods", type=int, default=4, help="of each job")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dispatch-bench-") as folder:
        progress("a fresh cluster")
        with local.up(pathlib.Path(folder)) as cluster:
            figures = [*measured(cluster, options.jobs, options.pods), *closing(cluster)]
    widths = [max(len(row[column]) for row in figures) for column in range(3)]
    for row in [("figure", "measured", "aim"), *figures]:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def measured(cluster: Cluster, jobs: int, pods: int) -> list[Figure]:
    """Starts a watcher on so many jobs, and changes some of them."""
    adapters.install_runtime(cluster)
    with cluster.namespace(check=False) as namespace:
        settings: dict[str, Any] = adapters.settings_for(cluster, namespace, "plain")
        progress(f"{jobs} TrainJobs are created")
        names = [f"dj-{adapter.new_job()}-s1" for _ in range(jobs)]
        in_parallel(jobs, lambda i: namespace.create(trainjob(names[i], settings)))
        progress(f"{jobs * pods} pods are created")
        in_parallel(jobs * pods, lambda i: running_pod(namespace, names[i // pods], i % pods))
        began = time.time()
        with subprocess.Popen(
            [sys.executable, "-c", WATCHER, json.dumps(settings)], stdout=subprocess.PIPE, text=True
        ) as watcher:
            assert watcher.stdout is not None
            first = [json.loads(watcher.stdout.readline()) for _ in range(jobs)]
            listed = first[-1][0] - began
            figures = [
                (f"{jobs} jobs with {pods} pods each: the first status of each", f"{listed:.1f} s", ""),
                ("RSS then", memory(watcher.pid), "≤ 150 MiB"),
            ]
            changed = names[:: max(jobs // 100, 1)]
            delays = []
            for name in changed:
                at = time.time()
                namespace.patch("Pod", f"{name}-0", phase("Failed"), subresource="status")
                told = json.loads(watcher.stdout.readline())
                delays.append(told[0] - at)
                assert told[1] == name
            again = told[4] - first[-1][4]
            figures += [
                (f"{len(changed)} changes: change → status", f"median {statistics.median(delays) * 1000:.0f} ms", ""),
                ("jobs classified for them", f"{again}", f"{len(changed)}"),
                ("RSS then", memory(watcher.pid), "≤ 150 MiB"),
            ]
            watcher.kill()
    return figures


def closing(cluster: Cluster, times: int = 10) -> Iterator[Figure]:
    """From `close()`, called by another thread, to the end of the iteration: of views that have nothing to tell."""
    with adapters.world(cluster, "plain") as world:
        handle, backend = world.opened(), world.backend
        world.cluster.pods.log(world.running(handle)[0], "line")
        live: dict[str, Callable[[], adapter.Live[Any]]] = {
            "watch()": backend.watch,
            "watch(handle)": lambda: backend.watch(handle),
            "output(handle, follow=True)": lambda: backend.output(handle, follow=True),
        }
        for what, begin in live.items():
            for server in ("answers", "has stopped answering"):
                progress(f"{what} is closed {times} times while the API server {server}")
                took = sorted(closed_in(cluster, begin, paused=server != "answers") for _ in range(times))
                measured = f"median {statistics.median(took) * 1000:.0f} ms, longest {took[-1] * 1000:.0f} ms"
                yield f"close() of {what}, the API server {server}", measured, "≤ 1 s"


def closed_in(cluster: Cluster, begin: Callable[[], adapter.Live[Any]], *, paused: bool) -> float:
    """How long (s) it takes to close it, once it has told something."""
    live, told = begin(), threading.Event()

    def read() -> None:
        for _ in live:
            told.set()

    reader = threading.Thread(target=read)
    reader.start()
    if not told.wait(60):
        raise TimeoutError("it has told nothing")
    while told.wait(1.0):  # until all that there is has been told, and its connections wait
        told.clear()
    if paused:
        cluster.pause("kube-apiserver")
    began = time.monotonic()
    live.close()
    reader.join()
    took = time.monotonic() - began
    if paused:
        cluster.resume("kube-apiserver")
    return took


def trainjob(name: str, settings: dict[str, Any]) -> Object:
    """One that the adapter would start, but which Trainer leaves alone."""
    match = adapter.JOB_NAME.fullmatch(name)
    assert match is not None
    spec = adapter.JobSpec(match[1], adapter.Runtime("torch-safe"), command=["python", "train.py"], nodes=4)
    runtime = {"spec": {"template": {"spec": {"replicatedJobs": [{"name": "node"}]}}}}
    made = adapter.render(spec, runtime, adapter.Settings.load(settings))
    made["spec"] |= {"managedBy": "kueue.x-k8s.io/multikueue", "suspend": False}
    made["metadata"]["annotations"].pop(adapter.GATE)
    return made


def running_pod(namespace: Namespace, job: str, rank: int) -> None:
    """A pod of it as the Job controller makes them, with the status that a kubelet writes."""
    labels = {
        adapter.JOB: job[3:29],
        adapter.SUBMISSION: "1",
        adapter.JOBSET_NAME: job,
        adapter.REPLICATED_JOB: "node",
        adapter.RESTART: "0",
        **{f"jobset.sigs.k8s.io/{name}": "0" for name in ("job-index", "job-global-index", "group-name", "job-key")},
    }
    annotations = {adapter.ADMISSION: "1", adapter.EPOCH: "1000001", adapter.RANK: str(rank), **labels}
    env = [{"name": f"VARIABLE_{i}", "value": "x" * 40} for i in range(20)]
    container = {"name": "node", "image": "registry.example/train:v1", "command": ["python", "train.py"], "env": env}
    name = f"{job}-{rank}"
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels, "annotations": annotations},
        "spec": {"schedulerName": "nobody", "containers": [container], "restartPolicy": "Never"},
    }
    namespace.create(pod)
    namespace.patch("Pod", name, phase("Running"), subresource="status")


def phase(phase: str) -> Object:
    """A pod's status, as large as a kubelet's."""
    now = "2026-01-01T00:00:00Z"
    state = (
        {"running": {"startedAt": now}} if phase == "Running" else {"terminated": {"exitCode": 1, "finishedAt": now}}
    )
    kinds = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
    status = {
        "phase": phase,
        "hostIP": "10.0.0.1",
        "podIP": "10.0.0.2",
        "startTime": now,
        "conditions": [{"type": kind, "status": "True", "lastTransitionTime": now} for kind in kinds],
        "containerStatuses": [
            {
                "name": "node",
                "ready": True,
                "started": True,
                "restartCount": 0,
                "image": "registry.example/train:v1",
                "imageID": f"registry.example/train@sha256:{'0' * 64}",
                "containerID": f"containerd://{'0' * 64}",
                "state": state,
            }
        ],
    }
    return {"status": status}


def memory(pid: int) -> str:
    """The process's memory now, and at its highest."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    now, peak = (int(re.findall(rf"{name}:\s+(\d+)", status)[0]) / 1024 for name in ("VmRSS", "VmHWM"))
    return f"{now:.1f} MiB (peak {peak:.1f})"


if __name__ == "__main__":
    sys.exit(main())
