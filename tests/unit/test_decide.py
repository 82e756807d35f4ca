"""The table of `admission.decide`: the rows in their order, and what holds for any JSON."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import admission
from admission import Action, Decision, Facts, Raised, decide

CHECKS = frozenset({"gate", "second-gate"})
NAME = "dj-01arz3ndektsv4rrffq69g5fav-s1"
Object = dict[str, Any]


def condition(kind: str, status: str = "True") -> Object:
    return {"type": kind, "status": status}


def check(name: str = "gate", state: str = "Pending", message: str = "") -> Object:
    return {"name": name, "state": state, "message": message, "lastTransitionTime": "2026-01-01T00:00:00Z"}


def workload(*conditions: Object, checks: list[Object] | None = None, **changes: Any) -> Object:
    owner = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "name": NAME, "uid": "u1"}
    obj: Object = {
        "metadata": {
            "namespace": "ns",
            "name": "w",
            "resourceVersion": "7",
            "ownerReferences": [{**owner, "controller": True}],
        },
        "spec": {"active": True, "podSets": [{"name": "node", "template": {"metadata": {}}}]},
        "status": {
            "conditions": [condition("QuotaReserved"), *conditions],
            "admissionChecks": [check()] if checks is None else checks,
        },
    }
    return merged(obj, changes)


def replicated_job(admission: str, epoch: str, name: str = "node") -> Object:
    annotations = {"dispatch.phpboyscout.uk/admission": admission, "dispatch.phpboyscout.uk/epoch": epoch}
    return {"name": name, "template": {"spec": {"template": {"metadata": {"annotations": annotations}}}}}


def patch(*jobs: Object) -> Object:
    spec = {"template": {"spec": {"replicatedJobs": list(jobs)}}}
    return {"manager": "dispatch.phpboyscout.uk/adapter", "trainingRuntimeSpec": spec}


KUEUES_PATCH = {"manager": "kueue.x-k8s.io/manager", "trainingRuntimeSpec": {"template": {"spec": {}}}}


def trainjob(*jobs: Object, **changes: Any) -> Object:
    obj: Object = {
        "metadata": {"namespace": "ns", "name": NAME, "uid": "u1", "generation": 3},
        "spec": {"suspend": True, "runtimePatches": [KUEUES_PATCH, patch(*(jobs or [replicated_job("0", "1000000")]))]},
        "status": {},
    }
    return merged(obj, changes)


def merged(obj: Object, changes: Object) -> Object:
    """`obj` with the changes laid over it, key by key."""
    for key, value in changes.items():
        obj[key] = merged(obj.get(key) or {}, value) if isinstance(value, dict) else value
    return obj


def jobset(suspend: bool = True, suspended: str = "True", active: int = 0) -> Object:
    status = {"conditions": [condition("Suspended", suspended)], "replicatedJobsStatus": [{"active": active}]}
    return {"metadata": {"name": NAME}, "spec": {"suspend": suspend}, "status": status}


def pod(name: str, phase: str | None = "Running", node: str | None = "n1") -> Object:
    return {"metadata": {"name": name}, "spec": {"nodeName": node}, "status": {"phase": phase}}


def decided(
    wl: Object, tj: Object | None = None, js: Object | None = None, pods: list[Object] | None = None
) -> Decision:
    return decide(Facts(wl, CHECKS, tj, js, pods or []))


NOT_RESERVED = workload(status={"conditions": [condition("QuotaReserved", "False")]})
VARIANT = {
    "apiVersion": "kueue.x-k8s.io/v1beta2",
    "kind": "Workload",
    "name": "parent",
    "uid": "u9",
    "controller": True,
}
ANNOTATED = [{"name": "node", "template": replicated_job("0", "1000000")["template"]["spec"]["template"]}]
HELD = "dispatch.phpboyscout.uk/hold"
UNREADABLE = "the admission count is unreadable: "


# Each row of the table, in its order; within a row, each way to come to it.
@pytest.mark.parametrize(
    ("row", "action", "message", "facts"),
    [
        ("1", Action.NOTHING, "", (NOT_RESERVED,)),
        ("1", Action.NOTHING, "", (workload(checks=[]),)),
        ("1", Action.NOTHING, "", (workload(checks=[check(state="Ready")]),)),
        ("1", Action.NOTHING, "", (workload(checks=[check("foreign")]),)),
        ("1", Action.NOTHING, "", (workload(status=None),)),
        ("2", Action.NOTHING, "", (workload(condition("Evicted")), trainjob())),
        ("2", Action.NOTHING, "", (workload(condition("Finished")), trainjob())),
        ("2", Action.NOTHING, "", (workload(spec={"active": False}), trainjob())),
        ("2", Action.NOTHING, "", (workload(metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}), trainjob())),
        (
            "3",
            Action.APPROVE,
            "not dispatch's",
            (workload(metadata={"ownerReferences": [{**VARIANT, "kind": "Job"}]}),),
        ),
        ("3", Action.APPROVE, "not dispatch's", (workload(metadata={"ownerReferences": []}),)),
        (
            "3a",
            Action.COMPLAIN,
            "unsupported: owned by Workload",
            (workload(metadata={"ownerReferences": [VARIANT]}, spec={"podSets": ANNOTATED}),),
        ),
        (
            "3a",
            Action.COMPLAIN,
            "unsupported: owned by nobody",
            (workload(metadata={"ownerReferences": None}, spec={"podSets": ANNOTATED}),),
        ),
        ("4", Action.NOTHING, "", (workload(), None)),
        ("4", Action.NOTHING, "", (workload(), trainjob(metadata={"uid": "another"}))),
        (
            "5",
            Action.APPROVE,
            "not dispatch's",
            (workload(), trainjob(metadata={"name": "mine"}, spec={"runtimePatches": [KUEUES_PATCH]})),
        ),
        ("6", Action.NOTHING, "", (workload(), trainjob(metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}))),
        ("6", Action.NOTHING, "", (workload(), trainjob(status={"conditions": [condition("Complete")]}))),
        ("6", Action.NOTHING, "", (workload(), trainjob(status={"conditions": [condition("Failed")]}))),
        (
            "7",
            Action.COMPLAIN,
            UNREADABLE + "the TrainJob has no runtime patch of the adapter",
            (workload(), trainjob(spec={"runtimePatches": [KUEUES_PATCH]})),
        ),
        (
            "7",
            Action.COMPLAIN,
            UNREADABLE + "the adapter's patch names no replicated job",
            (workload(), trainjob(spec={"runtimePatches": [patch()]})),
        ),
        (
            "7",
            Action.COMPLAIN,
            UNREADABLE + "dispatch.phpboyscout.uk/admission is '01'",
            (workload(), trainjob(replicated_job("01", "1000001"))),
        ),
        (
            "7",
            Action.COMPLAIN,
            UNREADABLE + "dispatch.phpboyscout.uk/admission is '1000000'",
            (workload(), trainjob(replicated_job("1000000", "2000000"))),
        ),
        (
            "7",
            Action.COMPLAIN,
            UNREADABLE + "dispatch.phpboyscout.uk/epoch is '1000002' at admission 1",
            (workload(), trainjob(replicated_job("1", "1000002"))),
        ),
        (
            "7",
            Action.COMPLAIN,
            UNREADABLE + "dispatch.phpboyscout.uk/epoch is '1000000000001' at admission 1",
            (workload(), trainjob(replicated_job("1", "1000000000001"))),
        ),
        (
            "7",
            Action.COMPLAIN,
            UNREADABLE + "dispatch.phpboyscout.uk/admission is 'missing'",
            (workload(), trainjob(replicated_job("0", "1000000"), {"name": "model-initializer"})),
        ),
        (
            "7",
            Action.COMPLAIN,
            UNREADABLE + "its replicated jobs differ",
            (workload(), trainjob(replicated_job("1", "1000001"), replicated_job("2", "1000002", "model-initializer"))),
        ),
        (
            "7a",
            Action.COMPLAIN,
            "managed by kueue.x-k8s.io/multikueue: its pods cannot be seen",
            (workload(), trainjob(spec={"managedBy": "kueue.x-k8s.io/multikueue"})),
        ),
        ("8", Action.LEAVE, "held: instance 3", (workload(), trainjob(metadata={"annotations": {HELD: "3"}}))),
        ("8", Action.LEAVE, "being stopped", (workload(), trainjob(metadata={"annotations": {HELD: "stop"}}))),
        ("8", Action.LEAVE, "held: instance yes", (workload(), trainjob(metadata={"annotations": {HELD: "yes"}}))),
        ("9", Action.LEAVE, "the TrainJob is not suspended", (workload(), trainjob(spec={"suspend": False}))),
        ("9", Action.LEAVE, "the TrainJob is not suspended", (workload(), trainjob(spec={"suspend": None}))),
        ("10", Action.WAIT, "the JobSet still runs", (workload(), trainjob(), jobset(suspend=False))),
        ("10", Action.WAIT, "the JobSet still runs", (workload(), trainjob(), jobset(suspended="False"))),
        ("10", Action.WAIT, "the JobSet still runs", (workload(), trainjob(), jobset(active=1))),
        (
            "11",
            Action.WAIT,
            "waiting for 1 pods of the earlier attempt: a on n1",
            (workload(), trainjob(), jobset(), [pod("a"), pod("b", "Succeeded"), pod("c", "Failed")]),
        ),
        (
            "11",
            Action.WAIT,
            "waiting for 4 pods of the earlier attempt: a on n1, b on n2, c on no node, …",
            (
                workload(),
                trainjob(),
                jobset(),
                [pod("d", "Unknown"), pod("b", node="n2"), pod("c", "Pending", None), pod("a", None)],
            ),
        ),
        (
            "12",
            Action.REJECT,
            "the admission count is exhausted",
            (workload(), trainjob(replicated_job("999999", "1999999")), jobset()),
        ),
        ("13", Action.RAISE, "admission 1", (workload(), trainjob(), None)),
        ("13", Action.RAISE, "admission 1", (workload(), trainjob(), jobset(), [pod("a", "Failed")])),
        ("13", Action.RAISE, "admission 1", (workload(), trainjob(metadata={"annotations": {HELD: "released-3"}}))),
        (
            "13",
            Action.RAISE,
            "admission 1",
            (workload(), trainjob(spec={"managedBy": "trainer.kubeflow.org/trainjob-controller"})),
        ),
    ],
)
def test_the_table(row: str, action: Action, message: str, facts: tuple[Any, ...]) -> None:
    decision = decided(*facts)
    assert (decision.row, decision.action, decision.message) == (row, action, message)


def test_a_trainjob_is_dispatchs_by_its_patch_alone() -> None:
    assert decided(workload(), trainjob(metadata={"name": "renamed"})).action is Action.RAISE


def test_an_earlier_row_wins() -> None:
    """Held, not suspended, with a running JobSet and pods: row 8 is what is said."""
    held = trainjob(metadata={"annotations": {HELD: "1"}}, spec={"suspend": False})
    assert decided(workload(), held, jobset(suspend=False), [pod("a")]).row == "8"


def test_facts_are_read_one_after_the_other_and_only_as_needed() -> None:
    nothing = Facts(workload(), CHECKS)
    with_trainjob = replace(nothing, trainjob=trainjob())
    with_jobset = replace(with_trainjob, jobset=jobset())
    with_pods = replace(with_jobset, pods=[])
    decisions = [decide(facts) for facts in (nothing, with_trainjob, with_jobset, with_pods)]
    assert [d.fact for d in decisions] == ["trainjob", "jobset", "pods", ""]
    assert [d.action for d in decisions] == [Action.READ, Action.READ, Action.READ, Action.RAISE]


def test_row_13_does_not_repeat_its_own_raise() -> None:
    facts = Facts(
        workload(), CHECKS, trainjob(replicated_job("1", "1000001")), None, [], Raised(generation=3, admission=1)
    )
    assert decide(facts) == Decision("13", Action.APPROVE, "admission 1", admission=1)


def test_the_last_admission_that_was_raised_for_is_granted_and_not_rejected() -> None:
    last = trainjob(replicated_job("999999", "1999999"))
    facts = Facts(workload(), CHECKS, last, None, [], Raised(generation=3, admission=999_999))
    assert decide(facts) == Decision("13", Action.APPROVE, "admission 999999", admission=999_999)


@pytest.mark.parametrize("raised", [Raised(generation=2, admission=1), Raised(generation=3, admission=2), None])
def test_row_13_raises_when_the_trainjob_is_not_as_the_raise_left_it(raised: Raised | None) -> None:
    facts = Facts(workload(), CHECKS, trainjob(replicated_job("1", "1000001")), None, [], raised)
    assert decide(facts) == Decision("13", Action.RAISE, "admission 2", admission=2)


def test_a_raise_changes_the_counts_of_every_replicated_job_and_nothing_else() -> None:
    before = trainjob(replicated_job("4", "3000004"), replicated_job("4", "3000004", "model-initializer"))
    before["unknown"] = {"kept": True}
    untouched = copy.deepcopy(before)
    after = admission.raised_counts(before)
    expected = copy.deepcopy(untouched)
    expected["spec"]["runtimePatches"][1] = patch(
        replicated_job("5", "3000005"), replicated_job("5", "3000005", "model-initializer")
    )
    assert after == expected
    assert before == untouched


def test_two_of_our_checks_are_written_at_once_and_foreign_ones_are_left() -> None:
    checks = [check("gate"), check("foreign"), check("second-gate"), check("gate-3", "Ready")]
    changed = admission.with_check_state(workload(checks=checks), CHECKS, "Ready", "admission 1", "now")
    assert changed is not None
    ours = {"state": "Ready", "message": "admission 1", "lastTransitionTime": "now"}
    assert changed["status"]["admissionChecks"] == [
        {"name": "gate", **ours},
        check("foreign"),
        {"name": "second-gate", **ours},
        check("gate-3", "Ready"),
    ]


def test_a_message_is_written_only_when_it_changes() -> None:
    waits = workload(checks=[check(message="the JobSet still runs")])
    assert admission.with_check_state(waits, CHECKS, "Pending", "the JobSet still runs", "now") is None


def test_a_message_does_not_move_the_transition_time() -> None:
    changed = admission.with_check_state(workload(), CHECKS, "Pending", "the JobSet still runs", "now")
    assert changed is not None
    assert changed["status"]["admissionChecks"] == [check(message="the JobSet still runs")]


def test_an_activated_check_keeps_its_other_conditions() -> None:
    other = condition("Other")
    before = {
        "metadata": {"name": "gate", "generation": 4},
        "status": {"conditions": [condition("Active", "False"), other]},
    }
    after = admission.with_active(before, "now")
    active = after["status"]["conditions"][1]
    assert after["status"]["conditions"][0] == other
    assert (active["type"], active["status"], active["reason"]) == ("Active", "True", "ControllerStarted")


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def broken(draw: st.DrawFn, objects: st.SearchStrategy[Object]) -> Object:
    """An object of the right shape in which a few places hold any JSON at all, or nothing."""
    obj = copy.deepcopy(draw(objects))
    for _ in range(draw(st.integers(0, 3))):
        place: Any = obj
        while isinstance(place, dict | list) and place:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = draw(st.sampled_from(keys))
            if draw(st.booleans()) or not isinstance(place[key], dict | list):
                if draw(st.booleans()):
                    place[key] = draw(json_values)
                else:
                    del place[key]
                break
            place = place[key]
    return obj


workloads = st.sampled_from(
    [
        workload(),
        workload(checks=[check("gate"), check("second-gate"), check("foreign")]),
        workload(metadata={"ownerReferences": [VARIANT]}, spec={"podSets": ANNOTATED}),
        workload(condition("Evicted")),
    ]
)
trainjobs = st.sampled_from(
    [trainjob(), trainjob(metadata={"annotations": {HELD: "1"}}), trainjob(spec={"suspend": False})]
)
jobsets = st.sampled_from([jobset(), jobset(suspend=False), jobset(active=1), jobset(suspended="False")])
pods = st.sampled_from([pod("a"), pod("b", "Succeeded"), pod("c", "Failed"), pod("d", None)])


def at(value: Any, *path: str) -> Any:
    """What is at a path of names; None where the path ends early."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


