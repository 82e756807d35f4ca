"""What preflight makes of what it read, and what is written when a job is held and released."""

from __future__ import annotations

import datetime
import pathlib
import re
from typing import Any

import pytest
import yaml

import adapter
from adapter import Answer, Capability, Ceased, Conflict, Kueue, Source, StaleHold, Support

NOW = datetime.datetime(2026, 1, 1, 12, 0, 0, tzinfo=datetime.UTC)
KUEUE = Kueue("lq", "check", "system/lease")
HOLD, GATED_BY = adapter.HOLD, adapter.GATED_BY


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.9, "0s"),
        (45, "45s"),
        (60, "1m0s"),
        (90.5, "1m30s"),
        (3600, "1h0m0s"),
        (3661, "1h1m1s"),
        (90000, "25h0m0s"),
        (-0.9, "0s"),
        (-5, "-5s"),
        (-3661, "-1h1m1s"),
    ],
)
def test_a_duration_is_written_as_go_does(seconds: float, text: str) -> None:
    assert adapter.go_duration(seconds) == text


def condition(kind: str, status: str = "True", message: str = "m") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": "R", "message": message}


def good() -> dict[str, Any]:
    """The objects of a gate that works, in the order in which they are read."""
    lease = {"holderIdentity": "g", "leaseDurationSeconds": 15, "renewTime": "2026-01-01T11:59:40.000000Z"}
    return {
        "LocalQueue": {"spec": {"clusterQueue": "cq"}},
        "ClusterQueue": {"spec": {"admissionChecksStrategy": {"admissionChecks": [{"name": "x"}, {"name": "check"}]}}},
        "AdmissionCheck": {
            "spec": {"controllerName": adapter.CONTROLLER},
            "status": {"conditions": [condition("Active")]},
        },
        "Lease": {"spec": lease},
    }


def fault(**changes: Any) -> str:
    return adapter.readmission_fault(KUEUE, "ns", {**good(), **changes}, NOW)


def test_a_gate_that_works_has_no_fault_at_any_step() -> None:
    found: dict[str, Any] = {}
    for kind, obj in good().items():
        found[kind] = obj
        assert adapter.readmission_fault(KUEUE, "ns", found, NOW) == ""


def lease(**changes: Any) -> dict[str, Any]:
    return {"spec": {**good()["Lease"]["spec"], **changes}}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"LocalQueue": None}, "LocalQueue ns/lq does not exist"),
        ({"ClusterQueue": None}, "ClusterQueue cq does not exist"),
        ({"ClusterQueue": {"spec": {}}}, "ClusterQueue cq does not list AdmissionCheck check"),
        ({"AdmissionCheck": None}, "AdmissionCheck check does not exist"),
        (
            {"AdmissionCheck": {"spec": {"controllerName": "x/y"}}},
            f'AdmissionCheck check names controller "x/y", not {adapter.CONTROLLER}',
        ),
        ({"AdmissionCheck": {"spec": good()["AdmissionCheck"]["spec"]}}, "AdmissionCheck check is not Active"),
        ({"Lease": None}, "Lease system/lease does not exist"),
        ({"Lease": lease(holderIdentity=None)}, "the admission controller's Lease has no holder"),
        ({"Lease": lease(renewTime=None)}, "the admission controller's Lease has never been renewed"),
        ({"Lease": lease(renewTime="soon")}, "the admission controller's Lease has never been renewed"),
        (
            {"Lease": lease(renewTime="2026-01-01T11:58:45Z")},
            "the admission controller's Lease was last renewed 1m15s ago, beyond 30s",
        ),
        (
            {"Lease": lease(renewTime="2026-01-01T13:00:00Z")},
            "the admission controller's Lease was last renewed -1h0m0s ago, beyond 30s",
        ),
    ],
)
def test_a_fault_of_the_readmission_gate(changes: dict[str, Any], text: str) -> None:
    assert fault(**changes) == text
    assert adapter.remedy(text)


