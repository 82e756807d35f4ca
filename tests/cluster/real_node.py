"""A node that is real: kubelet, containerd and runc, on a machine of its own (machine.py). Needs root on Linux.

It is tainted, so that nothing lands there unasked; `FLAVOR` is the spec of a ResourceFlavor that places a queue's jobs
there: `cluster.namespace(flavor_spec=real_node.FLAVOR)`. Their image is `images.PYTHON`.

The parts are processes of the cluster's supervisor, by the names below: `cluster.kill("kubelet")` loses the node,
`cluster.start("kubelet")` brings it back. Pods run on without their kubelet, and end with the machine.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import yaml

from . import build, images, supervisor
from .api import Object
from .machine import BRIDGE, BRIDGE_ADDRESS, POD_RANGE, SERVICE_ADDRESS
from .supervisor import Processes

if TYPE_CHECKING:
    from .cluster import Cluster

NAME = "real-0"
MACHINE, RELAY, CONTAINERD, KUBELET = NAMES = ("machine", "relay", "containerd", "kubelet")
MARK = "dispatch.test/real"  # label and taint
FLAVOR: Object = {"nodeLabels": {MARK: "true"}, "tolerations": [{"key": MARK, "operator": "Exists"}]}
PLACEMENT: Object = {"nodeSelector": FLAVOR["nodeLabels"], "tolerations": FLAVOR["tolerations"]}  # of a pod's spec
_MEASURED = ("available", "inodesFree")
PACKAGES = "Debian: apt-get install mount libc-bin"


def missing() -> str:
    """What this machine lacks for a real node, and how to get it; empty when it lacks nothing."""
    if not sys.platform.startswith("linux"):
        return "a real node needs Linux"
    if os.geteuid() != 0:
        return "a real node needs root: run this with sudo -E, in a virtual machine, or in a privileged container"
    if programs := [name for name in ("mount", "umount", "ldd") if not shutil.which(name)]:
        return f"a real node needs the programs {', '.join(programs)} ({PACKAGES})"
    folder = tempfile.mkdtemp(prefix="dispatch-try-")
    argv = [sys.executable, "-m", "tests.cluster.machine", "--try", folder]
    tried = subprocess.run(argv, cwd=supervisor.ROOT, capture_output=True, text=True, timeout=60)
    shutil.rmtree(folder, ignore_errors=True)
    reasons = tried.stdout.splitlines() if tried.returncode == 0 else [tried.stderr.strip() or "it was killed"]
    if not reasons:
        return ""
    return (
        f"a real node cannot run here, as it cannot have {'; '.join(reasons)}. It needs all capabilities, unconfined, "
        "and a folder for temporary files ($TMPDIR) that is no overlay: a virtual machine, or a container with "
        "--privileged and a volume"
    )


def ready(cluster: Cluster, name: str) -> bool:
    """Whether a part of the node serves; False, or an error, means not yet."""
    processes = cluster.processes
    if name == MACHINE:
        program = pathlib.Path(f"/proc/{_pid(processes, MACHINE)}/exe").resolve()
        return program.name == "pause"  # it was Python until all was arranged
    if name == RELAY:
        with socket.create_connection(("127.0.0.1", cluster.components.ports[KUBELET])):
            return True  # it listens inside first
    if name == CONTAINERD:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(_containerd(processes))
        return True
    return cluster.nodes.condition(NAME, "Ready") == "True"


def _pid(processes: Processes, name: str) -> int:
    return next(process.pid for process in processes.status() if process.name == name)


def _containerd(processes: Processes) -> str:
    """Its socket: the machine's files can be seen from here, though not at their place."""
    return f"/proc/{_pid(processes, MACHINE)}/root/run/containerd/containerd.sock"


