"""Preflight on a cluster where something is missing or wrong: each reason of its page, with its exact text.

No gate runs but those that the tests start.
"""

from __future__ import annotations

import contextlib
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import adapter
from adapter import Answer, Backend, Capability, Invalid, Source, Support, Unsupported
from tests import adapters, jobs
from tests.adapters import World
from tests.cluster.api import Object
from tests.cluster.cluster import Cluster
from tests.cluster.gate import Gate
from tests.cluster.namespaces import Namespace
from tests.faults.proxy import Proxy, Request

PROBE = "dispatch.phpboyscout.uk/probe"


# --- the readmission gate's objects


def lease(cluster: Cluster, world: World, **spec: Any) -> None:
    """Has the settings name a Lease of the test's own."""
    name = world.namespace.name
    metadata = {"name": name, "namespace": "dispatch-system"}
    cluster.create({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec})
    world.settings["kueue"]["admissionLease"] = f"dispatch-system/{name}"


def no_check(world: World) -> str:
    del world.settings["kueue"]["admissionCheck"]
    return "kueue.admissionCheck is not set"


def no_local_queue(world: World) -> str:
    world.settings["kueue"]["localQueue"] = "nowhere"
    return f"LocalQueue {world.namespace.name}/nowhere does not exist"


def no_cluster_queue(world: World) -> str:
    metadata = {"name": "astray", "namespace": world.namespace.name}
    queue = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue", "metadata": metadata}
    world.cluster.create({**queue, "spec": {"clusterQueue": "nowhere"}})
    world.settings["kueue"]["localQueue"] = "astray"
    return "ClusterQueue nowhere does not exist"


