"""Preflight: each row of its page, on the real control plane, with its exact text."""

from __future__ import annotations

import pytest

import adapter
from adapter import Answer, Backend, Capability, Source, Support, Unauthorized, Unsupported
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
