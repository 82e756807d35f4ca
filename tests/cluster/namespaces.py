"""A test's own namespace, with a queue of its own: tests never meet in one."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import urllib3

from .api import ApiError, Object
from .waiting import unique

if TYPE_CHECKING:
    from .cluster import Cluster

CONTROLLER = "dispatch.phpboyscout.uk/admission"
KUEUE = "kueue.x-k8s.io/v1beta2"

Objects = list[Object]  # `Namespace.list` hides the type within its class


@dataclass(frozen=True)
class Queue:
    """What a namespace's ClusterQueue looks like.

    `quota` is in CPUs, for each flavor; `flavors` are more flavors than one, by suffix of their name; `flavor_spec` is
    what they are like. `check` lists an AdmissionCheck of the gate's on the queue, for all flavors, or for those in
    `on_flavors`; `extra_checks` are others, `<namespace>-<name>` with the controllerName `dispatch-test/<name>`.
    `borrow` and `lend` are limits in a `cohort`.
    """

    quota: str = "4"
    memory: str = "1Ti"
    check: bool = True
    flavors: Sequence[str] = ("",)
    flavor_spec: Object | None = None
    on_flavors: Sequence[str] | None = None
    extra_checks: Sequence[str] = ()
    cohort: str | None = None
    borrow: str | None = None
    lend: str | None = None
    preemption: Object | None = None
    settings: Object | None = None  # merged into the ClusterQueue's spec


class Namespace:
    """A namespace with ResourceFlavor(s), ClusterQueue, LocalQueue `lq` and AdmissionCheck, all gone after the test.

    `name` is the namespace's and the ClusterQueue's; `check` is the name of its AdmissionCheck, None without one. A
    ClusterQueue only works once its check is active, which a running gate sees to, or `activate()`.
    """

    queue = "lq"

    def __init__(self, cluster: Cluster, options: Queue) -> None:
        self.cluster, self.options = cluster, options
        self.name = f"t-{unique()}"
        self.cluster_queue = self.name
        self.flavors = [f"{self.name}{suffix and '-' + suffix}" for suffix in options.flavors]
        self.check = self.name if options.check else None
        self.checks = [*([self.name] if options.check else []), *(f"{self.name}-{c}" for c in options.extra_checks)]
        for obj in self._objects():
            cluster.create(obj)

    # --- what is in it

    def create(self, obj: Object, *, dry_run: bool = False) -> Object:
        """Creates an object in this namespace."""
        return self.cluster.api.create(obj, self.name, dry_run=dry_run)

    def get(self, kind: str, name: str) -> Object:
        return self.cluster.get(kind, name, self.name)

    def find(self, kind: str, name: str) -> Object | None:
        return self.cluster.find(kind, name, self.name)

    def list(self, kind: str, *, labels: str = "") -> Objects:
        return self.cluster.list(kind, self.name, labels=labels)

    def patch(self, kind: str, name: str, patch: Object, *, subresource: str = "") -> Object:
        """A merge patch."""
        return self.cluster.patch(kind, name, self.name, patch, subresource=subresource)

    def delete(self, kind: str, name: str, **options: Any) -> None:
        self.cluster.delete(kind, name, self.name, **options)

    def pods(self, job: str | None = None) -> Objects:
        """Its pods, or those of one TrainJob, oldest first; Terminating ones included."""
        labels = f"jobset.sigs.k8s.io/jobset-name={job}" if job else ""
        return sorted(self.list("Pod", labels=labels), key=lambda pod: str(pod["metadata"]["creationTimestamp"]))

    def workload(self, owner: str) -> Object:
        """The Workload that Kueue made for the object of this name. Raises LookupError when there is none."""
        for workload in self.list("Workload"):
            if any(reference["name"] == owner for reference in workload["metadata"].get("ownerReferences", [])):
                return workload
        raise LookupError(f"there is no Workload of {self.name}/{owner}")

    def activate(self) -> None:
        """Says that the namespace's checks are served, as their controllers would: for tests without a running gate."""
        for name in self.checks:
            condition = {
                "type": "Active",
                "status": "True",
                "reason": "Active",
                "message": "",
                "lastTransitionTime": "2000-01-01T00:00:00Z",
            }
            status = {"status": {"conditions": [condition]}}
            self.cluster.patch("AdmissionCheck", name, None, status, subresource="status")

    def wait_served(self) -> None:
        """Returns when the gate's check is Active: a gate has found it."""

        def active() -> bool:
            conditions = self.cluster.get("AdmissionCheck", self.name).get("status", {}).get("conditions", [])
            return any(c["type"] == "Active" and c["status"] == "True" for c in conditions)

        self.cluster.wait(active, f"a gate serves the check {self.name}", interval=0.05)

    # --- its life

    def __enter__(self) -> Namespace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Has everything deleted, stuck pods and those of lost nodes too, and does not wait for it."""
        # The next test does not depend on it. No answer in time: there is much to delete, and the server goes on.
        with contextlib.suppress(ApiError, urllib3.exceptions.HTTPError):
            # First: nothing new can then be created in it while the rest goes.
            self.cluster.delete("Namespace", self.name)
            self.cluster.delete_all("Pod", self.name, grace=0)
        others = [("LocalQueue", self.queue), ("ClusterQueue", self.name)]
        others += [("ResourceFlavor", flavor) for flavor in self.flavors]
        others += [("AdmissionCheck", check) for check in self.checks]
        for kind, name in others:
            with contextlib.suppress(ApiError, urllib3.exceptions.HTTPError):
                self.cluster.delete(kind, name, self.name)

    def _objects(self) -> Objects:
        made: Objects = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.name}}]
        made += [_kueue("ResourceFlavor", flavor, self.options.flavor_spec or {}) for flavor in self.flavors]
        if self.check:
            made.append(_kueue("AdmissionCheck", self.check, {"controllerName": CONTROLLER}))
        made += [
            _kueue("AdmissionCheck", f"{self.name}-{check}", {"controllerName": f"dispatch-test/{check}"})
            for check in self.options.extra_checks
        ]
        made.append(_kueue("ClusterQueue", self.name, self._cluster_queue()))
        local = _kueue("LocalQueue", self.queue, {"clusterQueue": self.name})
        local["metadata"]["namespace"] = self.name
        return [*made, local]

    def _cluster_queue(self) -> Object:
        options = self.options
        limits = {"borrowingLimit": options.borrow, "lendingLimit": options.lend}
        cpu = {"name": "cpu", "nominalQuota": options.quota, **{k: v for k, v in limits.items() if v is not None}}
        resources = [cpu, {"name": "memory", "nominalQuota": options.memory}]
        spec: Object = {
            "namespaceSelector": {},
            "preemption": options.preemption or {"withinClusterQueue": "LowerPriority"},
            "resourceGroups": [
                {
                    "coveredResources": ["cpu", "memory"],
                    "flavors": [{"name": flavor, "resources": resources} for flavor in self.flavors],
                }
            ],
        }
        rules: Objects = [{"name": check} for check in self.checks]
        if options.on_flavors is not None and self.check:
            rules[0]["onFlavors"] = [f"{self.name}-{suffix}" if suffix else self.name for suffix in options.on_flavors]
        if rules:
            spec["admissionChecksStrategy"] = {"admissionChecks": rules}
        if options.cohort:
            spec["cohortName"] = options.cohort
        return {**spec, **(options.settings or {})}


def _kueue(kind: str, name: str, spec: Object) -> Object:
    return {"apiVersion": KUEUE, "kind": kind, "metadata": {"name": name}, "spec": spec}