@pytest.mark.parametrize("renewed", ["2026-01-01T11:59:30Z", "2026-01-01T12:00:20Z"])
def test_a_lease_is_fresh_up_to_its_limit_also_when_its_clock_is_ahead(renewed: str) -> None:
    assert fault(Lease=lease(renewTime=renewed)) == ""


def workload(*conditions: dict[str, str], gate: str = adapter.START_GATE) -> dict[str, Any]:
    return {"metadata": {"name": "w", "annotations": {GATED_BY: gate}}, "status": {"conditions": list(conditions)}}


JOBSET = {"spec": {"suspend": True}, "status": {"conditions": [condition("Suspended")]}}


@pytest.mark.parametrize(
    ("queued", "pods", "workloads", "jobsets", "expected"),
    [
        (True, [], [], [], None),
        (True, [], [workload()], [], None),
        (True, [], [workload(condition("QuotaReserved", "False"))], [], ""),
        (True, [], [workload(condition("QuotaReserved", "False"), gate="x/y")], [JOBSET], None),
        (True, [], [workload(condition("QuotaReserved"))], [], "Kueue admitted the gated probe's Workload w"),
        (True, [], [workload(condition("Admitted"))], [], "Kueue admitted the gated probe's Workload w"),
        (False, [], [], [], None),
        (False, [], [], [{"spec": {"suspend": True}}], None),
        (False, [], [], [JOBSET], ""),
        (
            False,
            [{"metadata": {"name": "b"}}, {"metadata": {"name": "a"}}],
            [],
            [JOBSET],
            "pods appeared for the gated probe: a, b",
        ),
    ],
)
def test_what_proves_the_start_gate(
    queued: bool, pods: Any, workloads: Any, jobsets: Any, expected: str | None
) -> None:
    assert adapter.start_fault(queued, pods, workloads, jobsets) == expected


def test_every_reason_has_its_own_remedy() -> None:
    for form, text in adapter.REMEDIES:
        assert adapter.remedy(f"the cluster is observe-only: {re.sub('<[a-z]+>', 'x-1', form)}") == text
    assert adapter.remedy("nothing but the adapter resumes a job") == ""


