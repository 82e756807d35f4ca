"""`./build.sh demo`: the hazard, and the gate that closes it, on a real control plane on this machine."""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from tests import jobs
from tests.attempts import Attempts
from tests.cluster import local
from tests.cluster.cluster import Cluster
from tests.cluster.namespaces import Namespace

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
        job = jobs.submit(namespace, nodes=2)
        return job, jobs.running(namespace, job, count=2, epoch="1000001")

    job, pods = step("a TrainJob of two pods is created gated, opened, admitted by Kueue, and runs", start)
    say(f"      {job} runs with epoch 1000001")
    hanging = pods[0]
    cluster.pods.stick(hanging)
    name = hanging["metadata"]["name"]  # type: ignore[index]
    other = step(
        "a job of higher priority takes all the quota: Kueue preempts the first",
        lambda: jobs.preempt(namespace, job, cpu="4"),
    )
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
    rows = [("job", "epoch", "pod", "start", "end")]
    for seen in sorted(pods, key=lambda s: (pods[0].job != s.job, s.job, s.epoch, s.first)):
        end = f"{seen.ended:%H:%M:%S.%f}"[:-3] if seen.ended else "still there"
        rows.append((seen.job, seen.epoch, seen.pod, f"{seen.started:%H:%M:%S.%f}"[:-3], end))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


@contextlib.contextmanager
def a_cluster(step: Steps, *, keep: bool) -> Iterator[Cluster]:
    """A test cluster in a new folder; both are gone afterwards, unless they are to be kept."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="dispatch-demo-"))

    def start() -> Cluster:
        return local.start(folder, progress=lambda line: say(f"      {line}"))

    cluster = step(
        "a real control plane starts: etcd, Kubernetes, JobSet, Trainer, Kueue, and nodes played by kwok", start
    )
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
    options = parser.parse_args()
    step = Steps()
    try:
        with a_cluster(step, keep=options.keep) as cluster:
            off = ["old-pods"] if options.without_gate else []
            namespace = cluster.namespace(quota="4")
            gate = cluster.controller("demo", guards_off=off)
            step("the gate starts, but its guard is off" if off else "the readmission gate starts", gate.start)
            with Attempts(namespace) as attempts:
                story(namespace, step, gate=not off)
            overlaps = attempts.overlaps()
            say(f"\n{table(attempts)}\n")
            say(f"{len(overlaps)} pairs of pods of different attempts of one job ran at the same time")
            if options.keep:
                say(how_to_use(cluster, namespace))
    except (local.LocalError, AssertionError) as error:
        say(f"demo: {error}")
        return 1
    except KeyboardInterrupt:
        say("demo: interrupted; everything it started is gone")
        return 130
    return 0 if bool(overlaps) == options.without_gate else 1


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
