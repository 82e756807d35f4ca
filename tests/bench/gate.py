"""Figures of the readmission gate, printed as a table: `python -m tests.bench.gate [--only PART,…] [--scale 0.1]`.

`--zipapp FILE` measures the packaged one, on `--python` (the image's, 3.13). Run by hand. Times depend on the machine:
what counts are the ratios within one run, and the memory.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import pathlib
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import kubernetes
import urllib3

import admission
from tests import jobs, packaged
from tests.cluster import local
from tests.cluster.api import ApiError, Object
from tests.cluster.cluster import Cluster
from tests.cluster.gate import USER, Gate
from tests.cluster.namespaces import Namespace

Figure = tuple[str, str, str]  # what, measured, aim
PACKAGED: dict[str, Any] = {}  # with --zipapp: the options of every controller


def main() -> int:
    """Prints the figures of the chosen parts as they come, and all of them at the end."""
    parts: dict[str, Callable[[Cluster, float], Iterator[Figure]]] = {
        "start": start,
        "memory": memory,
        "latency": latency,
        "burst": burst,
        "waiting": waiting,
    }
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gate", description=__doc__)
    parser.add_argument("--only", default=",".join(parts), help=f"parts, of {', '.join(parts)}")
    parser.add_argument("--scale", type=float, default=1.0, help="of the sizes; 1 is the real one")
    parser.add_argument("--zipapp", type=pathlib.Path, help="the packaged controller, instead of the source")
    parser.add_argument("--python", default=packaged.find_interpreter("3.13"), help="what runs it")
    options = parser.parse_args()
    if options.zipapp:
        PACKAGED.update(zipapp=options.zipapp.resolve(), python=options.python)
    figures: list[Figure] = []
    for name in options.only.split(","):
        with tempfile.TemporaryDirectory(prefix="dispatch-bench-") as folder:
            progress(f"{name}: a fresh cluster")
            with local.up(pathlib.Path(folder)) as cluster:
                for figure in parts[name](cluster, options.scale):
                    progress("  ".join(figure))
                    figures.append(figure)
    widths = [max(len(row[column]) for row in figures) for column in range(3)]
    for row in [("figure", "measured", "aim"), *figures]:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def progress(text: str) -> None:
    """A line for the person who waits."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


# --- start and memory


def start(cluster: Cluster, scale: float) -> Iterator[Figure]:
    """From the start of the process to leading, with a Lease that nobody holds."""
    if PACKAGED:
        yield "size of the archive", f"{PACKAGED['zipapp'].stat().st_size / 1e6:.2f} MB", "≤ 2.5 MB"
    times = []
    for _ in range(max(int(10 * scale), 3)):
        started = time.time()
        with cluster.controller("start", **PACKAGED) as gate:
            stamp = gate.wait_log("msg=leading").partition(" ")[0][5:]
        times.append(datetime.fromisoformat(stamp).timestamp() - started)
    yield f"start → leading, {len(times)} times", spread(times), "≤ 1.5 s" if PACKAGED else ""


