"""The provider kind: the released Kueue, Trainer, JobSet and kwok in a kind cluster, where there is Docker.

It needs docker, kind, kubectl and git, and the network. The kind cluster has a name of its own, which the cluster's
folder records: `down` ends that one and no other. Unlike a local cluster it outlives a test run that is killed, until
`python3 -m tests.cluster down DIR`.

- The one real node runs the controllers. Tests' pods go to the nodes that kwok plays: it is tainted.
- The audit log and the folder of the pods' logs are shared with this machine.
- JobSet, Trainer, Kueue and kwok can be killed and started again, with the configuration of their release. Nothing can
  be paused, and the control plane itself is out of reach: such a test is skipped.
"""

from __future__ import annotations

import json
import pathlib
import re
import shlex
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import yaml
from urllib3.exceptions import HTTPError

from . import components, stages, supervisor
from . import folder as places
from .api import ApiError, Object
from .cluster import Cluster, ClusterError
from .remote import REAL, Controls, Remote, furnish
from .waiting import WaitTimeout, unique

KUEUE = "https://github.com/kubernetes-sigs/kueue/releases/download/v0.20.1/manifests.yaml"
TRAINER = "https://github.com/kubeflow/trainer.git/manifests/overlays/{}?ref=v2.3.0"  # it brings JobSet v0.12.0
KWOK = "https://github.com/kubernetes-sigs/kwok/releases/download/v0.7.0/{}"
DEPLOYMENTS = {
    "jobset": ("kubeflow-system", "jobset-controller-manager"),
    "trainer": ("kubeflow-system", "kubeflow-trainer-controller-manager"),
    "kueue": ("kueue-system", "kueue-controller-manager"),
    "kwok": ("kube-system", "kwok-controller"),
}
TOOLS = {
    "docker": "https://docs.docker.com/engine/install/",
    "kind": "https://kind.sigs.k8s.io/docs/user/quick-start/#installation",
    "kubectl": "https://kubernetes.io/docs/tasks/tools/",
    "git": "https://git-scm.com/downloads",  # kubectl fetches Trainer's manifests with it
}
NAME = re.compile(r"dispatch-[0-9a-f]{8}")
CONTROL_PLANE = "node-role.kubernetes.io/control-plane"  # its label, which kubeadm gives it
AUDIT, AUDIT_POLICY = "/var/log/dispatch", "/etc/kubernetes/dispatch"  # places in the kind node
ROLLOUT = "600s"  # for pulling a controller's image, too

Progress = Callable[[str], None]


class KindError(ClusterError):
    """The kind cluster cannot be started or ended; the text says what is missing, or which command failed, and how."""


def start(folder: pathlib.Path, *, progress: Progress) -> Cluster:
    """Starts a kind cluster whose files are in `folder`, and installs everything. Raises KindError: none is left then.

    `down` ends it. The end of this process does not, but it ends the gates, unless `cluster.disown()` is called.
    """
    folder = folder.absolute()
    if reason := places.unusable(folder) or lacking():
        raise KindError(reason)
    places.empty(folder)
    began = time.monotonic()
    try:
        cluster = _start(folder, Controls.launch(folder), progress)
    except (ApiError, HTTPError, OSError, WaitTimeout) as error:
        down(folder)
        raise KindError(f"the cluster did not start: {error}") from error
    except BaseException:  # Ctrl-C too
        down(folder)
        raise
    progress(f"the cluster is up after {time.monotonic() - began:.0f} s")
    return cluster


def attach(folder: pathlib.Path) -> Cluster:
    """The cluster that runs in `folder`. Raises KindError when none does."""
    folder = folder.absolute()
    if not is_here(folder) or not supervisor.running(folder):
        raise KindError(f"no cluster runs in {folder}: start one with `python3 -m tests.cluster up {folder}`")
    return _attach(folder, Controls(folder))


def is_here(folder: pathlib.Path) -> bool:
    """Whether a kind cluster was made for this folder, and not ended."""
    return (folder / places.KIND).exists()


