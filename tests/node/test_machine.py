"""The real node's machine: what it may touch, what it cannot reach, and that nothing of it stays."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.cluster import build, cgroups, images, local, machine, supervisor
from tests.cluster.api import Api, ApiError, Object
from tests.cluster.namespaces import Namespace
from tests.cluster.nodes import KWOK_NODES
from tests.cluster.real_node import KUBELET, MACHINE, NAME, NAMES, PLACEMENT, RealNode
from tests.cluster.waiting import wait
from tests.node.site import execute

ROOT = supervisor.ROOT


def pod(name: str, code: str, **spec: object) -> Object:
    """A pod of the real node that runs Python code."""
    container = {"name": "main", "image": images.PYTHON, "args": ["-c", code]}
    fields = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container], **PLACEMENT}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {**fields, **spec}}


def reached(namespace: Namespace, name: str, phase: str) -> Object:
    """A pod, once it is in this phase; one that has failed shows its log."""

    def look() -> Object | None:
        found = namespace.get("Pod", name)
        return found if found["status"]["phase"] in (phase, "Failed") else None

    pod = namespace.cluster.wait(look, f"pod {name} is {phase}")
    assert pod["status"]["phase"] == phase, namespace.cluster.pods.read_log(pod)
    return pod


# --- what pods see and reach

LOOK = """
import json, os, socket, ssl, urllib.request
def connects(*address):
    try:
        socket.create_connection(address, timeout=3).close()
    except OSError as error:
        return type(error).__name__
    return "connected"
account = "/var/run/secrets/kubernetes.io/serviceaccount/"
url = f"https://{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}/api/v1/namespaces"
request = urllib.request.Request(url, headers={"Authorization": "Bearer " + open(account + "token").read()})
try:
    urllib.request.urlopen(request, context=ssl.create_default_context(cafile=account + "ca.crt"), timeout=10)
except urllib.error.HTTPError as error:
    refused = error.code
print(json.dumps({
    "api": refused,
    "others": [connects("198.18.1.1", OTHER), connects("192.0.2.1", 80)],
    "routes": len(open("/proc/net/route").readlines()) - 1,
    "shell": [path for path in ("/bin/sh", "/bin/bash", "/usr/bin/sh") if os.path.exists(path)],
}))
"""


def test_a_pod_reaches_the_api_server_and_nothing_else(real_node: RealNode, namespace: Namespace) -> None:
    port = real_node.cluster.components.ports["kube-apiserver"]
    namespace.create(pod("look", LOOK.replace("OTHER", str(port))))
    seen = json.loads(real_node.cluster.pods.read_log(reached(namespace, "look", "Succeeded")))
    assert seen == {
        "api": 403,  # it is known, by its token, and may not do that
        "others": ["ConnectionRefusedError", "OSError"],  # the bridge's other ports; the network is unreachable
        "routes": 2,  # to its neighbours and to the service address
        "shell": [],
    }


def test_the_kubelet_answers_to_no_stranger_and_may_change_no_other_node(real_node: RealNode) -> None:
    place = real_node.cluster.components
    url = f"https://127.0.0.1:{place.ports[KUBELET]}/pods"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url, context=ssl.create_default_context(cafile=str(place.authority)), timeout=10)
    with refused.value:
        assert refused.value.code == 401

    kubelet = Api(real_node.cluster.folder / "config/kubelet.kubeconfig")
    with pytest.raises(ApiError, match="is not allowed to modify node"):
        kubelet.patch("Node", KWOK_NODES[0], None, {"metadata": {"annotations": {"dispatch.test/mine": "true"}}})
    kubelet.close()


def test_nothing_lands_on_the_real_node_unasked(real_node: RealNode, namespace: Namespace) -> None:
    cluster = real_node.cluster
    namespace.create(pod("stranger", "", tolerations=[]))

    def refused() -> Object | None:
        conditions = namespace.get("Pod", "stranger")["status"]["conditions"]
        return next((c for c in conditions if (c["type"], c.get("reason")) == ("PodScheduled", "Unschedulable")), None)

    assert "1 node(s) had untolerated taint(s)" in cluster.wait(refused, "it is not scheduled")["message"]


HARDENED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
STATUS = """
for line in open("/proc/self/status"):
    if line.startswith(("CapBnd", "NoNewPrivs", "Seccomp:")):
        print(*line.split())
try:
    open("/written", "w")
except OSError as error:
    print(error.strerror)
