"""A cluster whose components are not processes of this machine: known by a kubeconfig, and furnished for tests.

A gate still runs here, from source, so a cluster elsewhere has a supervisor and a folder of its own as well.
"""

from __future__ import annotations

import base64
import functools
import pathlib
from collections.abc import Mapping
from typing import Any, NoReturn

import yaml

from . import gate, manifests
from .api import Api, Object
from .certificates import Pair
from .cluster import Cluster, Unsupported
from .components import DEFAULT, NAMES, Command, Override, token_kubeconfig, webhook_answers
from .nodes import KWOK_NODES
from .supervisor import LOGS, Process, Processes
from .waiting import wait

REAL = "dispatch.test/real"  # the taint of a real node, which keeps tests' pods off it
NOTHING: Mapping[str, tuple[str, str]] = {}


class Remote:
    """Where such a cluster runs (see `cluster.Place`), as far as anything is known of it.

    `deployments` are the components that can be stopped and started: their Deployments, as (namespace, name). `audit`
    and `logs` are the API server's audit log and the folder of the pods' logs, for a cluster that shares them with us.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        kubeconfig: pathlib.Path,
        called: str,
        deployments: Mapping[str, tuple[str, str]] = NOTHING,
        audit: pathlib.Path | None = None,
        logs: pathlib.Path | None = None,
    ) -> None:
        self.folder, self.called, self.deployments = folder, called, deployments
        self._kubeconfig, self._audit, self._logs = kubeconfig, audit, logs

    def prepare(self) -> None:
        """Makes the folders that tests write to."""
        for name in ("config", "pki"):
            (self.folder / name).mkdir(exist_ok=True)

    def refuse(self, what: str) -> NoReturn:
        """Raises Unsupported."""
        raise Unsupported(f"{self.called} cannot {what}: this test needs the local provider")

    def kubeconfig(self) -> pathlib.Path:
        return self._kubeconfig

    def write_kubeconfig(self, path: pathlib.Path, token: str, namespace: str = "default") -> None:
        """A kubeconfig for whoever the token says."""
        path.write_text(token_kubeconfig(self._cluster, token, namespace))

    @property
    def authority(self) -> pathlib.Path:
        """The certificate that the API server is trusted by."""
        if "certificate-authority-data" not in self._cluster:
            self.refuse("say by which authority its API server is trusted")
        file = self.folder / "pki" / "ca.crt"
        file.write_bytes(base64.b64decode(self._cluster["certificate-authority-data"]))
        return file

    @property
    def serving(self) -> Pair:
        self.refuse("lend the API server's key to a proxy")

    @property
    def ports(self) -> dict[str, int]:
        self.refuse("put a proxy before a component")

    @property
    def audit_log(self) -> pathlib.Path:
        return self._audit or self.refuse("show its audit log")

    @property
    def pod_logs(self) -> pathlib.Path:
        return self._logs or self.refuse("write a pod's log")

    def command(self, name: str, override: Override = DEFAULT) -> Command:
        """Nothing to run: a component starts as it was installed, or not at all."""
        if override != DEFAULT:
            self.refuse(f"run {name} with another configuration")
        self.deployment(name)
        return Command([])

    def deployment(self, name: str) -> tuple[str, str]:
        """A component's Deployment, as (namespace, name)."""
        return self.deployments.get(name) or self.refuse(f"stop or start {name}")

    def ready(self, name: str, api: Api) -> bool:
        """Whether a component serves."""
        namespace, deployment = self.deployment(name)
        status = api.get("Deployment", deployment, namespace).get("status", {})
        if not status.get("availableReplicas"):
            return False
        return name == "kwok" or webhook_answers(name, api)

    @functools.cached_property
    def _cluster(self) -> Object:
        """The kubeconfig's entry for the cluster of its current context, with all that it refers to in it."""
        config = yaml.safe_load(self._kubeconfig.read_text())
        context = _named(config["contexts"], config["current-context"])["context"]
        entry: Object = dict(_named(config["clusters"], context["cluster"])["cluster"])
        if file := entry.pop("certificate-authority", None):
            content = (self._kubeconfig.parent / file).read_bytes()
            entry["certificate-authority-data"] = base64.b64encode(content).decode()
        return entry


class Controls(Processes):
    """`Processes` for a cluster elsewhere: gates are processes here, components are Deployments there.

    A Deployment at 0 replicas is a component that was killed. Nothing pauses one.
    """

    _place: Remote

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._stopped: set[str] = set()

    def serve(self, place: Remote) -> Controls:
        """Says which cluster it is."""
        self._place = place
        return self

    @functools.cached_property
    def _api(self) -> Api:
        return Api(self._place.kubeconfig())

    def kill(self, name: str) -> int | None:
        if name not in NAMES:
            return super().kill(name)
        namespace, deployment = self._place.deployment(name)
        self._scale(name, 0)
        selector = self._api.get("Deployment", deployment, namespace)["spec"]["selector"]["matchLabels"]
        labels = ",".join(f"{key}={value}" for key, value in selector.items())
        # With a grace of 0 the object would go before its process does.
        self._api.delete_all("Pod", namespace, grace=1, labels=labels)

        def ended() -> bool:
            counted = self._api.get("Deployment", deployment, namespace).get("status", {}).get("replicas")
            return not (counted or self._api.list("Pod", namespace, labels=labels))

        wait(ended, f"{name} has ended", timeout=60)
        self._stopped.add(name)
        return None

    def start(self, name: str, argv: list[str] | None = None, env: dict[str, str] | None = None, **options: Any) -> int:
        if name not in NAMES:
            return super().start(name, argv, env, **options)
        self._scale(name, 1)
        self._stopped.discard(name)
        return 0

    def pause(self, name: str) -> None:
        if name in NAMES:
            self._place.refuse(f"pause {name}")
        super().pause(name)

    def resume(self, name: str) -> None:
        if name in NAMES:
            self._place.refuse(f"resume {name}")
        super().resume(name)

    def status(self) -> list[Process]:
        """The processes here, and the components that were killed and not started again."""
        logs = self.folder / LOGS
        stopped = [Process(name, 0, "stopped", None, True, logs / f"{name}.log", 0) for name in sorted(self._stopped)]
        return [*super().status(), *stopped]

    def _scale(self, name: str, replicas: int) -> None:
        namespace, deployment = self._place.deployment(name)
        self._api.patch("Deployment", deployment, namespace, {"spec": {"replicas": replicas}})


def furnish(cluster: Cluster) -> None:
    """What every test takes for granted and an installation does not bring: made where it is missing, and left.

    The gate's namespace, the priorities `low` and `high`, and the nodes that kwok plays.
    """
    wanted = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": gate.NAMESPACE}}, *manifests.priorities()]
    for obj in wanted:
        if cluster.find(obj["kind"], obj["metadata"]["name"]) is None:
            cluster.create(obj)
    for name in KWOK_NODES:
        if cluster.find("Node", name) is None:
            cluster.nodes.create(name, ready=False)
    for name in KWOK_NODES:
        cluster.nodes.wait_ready(name)


def _named(entries: list[Object], name: str) -> Object:
    return next(entry for entry in entries if entry["name"] == name)
