"""A namespace whose jobs run on the real node, as real processes."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import kubernetes
import yaml

import adapter
from tests import jobs
from tests.cluster import images, real_node
from tests.cluster.api import Object
from tests.cluster.cluster import Cluster
from tests.cluster.namespaces import Namespace
from tests.cluster.real_node import RealNode
from tests.node import runs
from tests.node.runs import Run

EXAMPLE = pathlib.Path("examples/runtime.yaml")
PROGRAM = pathlib.Path(__file__).with_name("program.py")
INSIDE = "/run/test"  # where pods see the site's folder
GRACE = 10  # seconds that a pod gets to end
EXIT_CODE_RULE = {"action": "FailJob", "onExitCodes": {"containerName": "node", "operator": "NotIn", "values": [0]}}
CPU = "100m"  # of a job, and of the queue: they run one at a time


@dataclass
class Site:
    """A namespace with a queue that places jobs on the real node, a runtime of its name, and a folder that pods see."""

    node: RealNode
    namespace: Namespace
    folder: pathlib.Path
    grace: int

    @property
    def cluster(self) -> Cluster:
        return self.namespace.cluster

    def command(self, *options: str) -> list[str]:
        """How a pod runs program.py."""
        return ["python", f"{INSIDE}/{PROGRAM.name}", INSIDE, *options]

    def job(self, *options: str, memory: str = "64Mi", **more: Any) -> Object:
        """A TrainJob that runs program.py with these options; `more` as for `jobs.trainjob`."""
        job = jobs.trainjob(**{"cpu": CPU, "runtime": self.namespace.name, **more})
        job["spec"]["trainer"].setdefault("command", self.command(*options))
        job["spec"]["trainer"]["resourcesPerNode"]["limits"] = {"memory": memory}
        return job

    def submit(self, *options: str, **more: Any) -> str:
        """Creates such a job and opens it; returns its name."""
        return jobs.submit(self.namespace, self.job(*options, **more))

    def settings(self, lease: str) -> dict[str, Any]:
        """The adapter's, without credentials; `lease` is that of the gate that serves this namespace."""
        kueue = {"localQueue": self.namespace.queue, "admissionCheck": self.namespace.check}
        return {
            "namespace": self.namespace.name,
            "probeRuntime": {"kind": "ClusterTrainingRuntime", "name": self.namespace.name},
            "kueue": {**kueue, "admissionLease": f"dispatch-system/{lease}"},
        }

    def backend(self, lease: str, *, read_only: bool = False) -> adapter.Backend:
        """The adapter, in this namespace, once a gate serves it."""
        self.namespace.wait_served()
        return adapter.connect(self.settings(lease), read_only=read_only, api_client=self.cluster.admin)

    def spec(self, *options: str, **more: Any) -> adapter.JobSpec:
        """Of a new job that runs program.py with these options; `more` are fields of it."""
        fields = {
            "job": adapter.new_job(),
            "runtime": {"name": self.namespace.name},
            "command": self.command(*options),
            "resources": {"requests": {"cpu": CPU}, "limits": {"memory": "64Mi"}},
        }
        return adapter.JobSpec.from_json({**fields, **more})

    def running(self, job: str, epoch: str = "", *, count: int = 1) -> list[Object]:
        """Its pods, once they run and their programs have written that they do."""
        pods = jobs.running(self.namespace, job, count=count, epoch=epoch)
        self.cluster.wait(
            lambda: len([run for run in self.runs(job) if epoch in ("", run.epoch)]) >= count, f"{job} has started"
        )
        return pods

    def preempt(self, job: str) -> None:
        """Has a job of higher priority take the quota, and go as soon as `job` is evicted: quota is back at once."""
        other = self.submit(priority="high")
        self.cluster.wait(lambda: jobs.condition(self.namespace.workload(job), "Evicted"), f"{job} is evicted")
        self.namespace.delete("TrainJob", other)

    def give_up(self, job: str) -> None:
        """Has its programs end in the middle; returns when no pod is left. The job's next attempt runs as ever."""
        (self.folder / f"{job}.end").touch()
        self.cluster.wait(lambda: not self.namespace.pods(job), f"the pods of {job} are gone")
        (self.folder / f"{job}.end").unlink()

    def end(self, job: str) -> None:
        """Has its programs end, now or as soon as they run; returns when the job is Complete."""
        (self.folder / f"{job}.end").touch()
        self.cluster.wait(lambda: jobs.condition(self.namespace.get("TrainJob", job), "Complete"), f"{job} completes")

    def runs(self, job: str = "") -> list[Run]:
        """What its programs wrote, or those of all jobs."""
        return runs.read(self.folder, job)


def execute(cluster: Cluster, pod: Object, *command: str) -> str:
    """Runs a command in a pod's first container, as `kubectl exec` does; returns what it printed."""
    name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
    # A client of its own: while it streams, a client can do nothing else.
    with kubernetes.config.new_client_from_config(str(cluster.kubeconfig)) as client:
        call = kubernetes.client.CoreV1Api(client).connect_get_namespaced_pod_exec
        options = {"command": list(command), "stdout": True, "stderr": True, "_preload_content": False}
        stream = kubernetes.stream.stream(call, name, namespace, **options)
        stream.run_forever(timeout=30)
        printed: str = stream.read_all()
        stream.sock.shutdown()  # `close` leaves open what the server has closed
    return printed


def make(
    node: RealNode,
    *,
    grace: int = GRACE,
    stock: bool = False,
    change: Callable[[Object], None] | None = None,
    exit_code_rule: bool = False,
    **options: Any,
) -> Site:
    """A site. Its runtime is the example one, or Trainer's own with `stock`; `change` edits its pod spec.

    `exit_code_rule` adds to its podFailurePolicy what the example leaves out, to fail a job by exit code. That is a
    hazard: see test_attempts.py. Options: see `Queue`.
    """
    cluster = node.cluster
    namespace = cluster.namespace(**{"quota": CPU, "flavor_spec": real_node.FLAVOR, **options})
    folder = node.shared / namespace.name
    folder.mkdir()
    folder.chmod(0o1777)  # pods have a user of their own
    shutil.copy(PROGRAM, folder)
    published = cluster.get("ClusterTrainingRuntime", "torch-distributed")
    runtime = published if stock else yaml.safe_load(EXAMPLE.read_text())
    runtime["metadata"] = {"name": namespace.name, "labels": runtime["metadata"].get("labels", {})}
    job = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    if exit_code_rule:
        job["podFailurePolicy"]["rules"].append(EXIT_CODE_RULE)
    pod = job["template"]["spec"]
    pod |= {
        "terminationGracePeriodSeconds": grace,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "runAsGroup": 65532},
        "volumes": [{"name": "test", "hostPath": {"path": str(folder), "type": "Directory"}}],
    }
    pod["containers"][0] |= {"image": images.PYTHON, "volumeMounts": [{"name": "test", "mountPath": INSIDE}]}
    if change:
        change(pod)
    jobs.install(cluster, runtime)
    return Site(node, namespace, folder, grace)


@contextlib.contextmanager
def on(node: RealNode, **options: Any) -> Iterator[Site]:
    """A site for the length of the `with` block. Options: see `make`."""
    site = make(node, **options)
    try:
        yield site
    finally:
        site.namespace.close()
        node.cluster.delete("ClusterTrainingRuntime", site.namespace.name)