def down(folder: pathlib.Path, cluster: Cluster | None = None) -> None:
    """Ends the kind cluster of `folder`, and its gates; only the logs stay. May be repeated."""
    folder = folder.absolute()
    if cluster:
        cluster.close()
    supervisor.shutdown(folder)
    if is_here(folder):
        name = (folder / places.KIND).read_text()
        if not NAME.fullmatch(name):
            raise KindError(f"{folder / places.KIND} names no cluster of the tests: {name[:80]!r}")
        _run(folder, "kind", "delete", "cluster", "--name", name, "--kubeconfig", str(_kubeconfig(folder)))
    places.clear(folder)


def lacking() -> str:
    """Which programs are missing, and where they are; empty when all are there."""
    missing = [f"{tool} ({url})" for tool, url in TOOLS.items() if shutil.which(tool) is None]
    return f"the provider kind needs {', '.join(missing)}: install it" if missing else ""


# --- the start


def _start(folder: pathlib.Path, controls: Controls, progress: Progress) -> Cluster:
    progress("creating a kind cluster")
    name = f"dispatch-{unique()}"
    _run(folder, "docker", "version")  # says so when the engine does not run
    for place in ("pod-logs/empty", "config/kind.yaml", "config/audit.yaml", "logs/audit.log"):
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).touch()  # the log belongs to us then, not to the API server's user
    (folder / "config/audit.yaml").write_text(yaml.safe_dump(components.AUDIT_POLICY))
    (folder / "config/kind.yaml").write_text(yaml.safe_dump(configuration(folder)))
    (folder / places.KIND).write_text(name)  # first: a start that is interrupted leaves something to end
    config, kubeconfig = str(folder / "config/kind.yaml"), str(_kubeconfig(folder))
    create = ["create", "cluster", "--name", name, "--config", config, "--kubeconfig", kubeconfig, "--wait", "5m"]
    _run(folder, "kind", *create)

    progress("installing Trainer v2.3.0 and JobSet v0.12.0")
    _apply(folder, on_the_real_node(_documents(_kubectl(folder, "kustomize", TRAINER.format("manager")))))
    _ready(folder, "jobset", "trainer")
    _apply(folder, _documents(_kubectl(folder, "kustomize", TRAINER.format("runtimes"))))
    progress("installing Kueue v0.20.1")
    _apply(folder, on_the_real_node(_download(KUEUE)))
    progress("installing kwok v0.7.0")
    _apply(folder, on_the_real_node(playing(_download(KWOK.format("kwok.yaml")), folder / "pod-logs")))
    _kubectl(folder, "wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    played = stages.fitted(_download(KWOK.format("stage-fast.yaml")))
    _apply(folder, [*played, stages.cluster_logs(folder / "pod-logs/empty")])
    _ready(folder, "kueue", "kwok")

    progress("installing priorities and nodes")
    cluster = _attach(folder, controls)
    for component in DEPLOYMENTS:
        cluster.ready(component)
    cluster.nodes.taint(f"{name}-control-plane", REAL)
    furnish(cluster)
    return cluster


def _attach(folder: pathlib.Path, controls: Controls) -> Cluster:
    audit, logs = folder / "logs/audit.log", folder / "pod-logs"
    place = Remote(folder, _kubeconfig(folder), "kind", DEPLOYMENTS, audit, logs)
    place.prepare()
    return Cluster(place, controls.serve(place))


def configuration(folder: pathlib.Path) -> Object:
    """The kind cluster: one node, its audit log in `logs` and the pods' logs in `pod-logs` of the folder."""
    # Without an apiVersion kind fits the patch to whichever one its kubeadm has.
    patch = {
        "kind": "ClusterConfiguration",
        "apiServer": {
            "extraArgs": {
                "audit-policy-file": f"{AUDIT_POLICY}/audit.yaml",
                "audit-log-path": f"{AUDIT}/audit.log",
                "audit-log-maxsize": "1000000",  # one file: a reader keeps its place in it
            },
            "extraVolumes": [
                _volume("audit-policy", AUDIT_POLICY, read_only=True),
                _volume("audit-log", AUDIT, read_only=False),
            ],
        },
        # A lost node is noticed soon; the real one's kubelet renews every 10 s.
        "controllerManager": {
            "extraArgs": {
                "node-monitor-grace-period": "30s",
                "node-monitor-period": "1s",
                "node-eviction-rate": "1000",
            }
        },
    }
    logs = str(folder / "pod-logs")  # the same path everywhere: an object of kwok's names a file by it
    return {
        "kind": "Cluster",
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "nodes": [
            {
                "role": "control-plane",
                "kubeadmConfigPatches": [yaml.safe_dump(patch)],
                "extraMounts": [
                    _mount(str(folder / "config/audit.yaml"), f"{AUDIT_POLICY}/audit.yaml", read_only=True),
                    _mount(str(folder / "logs"), AUDIT, read_only=False),
                    _mount(logs, logs, read_only=True),
                ],
            }
        ],
    }


def _volume(name: str, path: str, *, read_only: bool) -> Object:
    """Lets the API server's pod see a folder of the kind node."""
    return {"name": name, "hostPath": path, "mountPath": path, "readOnly": read_only, "pathType": "DirectoryOrCreate"}


def _mount(here: str, there: str, *, read_only: bool) -> Object:
    """Lets the kind node see a folder or file of this machine."""
    return {"hostPath": here, "containerPath": there, "readOnly": read_only}


def on_the_real_node(documents: list[Object]) -> list[Object]:
    """Manifests whose Deployments run on the real node, also when they are started again beside kwok's."""
    for spec in _pod_specs(documents):
        spec["nodeSelector"] = {**spec.get("nodeSelector", {}), CONTROL_PLANE: ""}
        spec["tolerations"] = [*spec.get("tolerations", []), {"key": REAL, "operator": "Exists"}]
    return documents


def playing(documents: list[Object], logs: pathlib.Path) -> list[Object]:
    """kwok's manifests, so that it plays the nodes that the tests label, and reads the pods' logs from a folder."""
    volume = {"name": "pod-logs", "hostPath": {"path": str(logs)}}
    for spec in _pod_specs(documents):
        spec["volumes"] = [*spec.get("volumes", []), volume]
        (container,) = spec["containers"]
        mount = {"name": "pod-logs", "mountPath": str(logs), "readOnly": True}
        container["volumeMounts"] = [*container.get("volumeMounts", []), mount]
        container["args"] = [  # flags go before its configuration file
            *container["args"],
            "--manage-nodes-with-annotation-selector=",
            f"--manage-nodes-with-label-selector={stages.KUBELET_LABEL}={stages.KUBELET_VALUE}",
            f"--node-lease-duration-seconds={components.NODE_LEASE}",
            "--cidr=198.19.0.0/16",
        ]
    return documents


def _pod_specs(documents: list[Object]) -> list[Object]:
    return [doc["spec"]["template"]["spec"] for doc in documents if doc["kind"] == "Deployment"]


# --- commands


def _kubeconfig(folder: pathlib.Path) -> pathlib.Path:
    return folder / "admin.kubeconfig"


def _apply(folder: pathlib.Path, documents: list[Object]) -> None:
    _kubectl(
        folder,
        "apply",
        "--server-side",
        "-f",
        "-",
        text=json.dumps({"apiVersion": "v1", "kind": "List", "items": documents}),
    )


def _ready(folder: pathlib.Path, *names: str) -> None:
    for namespace, deployment in (DEPLOYMENTS[name] for name in names):
        status = ["rollout", "status", f"deployment/{deployment}", "-n", namespace, f"--timeout={ROLLOUT}"]
        _kubectl(folder, *status)


def _kubectl(folder: pathlib.Path, *arguments: str, text: str = "") -> str:
    return _run(folder, "kubectl", "--kubeconfig", str(_kubeconfig(folder)), *arguments, text=text)


def _run(folder: pathlib.Path, *argv: str, text: str = "") -> str:
    """What a command prints; its errors go to logs/kind.log. Raises KindError."""
    try:
        done = subprocess.run(argv, input=text, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise KindError(f"`{shlex.join(argv)}` cannot be run: {argv[0]} is not installed ({TOOLS[argv[0]]})") from error
    with (folder / supervisor.LOGS / "kind.log").open("a") as log:
        log.write(f"$ {shlex.join(argv)}\n{done.stderr}")
    if done.returncode:
        raise KindError(f"`{shlex.join(argv)}` failed:\n{done.stderr[-2000:].strip()}")
    return done.stdout


def _download(url: str) -> list[Object]:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310  # the URLs above
            return _documents(answer.read().decode())
    except OSError as error:
        raise KindError(f"{url} cannot be downloaded: {error}") from error


def _documents(text: str) -> list[Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [document for document in yaml.load_all(text, loader) if document]  # a safe loader either way