def no_cluster_queue_named(world: World) -> str:
    metadata = {"name": "astray", "namespace": world.namespace.name}
    world.cluster.create(
        {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue", "metadata": metadata, "spec": {}}
    )
    world.settings["kueue"]["localQueue"] = "astray"
    return "ClusterQueue (none) does not exist"


def not_listed(world: World) -> str:
    world.settings["kueue"]["admissionCheck"] = "other"
    return f"ClusterQueue {world.namespace.name} does not list AdmissionCheck other"


def not_there(world: World) -> str:
    strategy = {"admissionChecks": [{"name": world.namespace.check}, {"name": "nowhere"}]}
    world.cluster.patch("ClusterQueue", world.namespace.name, None, {"spec": {"admissionChecksStrategy": strategy}})
    world.settings["kueue"]["admissionCheck"] = "nowhere"
    return "AdmissionCheck nowhere does not exist"


def another_controllers(world: World) -> str:
    world.settings["kueue"]["admissionCheck"] = f"{world.namespace.name}-other"
    return (
        f'AdmissionCheck {world.namespace.name}-other names controller "dispatch-test/other", '
        "not dispatch.phpboyscout.uk/admission"
    )


def not_active(world: World) -> str:
    return f"AdmissionCheck {world.namespace.check} is not Active"


def no_lease(world: World) -> str:
    world.namespace.activate()  # by hand: no controller is behind it
    world.settings["kueue"]["admissionLease"] = "dispatch-system/nowhere"
    return "Lease dispatch-system/nowhere does not exist"


def no_holder(world: World) -> str:
    world.namespace.activate()
    lease(world.cluster, world, holderIdentity="", leaseDurationSeconds=15)
    return "the admission controller's Lease has no holder"


def never_renewed(world: World) -> str:
    world.namespace.activate()
    lease(world.cluster, world, holderIdentity="gate", leaseDurationSeconds=15)
    return "the admission controller's Lease has never been renewed"


FAULTS = [
    *(no_check, no_local_queue, no_cluster_queue, no_cluster_queue_named, not_listed, not_there),
    *(another_controllers, not_active, no_lease, no_holder, never_renewed),
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_readmission_gate(cluster: Cluster, fault: Callable[[World], str]) -> None:
    with adapters.world(cluster, "kueue", extra_checks=["other"]) as world:
        text = fault(world)
        assert adapters.observing(world) == f"the readmission gate is not proven: {text}"
        support = adapters.prove(world).capabilities()
        assert support[Capability.READMISSION_GATE] == Support(Answer.NO, Source.PROBED, text)
        assert support[Capability.ATTEMPT_INJECTION] == support[Capability.READMISSION_GATE]
        assert adapter.remedy(text)
        assert world.created_trainjobs() == []


@pytest.mark.parametrize("renewed", ["2026-01-01T00:00:00.000000Z", "2999-01-01T00:00:00.000000Z"])
def test_a_check_set_active_by_hand_is_told_by_its_lease(cluster: Cluster, renewed: str) -> None:
    """Also by one that was last renewed by a clock far ahead."""
    with adapters.world(cluster, "kueue") as world:
        world.namespace.activate()
        lease(cluster, world, holderIdentity="gate", leaseDurationSeconds=45, renewTime=renewed)
        assert re.fullmatch(
            "the readmission gate is not proven: the admission controller's Lease was last renewed "
            r"-?[0-9]+h[0-9]+m[0-9]+s ago, beyond 1m30s",
            adapters.observing(world),
        )


def test_a_controller_that_ended_is_told_by_its_lease(cluster: Cluster) -> None:
    with cluster.controller() as gate, adapters.world(cluster, "kueue") as world:
        path = ("Lease", gate.lease, "dispatch-system")
        gate.kill()
        found = cluster.get(*path)
        found["spec"]["leaseDurationSeconds"] = 1  # so that nobody waits for 30 s
        cluster.update(found)
        text = r"the admission controller's Lease was last renewed [0-9]+s ago, beyond 2s"
        world.wait(lambda: re.search(text, adapters.prove(world).observe_only), "the Lease is old")


# --- the start gate


def test_without_admission_gated_by_no_probe_is_made(cluster: Cluster, gate: Gate) -> None:
    with cluster.reconfigured("kueue", feature_gates={"AdmissionGatedBy": False}):
        with cohort(cluster) as (world, other, neighbour):
            text = "Kueue does not enforce admission-gated-by: check the Kueue version and the AdmissionGatedBy feature"
            assert adapters.observing(world) == f"the start gate is not proven: {text}"
            assert world.created_trainjobs() == []
            assert evictions(other, neighbour) == []
    assert gate.exit_code is None


def test_a_probe_evicts_nobody_where_all_is_well(cluster: Cluster, gate: Gate) -> None:
    with cohort(cluster) as (world, other, neighbour):
        assert adapters.prove(world).capabilities()[Capability.HOLD].value is Answer.YES
        assert len(world.created_trainjobs()) == 1
        assert evictions(other, neighbour) == []
    assert gate.exit_code is None


def test_guard_off_a_probe_without_a_dry_run_evicts_another_tenants_job(
    cluster: Cluster, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backend, "_dry_runs", lambda *_: ("", False))
    with cluster.reconfigured("kueue", feature_gates={"AdmissionGatedBy": False}):
        with cohort(cluster) as (world, other, neighbour):
            text = r"the start gate is not proven: Kueue admitted the gated probe's Workload trainjob-dj-[0-9a-z-]+"
            assert re.fullmatch(text, adapters.observing(world))
            world.wait(lambda: evictions(other, neighbour), "the neighbour was evicted")
    assert gate.exit_code is None


@pytest.fixture
def gate(cluster: Cluster) -> Iterator[Gate]:
    with cluster.controller() as running:
        yield running


def evictions(namespace: Namespace, job: str) -> list[Object]:
    """All that its Workload has seen: it runs again when the probe is gone."""
    found: list[Object] = namespace.workload(job)["status"].get("schedulingStats", {}).get("evictions", [])
    return found


@contextlib.contextmanager
def cohort(cluster: Cluster) -> Iterator[tuple[World, Namespace, str]]:
    """The adapter's queue, and a neighbour's that has borrowed all of its quota and runs a job on it."""
    name = adapter.new_job()
    reclaim = {"reclaimWithinCohort": "Any", "withinClusterQueue": "LowerPriority"}
    with adapters.world(cluster, "kueue", quota="1", cohort=name, preemption=reclaim) as world:
        groups = cluster.get("ClusterQueue", world.namespace.name)["spec"]["resourceGroups"]
        groups[0]["flavors"][0]["resources"][0]["nominalQuota"] = "0"  # all is borrowed
        with cluster.namespace(check=False, cohort=name, settings={"resourceGroups": groups}) as other:
            job = jobs.trainjob(cpu="1", gated=False)
            other.create(job)
            jobs.running(other, job["metadata"]["name"])
            yield world, other, job["metadata"]["name"]


def test_a_policy_that_takes_the_gate_off_is_found_by_a_dry_run(cluster: Cluster) -> None:
    patch = '[JSONPatch{op: "remove", path: "/metadata/annotations/dispatch.phpboyscout.uk~1gate"}]'
    with adapters.world(cluster, "plain") as world:
        with adapters.mutating_policy(cluster, world.namespace.name, patch):
            world.wait(lambda: adapters.prove(world).observe_only, "the policy works")
            found = adapters.prove(world).observe_only  # it may have begun to work between two steps
            assert found == (
                "the start gate is not proven: a dry run of the probe: it came back without its gate "
                "dispatch.phpboyscout.uk/gate: look at the webhooks that change TrainJobs"
            )
            made = world.created_trainjobs()
            assert adapters.observing(world) == found
            assert world.created_trainjobs() == made  # none since the policy works


@pytest.mark.parametrize("lost", [False, True])
def test_a_gate_that_is_taken_off_the_probe_itself_is_found(plain: World, proxy: Proxy, lost: bool) -> None:
    """By a policy that leaves a dry run alone; also when the answer to the create is lost."""
    patch = '[JSONPatch{op: "remove", path: "/metadata/annotations/dispatch.phpboyscout.uk~1gate"}]'
    plain.settings["kubeconfig"] = str(proxy.kubeconfig(pathlib.Path(plain.settings["kubeconfig"])))
    name = plain.namespace.name
    with adapters.mutating_policy(plain.cluster, name, patch, when="request.?dryRun.orValue(false) == false"):
        with proxy.lose_answer("POST", "/trainjobs$") if lost else contextlib.nullcontext():
            found = plain.wait(lambda: adapters.prove(plain).observe_only, "the policy works")
    assert found == (
        "the start gate is not proven: the probe: it came back without its gate dispatch.phpboyscout.uk/gate: "
        "look at the webhooks that change TrainJobs"
    )
    assert plain.created_trainjobs() != []


def test_pods_of_the_probe_are_named(plain: World) -> None:
    """Somebody resumes the probe before it has a JobSet."""
    cluster, found = plain.cluster, []
    cluster.kill("jobset")
    try:
        call = adapters.Call(lambda: found.append(adapter.connect(plain.settings)))
        (probe,) = plain.wait(lambda: plain.namespace.list("TrainJob", labels=PROBE), "the probe is there")
        plain.namespace.patch("TrainJob", probe["metadata"]["name"], {"spec": {"suspend": False}})
    finally:
        cluster.start("jobset")
    assert call.wait() is None
    assert re.fullmatch(
        r"the start gate is not proven: pods appeared for the gated probe: dj-[0-9a-z]{26}-s1-node-0-0-[0-9a-z]{5}",
        found[0].observe_only,
    )
    assert plain.left() == []


def test_a_probe_runtime_that_is_not_there_is_told(plain: World) -> None:
    plain.settings["probeRuntime"] = {"name": "nowhere"}
    with pytest.raises(Invalid) as error:
        adapters.prove(plain)
    what = rf"preflight probe: TrainJob {plain.namespace.name}/dj-[0-9a-z]{{26}}-s1: the cluster refuses it: "
    assert re.match(rf"dispatch: invalid: {what}.*nowhere", str(error.value))
    assert plain.created_trainjobs() == []


def test_what_proves_nothing_in_time_is_told(plain: World) -> None:
    plain.settings["probeTimeout"] = 1
    plain.cluster.kill("jobset")
    try:
        backend = adapter.connect(plain.settings)
    finally:
        plain.cluster.start("jobset")
    assert backend.observe_only == "the start gate is not proven: nothing proved it within 1s: there is nothing of it"
    assert plain.left() == []


def test_a_server_without_the_core_api_is_named(plain: World, proxy: Proxy) -> None:
    """Whatever it is: the real one does not even start so."""
    plain.settings["kubeconfig"] = str(proxy.kubeconfig(pathlib.Path(plain.settings["kubeconfig"])))
    with proxy.answer(404, "GET", "/api/v1$"), pytest.raises(Unsupported) as error:
        adapters.prove(plain)
    text = "the cluster does not serve v1; this adapter supports Trainer v2.3, JobSet v0.12 and Kueue v0.20"
    assert str(error.value) == f"dispatch: unsupported: {text}"


def test_a_release_that_the_server_refuses_makes_hold_a_no(plain: World, proxy: Proxy) -> None:
    plain.settings["kubeconfig"] = str(proxy.kubeconfig(pathlib.Path(plain.settings["kubeconfig"])))
    reads = "GET", r"/trainjobs/dj-[^/?]*$"

    def opened(request: Request) -> None:
        """When the probe is open it is inspected, and then released."""
        if not adapter.is_gated(plain.namespace.get("TrainJob", request.path.rpartition("/")[2])):
            steps.remove()
            proxy.answer(400, *reads, times=1)

    steps = proxy.call(opened, *reads)
    hold = adapters.prove(plain).capabilities()[Capability.HOLD]
    assert (hold.value, hold.source) == (Answer.NO, Source.PROBED)
    text = r"preflight probe step release failed: TrainJob .*: the cluster refuses it: the proxy says 400"
    assert re.fullmatch(text, hold.reason)


# --- plain mode where Kueue takes jobs


def captured(world: World) -> None:
    with pytest.raises(Unsupported) as error:
        adapters.prove(world)
    assert re.match(
        r"dispatch: unsupported: Kueue made Workload trainjob-dj-[0-9a-z]{26}-s1-[0-9a-f]{5} for a TrainJob "
        "with no queue: add a kueue section to the settings, or have Kueue leave jobs without a queue alone",
        str(error.value),
    )


def default_queue(world: World) -> None:
    metadata = {"name": "default", "namespace": world.namespace.name}
    queue = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue", "metadata": metadata}
    world.cluster.create({**queue, "spec": {"clusterQueue": world.namespace.name}})

    def takes() -> bool:
        made = world.namespace.create(jobs.trainjob(queue=None, gated=False), dry_run=True)
        return "kueue.x-k8s.io/queue-name" in made["metadata"]["labels"]

    world.wait(takes, "Kueue knows the queue")


def test_plain_mode_is_refused_where_a_queue_named_default_takes_jobs(plain: World) -> None:
    default_queue(plain)
    captured(plain)


def test_plain_mode_is_refused_where_kueue_manages_jobs_without_a_queue(plain: World) -> None:
    with plain.cluster.reconfigured("kueue", config={"manageJobsWithoutQueueName": True}):
        captured(plain)


def test_where_kueue_takes_jobs_and_does_not_gate_them_no_probe_is_made(plain: World) -> None:
    with plain.cluster.reconfigured("kueue", feature_gates={"AdmissionGatedBy": False}):
        default_queue(plain)
        text = "Kueue takes a TrainJob with no queue, and Kueue does not enforce admission-gated-by: check"
        with pytest.raises(Unsupported, match=text):
            adapters.prove(plain)
        assert plain.created_trainjobs() == []