def memory(cluster: Cluster, scale: float) -> Iterator[Figure]:
    """Leading an empty cluster; then with many Workloads through ten passes."""
    size = int(10_000 * scale)
    with cluster.namespace() as namespace:
        with cluster.controller("empty", resync="5s", **PACKAGED) as gate:
            passes(cluster, 3, per_pass=1)
            yield "RSS leading an empty cluster", rss(gate), "≤ 40 MiB" if PACKAGED else "≤ 76 MiB"
        namespace.patch("LocalQueue", "lq", {"spec": {"stopPolicy": "Hold"}})  # Kueue leaves them alone
        progress(f"{size} Workloads of 6 KB are created")
        in_parallel(size, lambda number: namespace.create(big_workload(number)))
        length = len(str(namespace.list("Workload")[0]))
        with cluster.controller("full", resync="5s", **PACKAGED) as gate:
            passes(cluster, 1, per_pass=max(size // 100, 1))
            first = resources(gate)
            passes(cluster, 10, per_pass=max(size // 100, 1))
            aim = "≤ 64 MiB" if PACKAGED else "≤ 90 MiB"
            yield f"RSS, {size} Workloads of {length} bytes, after ten passes", rss(gate), aim
            yield (
                "file descriptors and threads, after one pass and after ten more",
                f"{first}, {resources(gate)}",
                "equal",
            )


def big_workload(number: int) -> Object:
    """A Workload of about 6 KB that Kueue does not admit."""
    env = [{"name": f"VARIABLE_{i}", "value": "x" * 100} for i in range(30)]
    container = {"name": "c", "image": "example.invalid/any", "env": env, "resources": {"requests": {"cpu": "1"}}}
    template = {"spec": {"containers": [container], "restartPolicy": "Never"}}
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "Workload",
        "metadata": {"name": f"big-{number}"},
        "spec": {"queueName": "lq", "active": True, "podSets": [{"name": "main", "count": 1, "template": template}]},
    }


def passes(cluster: Cluster, count: int, *, per_pass: int) -> None:
    """Waits until the gate that leads has listed the Workloads `count` times more; a list has `per_pass` pages."""
    since = cluster.audit_mark()

    def done() -> bool:
        events = cluster.audit_events(USER, since=since)
        lists = [e for e in events if e["verb"] == "list" and e.get("objectRef", {}).get("resource") == "workloads"]
        return len(lists) >= count * per_pass

    cluster.wait(done, f"{count} passes", timeout=600, interval=2)


def rss(gate: Gate) -> str:
    """The process's memory now, and at its highest."""
    status = pathlib.Path(f"/proc/{gate.pid}/status").read_text()
    now, peak = (int(re.findall(rf"{name}:\s+(\d+)", status)[0]) / 1024 for name in ("VmRSS", "VmHWM"))
    return f"{now:.1f} MiB (peak {peak:.1f})"


def resources(gate: Gate) -> tuple[int, int]:
    """How many file descriptors and threads the process has."""
    process = pathlib.Path(f"/proc/{gate.pid}")
    return len(list((process / "fd").iterdir())), len(list((process / "task").iterdir()))


# --- latency


def latency(cluster: Cluster, scale: float) -> Iterator[Figure]:
    """From the reservation to Ready: a job opened after it has settled, and one that comes back."""
    rounds = max(int(20 * scale), 3)
    with (
        cluster.namespace() as namespace,
        cluster.controller("bench", resync="30s", **PACKAGED),
        Watched(namespace) as seen,
    ):
        opened, again, freed = [], [], []
        for _ in range(rounds):
            job = jobs.submit(namespace)
            opened.append(seen.ready_after_reserved(job, 1))
            jobs.running(namespace, job, epoch="1000001")
            other = jobs.preempt(namespace, job, cpu="4")
            namespace.delete("TrainJob", other)
            again.append(seen.ready_after_reserved(job, 2))
            [pod] = jobs.running(namespace, job, epoch="1000002")
            cluster.pods.stick(pod)
            namespace.delete("TrainJob", jobs.preempt(namespace, job, cpu="4"))
            jobs.wait_message(namespace, job, "waiting for")
            cluster.pods.unstick(pod)
            freed.append(seen.ready_after_gone(job, 3, pod["metadata"]["name"]))
            namespace.delete("TrainJob", job)
    yield f"QuotaReserved → Ready, opened after settling, {rounds} times", spread(opened), "median ≤ 0.25 s"
    yield f"QuotaReserved → Ready, readmission, {rounds} times", spread(again), "median ≤ 0.25 s"
    yield f"last old pod gone → Ready, {rounds} times", spread(freed), "≤ 1.5 s"


def spread(seconds: list[float]) -> str:
    """Median and greatest."""
    return f"median {statistics.median(seconds):.2f} s, longest {max(seconds):.2f} s"


class Watched:
    """When each job's Workload was seen reserved and Ready, and when pods were seen gone, on this process's clock."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self.reserved: dict[str, list[float]] = {}
        self.ready: dict[str, list[float]] = {}
        self.gone: dict[str, float] = {}
        self._last: dict[tuple[str, str], bool] = {}
        self._stop = threading.Event()

    def __enter__(self) -> Watched:
        custom = kubernetes.client.CustomObjectsApi(self._namespace.cluster.admin)
        core = kubernetes.client.CoreV1Api(self._namespace.cluster.admin)
        workloads = ("kueue.x-k8s.io", "v1beta2", self._namespace.name, "workloads")
        for source, arguments, note in (
            (custom.list_namespaced_custom_object, workloads, self._workload),
            (core.list_namespaced_pod, (self._namespace.name,), self._pod),
        ):
            threading.Thread(target=self._follow, args=(source, arguments, note), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def ready_after_reserved(self, job: str, nth: int) -> float:
        """Seconds from the nth reservation to the nth Ready."""
        return self._nth_ready(job, nth) - self.reserved[job][nth - 1]

    def ready_after_gone(self, job: str, nth: int, pod: str) -> float:
        """Seconds from the pod's end to the nth Ready."""
        return self._nth_ready(job, nth) - self.gone[pod]

    def _nth_ready(self, job: str, nth: int) -> float:
        wait = self._namespace.cluster.wait
        return wait(lambda: self.ready.get(job, [])[nth - 1 :], f"{job} is Ready time {nth}", interval=0.02)[0]

    def _follow(self, source: Any, arguments: tuple[str, ...], note: Callable[[str, Object], None]) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(urllib3.exceptions.HTTPError):  # quiet for a minute
                for event in kubernetes.watch.Watch().stream(source, *arguments, _request_timeout=(5, 60)):
                    note(event["type"], event["raw_object"])

    def _workload(self, _: str, workload: Object) -> None:
        now = time.monotonic()
        job = next((owner["name"] for owner in workload["metadata"].get("ownerReferences", [])), "")
        ready = any(c["state"] == "Ready" for c in workload.get("status", {}).get("admissionChecks", []))
        for what, value, times in (
            ("reserved", jobs.condition(workload, "QuotaReserved"), self.reserved),
            ("ready", ready, self.ready),
        ):
            if value and not self._last.get((job, what)):
                times.setdefault(job, []).append(now)
            self._last[job, what] = value

    def _pod(self, kind: str, pod: Object) -> None:
        if kind == "DELETED":
            self.gone[pod["metadata"]["name"]] = time.monotonic()


# --- many at once


def burst(cluster: Cluster, scale: float) -> Iterator[Figure]:
    """Many Workloads with quota and no gate; then the gate comes, or a bare client that makes the same calls."""
    size = max(int(300 * scale), 10)
    rates = {}
    for who in ("bare client", "gate", "bare client again", "gate again"):
        with cluster.namespace(quota=str(size)) as namespace:
            namespace.activate()
            reserved(namespace, size)
            rates[who] = by_the_gate(cluster, size) if who.startswith("gate") else by_a_bare_client(cluster, namespace)
            progress(f"{who}: {rates[who]:.1f} approvals a second")
            delete_trainjobs(namespace)
    gate, bare = rates["gate"] + rates["gate again"], rates["bare client"] + rates["bare client again"]
    yield f"{size} Workloads with quota at once", f"{gate / 2:.1f}/s", ""
    yield f"the same by a bare client with {admission.WORKERS} connections", f"{bare / 2:.1f}/s", ""
    yield "gate : bare client", f"{gate / bare:.2f}", "≥ 0.8"


def reserved(namespace: Namespace, size: int) -> None:
    """Creates jobs, opens them, and waits until Kueue has reserved quota for all."""
    names = [jobs.new_name() for _ in range(size)]
    in_parallel(size, lambda number: namespace.create(jobs.trainjob(names[number])))
    wait = namespace.cluster.wait
    wait(lambda: len(namespace.list("Workload")) == size, "every job has a Workload", timeout=600, interval=1)
    in_parallel(size, lambda number: jobs.open_gate(namespace, names[number]))
    wait(
        lambda: all(jobs.condition(w, "QuotaReserved") for w in namespace.list("Workload")),
        "all have quota",
        timeout=600,
        interval=1,
    )


def delete_trainjobs(namespace: Namespace) -> None:
    """So that the stack has nothing to do with them while the next are measured."""
    namespace.cluster.delete_all("TrainJob", namespace.name)
    namespace.cluster.wait(lambda: not namespace.list("Pod"), "the pods are gone", timeout=600, interval=1)


def by_the_gate(cluster: Cluster, size: int) -> float:
    """Approvals a second, from the first line of its log about a job to the last."""
    with cluster.controller("burst", resync="30s", **PACKAGED) as gate:
        cluster.wait(
            lambda: sum("msg=approved" in line for line in gate.log) >= size,
            "all are approved",
            timeout=600,
            interval=0.5,
        )
        stamps = [line.partition(" ")[0][5:] for line in gate.log if "msg=leading" in line or "msg=approved" in line]
    times = sorted(datetime.fromisoformat(stamp) for stamp in stamps)
    return size / (times[-1] - times[0]).total_seconds()


def by_a_bare_client(cluster: Cluster, namespace: Namespace) -> float:
    """Approvals a second: reads TrainJob, JobSet and pods, and writes TrainJob and Workload, each once per job."""
    workloads = namespace.list("Workload")
    started = time.monotonic()

    def approve(number: int) -> None:
        workload = workloads[number]
        name = workload["metadata"]["ownerReferences"][0]["name"]
        while True:
            trainjob = namespace.get("TrainJob", name)
            namespace.find("JobSet", name)
            namespace.pods(name)
            with contextlib.suppress(ApiError):
                cluster.update(admission.raised_counts(trainjob))
                ready = admission.with_check_state(
                    workload, frozenset([str(namespace.check)]), "Ready", "", admission._now()
                )
                cluster.update(ready or workload, "status")
                return
            workload = namespace.get("Workload", workload["metadata"]["name"])

    in_parallel(len(workloads), approve)
    return len(workloads) / (time.monotonic() - started)


# --- many that wait


def waiting(cluster: Cluster, scale: float) -> Iterator[Figure]:
    """Jobs whose old pods do not go: what the gate asks meanwhile, and whether a new job passes them."""
    size = max(int(1000 * scale), 20)
    with cluster.namespace(quota=str(size + 10)) as namespace:
        with cluster.controller("waits", resync="30s", **PACKAGED) as gate:
            names = [jobs.new_name() for _ in range(size)]
            progress(f"{size} jobs with an old pod each are created")
            in_parallel(size, lambda number: namespace.create(old_pod(names[number])))
            in_parallel(size, lambda number: namespace.create(jobs.trainjob(names[number], gated=False)))
            cluster.wait(
                lambda: sum("msg=waiting" in line and "waiting for 1 pods" in line for line in gate.log) >= size,
                "all wait",
                timeout=900,
                interval=2,
            )
            progress("all wait; requests are counted for a minute")
            yield f"requests a second with {size} waiting jobs", requests(cluster), "≤ 20"
            with Watched(namespace) as seen:
                times = [seen.ready_after_reserved(jobs.submit(namespace), 1) for _ in range(5)]
            yield "QuotaReserved → Ready beside them, 5 times", spread(times), "not delayed"


def old_pod(job: str) -> Object:
    """A pod that could be of an earlier attempt of the job."""
    container = {"name": "node", "image": "example.invalid/any"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"{job}-old", "labels": {admission.JOBSET_NAME: job}},
        "spec": {"containers": [container], "nodeName": "kwok-0"},
    }


def requests(cluster: Cluster) -> str:
    """The gate's requests a second over a minute, without those for its Lease; and in its busiest second."""
    since, started = cluster.audit_mark(), time.monotonic()
    cluster.wait(lambda: time.monotonic() > started + 60, "a minute passes", timeout=90, interval=1)
    events = cluster.audit_events(USER, since=since)
    stamps = [e["requestReceivedTimestamp"][:19] for e in events if e.get("objectRef", {}).get("resource") != "leases"]
    busiest = max((stamps.count(second) for second in set(stamps)), default=0)
    return f"{len(stamps) / (time.monotonic() - started):.1f} (busiest second {busiest})"


def in_parallel(count: int, work: Callable[[int], object]) -> None:
    """Calls `work` with 0 … count - 1, as many at a time as the gate has workers; raises the first failure."""
    with concurrent.futures.ThreadPoolExecutor(admission.WORKERS) as pool:
        for future in concurrent.futures.as_completed([pool.submit(work, number) for number in range(count)]):
            future.result()


if __name__ == "__main__":
    sys.exit(main())
