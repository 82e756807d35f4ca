"""Who ran when: records pods, approvals and counts of a namespace from the API server's watch, and judges them.

All order is by resourceVersion: the API server numbers every write, to whatever object, in one sequence.
"""

from __future__ import annotations

import datetime
import itertools
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import urllib3

from tests import jobs
from tests.cluster.api import ApiError, Object, path
from tests.cluster.namespaces import Namespace

JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
NEVER = datetime.datetime.max.replace(tzinfo=datetime.UTC)


@dataclass
class Seen:
    """One pod's life: the versions of the writes that created it, made it Running (0: not yet), and ended it."""

    pod: str
    job: str
    epoch: str
    node: str
    created: int
    first: int = 0
    last: int | None = None
    started: datetime.datetime = NEVER
    ended: datetime.datetime | None = None

    def overlaps(self, other: Seen) -> bool:
        """Whether both could run at one moment."""
        return (self.last is None or other.first < self.last) and (other.last is None or self.first < other.last)


@dataclass(frozen=True)
class Approval:
    """The gate's check of a Workload became Ready, at the version of that write; `again`: it was Ready already."""

    job: str
    version: int
    message: str
    again: bool


class Attempts:
    """Records a namespace between entering and leaving the `with` block; pods without an epoch are left out.

    A pod has started when a Running status is first seen, and ended when it is Succeeded, Failed, or gone: one that
    terminates can still run. No moment is missed: a watch that ends is taken up at the version it has reached.
    """

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._pods: dict[str, Seen] = {}
        self._checks: dict[str, tuple[str, str]] = {}  # of each Workload, by UID: the last state and message
        self._approvals: list[Approval] = []
        self._counts: dict[str, list[int]] = defaultdict(list)
        self._stop = threading.Event()
        kinds = {"Pod": self._note_pod, "Workload": self._note_workload, "TrainJob": self._note_trainjob}
        self._threads = [threading.Thread(target=self._follow, args=item, daemon=True) for item in kinds.items()]

    def __enter__(self) -> Attempts:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=10)

    # --- what was seen so far

    def pods(self) -> list[Seen]:
        """The pods that have started, in the order of their starts."""
        return sorted((seen for seen in list(self._pods.values()) if seen.first), key=lambda seen: seen.first)

    def approvals(self, job: str) -> list[Approval]:
        """A job's approvals, oldest first."""
        return [approval for approval in list(self._approvals) if approval.job == job]

    def counts(self, job: str) -> list[int]:
        """The admission counts that a job's TrainJob had, one after the other."""
        return list(self._counts[job])

    # --- what must never happen: each returns what shows that it did; complete after the `with` block

    def overlaps(self) -> list[tuple[Seen, Seen]]:
        """Pods of one job and different epochs that could run at one moment."""
        pairs = itertools.combinations(self.pods(), 2)
        return [(a, b) for a, b in pairs if a.job == b.job and a.epoch != b.epoch and a.overlaps(b)]

    def early(self) -> list[tuple[Approval, Seen]]:
        """Approvals at whose moment a pod of the job's earlier attempt was still there, running or not."""
        pairs = itertools.product(list(self._approvals), list(self._pods.values()))
        return [
            (approval, pod)
            for approval, pod in pairs
            if approval.job == pod.job
            and pod.created < approval.version
            and (pod.last is None or pod.last > approval.version)
        ]

    def stale(self) -> list[tuple[Seen, Seen]]:
        """Pods of a later admission whose epoch is not greater than that of one before."""

        def admission(pod: Seen) -> int:
            return sum(approval.version < pod.created for approval in self.approvals(pod.job))

        pods = [(pod, admission(pod)) for pod in sorted(self._pods.values(), key=lambda pod: pod.created)]
        return [
            (a, b)
            for (a, earlier), (b, later) in itertools.combinations(pods, 2)
            if a.job == b.job and earlier < later and int(a.epoch) >= int(b.epoch)
        ]

    def doubled(self) -> list[Approval]:
        """Approvals of what was approved already."""
        return [approval for approval in list(self._approvals) if approval.again]

    def lowered(self) -> dict[str, list[int]]:
        """The jobs whose count did not only ever grow by one."""
        return {
            job: counts
            for job, counts in list(self._counts.items())
            if any(b != a + 1 for a, b in itertools.pairwise(counts))
        }

    def violations(self) -> list[object]:
        """All of that."""
        found: list[object] = [*self.overlaps(), *self.early(), *self.stale(), *self.doubled()]
        return found + list(self.lowered().items())

    # --- the watches

    def _follow(self, kind: str, note: Callable[[str, Object, int], None]) -> None:
        api, version = self._namespace.cluster.api, "0"
        query = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": "1"}
        last = False
        while not last:
            last = self._stop.is_set()  # then one more, which has all that came before
            try:
                for line in api.follow(
                    path(kind, self._namespace.name), query={**query, "resourceVersion": version}, timeout=30
                ):
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise AssertionError(f"the watch of {kind} lost its place: {event['object']}")
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        note(event["type"], event["object"], int(version))
            except (urllib3.exceptions.HTTPError, ApiError, OSError, ValueError):
                last = False  # the server restarts, or cut a line in two
                time.sleep(0.1)

    def _note_pod(self, kind: str, pod: Object, version: int) -> None:
        metadata, phase = pod["metadata"], pod["status"].get("phase")
        epoch, now = jobs.epoch_of(pod), datetime.datetime.now(datetime.UTC)
        if not epoch or JOBSET_NAME not in metadata["labels"]:
            return
        job = metadata["labels"][JOBSET_NAME]
        seen = self._pods.setdefault(metadata["uid"], Seen(metadata["name"], job, epoch, "", version))
        seen.node = pod["spec"].get("nodeName", "")
        if phase == "Running" and not seen.first and seen.last is None:
            seen.first, seen.started = version, now
        if seen.last is None and (kind == "DELETED" or phase in ("Succeeded", "Failed")):
            seen.last, seen.ended = version, now

    def _note_workload(self, kind: str, workload: Object, version: int) -> None:
        owners, uid = workload["metadata"].get("ownerReferences", []), workload["metadata"]["uid"]
        entries = workload.get("status", {}).get("admissionChecks", [])
        entry = next((entry for entry in entries if entry["name"] == self._namespace.check), None)
        if kind == "DELETED" or not owners:
            return
        now = (entry["state"], entry["message"]) if entry else ("", "")
        before = self._checks.get(uid, now)  # what the watch begins with is no change
        if now != before and now[0] == "Ready":
            self._approvals.append(Approval(owners[0]["name"], version, now[1], again=before[0] == "Ready"))
        self._checks[uid] = now

    def _note_trainjob(self, kind: str, trainjob: Object, _: int) -> None:
        counts = self._counts[trainjob["metadata"]["name"]]
        admission = jobs.admission_in(trainjob)
        if kind != "DELETED" and admission is not None and counts[-1:] != [admission]:
            counts.append(admission)
