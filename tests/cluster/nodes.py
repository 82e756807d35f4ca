"""Nodes that kwok plays, and what may happen to a node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .api import STRATEGIC, Api, ApiError, Object
from .stages import KUBELET_LABEL, KUBELET_VALUE

if TYPE_CHECKING:
    from collections.abc import Callable

KWOK_NODES = ("kwok-0", "kwok-1")  # what every cluster starts with


class Nodes:
    """Acts on nodes by name. Waits where it says so; `wait` is the cluster's."""

    def __init__(self, api: Api, wait: Callable[..., Any]) -> None:
        self._api, self._wait = api, wait

    def create(
        self,
        name: str,
        *,
        cpu: str = "1000",
        memory: str = "10Ti",
        pods: int = 10_000,
        labels: dict[str, str] | None = None,
        taints: list[Object] | None = None,
        ready: bool = True,
    ) -> None:
        """A node whose kubelet is kwok; returns when pods can be placed on it, unless `ready` is False."""
        resources = {"cpu": cpu, "memory": memory, "pods": str(pods), "ephemeral-storage": "1Ti"}
        self._api.create(
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {
                    "name": name,
                    "labels": {"kubernetes.io/hostname": name, KUBELET_LABEL: KUBELET_VALUE, **(labels or {})},
                },
                "spec": {"taints": taints or []},
                "status": {"capacity": resources, "allocatable": resources},
            }
        )
        if ready:
            self.wait_ready(name)

    def lose(self, name: str, *, wait: bool = True) -> None:
        """The machine stops answering: no heartbeat any more, and its pods stay as they are, also when deleted.

        Returns when the control plane has noticed (Ready is Unknown, the node tainted unreachable: about ten seconds),
        or at once without `wait`.
        """
        self._label(name, None)
        if wait:
            self._wait(lambda: self.condition(name, "Ready") == "Unknown", f"node {name} is noticed as lost", 60)
            self._wait(
                lambda: "node.kubernetes.io/unreachable" in self.taints(name), f"node {name} is tainted unreachable", 30
            )

    def recover(self, name: str, *, wait: bool = True) -> None:
        """The machine is back: heartbeats again, and pods that were deleted meanwhile go."""
        self._label(name, KUBELET_VALUE)
        if wait:
            self.wait_ready(name)

    def delete(self, name: str) -> None:
        """Deletes the Node object; Kubernetes collects its pods within a minute."""
        self._api.delete("Node", name)

    def taint(self, name: str, key: str, value: str = "", effect: str = "NoSchedule") -> None:
        """Adds a taint, or changes its value. `node.kubernetes.io/out-of-service` with NoExecute frees a lost node."""
        taints = [t for t in self._taints(name) if (t["key"], t["effect"]) != (key, effect)]
        self._set_taints(name, [*taints, {"key": key, "value": value, "effect": effect}])

    def untaint(self, name: str, key: str) -> None:
        """Removes a taint, whatever its effect."""
        self._set_taints(name, [t for t in self._taints(name) if t["key"] != key])

    def taints(self, name: str) -> set[str]:
        """The keys of a node's taints."""
        return {taint["key"] for taint in self._taints(name)}

    def condition(self, name: str, kind: str) -> str | None:
        """The status of a node's condition: True, False, Unknown, or None when it has none."""
        conditions = self._api.get("Node", name).get("status", {}).get("conditions", [])
        return next((c["status"] for c in conditions if c["type"] == kind), None)

    def wait_ready(self, name: str) -> None:
        """Returns when a node is Ready and the control plane has taken its own taints off."""
        self._wait(
            lambda: (
                self.condition(name, "Ready") == "True"
                and not any(key.startswith("node.kubernetes.io/") for key in self.taints(name))
            ),
            f"node {name} is ready",
            60,
        )

    def _label(self, name: str, value: str | None) -> None:
        self._api.patch("Node", name, None, {"metadata": {"labels": {KUBELET_LABEL: value}}}, content=STRATEGIC)

    def _taints(self, name: str) -> list[Object]:
        found: list[Object] = self._api.get("Node", name)["spec"].get("taints", [])
        return found

    def _set_taints(self, name: str, taints: list[Object]) -> None:
        while True:  # the node lifecycle controller writes taints, too
            node = self._api.get("Node", name)
            node["spec"]["taints"] = taints
            try:
                self._api.update(node)
            except ApiError as error:
                if error.status != 409:
                    raise
            else:
                return