"""


def test_a_hardened_pod_has_no_capabilities_and_a_seccomp_filter(real_node: RealNode, namespace: Namespace) -> None:
    hardened = pod("hardened", STATUS)
    hardened["spec"]["containers"][0]["securityContext"] = HARDENED
    namespace.create(hardened)
    seen = reached(namespace, "hardened", "Succeeded")
    printed = real_node.cluster.pods.read_log(seen).splitlines()
    if "Seccomp: 0" in printed:
        pytest.skip(f"pods run without seccomp filters here: {build.SECCOMP_HELP}")
    assert printed == ["CapBnd: 0000000000000000", "NoNewPrivs: 1", "Seccomp: 2", "Read-only file system"]


def test_this_machine_sees_neither_its_network_nor_its_mounts(real_node: RealNode) -> None:
    assert not pathlib.Path("/sys/class/net", machine.BRIDGE).exists()
    mounts = pathlib.Path("/proc/self/mountinfo").read_text()
    assert str(real_node.folder) not in mounts
    pid = next(process.pid for process in real_node.cluster.status() if process.name == MACHINE)
    listed = pathlib.Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]
    devices = {line.split(":")[0].strip() for line in listed}
    assert {name for name in devices if not name.startswith("veth")} == {"lo", machine.BRIDGE}


def test_logs_are_followed_and_commands_executed_through_the_api_server(
    real_node: RealNode, namespace: Namespace
) -> None:
    cluster = real_node.cluster
    namespace.create(pod("talker", "import time\nfor n in range(1000): print('line', n, flush=True); time.sleep(0.1)"))
    talker = reached(namespace, "talker", "Running")
    path = f"/api/v1/namespaces/{namespace.name}/pods/talker/log"
    lines = cluster.api.follow(path, query={"follow": "true"})
    assert [next(lines), next(lines)] == ["line 0", "line 1"]
    lines.close()  # type: ignore[attr-defined]  # it is a generator
    assert execute(cluster, talker, "python", "-c", "import os; print(os.uname().nodename)") == "talker\n"


# --- nothing is left

OWNER = """
import pathlib, sys
from tests.cluster import local
from tests.node.test_machine import pod, reached

cluster = local.start(pathlib.Path(sys.argv[1]), with_real_node=True)
namespace = cluster.namespace(check=False)
namespace.create(pod("stays", sys.argv[2]))
reached(namespace, "stays", "Running")
print("started", flush=True)
sys.stdin.read()
"""
STAYS = "import signal, time  # {}\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(1000)"


@dataclass
class Owned:
    """A cluster with a real node and a pod on it, that belongs to another process."""

    owner: subprocess.Popen[str]
    folder: pathlib.Path
    supervisor: int
    cgroup: str

    def processes(self) -> list[int]:
        """Every process that names its folder, the pod's included."""
        return processes_of(self.folder)

    def cgroups(self) -> list[pathlib.Path]:
        return [path for path in (cgroups.ROOT / self.cgroup, *cgroups.ROOT.glob(f"*/{self.cgroup}")) if path.is_dir()]


@pytest.fixture
def owned(real_node: RealNode, tmp_path: pathlib.Path) -> Iterator[Owned]:  # noqa: ARG001  # that one can be had
    folder = tmp_path / "owned"
    argv = [sys.executable, "-c", OWNER, str(folder), STAYS.format(folder)]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout
            assert owner.stdout.readline() == "started\n"
            pid = json.loads((folder / supervisor.STATE).read_text())["pid"]
            yield Owned(owner, folder, pid, cgroups.name(pid, supervisor.start_time(pid)))
        finally:
            owner.kill()
    local.down(folder)


def settings() -> dict[str, str]:
    """The kernel's settings that a kubelet changes."""
    return {name: pathlib.Path("/proc/sys", name).read_text() for name in machine.SETTINGS}


KERNEL = settings()


def test_nothing_is_left_when_the_owner_is_killed(owned: Owned) -> None:
    assert len(owned.processes()) > 10
    assert len(owned.cgroups()) >= len(cgroups.hierarchies())
    assert settings() == KERNEL

    os.kill(owned.owner.pid, signal.SIGKILL)
    wait(lambda: not owned.processes(), "every process is gone", timeout=30)
    assert owned.cgroups() == []
    assert settings() == KERNEL


def test_down_removes_what_a_killed_supervisor_has_left(real_node: RealNode, tmp_path: pathlib.Path) -> None:  # noqa: ARG001
    folder = tmp_path / "cluster"
    up = command_line("up", str(folder), "--real-node")
    try:
        assert up.returncode == 0, up.stderr
        cluster = local.attach(folder)
        assert cluster.nodes.condition(NAME, "Ready") == "True"
        assert set(NAMES) <= {process.name for process in cluster.status()}
        cgroup = cluster.processes.cgroup()
        cluster.api.close()

        os.kill(json.loads((folder / supervisor.STATE).read_text())["pid"], signal.SIGKILL)
        wait(lambda: not processes_of(folder), "every process is gone", timeout=30)
        assert cgroup in cgroups.owners()
    finally:
        down = command_line("down", str(folder))
    assert down.returncode == 0, down.stderr
    assert cgroup not in cgroups.owners()
    assert [path.name for path in folder.iterdir()] == ["logs"]


def command_line(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "tests.cluster", *arguments]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=200)


def processes_of(folder: pathlib.Path) -> list[int]:
    """Every process that names this folder in its arguments, and is no zombie."""
    found = []
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            text = (entry / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if os.fsencode(folder) in text and supervisor.start_time(int(entry.name)) is not None:
            found.append(int(entry.name))
    return found
