"""The adapter as tests use it: in a namespace of the test cluster, in one of its modes, from the files of `examples`.

    with adapters.world(cluster, "kueue") as world:
        handle = world.backend.start(world.spec())
        world.backend.open(handle)
        world.running(handle)

The backend acts as a ServiceAccount under `examples/adapter-role.yaml`, so every test shows that the role is enough.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import yaml

import adapter
from adapter import Backend, Handle, JobSpec, State
from tests import jobs
from tests.cluster import gate
from tests.cluster.api import ApiError, Object
from tests.cluster.cluster import Cluster
from tests.cluster.namespaces import Namespace
from tests.faults.proxy import Proxy

EXAMPLES = pathlib.Path("examples")
MODES = ("plain", "kueue")
ACCOUNT = "dispatch-adapter"
JOB_CONTROLLER = "system:serviceaccount:kube-system:job-controller"
GATED_BY, HOLD = "kueue.x-k8s.io/admission-gated-by", "dispatch.phpboyscout.uk/hold"


@dataclass
class World:
    """A namespace, the adapter's settings for it, and a backend on them."""

    cluster: Cluster
    namespace: Namespace
    mode: str
    settings: dict[str, Any]
    backend: Backend  # unproven: see `unproven`
    mark: int  # where the audit log stood at the beginning

    @property
    def user(self) -> str:
        """Whom the audit log names."""
        return f"system:serviceaccount:{self.namespace.name}:{ACCOUNT}"

    def connect(self, **changes: Any) -> Backend:
        """Another backend, on other settings: None removes one. Unproven as well."""
        return unproven({k: v for k, v in {**self.settings, **changes}.items() if v is not None})

    def through(self, proxy: Proxy) -> World:
        """The same with settings, and an unproven backend on them, that lead through the proxy."""
        kubeconfig = str(proxy.kubeconfig(pathlib.Path(self.settings["kubeconfig"])))
        settings = {**self.settings, "kubeconfig": kubeconfig}
        return replace(self, settings=settings, backend=unproven(settings))

    def spec(self, **changes: Any) -> JobSpec:
        """The spec of `examples/job.json`, of a new job unless `job` is given."""
        fields = {**json.loads((EXAMPLES / "job.json").read_text()), "job": adapter.new_job(), **changes}
        return JobSpec.from_json({k: v for k, v in fields.items() if v is not None})

    def trainjob(self, handle: Handle) -> Object:
        return self.namespace.get("TrainJob", handle.name)

    def annotate(self, handle: Handle, name: str, value: str | None) -> None:
        self.namespace.patch("TrainJob", handle.name, {"metadata": {"annotations": {name: value}}})

    def started(self, **changes: Any) -> Handle:
        """A job that was started, and whose JobSet or Workload its controllers have made."""
        handle = self.backend.start(self.spec(**changes))
        self.settled(handle)
        return handle

    def settled(self, handle: Handle) -> None:
        """Returns when the controllers have done what they do about a job that is suspended."""

        def suspended() -> bool:
            return all(job["suspended"] == 1 for job in self.trainjob(handle)["status"]["jobsStatus"])

        self.wait(suspended, f"{handle.name} has a JobSet that is suspended")
        if self.mode == "kueue":
            self.wait(lambda: self.namespace.workload(handle.name)["status"]["conditions"], f"{handle} has a Workload")

    def opened(self, **changes: Any) -> Handle:
        """A job that runs."""
        spec = self.spec(**changes)
        handle = self.backend.start(spec)
        self.backend.open(handle)
        self.running(handle, spec.nodes or 1)
        return handle

    def running(self, handle: Handle, count: int = 2) -> list[Object]:
        """Its pods, once so many run."""

        def pods() -> list[Object]:
            found = [p for p in self.namespace.pods(handle.name) if p["status"].get("phase") == "Running"]
            return found if len(found) == count else []

        running: list[Object] = self.wait(pods, f"{count} pods of {handle.name} run")
        return running

    def state(self, handle: Handle, state: State) -> adapter.Status:
        """Its status, once it is in this state."""

        def status() -> adapter.Status | None:
            found = self.backend.inspect(handle)
            return found if found.state is state else None

        reached: adapter.Status = self.wait(status, f"{handle.name} is {state}")
        return reached

    def end(self, handle: Handle, *, code: int = 0) -> None:
        """Its program ends: well on every node, or badly on the first."""
        for pod in self.running(handle)[: 1 if code else None]:
            self.cluster.pods.end(pod, code, "Error" if code else "Completed")
        self.wait(lambda: self.backend.inspect(handle).final, f"{handle.name} has ended")

    def created_trainjobs(self) -> list[str]:
        """Those that the adapter has created, and not in a dry run."""
        return [
            str(event["objectRef"].get("name"))
            for event in self.cluster.audit_events(self.user, since=self.mark)
            if (event["verb"], event.get("objectRef", {}).get("resource")) == ("create", "trainjobs")
            and event["responseStatus"]["code"] == 201
            and "dryRun" not in event["requestURI"]
        ]

    def pods_created(self) -> int:
        """How many pods the Job controller has ever made in the namespace, by the API server's own record."""
        return sum(
            (event["verb"], event["responseStatus"]["code"]) == ("create", 201)
            and event.get("objectRef", {}).get("resource") == "pods"
            and event["objectRef"].get("namespace") == self.namespace.name
            and "subresource" not in event["objectRef"]
            for event in self.cluster.audit_events(JOB_CONTROLLER, since=self.mark)
        )

    def left(self, job: str = "") -> list[str]:
        """What there is of a job, or of all: kind and name of each object."""
        kinds = ("TrainJob", "JobSet", "Job", "Pod", "Workload")
        found = [(kind, obj["metadata"]["name"]) for kind in kinds for obj in self.namespace.list(kind)]
        return [f"{kind} {name}" for kind, name in found if job in name]

    def wait(self, until: Callable[[], Any], what: str, timeout: float = 60) -> Any:
        return self.cluster.wait(until, what, timeout, interval=0.05)


