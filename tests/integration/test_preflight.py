"""Preflight: each row of its page, on the real control plane, with its exact text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import adapter
from adapter import Answer, Backend, Capability, ReadOnly, Source, State, Support, Unauthorized, Unsupported
from tests import adapters
from tests.adapters import World
from tests.cluster.cluster import Cluster

PROBE = "dispatch.phpboyscout.uk/probe"


# --- all is well


def test_everything_is_proven_on_a_cluster_that_has_everything(world: World) -> None:
    backend = adapters.prove(world)
    yes, declared = Support(Answer.YES, Source.PROBED), Support(Answer.YES, Source.DECLARED)
    gate = yes
    if world.mode == "plain":
        gate = Support(Answer.YES, Source.DECLARED, "nothing but the adapter resumes a job")
    assert backend.observe_only == ""
    assert backend.leftovers == ()
    assert backend.capabilities() == {
        Capability.READMISSION_GATE: gate,
        Capability.ATTEMPT_INJECTION: gate if world.mode == "kueue" else declared,
        Capability.HOLD: yes,
        Capability.OUTPUT_READ: yes,
        Capability.OUTPUT_FOLLOW: yes,
    }


def test_a_read_only_backend_finds_the_same_and_writes_nothing(world: World) -> None:
    backend = adapters.prove(world, read_only=True)
    unprobed = Support(Answer.UNKNOWN, Source.DECLARED, "not probed: the backend is read-only")
    assert backend.capabilities() == {**adapters.prove(world).capabilities(), Capability.HOLD: unprobed}
    calls = {event["verb"] for event in world.cluster.audit_events(world.user, since=world.mark)}
    assert "create" in calls
    mark = world.cluster.audit_mark()
    adapters.prove(world, read_only=True)
    written = [
        event["objectRef"]["resource"]
        for event in world.cluster.audit_events(world.user, since=mark)
        if event["verb"] not in ("get", "list", "watch")
    ]
    assert set(written) == {"selfsubjectaccessreviews"}


def test_a_probe_is_nobodys_job(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    steps = Backend._hold_steps

    def looked(backend: Backend, handle: adapter.Handle) -> str:
        seen.append((backend.find(handle.job), backend.list(), world.trainjob(handle)["metadata"]["labels"][PROBE]))
        return steps(backend, handle)

    monkeypatch.setattr(Backend, "_hold_steps", looked)
    adapters.prove(world)
    assert seen == [((), (), "true")]


# --- permissions

RIGHTS = {mode: adapter.rights(mode == "kueue") for mode in adapters.MODES}
CASES = [(mode, right) for mode in adapters.MODES for right in RIGHTS[mode]]


@pytest.mark.usefixtures("_gate")
@pytest.mark.parametrize(("mode", "right"), CASES)
def test_one_missing_permission(cluster: Cluster, mode: str, right: str) -> None:
    kueue = mode == "kueue"
    with adapters.world(cluster, mode, without=right) as world:
        if right in adapter.rights(kueue, "observe"):
            with pytest.raises(Unauthorized) as error:
                adapters.prove(world)
            text = f"dispatch: unauthorized: the adapter may not {right}, so it cannot observe the cluster: "
            assert str(error.value).startswith(text)
            return
        if right in adapter.rights(kueue, "write"):
            assert adapters.observing(world) == f"not permitted to {right}"
            assert world.created_trainjobs() == []
            return
        backend = adapters.prove(world)
        lowered = {c: s for c, s in backend.capabilities().items() if s.value is not Answer.YES}
        no = Support(Answer.NO, Source.PROBED, f"not permitted to {right}")
        assert lowered == {
            "update workloads.kueue.x-k8s.io": {Capability.HOLD: no},
            "get pods/log": {Capability.OUTPUT_READ: no, Capability.OUTPUT_FOLLOW: no},
        }.get(right, {})
        assert backend.observe_only == ""
        handle = backend.start(world.spec())
        if Capability.HOLD in lowered:
            for operation in (backend.hold, backend.release):
                with pytest.raises(Unsupported, match=r"not permitted to update workloads\.kueue\.x-k8s\.io$"):
                    operation(handle, 1)
        if right == "get nodes":
            with pytest.raises(Unsupported, match="not permitted to get nodes"):
                backend.ceased(handle)
        else:
            assert backend.ceased(handle).value is Answer.NO


def test_several_missing_permissions_are_all_named(cluster: Cluster) -> None:
    with adapters.world(cluster, "plain") as world:
        kubeconfig = cluster.token_kubeconfig(world.namespace.name, "nobody")
        world.settings["kubeconfig"] = str(kubeconfig)
        with pytest.raises(Unauthorized) as error:
            adapters.prove(world)
        assert f"may not {', '.join(adapter.rights(False, 'observe'))}, so it cannot observe" in str(error.value)
        rules = [
            {"apiGroups": [group], "resources": resources, "verbs": ["get", "list", "watch"]}
            for group, resources in (
                ("trainer.kubeflow.org", ["trainjobs"]),
                ("jobset.x-k8s.io", ["jobsets"]),
                ("batch", ["jobs"]),
                ("", ["pods"]),
            )
        ]
        cluster.grant(world.namespace.name, "nobody", rules, inside=world.namespace.name)
        world.wait(lambda: "trainjobs" in adapters.observing(world), "the new rights count")
        assert adapters.observing(world) == (
            "not permitted to create trainjobs.trainer.kubeflow.org, update trainjobs.trainer.kubeflow.org, "
            "delete trainjobs.trainer.kubeflow.org, delete jobsets.jobset.x-k8s.io, delete pods"
        )


@pytest.mark.parametrize("resource", ["clustertrainingruntimes", "trainingruntimes"])
def test_runtimes_are_not_needed_before_a_job_is_started(cluster: Cluster, resource: str) -> None:
    with adapters.world(cluster, "plain", without=f"get {resource}.trainer.kubeflow.org") as world:
        backend = adapters.prove(world)
        assert backend.observe_only == ""
        kind = {v: k for k, v in adapter.RUNTIME_KINDS.items()}[resource]
        spec = world.spec(runtime={"name": "torch-safe", "kind": kind})
        for call in (backend.start, backend.capabilities):
            with pytest.raises(Unauthorized, match=f'cannot get resource "{resource}"'):
                call(spec)


@pytest.mark.usefixtures("_gate")
@pytest.mark.parametrize(
    ("right", "what"),
    [
        ("get clusterqueues.kueue.x-k8s.io", 'clusterqueues.kueue.x-k8s.io "{}"'),
        ("get admissionchecks.kueue.x-k8s.io", 'admissionchecks.kueue.x-k8s.io "{}"'),
        ("get leases.coordination.k8s.io", 'leases.coordination.k8s.io "dispatch-admission-'),
    ],
)
def test_an_object_of_the_gate_that_may_not_be_read_leaves_it_unknown(cluster: Cluster, right: str, what: str) -> None:
    with adapters.world(cluster, "kueue", without=right) as world:
        backend = adapters.prove(world)
        gate = backend.capabilities()[Capability.READMISSION_GATE]
        assert (gate.value, gate.source) == (Answer.UNKNOWN, Source.PROBED)
        assert gate.reason.startswith(f"not permitted to {right}: {what.format(world.namespace.name)}")
        assert f'is forbidden: User "{world.user}" cannot get resource' in gate.reason
        assert backend.observe_only == f"the readmission gate is not proven: {gate.reason}"


@pytest.mark.usefixtures("_gate")
def test_a_check_that_is_limited_to_some_flavors_counts_as_not_listed(cluster: Cluster) -> None:
    with adapters.world(cluster, "kueue", flavors=("a", "b"), on_flavors=["a"]) as world:
        text = f"ClusterQueue {world.namespace.name} does not list AdmissionCheck {world.namespace.check}"
        assert adapters.observing(world) == f"the readmission gate is not proven: {text}"


# --- holding

HELD = f"object.metadata.annotations[?'{adapter.HOLD}'].orValue('') == '1'"
GATED = f"'{adapter.GATE}' in object.metadata.annotations"
OPENED = f"{HELD} && !({GATED}) && '{adapter.GATE}' in oldObject.metadata.annotations"
AT_HOLD = "/metadata/annotations/dispatch.phpboyscout.uk~1hold"
STEPS = {  # what a policy does to the updates of a TrainJob: when, and how; the text
    "hold": (
        HELD,
        '[JSONPatch{op: "add", path: "/metadata/annotations/x", value: object.metadata.annotations["nothing"]}]',
        "the cluster refuses it: .*no such key",
    ),
    "inspect": (
        f"{HELD} && {GATED}",
        f'[JSONPatch{{op: "remove", path: "{AT_HOLD}"}}]',
        "it is gated, with hold None, instead of held, with hold 1",
    ),
    "open": (
        OPENED,
        f'[JSONPatch{{op: "replace", path: "{AT_HOLD}", value: "7"}}]',
        "it is held, with hold 7, instead of held, with hold 1",
    ),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_step_of_holding_that_fails_makes_hold_a_no(plain: World, step: str) -> None:
    when, patch, text = STEPS[step]

    def lowered() -> bool:
        return adapters.prove(plain).capabilities()[Capability.HOLD].value is Answer.NO

    name = plain.namespace.name
    with adapters.mutating_policy(plain.cluster, name, patch, operation="UPDATE", when=when):
        plain.wait(lowered, "the policy works")
        backend = adapters.prove(plain)  # it may have begun to work between two steps
        hold = backend.capabilities()[Capability.HOLD]
        assert hold.source is Source.PROBED
        assert re.match(rf"preflight probe step {step} failed: .*{text}", hold.reason)
        assert adapter.remedy(hold.reason)
        assert backend.observe_only == ""
        handle = backend.start(plain.spec())
        for operation in (backend.hold, backend.release):
            with pytest.raises(Unsupported) as error:
                operation(handle, 1)
            assert str(error.value).endswith(hold.reason)


def test_a_release_that_is_not_refused_as_stale_makes_hold_a_no(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "released", lambda *_: None)
    hold = adapters.prove(world).capabilities()[Capability.HOLD]
    text = "preflight probe step release failed: instance 2 was not refused as stale"
    assert hold == Support(Answer.NO, Source.PROBED, text)


# --- a spec


def test_a_runtime_that_may_overlap_lowers_attempt_injection(world: World) -> None:
    backend = adapters.prove(world)
    assert backend.capabilities(world.spec()) == backend.capabilities()
    stock = backend.capabilities(world.spec(runtime={"name": "torch-distributed"}))
    reason = "the runtime's Jobs may replace a pod while it terminates"
    assert stock.pop(Capability.ATTEMPT_INJECTION) == Support(Answer.NO, Source.DECLARED, reason)
    assert stock == {c: s for c, s in backend.capabilities().items() if c is not Capability.ATTEMPT_INJECTION}


def test_a_runtime_that_cannot_run_a_spec_is_unsupported(plain: World) -> None:
    backend = adapters.prove(plain)
    spec = plain.spec(runtime={"name": "nowhere"})
    for call in (backend.capabilities, backend.start):
        with pytest.raises(Unsupported, match=r"Runtime nowhere cannot run .*: there is none of that name"):
            call(spec)


# --- what does not write


@pytest.mark.parametrize("why", ["observe-only", "read-only"])
def test_who_does_not_write_reads_as_ever(world: World, why: str) -> None:
    handle = world.opened()
    settings = dict(world.settings)
    if why == "observe-only":
        weak = adapters.account(world.cluster, world.namespace.name, "delete pods", name="weak")
        settings["kubeconfig"] = str(weak)
    backend = adapter.connect(settings, read_only=why == "read-only")
    text = "the backend was opened read-only"
    if why == "observe-only":
        text = "the cluster is observe-only: not permitted to delete pods"
        assert backend.observe_only == "not permitted to delete pods"
    before = world.trainjob(handle)
    writes: dict[str, tuple[Callable[..., object], tuple[Any, ...]]] = {
        "start": (backend.start, (world.spec(),)),
        "open": (backend.open, (handle,)),
        "hold": (backend.hold, (handle, 1)),
        "release": (backend.release, (handle, 1)),
        "stop": (backend.stop, (handle,)),
        "stop job": (backend.stop_job, (handle.job,)),
    }
    for name, (write, arguments) in writes.items():
        expected = Unsupported if (name, why) == ("start", "observe-only") else ReadOnly
        with pytest.raises(expected) as error:
            write(*arguments)
        what = f"{name.split()[0]} in namespace {world.namespace.name}: {text}"
        assert str(error.value) == f"dispatch: {expected.kind}: {what}"
    assert world.trainjob(handle)["spec"] == before["spec"]
    assert backend.find(handle.job) == backend.list() == (handle,)
    assert backend.inspect(handle).state is State.RUNNING
    assert backend.ceased(handle).value is Answer.NO
    with backend.watch(handle) as statuses:
        assert next(iter(statuses)).state is State.RUNNING
    with backend.output(handle) as lines:
        list(lines)
