"""`./build.sh demo`: the hazard, and the gate that closes it, on a real control plane on this machine.

kwok plays the pods, which end when the demo says so. With --real-node they are real processes: the one that is
preempted ignores SIGTERM for as long as it is let, and each writes down when it lived.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import pathlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import adapter
from tests import jobs
from tests.attempts import Attempts
from tests.cluster import local, real_node
from tests.cluster.cluster import Cluster
from tests.cluster.namespaces import Namespace
from tests.node import runs
from tests.node import site as sites
from tests.node.runs import Run
from tests.node.site import Site

T = TypeVar("T")


def say(text: str = "") -> None:
    """A line for the person who watches."""
    print(text, flush=True)


class Steps:
    """Numbers the steps, and says of each that takes longer than two seconds that it still goes on."""

    def __init__(self) -> None:
        self._number = 0

    def __call__(self, text: str, work: Callable[[], T]) -> T:
        self._number += 1
        say(f"{self._number:2}. {text}")
        done = threading.Event()
        thread = threading.Thread(target=self._beat, args=(done,), daemon=True)
        thread.start()
        try:
            return work()
        finally:
            done.set()
            thread.join()

    @staticmethod
    def _beat(done: threading.Event) -> None:
        started, pause = time.monotonic(), 2
        while not done.wait(pause):
            say(f"      … {time.monotonic() - started:.0f} s")
            pause = 5


def story(namespace: Namespace, step: Steps, *, gate: bool) -> None:
    """A job is preempted while one of its pods hangs; quota comes back; what happens next depends on the gate."""
    cluster = namespace.cluster

    def start() -> tuple[str, list[dict[str, object]]]:
        job = launch(namespace, nodes=2)
        return job, jobs.running(namespace, job, count=2, epoch="1000001")

    job, pods = step("a TrainJob of two pods is created gated, opened, admitted by Kueue, and runs", start)
    say(f"      {job} runs with epoch 1000001")
    hanging = pods[0]
    cluster.pods.stick(hanging)
    name = hanging["metadata"]["name"]  # type: ignore[index]

    def preempt() -> str:
        other = launch(namespace, cpu="4", priority="high")
        cluster.wait(lambda: jobs.condition(namespace.workload(job), "Evicted"), f"{job} is evicted")
        return other

    other = step("a job of higher priority takes all the quota: Kueue preempts the first", preempt)
    say(f"      one of its pods is gone, the other hangs Terminating: {name}")

    def quota_back() -> None:
        jobs.running(namespace, other)
        jobs.finish(namespace, other)
        cluster.wait(lambda: jobs.condition(namespace.workload(job), "QuotaReserved"), "quota is back")

    step("that job ends: Kueue has quota for the first one again, and asks its checks", quota_back)
    if gate:
        entry = step("the gate waits, and says for what on the Workload", lambda: waiting(namespace, job))
        say(f'      "{entry}"')
        step("a batch Job in the same queue is not dispatch's: it passes at once", lambda: neighbour(namespace))
    else:
        step(
            "nothing waits: the second attempt starts beside the pod that hangs",
            lambda: jobs.running(namespace, job, count=2, epoch="1000002"),
        )
    step("the pod goes at last", lambda: cluster.pods.unstick(namespace.get("Pod", name)))
    step("the second attempt runs, with epoch 1000002", lambda: jobs.running(namespace, job, count=2, epoch="1000002"))
    step("it ends", lambda: jobs.finish(namespace, job))


def launch(namespace: Namespace, *, nodes: int = 1, cpu: str = "1", priority: str | None = None) -> str:
    """Starts a job with the adapter, sees it wait at its start gate, opens it; returns its TrainJob's name."""
    spec = adapter.JobSpec(
        adapter.new_job(),
        adapter.Runtime("torch-distributed"),
        nodes=nodes,
        resources=adapter.Resources(requests={"cpu": cpu}),
        priority=priority,
    )
    backend = backend_of(namespace)
    handle = backend.start(spec)
    namespace.cluster.wait(lambda: backend.inspect(handle).state == adapter.State.GATED, f"{handle.name} is gated")
    namespace.cluster.wait(lambda: namespace.workload(handle.name), f"{handle.name} has a Workload")
    backend.open(handle)
    return handle.name