class Call(threading.Thread):
    """An operation in a thread of its own."""

    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.function = function
        self.result: adapter.DispatchError | None = None
        self.start()

    def run(self) -> None:
        try:
            self.function()
        except adapter.DispatchError as error:
            self.result = error

    def wait(self, timeout: float = 120) -> adapter.DispatchError | None:
        """What it raised, None when it returned."""
        self.join(timeout)
        assert not self.is_alive(), "it has not returned"
        return self.result


@contextlib.contextmanager
def world(
    cluster: Cluster, mode: str, *, check: bool = True, quota: str = "4", without: str = "", **options: Any
) -> Iterator[World]:
    """A fresh namespace, and the adapter in it. In Kueue mode a gate must run, or `check` be False, for jobs to run.

    `without` is a right that its account does not have: `get pods/log`.
    """
    install_runtime(cluster)
    with cluster.namespace(quota, check=check and mode == "kueue", **options) as namespace:
        if namespace.check and cluster.gates:
            namespace.wait_served()  # before, a backend would be observe-only
        settings = settings_for(cluster, namespace, mode, without)
        yield World(cluster, namespace, mode, settings, unproven(settings), cluster.audit_mark())


def prove(world: World, **options: Any) -> Backend:
    """A backend by `adapter.connect`. Whatever it found, nothing of a probe is left, and none had a pod."""
    try:
        return adapter.connect(world.settings, **options)
    finally:
        assert world.left() == []
        assert world.pods_created() == 0


def observing(world: World) -> str:
    """Why the backend is observe-only."""
    backend = prove(world)
    assert backend.observe_only
    hold = adapter.Support(
        adapter.Answer.NO, adapter.Source.PROBED, f"the cluster is observe-only: {backend.observe_only}"
    )
    assert backend.capabilities()[adapter.Capability.HOLD] == hold
    return backend.observe_only


def unproven(settings: dict[str, Any]) -> Backend:
    """A backend without the seconds that preflight takes: for tests of what comes after it."""
    loaded = adapter.Settings.load(settings)
    return Backend(loaded, adapter.credentials(loaded))


