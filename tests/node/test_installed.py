"""manifest.yaml on the real node: the packaged controller in its containers, as the cluster's admin gets it.

Of the Deployment only the image, its pull policy and the placement are others. The image is what the Dockerfile makes,
but for the Python in it, which is this machine's (images.py). Figures are printed: see them with `-s`.
"""

from __future__ import annotations

import functools
import os
import pathlib
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime

import pytest

import admission
from tests import installed, jobs, packaged
from tests.bench.gate import big_workload, in_parallel, passes
from tests.cluster import build, cgroups, images
from tests.cluster.api import Object
from tests.cluster.cluster import Cluster
from tests.cluster.gate import NAMESPACE
from tests.cluster.namespaces import Namespace
from tests.cluster.real_node import NAME, PLACEMENT, RealNode
from tests.integration.test_standstill import stopped

LIMIT = 128 << 20


@dataclass
class Installed:
    """The Deployment's pods, and what this machine knows of their processes."""

    cluster: Cluster

    def pods(self) -> list[Object]:
        """Both, once they run."""
        found = self.cluster.wait(lambda: pods if len(pods := self._started()) == 2 else None, "two pods run")
        return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))

    def leader(self, *, other_than: str = "") -> Object:
        """The pod that the Lease names, once it names one that is not `other_than`, and that one runs."""

        def look() -> Object | None:
            holder = self.holder()
            return next((p for p in self._started() if p["metadata"]["name"] == holder and holder != other_than), None)

        return self.cluster.wait(look, "one leads")

    def holder(self) -> str:
        """Whom the Lease names."""
        name: str = self.cluster.get("Lease", installed.NAME, NAMESPACE)["spec"]["holderIdentity"]
        return name

    def container(self, pod: Object) -> Object:
        """The container's status, as it is now."""
        status: Object = self.cluster.get("Pod", pod["metadata"]["name"], NAMESPACE)["status"]["containerStatuses"][0]
        return status

    def started_again(self, pod: Object) -> int:
        """The exit code of the container that `pod` shows running, once it has ended and runs again."""
        before = pod["status"]["containerStatuses"][0]["restartCount"]

        def runs() -> Object | None:
            found = self.container(pod)
            return found if found["restartCount"] > before and "running" in found["state"] else None

        status = self.cluster.wait(runs, "it is started again")
        code: int = status["lastState"]["terminated"]["exitCode"]
        return code

    def cgroup(self, pod: Object) -> pathlib.Path:
        """The cgroup of the container's memory."""
        root = cgroups.ROOT if cgroups.version_2() else cgroups.ROOT / "memory"
        container = pod["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
        [found] = (root / self.cluster.processes.cgroup()).rglob(container)
        return found

    def pid(self, pod: Object) -> int:
        """The controller's process, the only one in its container."""
        [pid] = (self.cgroup(pod) / "cgroup.procs").read_text().split()
        return int(pid)

    def _started(self) -> list[Object]:
        return [p for p in installed.running(self.cluster) if "running" in p["status"]["containerStatuses"][0]["state"]]


@pytest.fixture(scope="module", name="deployment")
def _deployment(
    real_node: RealNode, zipapp: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installed]:
    archive = tmp_path_factory.mktemp("image") / "controller.tar"
    images.write_controller(archive, zipapp, packaged.interpreter("3.13"))
    real_node.load(archive)

    def place(obj: Object) -> None:
        if obj["kind"] == "Deployment":
            pod = obj["spec"]["template"]["spec"]
            pod |= PLACEMENT
            pod["containers"][0] |= {"image": images.CONTROLLER, "imagePullPolicy": "Never"}

    with installed.on(real_node.cluster, place):
        yield Installed(real_node.cluster)


def test_one_of_its_pods_leads(deployment: Installed) -> None:
    leader = deployment.leader()
    acquired = deployment.cluster.get("Lease", installed.NAME, NAMESPACE)["spec"]["acquireTime"]
    since = datetime.fromisoformat(acquired) - datetime.fromisoformat(leader["status"]["startTime"])
    print(f"from the pod's start, a whole second, to the Lease: {since.total_seconds():.1f} s")
    assert {pod["spec"]["nodeName"] for pod in deployment.pods()} == {NAME}
    deployment.cluster.wait(
        lambda: jobs.condition(deployment.cluster.get("AdmissionCheck", installed.NAME), "Active"),
        "its check is active",
    )


def test_its_namespace_enforces_restricted_and_its_processes_have_nothing(deployment: Installed) -> None:
    labels = deployment.cluster.get("Namespace", NAMESPACE)["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    for pod in deployment.pods():
        process = pathlib.Path("/proc", str(deployment.pid(pod)))
        status = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines())
        assert (status["Uid"], status["Gid"]) == ("65532\t" * 3 + "65532",) * 2
        assert (status["CapEff"], status["CapBnd"], status["NoNewPrivs"]) == ("0" * 16, "0" * 16, "1")
        root = next(line.split() for line in (process / "mountinfo").read_text().splitlines() if line.split()[4] == "/")
        assert "ro" in root[5].split(",")
        assert not any((process / "root" / shell).exists() for shell in ("bin/sh", "bin/bash", "usr/bin/sh"))
        if status["Seccomp"] == "0":
            pytest.skip(f"pods run without seccomp filters here: {build.SECCOMP_HELP}")
        assert status["Seccomp"] == "2"


def test_it_opens_no_port_and_talks_to_the_api_server_alone(deployment: Installed) -> None:
    """So the NetworkPolicy's first rule is enough, where a pod is told the API server's address and not its name."""
    [policy] = [obj for obj in installed.documents("manifest.yaml") if obj["kind"] == "NetworkPolicy"]
    let_out = {port["port"] for port in policy["spec"]["egress"][0]["ports"]}
    deployment.leader()
    for pod in deployment.pods():
        found = deployment.cluster.wait(functools.partial(sockets, deployment.pid(pod)), "it is connected")
        assert {kind for kind, _, _ in found} == {"tcp"}
        assert "0A" not in {state for _, state, _ in found}  # nobody listens
        assert {port for _, _, port in found} <= let_out


def sockets(pid: int) -> list[tuple[str, str, int]]:
    """A process's internet sockets: the protocol, the state as the kernel has it, and the port of the other side."""
    process = pathlib.Path("/proc", str(pid))
    own = {str(link.readlink()) for link in (process / "fd").iterdir()}
    return [
        (kind, fields[3], int(fields[2].rpartition(":")[2], 16))
        for kind in ("tcp", "tcp6", "udp", "udp6")
        for fields in map(str.split, (process / "net" / kind).read_text().splitlines()[1:])
        if f"socket:[{fields[9]}]" in own
    ]


def test_when_the_leading_pod_is_gone_the_other_leads_and_admits(deployment: Installed, namespace: Namespace) -> None:
    cluster, first = deployment.cluster, deployment.leader()["metadata"]["name"]
    [other] = [name for pod in deployment.pods() if (name := pod["metadata"]["name"]) != first]
    cluster.patch("Node", NAME, None, {"spec": {"unschedulable": True}})  # a third one could be the first to see it
    try:
        gone = time.monotonic()
        cluster.delete("Pod", first, NAMESPACE, grace=0)
        assert deployment.leader(other_than=first)["metadata"]["name"] == other
        print(f"from the end of the first to the Lease of the second: {time.monotonic() - gone:.1f} s")
        jobs.running(namespace, jobs.submit(namespace), epoch="1000001")
    finally:
        cluster.patch("Node", NAME, None, {"spec": {"unschedulable": None}})
    deployment.pods()


@pytest.mark.timeout(3600)
def test_many_workloads_stay_within_its_memory_limit(
    deployment: Installed, namespace: Namespace, count: Callable[[int, int], int]
) -> None:
    size, cluster = count(300, 10_000), deployment.cluster
    leader, both = deployment.leader(), deployment.pods()
    namespace.patch("LocalQueue", "lq", {"spec": {"stopPolicy": "Hold"}})  # Kueue leaves them alone
    in_parallel(size, lambda number: namespace.create(big_workload(number)))
    passes(cluster, count(1, 10), per_pass=size // 100)

    v2 = cgroups.version_2()
    limit, peak = ("memory.max", "memory.peak") if v2 else ("memory.limit_in_bytes", "memory.max_usage_in_bytes")
    group = deployment.cgroup(leader)
    status = pathlib.Path(f"/proc/{deployment.pid(leader)}/status").read_text()
    now, most = (int(re.findall(rf"{name}:\s+(\d+)", status)[0]) / 1024 for name in ("VmRSS", "VmHWM"))
    charged = int((group / peak).read_text()) / 2**20
    print(f"{size} Workloads: RSS {now:.1f} MiB, at most {most:.1f}; the container, with what it read, {charged:.1f}")
    assert int((group / limit).read_text()) == LIMIT
    assert deployment.holder() == leader["metadata"]["name"]  # it did the passes
    for pod in both:  # nobody was killed: they are the same containers still
        assert deployment.container(pod)["containerID"] == pod["status"]["containerStatuses"][0]["containerID"]
    namespace.close()  # now, and waited for: no other test should be slowed down by it
    cluster.wait(lambda: cluster.find("Namespace", namespace.name) is None, "the Workloads are gone", 900, interval=1)


def test_one_that_is_killed_is_started_again(deployment: Installed) -> None:
    leader = deployment.leader()["metadata"]["name"]
    [other] = [pod for pod in deployment.pods() if pod["metadata"]["name"] != leader]
    os.kill(deployment.pid(other), signal.SIGKILL)
    assert deployment.started_again(other) == 128 + signal.SIGKILL


def test_one_that_is_told_to_end_ends_well_and_leads_on(deployment: Installed) -> None:
    leader, cluster = deployment.leader(), deployment.cluster
    os.kill(deployment.pid(leader), signal.SIGTERM)
    assert deployment.started_again(leader) == 0
    cluster.wait(lambda: "msg=leading" in cluster.pods.read_log(leader), "it leads: the Lease is still in its name")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_one_that_stands_still_is_started_again(deployment: Installed) -> None:
    leader, cluster = deployment.leader(), deployment.cluster
    tasks = pathlib.Path(f"/proc/{deployment.pid(leader)}/task")
    threads = cluster.wait(
        lambda: found if len(found := sorted(int(task.name) for task in tasks.iterdir())) >= 13 else None,
        "its threads are there",
    )
    with stopped(threads[2]):  # as in test_standstill: the one that lists and watches
        text = f"stands still for {admission.STANDSTILL} s"
        cluster.wait(lambda: text in cluster.pods.read_log(leader), "it says so", timeout=200, interval=1)
    assert deployment.started_again(leader) == 1
    deployment.leader()