def backend_of(namespace: Namespace) -> adapter.Backend:
    """The adapter there. Not by `connect`, which refuses what --without-gate is to show."""
    settings = {
        "namespace": namespace.name,
        "probeRuntime": {"name": "torch-distributed"},
        "kubeconfig": str(namespace.cluster.kubeconfig),
        "kueue": {"localQueue": namespace.queue, "admissionCheck": namespace.check},
    }
    loaded = adapter.Settings.load(settings)
    return adapter.Backend(loaded, adapter.credentials(loaded))


def real_story(site: Site, step: Steps, *, gate: bool) -> None:
    """The same with a real process, which hangs because it ignores SIGTERM, until its grace period is over."""
    namespace = site.namespace

    def start() -> str:
        job = site.submit("--ignore-sigterm")
        site.running(job, "1000001")
        return job

    job = step("a TrainJob is created gated, opened, admitted by Kueue, and runs as a real process", start)
    wrote(site.runs(job))

    def preempt() -> str:
        other = site.submit(priority="high")
        site.cluster.wait(lambda: jobs.condition(namespace.workload(job), "Evicted"), f"{job} is evicted")
        site.running(other)
        return other

    other = step("a job of higher priority takes all the quota: Kueue preempts the first", preempt)
    say(f"      its program ignores SIGTERM, and has {site.grace} s of grace: it still writes")
    step("that job ends: Kueue has quota for the first one again, and asks its checks", lambda: site.end(other))
    if gate:
        entry = step("the gate waits, and says for what on the Workload", lambda: waiting(namespace, job))
        say(f'      "{entry}"')
        step("the grace period ends, the kubelet kills the program: the second attempt runs", lambda: second(site, job))
        wrote(site.runs(job)[1:])
    else:
        step("nothing waits: the second attempt starts beside the program that hangs", lambda: second(site, job))
        wrote(site.runs(job)[1:])
        step("the grace period ends, the kubelet kills the first program", lambda: alone(site, job))
    step("the second attempt ends", lambda: site.end(job))


def second(site: Site, job: str) -> None:
    """The second attempt runs."""
    site.running(job, "1000002")


def alone(site: Site, job: str) -> None:
    """No program of an attempt before the second lives."""
    site.cluster.wait(lambda: jobs.epochs_of_living(site.namespace, job) == {"1000002"}, "the first attempt is gone")


def wrote(found: list[Run]) -> None:
    """What programs wrote first: what they see."""
    for run in found:
        say("      it wrote " + " ".join(f"{k}={v}" for k, v in run.variables.items() if k.startswith("DISPATCH_")))


def waiting(namespace: Namespace, job: str) -> str:
    """The gate's message while it waits."""
    message: str = jobs.wait_message(namespace, job, "waiting for")["message"]
    return message


def neighbour(namespace: Namespace) -> None:
    """A batch Job comes and is admitted."""
    namespace.create(jobs.batch_job("neighbour"))
    namespace.cluster.wait(
        lambda: jobs.condition(namespace.workload("neighbour"), "Admitted"), "the batch Job is admitted"
    )


def table(attempts: Attempts) -> str:
    """Every pod that ran, by job and epoch, with its start and end."""
    pods = attempts.pods()
    ordered = sorted(pods, key=lambda s: (pods[0].job != s.job, s.job, s.epoch, s.first))
    rows = [(seen.job, seen.epoch, seen.pod, clock(seen.started), clock(seen.ended)) for seen in ordered]
    return aligned(("job", "epoch", "pod", "start", "end"), *rows)


def real_table(found: list[Run]) -> str:
    """Every process that ran, by what it wrote itself."""
    rows = []
    for run in sorted(found, key=lambda r: (found[0].job != r.job, r.job, r.epoch, r.started)):
        times = [clock(datetime.datetime.fromtimestamp(at, datetime.UTC)) for at in (run.started, run.last)]
        end = "was killed" if run.exit_code is None else f"exit code {run.exit_code}"
        rows.append((run.job, run.epoch, run.pod, *times, end))
    return aligned(("job", "epoch", "pod", "first line", "last line", "end"), *rows)


def outcomes(namespace: Namespace) -> str:
    """Every job as the adapter tells of it: how it ended, and what interrupted it."""
    backend, rows = backend_of(namespace), []
    for trainjob in namespace.list("TrainJob"):
        metadata = trainjob["metadata"]
        status = backend.inspect(adapter.Handle(namespace.name, metadata["name"], metadata["uid"]))
        causes = [status.cause, *(interruption.cause for interruption in status.interruptions)]
        words = [status.detail, *(f"interrupted: {interruption.detail}" for interruption in status.interruptions)]
        rows.append((metadata["name"], str(status.state), ", ".join(filter(None, causes)) or "-", "; ".join(words)))
    return aligned(("job", "state", "cause", "detail"), *rows)