class RealNode:
    """The real node of a cluster, between `join` and the cluster's end."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.folder = cluster.folder / NAME
        self.shared = self.folder / "shared"  # for hostPath volumes: the rest of this machine is read-only to the node
        self._containerd_binaries = pathlib.Path()

    def join(self, programs: Mapping[str, pathlib.Path], progress: build.Progress) -> None:
        """Starts it; returns when it is Ready. Raises what a wait of the cluster raises."""
        began = time.monotonic()
        for name in ("containerd", "cni", "kubelet", "log", "tmp", "images", "shared"):
            (self.folder / name).mkdir(parents=True)
        self.shared.chmod(0o1777)  # pods have their own users
        cgroup = self.cluster.processes.cgroup()
        self._start_machine(programs)
        self._start_containerd(programs)
        self._create()
        self._start_kubelet(programs, cgroup)
        self.cluster.nodes.wait_ready(NAME)
        progress(f"the node {NAME} is ready after {time.monotonic() - began:.0f} s")

    def lose(self) -> None:
        """Kills the kubelet; returns when the control plane has noticed. The node's pods run on."""
        self.cluster.kill(KUBELET)
        nodes = self.cluster.nodes
        self.cluster.wait(lambda: nodes.condition(NAME, "Ready") == "Unknown", f"{NAME} is noticed as lost", 60)
        self.cluster.wait(lambda: "node.kubernetes.io/unreachable" in nodes.taints(NAME), f"{NAME} is tainted", 30)

    def recover(self) -> None:
        """Starts the kubelet again; returns when the node is Ready and not tainted."""
        self.cluster.start(KUBELET)
        self.cluster.nodes.wait_ready(NAME)

    def load(self, archive: pathlib.Path) -> None:
        """Gives it an image, from an archive, which is removed."""
        argv = [str(self._containerd_binaries / "ctr"), "--address", _containerd(self.cluster.processes)]
        subprocess.run(
            [*argv, "--namespace", "k8s.io", "images", "import", str(archive)], check=True, capture_output=True
        )
        archive.unlink()

    def _write(self, name: str, text: str) -> str:
        (self.folder / name).write_text(text)
        return str(self.folder / name)

    # --- its parts

    def _start_machine(self, programs: Mapping[str, pathlib.Path]) -> None:
        """And the relay; meanwhile, the images are made."""
        processes, pause = self.cluster.processes, programs["pause"] / "bin/pause"
        argv = [sys.executable, "-m", "tests.cluster.machine", str(self.folder), str(pause)]
        processes.start(MACHINE, argv, inside=MACHINE)
        images.write_pause(self.folder / "images/pause.tar", pause)
        images.write_python(self.folder / "images/python.tar")
        self.cluster.ready(MACHINE)
        ports = [str(self.cluster.components.ports[name]) for name in ("kube-apiserver", KUBELET)]
        processes.start(RELAY, [sys.executable, "-m", "tests.cluster.relay", str(_pid(processes, MACHINE)), *ports])
        self.cluster.ready(RELAY)

    def _start_containerd(self, programs: Mapping[str, pathlib.Path]) -> None:
        """And gives it the images."""
        self._containerd_binaries = binaries = programs["containerd"] / "bin"
        config = self._write("containerd.toml", self._containerd_config(programs))
        path = f"{binaries}:{programs['runc']}/bin:{os.environ['PATH']}"  # for its shim, and for `unfiltered`
        argv = [str(binaries / "containerd"), "--config", config]
        self.cluster.processes.start(CONTAINERD, argv, {**self._environment(), "PATH": path}, inside=MACHINE)
        self.cluster.ready(CONTAINERD)
        for archive in sorted((self.folder / "images").iterdir()):
            self.load(archive)

    def _start_kubelet(self, programs: Mapping[str, pathlib.Path], cgroup: str) -> None:
        self._write("resolv.conf", "")  # pods ask no name server
        flags = {
            "--config": self._write("kubelet.yaml", yaml.safe_dump(self._kubelet_config(cgroup))),
            "--kubeconfig": str(self.cluster.folder / "config/kubelet.kubeconfig"),
            "--hostname-override": NAME,
            "--cloud-provider": "external",  # keeps the addresses that the Node has
            "--cert-dir": "/var/lib/kubelet/pki",
        }
        argv = [str(programs["kubelet"] / "bin/kubelet"), *(f"{flag}={value}" for flag, value in flags.items())]
        self.cluster.processes.start(KUBELET, argv, self._environment(), inside=MACHINE)

    def _environment(self) -> dict[str, str]:
        return {"TMPDIR": str(self.folder / "tmp")}

    def _create(self) -> None:
        """Creates the Node, before its kubelet would.

        Its address is on the loopback, where the relay listens: a kubelet would refuse to take that for its own.
        """
        system = {"hostname": NAME, "os": "linux", "arch": images.ARCHITECTURE}
        labels = {MARK: "true", **{f"kubernetes.io/{key}": value for key, value in system.items()}}
        taint = {"key": MARK, "value": "true", "effect": "NoSchedule"}
        node: Object = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NAME, "labels": labels}}
        self.cluster.create({**node, "spec": {"taints": [taint]}})
        addresses = {"status": {"addresses": [{"type": "InternalIP", "address": "127.0.0.1"}]}}
        self.cluster.patch("Node", NAME, None, addresses, subresource="status")

    # --- configuration

    def _containerd_config(self, programs: Mapping[str, pathlib.Path]) -> str:
        network = {
            "cniVersion": "1.0.0",
            "name": BRIDGE,
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": BRIDGE,
                    "ipam": {
                        "type": "host-local",
                        "dataDir": "/run/addresses",
                        "ranges": [[{"subnet": POD_RANGE, "gateway": BRIDGE_ADDRESS}]],
                        "routes": [{"dst": f"{SERVICE_ADDRESS}/32", "gw": BRIDGE_ADDRESS}],  # and nowhere else
                    },
                }
            ],
        }
        self._write("cni/10-pods.conflist", json.dumps(network))
        runc = programs["runc"] / "bin/runc"  # on the PATH, too, for the one that may stand before it
        if "unfiltered" in programs:
            runc = programs["unfiltered"] / "bin/unfiltered"
        return f"""version = 3
root = '{self.folder}/containerd'
state = '/run/containerd'
temp = '{self.folder}/tmp'
imports = []
disabled_plugins = ['io.containerd.nri.v1.nri', 'io.containerd.internal.v1.opt']

[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = '{images.PAUSE}'

[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = true # without CAP_SYS_RESOURCE, as in some virtual machines, no score may be lowered
disable_apparmor = true # no profile is left in the kernel

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = 'io.containerd.runc.v2'

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
BinaryName = '{runc}'
SystemdCgroup = false

[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ['{programs["cni"]}/bin']
conf_dir = '{self.folder}/cni'
use_internal_loopback = true
"""

    def _kubelet_config(self, cgroup: str) -> dict[str, Any]:
        components = self.cluster.components
        thresholds = ["memory.available", *(f"{fs}.{what}" for fs in ("nodefs", "imagefs") for what in _MEASURED)]
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "failCgroupV1": False,
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{cgroup}",
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "address": "127.0.0.1",
            "port": components.ports[KUBELET],
            "readOnlyPort": 0,
            "healthzPort": 0,
            "tlsCertFile": str(components.serving.certificate),
            "tlsPrivateKeyFile": str(components.serving.key),
            # The API server shows its certificate, and is asked in turn whether its user may do that.
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(components.authority)},
            },
            "authorization": {"mode": "Webhook"},
            # Renewed at a quarter of it: well within kube-controller-manager's --node-monitor-grace-period.
            "nodeLeaseDurationSeconds": 8,
            "nodeStatusUpdateFrequency": "2s",
            "nodeStatusReportFrequency": "10s",
            "syncFrequency": "5s",
            "containerLogMaxSize": "128Ki",  # so that a test sees logs rotated
            "containerLogMonitorInterval": "3s",  # the least
            "volumeStatsAggPeriod": "2s",  # how soon a volume is found too full
            # A disk that is nearly full must not cost a test its pods, nor images that cannot be pulled again.
            "evictionHard": dict.fromkeys(thresholds, "0%"),
            "imageGCHighThresholdPercent": 100,
            "failSwapOn": False,
            "makeIPTablesUtilChains": False,
            "resolvConf": str(self.folder / "resolv.conf"),
            "volumePluginDir": "/var/lib/kubelet/plugins",  # not in /usr
            "clusterDomain": "cluster.local",
            "maxPods": 50,
            "logging": {"verbosity": 2},
        }