def settings_for(cluster: Cluster, namespace: Namespace, mode: str, without: str = "") -> dict[str, Any]:
    """Those of `examples/config.json`, for this namespace, with the credentials of `examples/adapter-role.yaml`."""
    settings: dict[str, Any] = json.loads((EXAMPLES / "config.json").read_text())
    settings |= {"namespace": namespace.name, "kubeconfig": str(account(cluster, namespace.name, without))}
    if mode == "plain":
        del settings["kueue"]
    elif namespace.check:
        settings["kueue"]["admissionCheck"] = namespace.check
        if cluster.gates:
            settings["kueue"]["admissionLease"] = f"{gate.NAMESPACE}/{cluster.gates[-1].lease}"
    return settings


def account(cluster: Cluster, namespace: str, without: str = "", *, name: str = ACCOUNT) -> pathlib.Path:
    """A kubeconfig of the account of `examples/adapter-role.yaml`, in this namespace instead of `team-a`.

    `without` is a right that it does not have, such as `get pods/log`.
    """
    verb, _, resource = without.partition(" ")
    text = (EXAMPLES / "adapter-role.yaml").read_text().replace("team-a", namespace).replace(ACCOUNT, name)
    for obj in yaml.safe_load_all(text):
        if obj["kind"] == "ClusterRoleBinding":
            obj["metadata"]["name"] += f"-{namespace}"
        if without and obj["kind"] in ("ClusterRole", "Role"):
            obj["rules"] = [rule for old in obj["rules"] for rule in _weaker(old, verb, resource)]
            obj["metadata"]["name"] = namespace
        if without and "roleRef" in obj:
            obj["roleRef"]["name"] = namespace
        with contextlib.suppress(ApiError) if obj["kind"] == "ClusterRole" else contextlib.nullcontext():
            cluster.apply(obj)
    return cluster.token_kubeconfig(namespace, name)


def _weaker(rule: Object, verb: str, resource: str) -> list[Object]:
    """A role's rule without one right."""
    name, _, group = resource.partition(".")
    return [
        {
            "apiGroups": rule["apiGroups"],
            "resources": [each],
            "verbs": [v for v in rule["verbs"] if v != verb or not same],
        }
        for each in rule["resources"]
        for same in [each == name and group in rule["apiGroups"]]
        if not same or rule["verbs"] != [verb]
    ]


def install_runtime(cluster: Cluster) -> None:
    """Puts the runtime of `examples/runtime.yaml` there."""
    jobs.install(cluster, yaml.safe_load((EXAMPLES / "runtime.yaml").read_text()))


@contextlib.contextmanager
def mutating_policy(
    cluster: Cluster, namespace: str, patch: str, *, operation: str = "CREATE", when: str = "true"
) -> Iterator[None]:
    """Somebody's admission policy changes each TrainJob that is created in the namespace: `patch`, a CEL JSON patch.

    `when`, in CEL, limits it, and `operation` may be UPDATE. The policy works a moment later.
    """
    version, name = "admissionregistration.k8s.io/v1", f"change-{namespace}"
    path = f"/apis/{version}/mutatingadmissionpolic"
    rule = {
        "apiGroups": ["trainer.kubeflow.org"],
        "apiVersions": ["*"],
        "operations": [operation],
        "resources": ["trainjobs"],
    }
    policy = {
        "matchConstraints": {"resourceRules": [rule]},
        "matchConditions": [
            {"name": "namespace", "expression": f"object.metadata.namespace == '{namespace}'"},
            {"name": "when", "expression": when},
        ],
        "failurePolicy": "Fail",
        "reinvocationPolicy": "Never",
        "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": patch}}],
    }
    kinds = {
        "ies": ("MutatingAdmissionPolicy", policy),
        "ybindings": ("MutatingAdmissionPolicyBinding", {"policyName": name}),
    }
    for plural, (kind, spec) in kinds.items():
        obj = {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}
        cluster.api.request("POST", path + plural, obj)
    try:
        yield
    finally:
        for plural in kinds:
            cluster.api.request("DELETE", f"{path}{plural}/{name}")


def impatient(monkeypatch: pytest.MonkeyPatch, *, reads: float = 2.0, writes: float = 3.0, settle: float = 2.0) -> None:
    """Has the adapter give up after so many seconds instead of its own bounds, which are too long for a test."""
    monkeypatch.setattr(adapter.Again, "PATIENCE", writes)
    monkeypatch.setitem(adapter.Connection.read.__kwdefaults__ or {}, "patience", reads)
    monkeypatch.setattr(adapter, "SETTLE", settle)