def clock(at: datetime.datetime | None) -> str:
    """A time of day, with milliseconds."""
    return f"{at:%H:%M:%S.%f}"[:-3] if at else "still there"


def aligned(*rows: tuple[str, ...]) -> str:
    """Rows as lines, with their columns one below the other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


@contextlib.contextmanager
def a_cluster(step: Steps, *, keep: bool, real: bool) -> Iterator[Cluster]:
    """A test cluster in a new folder; both are gone afterwards, unless they are to be kept."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="dispatch-demo-"))

    def start() -> Cluster:
        return local.start(folder, with_real_node=real, progress=lambda line: say(f"      {line}"))

    nodes = "a node with kubelet, containerd and runc" if real else "nodes played by kwok"
    cluster = step(f"a real control plane starts: etcd, Kubernetes, JobSet, Trainer, Kueue, and {nodes}", start)
    try:
        yield cluster
        if keep:
            cluster.disown()
    except BaseException:
        keep = False
        raise
    finally:
        if not keep:
            local.down(folder, cluster)
            for file in sorted(folder.rglob("*"), reverse=True):
                file.rmdir() if file.is_dir() else file.unlink()
            folder.rmdir()


def main() -> int:
    """0: the gate kept the attempts apart, or, without it, they overlapped as expected."""
    parser = argparse.ArgumentParser(prog="./build.sh demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the cluster up and print how to use it")
    parser.add_argument("--without-gate", action="store_true", help="show what happens without the guard")
    parser.add_argument("--real-node", action="store_true", help="with real processes on a real node (needs root)")
    options = parser.parse_args()
    step = Steps()
    try:
        with a_cluster(step, keep=options.keep, real=options.real_node) as cluster:
            play = on_a_real_node if options.real_node else on_kwok
            namespace, overlaps = play(cluster, step, gate=not options.without_gate)
            what = "processes" if options.real_node else "pods"
            say(f"What the adapter says of each job:\n\n{outcomes(namespace)}\n")
            say(f"{overlaps} pairs of {what} of different attempts of one job ran at the same time")
            if options.keep:
                say(how_to_use(cluster, namespace))
    except (local.LocalError, AssertionError) as error:
        say(f"demo: {error}")
        return 1
    except KeyboardInterrupt:
        say("demo: interrupted; everything it started is gone")
        return 130
    return 0 if bool(overlaps) == options.without_gate else 1


def on_kwok(cluster: Cluster, step: Steps, *, gate: bool) -> tuple[Namespace, int]:
    """Plays the story, prints who ran when, and returns how many pairs of attempts overlapped."""
    namespace = cluster.namespace(quota="4")
    start_gate(cluster, step, gate=gate)
    with Attempts(namespace) as attempts:
        story(namespace, step, gate=gate)
    say(f"\n{table(attempts)}\n")
    return namespace, len(attempts.overlaps())


def on_a_real_node(cluster: Cluster, step: Steps, *, gate: bool) -> tuple[Namespace, int]:
    """The same with real processes."""
    site = sites.make(real_node.RealNode(cluster), grace=20, stock=True)
    start_gate(cluster, step, gate=gate)
    real_story(site, step, gate=gate)
    found = site.runs()
    say(f"\nWhat the programs wrote:\n\n{real_table(found)}\n")
    return site.namespace, len(runs.overlaps(found))


def start_gate(cluster: Cluster, step: Steps, *, gate: bool) -> None:
    """The gate, or one whose guard is off."""
    started = cluster.controller("demo", guards_off=[] if gate else ["old-pods"])
    step("the readmission gate starts" if gate else "the gate starts, but its guard is off", started.start)


def how_to_use(cluster: Cluster, namespace: Namespace) -> str:
    """What a person does with a cluster that was kept."""
    return f"""
The cluster and the gate are still up.
  use it:       export KUBECONFIG={cluster.kubeconfig}   (namespace {namespace.name}, LocalQueue {namespace.queue})
  look at it:   {sys.executable} -m tests.cluster list {cluster.folder}
  its logs:     {cluster.folder}/logs
  end it:       {sys.executable} -m tests.cluster down {cluster.folder}"""


if __name__ == "__main__":
    sys.exit(main())