def test_the_example_role_has_every_right() -> None:
    granted = {
        f"{verb} {resource}" + (f".{group}" if group else "")
        for obj in yaml.safe_load_all(pathlib.Path("examples/adapter-role.yaml").read_text())
        for rule in obj.get("rules", [])
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    unasked = {
        "get clustertrainingruntimes.trainer.kubeflow.org",
        "get trainingruntimes.trainer.kubeflow.org",
        "get clusterqueues.kueue.x-k8s.io",
        "get admissionchecks.kueue.x-k8s.io",
        "get leases.coordination.k8s.io",
    }
    assert granted == {*adapter.rights(True), *unasked}
    assert set(adapter.rights(False)) == {right for right in adapter.rights(True) if "kueue" not in right}


def test_hold_is_no_for_the_first_reason_there_is() -> None:
    yes, right = Support(Answer.YES, Source.PROBED), "update workloads.kueue.x-k8s.io"

    def hold(**changes: Any) -> Support:
        given: dict[str, Any] = {"kueue": True, "read_only": False, "denied": [], "gate": yes}
        given |= {"observe_only": "", "hold_fault": "", **changes}
        return adapter.supports(**given)[Capability.HOLD]

    assert hold() == yes
    assert hold(hold_fault="a step failed").reason == "a step failed"
    assert hold(denied=[right]).reason == f"not permitted to {right}"
    assert hold(denied=[right], kueue=False) == yes
    assert hold(denied=[right], observe_only="why").reason == "the cluster is observe-only: why"
    assert hold(read_only=True, observe_only="why").value is Answer.UNKNOWN


@pytest.mark.parametrize(
    ("changes", "overlap"),
    [({}, True), ({"podReplacementPolicy": "Failed"}, False), ({"podFailurePolicy": {"rules": []}}, False)],
)
def test_a_runtime_whose_job_replaces_pods_early_cannot_inject_attempts(changes: Any, overlap: bool) -> None:
    runtime = {"spec": {"template": {"spec": {"replicatedJobs": [{"name": "node", "template": {"spec": changes}}]}}}}
    assert bool(adapter.may_overlap(runtime)) is overlap


# --- hold, release

NAME = "dj-01arz3ndektsv4rrffq69g5fav-s2"


def trainjob(hold: str | None = None, *, queued: bool = False, gated: bool = False, admission: str = "1") -> Any:
    annotations = {**({HOLD: hold} if hold else {}), **({adapter.GATE: "closed"} if gated else {})}
    pod = {"metadata": {"annotations": {adapter.ADMISSION: admission, adapter.EPOCH: "2000001"}}}
    rendered = [{"name": n, "template": {"spec": {"template": pod}}} for n in ("node", "other")]
    patch = {
        "manager": adapter.PATCH_MANAGER,
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": rendered}}},
    }
    return {
        "metadata": {
            "name": NAME,
            "labels": {adapter.QUEUE_NAME: "lq"} if queued else {},
            "annotations": annotations,
        },
        "spec": {"suspend": bool(hold), "runtimePatches": [{"manager": "kueue"}, patch]},
    }


@pytest.mark.parametrize(
    ("before", "instance"), [(None, 1), ("1", 2), ("released-1", 2), ("released-9", 10), (None, 10**18 - 1)]
)
def test_a_larger_instance_is_put_in_place(before: str | None, instance: int) -> None:
    for queued in (False, True):
        changed = adapter.held(trainjob(before, queued=queued), instance)
        assert changed is not None
        assert changed["metadata"]["annotations"][HOLD] == str(instance)
        assert changed["spec"]["suspend"] is (bool(before) or not queued)


@pytest.mark.parametrize(("before", "instance"), [("2", 1), ("released-2", 2), ("released-2", 1)])
def test_another_is_stale(before: str, instance: int) -> None:
    with pytest.raises(StaleHold):
        adapter.held(trainjob(before), instance)


def test_the_same_again_changes_nothing_but_completes() -> None:
    assert adapter.held(trainjob("2"), 2) is None
    resumed = trainjob("2")
    resumed["spec"]["suspend"] = False
    assert adapter.held(resumed, 2) == trainjob("2")


def test_a_hold_that_is_not_ours_is_a_conflict() -> None:
    with pytest.raises(Conflict, match="which is not dispatch's"):
        adapter.held(trainjob("forever"), 1)


def test_a_release_in_plain_mode_begins_the_next_attempt_in_every_replicated_job() -> None:
    changed = adapter.released(trainjob("1"), 1)
    assert changed is not None
    assert changed["metadata"]["annotations"][HOLD] == "released-1"
    assert changed["spec"]["suspend"] is False
    jobs = changed["spec"]["runtimePatches"][1]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    counts = [job["template"]["spec"]["template"]["metadata"]["annotations"] for job in jobs]
    assert counts == [{adapter.ADMISSION: "2", adapter.EPOCH: "2000002"}] * 2


@pytest.mark.parametrize("mode", [{"queued": True}, {"gated": True}])
def test_a_release_in_kueue_mode_or_before_open_only_marks(mode: Any) -> None:
    before = trainjob("1", **mode)
    changed = adapter.released(before, 1)
    before["metadata"]["annotations"][HOLD] = "released-1"
    assert changed == before


def test_a_release_of_what_was_released_changes_nothing() -> None:
    assert adapter.released(trainjob("released-1"), 1) is None


@pytest.mark.parametrize("hold", [None, "2", "released-2", "forever"])
def test_a_release_of_what_is_not_in_place_is_stale(hold: str | None) -> None:
    with pytest.raises(StaleHold):
        adapter.released(trainjob(hold), 1)


@pytest.mark.parametrize("admission", ["999999", "many"])
def test_a_release_without_a_next_admission_is_a_conflict(admission: str) -> None:
    with pytest.raises(Conflict, match="start the next submission"):
        adapter.released(trainjob("1", admission=admission), 1)


# --- does it stand still, has it ceased


def job(name: str = "j", *conditions: str, suspend: bool = True) -> Any:
    conditions_ = [condition(kind) for kind in conditions]
    return {"metadata": {"name": name}, "spec": {"suspend": suspend}, "status": {"conditions": conditions_}}


def pod(phase: str = "Running", node: str | None = "n") -> Any:
    metadata = {"name": "p", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {"metadata": metadata, "spec": {"nodeName": node} if node else {}, "status": {"phase": phase}}


@pytest.mark.parametrize(
    ("jobsets", "jobs", "pods", "text"),
    [
        ([JOBSET], [job("j", "Suspended"), job("i", "Complete", suspend=False)], [pod("Failed")], ""),
        ([JOBSET], [], [pod()], "pod p on n has not ended"),
        ([JOBSET], [job("j")], [], "Job j is not suspended yet"),
        ([JOBSET], [job("j", "Suspended", suspend=False)], [], "Job j is not suspended yet"),
        ([job("s")], [], [], "JobSet s is not suspended yet"),
        ([], [], [], "Trainer has not made its JobSet yet"),
    ],
)
def test_what_stands_still(jobsets: Any, jobs: Any, pods: Any, text: str) -> None:
    assert adapter.unquiet(jobsets, jobs, pods) == text


def node(*taints: str, made: str = "2025-01-01T00:00:00Z") -> Any:
    return {"metadata": {"creationTimestamp": made}, "spec": {"taints": [{"key": key} for key in taints]}}


@pytest.mark.parametrize(
    ("left", "nodes", "value", "evidence"),
    [
        ({"TrainJob": [job("t")]}, {}, "no", "TrainJob t has not ended"),
        ({"TrainJob": [job("t", "Failed")], "JobSet": [job("s")]}, {}, "no", "JobSet s has not ended"),
        ({"Job": [job("j")]}, {}, "no", "Job j has not ended"),
        ({"TrainJob": [job("t", "Failed")], "JobSet": [job("t", "Failed")]}, {}, "yes", "no pods are left"),
        ({"TrainJob": [job("t", "Failed")]}, {}, "yes", "no pods are left"),
        ({"TrainJob": [job("t", "Complete", suspend=False)]}, {}, "yes", "no pods are left"),
        (
            {"TrainJob": [job("t", "Failed", suspend=False)], "JobSet": [job("s", "Failed")]},
            *({}, "no", "TrainJob t has lost its JobSet, which Trainer makes anew"),
        ),
        ({"Pod": [pod("Failed")]}, {}, "yes", "1 pods are left, all have ended"),
        ({"Pod": [pod(node=None)]}, {}, "no", "pod p on no node has not ended"),
        ({"Pod": [pod()]}, {"n": node()}, "no", "pod p on n has not ended"),
        (
            {"Pod": [pod()]},
            {"n": node(adapter.UNREACHABLE_NODE)},
            "no",
            "pod p on n, which is unreachable, has not ended",
        ),
        ({"Pod": [pod()]}, {"n": None}, "unknown", "pod p on n, whose Node is gone: its machine may run on"),
        (
            {"Pod": [pod()]},
            {"n": node(adapter.OUT_OF_SERVICE, made="2026-02-01T00:00:00Z")},
            "unknown",
            "pod p on n, whose Node is another one since: its first machine may run on",
        ),
        (
            {"Pod": [pod()]},
            {"n": node(adapter.UNREACHABLE_NODE, adapter.OUT_OF_SERVICE)},
            "yes",
            "pod p on n, which is out of service",
        ),
        ({"Pod": [pod(), pod(node="m")]}, {"n": None, "m": node()}, "no", "pod p on m has not ended"),
    ],
)
def test_what_has_ceased(left: Any, nodes: Any, value: str, evidence: str) -> None:
    empty: dict[str, Any] = {"TrainJob": [], "JobSet": [], "Job": [], "Pod": []}
    assert adapter.ceased_by({**empty, **left}, nodes) == Ceased(Answer(value), evidence)
