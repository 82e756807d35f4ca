"""Who ran when: records every pod of a namespace from the API server's watch, and finds attempts that overlapped."""

from __future__ import annotations

import datetime
import itertools
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import kubernetes
import urllib3

from tests import jobs
from tests.cluster.namespaces import Namespace

JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"


@dataclass
class Seen:
    """One pod's life. `first` and `last` number the events in which it started and ended, in the server's own order."""

    pod: str
    job: str
    epoch: str
    node: str
    first: int
    started: datetime.datetime
    last: int | None = None
    ended: datetime.datetime | None = None

    def overlaps(self, other: Seen) -> bool:
        """Whether both could run at one moment."""
        return (self.last is None or other.first < self.last) and (other.last is None or self.first < other.last)


class Attempts:
    """Records pods of a namespace between entering and leaving the `with` block; pods without an epoch are left out.

    A pod has started when a Running status is first seen, and ended when it is Succeeded, Failed, or gone: one that
    terminates can still run. The order is the watch's, so no moment is missed.
    """

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._pods: dict[str, Seen] = {}
        self._number = itertools.count()
        self._stop = threading.Event()
        self._watch = kubernetes.watch.Watch()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Attempts:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._watch.stop()
        self._thread.join(timeout=10)

    def pods(self) -> list[Seen]:
        """What was seen so far, in the order of the starts."""
        return sorted(self._pods.values(), key=lambda seen: seen.first)

    def overlaps(self) -> list[tuple[Seen, Seen]]:
        """Pods of one job and different epochs that could run at one moment: what must never happen."""
        pairs = itertools.combinations(self.pods(), 2)
        return [(a, b) for a, b in pairs if a.job == b.job and a.epoch != b.epoch and a.overlaps(b)]

    def _follow(self) -> None:
        core = kubernetes.client.CoreV1Api(self._namespace.cluster.admin)
        version = "0"
        while not self._stop.is_set():
            try:
                for event in self._watch.stream(
                    core.list_namespaced_pod, self._namespace.name, resource_version=version, _request_timeout=(5, 30)
                ):
                    pod = event["raw_object"]
                    version = pod["metadata"]["resourceVersion"]
                    self._note(event["type"], pod)
            except (urllib3.exceptions.HTTPError, kubernetes.client.ApiException, OSError):
                self._stop.wait(0.1)  # the server restarts, or the connection was idle for long

    def _note(self, kind: str, pod: dict[str, Any]) -> None:
        metadata, phase = pod["metadata"], pod["status"].get("phase")
        epoch, now = jobs.epoch_of(pod), datetime.datetime.now(datetime.UTC)
        seen = self._pods.get(metadata["uid"])
        if seen is None and phase == "Running" and epoch:
            job, node = metadata["labels"][JOBSET_NAME], pod["spec"].get("nodeName", "")
            self._pods[metadata["uid"]] = Seen(metadata["name"], job, epoch, node, next(self._number), now)
        elif seen and seen.last is None and (kind == "DELETED" or phase in ("Succeeded", "Failed")):
            seen.last, seen.ended = next(self._number), now
