"""What happens to a pod that kwok plays: its status as a kubelet would write it, and how long it takes to go."""

from __future__ import annotations

import datetime
import pathlib
import threading
from collections.abc import Callable

from .api import Api, ApiError, Object
from .stages import STUCK
from .waiting import wait


class Pods:
    """Acts on pods, each given as the object that `cluster.list("Pod", …)` returned. Its current version is used."""

    def __init__(self, api: Api, logs: Callable[[], pathlib.Path]) -> None:
        self._api, self._logs, self._lock = api, logs, threading.Lock()

    def succeed(self, pod: Object) -> Object:
        """Every container ends with exit code 0."""
        return self.end(pod, 0, "Completed")

    def fail(self, pod: Object, code: int = 1) -> Object:
        """Every container ends with this exit code."""
        return self.end(pod, code, "Error")

    def oom(self, pod: Object) -> Object:
        """Every container is killed for its memory: reason OOMKilled, exit code 137."""
        return self.end(pod, 137, "OOMKilled")

    def end(self, pod: Object, code: int, reason: str) -> Object:
        """Ends every container that has not ended yet, and with them the pod: Succeeded if all codes are 0."""
        return self.status(pod, lambda status: _ended(status, code, reason))

    def status(self, pod: Object, change: Callable[[Object], None]) -> Object:
        """Lets `change` edit the pod's current status, and writes it as the kubelet would; returns the pod."""
        while True:
            current = self._current(pod)
            change(current.setdefault("status", {}))
            try:
                return self._api.update(current, "status")
            except ApiError as error:
                if error.status != 409:
                    raise

    def condition(self, pod: Object, kind: str, status: str, reason: str, message: str = "") -> Object:
        """Sets a condition, such as DisruptionTarget."""

        def change(fields: Object) -> None:
            _set_condition(fields, kind, status, reason, message)

        return self.status(pod, change)

    def stick(self, pod: Object) -> None:
        """When it is deleted, the pod will stay Terminating, until `unstick`."""
        self._annotate(pod, "true")

    def unstick(self, pod: Object) -> None:
        """A Terminating pod goes now. No error when it is gone already."""
        try:
            self._annotate(pod, None)
        except ApiError as error:
            if error.status != 404:
                raise

    def log(self, pod: Object, text: str, *, stream: str = "stdout") -> None:
        """Appends `text` to what the pod's containers have printed; returns when the API server serves it."""
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        file = self._logs() / pod["metadata"]["uid"]
        stamp = datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")
        with self._lock, file.open("a") as out:  # in the format in which container runtimes keep them
            out.writelines(f"{stamp} {stream} F {line}\n" for line in text.splitlines())
        if self._api.find("Logs", name, namespace) is None:
            logs = {
                "apiVersion": "kwok.x-k8s.io/v1alpha1",
                "kind": "Logs",
                "metadata": {"name": name},
                "spec": {"logs": [{"logsFile": str(file), "follow": True}]},
            }
            self._api.create(logs, namespace)
        last = text.splitlines()[-1]
        wait(lambda: last in self.read_log(pod), f"the log of pod {name} is served", timeout=30)

    def read_log(self, pod: Object) -> str:
        """What the API server gives as the pod's log."""
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}/log"
        container = pod["spec"]["containers"][0]["name"]
        text: str = self._api.request("GET", path, query={"container": container})
        return text

    def _annotate(self, pod: Object, value: str | None) -> None:
        meta = pod["metadata"]
        self._api.patch("Pod", meta["name"], meta["namespace"], {"metadata": {"annotations": {STUCK: value}}})

    def _current(self, pod: Object) -> Object:
        meta = pod["metadata"]
        current = self._api.get("Pod", meta["name"], meta["namespace"])
        if current["metadata"]["uid"] != meta["uid"]:
            raise LookupError(f"pod {meta['namespace']}/{meta['name']} is another one by now")
        return current


def _ended(status: Object, code: int, reason: str) -> None:
    now = _now()
    codes = []
    for container in status.get("containerStatuses", []):
        state = container["state"]
        if "terminated" not in state:
            started = state.get("running", {}).get("startedAt", now)
            ended = {"exitCode": code, "reason": reason, "startedAt": started, "finishedAt": now}
            container.update(state={"terminated": ended}, ready=False, started=False)
        codes.append(container["state"]["terminated"]["exitCode"])
    succeeded = not any(codes) if codes else code == 0
    status["phase"] = "Succeeded" if succeeded else "Failed"
    why = "PodCompleted" if succeeded else "PodFailed"
    for kind in ("Ready", "ContainersReady"):
        _set_condition(status, kind, "False", why)


def _set_condition(status: Object, kind: str, value: str, reason: str, message: str = "") -> None:
    condition = {"type": kind, "status": value, "reason": reason, "lastTransitionTime": _now()}
    if message:
        condition["message"] = message
    status["conditions"] = [c for c in status.get("conditions", []) if c["type"] != kind] + [condition]


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