@given(
    wl=json_values | broken(workloads),
    tj=st.none() | json_values | broken(trainjobs),
    js=st.none() | json_values | broken(jobsets),
    remaining=st.lists(broken(pods) | json_values, max_size=3),
    raised=st.none() | st.builds(Raised, st.integers(0, 4), st.integers(0, 2)),
)
def test_decide_never_raises_and_never_approves_without_each_guards_evidence(
    wl: Any, tj: Any, js: Any, remaining: list[Any], raised: Raised | None
) -> None:
    decision = decide(Facts(wl, CHECKS, tj, js, remaining, raised))
    if decision.action not in (Action.APPROVE, Action.RAISE):
        return
    conditions = {c["type"]: c["status"] for c in wl["status"]["conditions"] if isinstance(c, dict) and "type" in c}
    assert conditions["QuotaReserved"] == "True"
    assert admission.pending_checks(wl, CHECKS)
    assert at(wl, "metadata", "deletionTimestamp") is None
    if decision.row != "13":
        assert decision.message == "not dispatch's"
        assert decision.row in ("3", "5")
        return
    owner = next(o for o in wl["metadata"]["ownerReferences"] if isinstance(o, dict) and o.get("controller") is True)
    assert owner["uid"] == tj["metadata"]["uid"]
    assert tj["spec"]["suspend"] is True
    assert at(tj, "metadata", "annotations", HELD) in (None, "")
    if js is not None:
        assert js["spec"]["suspend"] is True
        counts = at(js, "status", "replicatedJobsStatus")
        assert not any(at(job, "active") for job in (counts if isinstance(counts, list) else []))
    assert all(p["status"]["phase"] in ("Succeeded", "Failed") for p in remaining)
    if decision.action is Action.RAISE:
        assert admission.read_admission(admission.raised_counts(tj)) == (decision.admission, "")
