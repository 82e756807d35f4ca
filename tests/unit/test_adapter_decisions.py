"""What is created, what is written later, and what is left: the adapter's pure decisions on objects."""

from __future__ import annotations

import copy
import json
import pathlib
from typing import Any

import pytest
import yaml
from hypothesis import given

import adapter
from adapter import JobSpec, Runtime, Settings
from tests.unit.test_adapter_specs import JOB, PATIENT, SPECS

Object = dict[str, Any]
NAME = f"dj-{JOB}-s1"
KUEUE = Settings.load("examples/config.json")
PLAIN = Settings("team-a", Runtime("torch-safe"))
RUNTIME: Object = yaml.safe_load(pathlib.Path("examples/runtime.yaml").read_text())


def spec(**changes: Any) -> JobSpec:
    return JobSpec(**{"job": JOB, "runtime": Runtime("torch-safe"), **changes})


def answered(sent: Object) -> Object:
    """As the server answers when all is well: Kueue appends its own entry."""
    answer = copy.deepcopy(sent)
    answer["metadata"] |= {"uid": "u1", "resourceVersion": "7"}
    answer["spec"]["runtimePatches"].append({"manager": "kueue.x-k8s.io/manager"})
    return answer


def replicated_job(name: str, container: str = "node", **job: Any) -> Object:
    template = {"spec": {"containers": [{"name": container}]}}
    return {"name": name, "template": {"spec": {"template": template, **job}}}


def runtime(*jobs: Object, **jobset: Any) -> Object:
    return {"spec": {"template": {"spec": {"replicatedJobs": list(jobs), **jobset}}}}


# --- runtime requirements


def test_the_example_runtime_is_not_refused() -> None:
    assert adapter.refusal(RUNTIME, spec(nodes=100_000, submission=999_999)) == ""


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (runtime(), "it has no replicated job node with a container node"),
        (runtime(replicated_job("worker")), "it has no replicated job node with a container node"),
        (runtime(replicated_job("node", "main")), "it has no replicated job node with a container node"),
        (runtime(replicated_job("node"), ttlSecondsAfterFinished=0), "its JobSet sets ttlSecondsAfterFinished"),
        (runtime(replicated_job("node"), replicated_job("x" * 30)), "pod names such as dj-"),
        ({}, "it has no replicated job node"),
        ({"spec": []}, "it has no replicated job node"),
    ],
)
def test_a_runtime_that_cannot_run_the_job_is_refused(wrong: Object, why: str) -> None:
    assert adapter.refusal(wrong, spec()).startswith(why)


@pytest.mark.parametrize(("submission", "fits"), [(99, True), (100, False)])
def test_a_runtime_with_a_dataset_initializer_takes_two_digits_of_submissions(submission: int, *, fits: bool) -> None:
    with_initializer = runtime(replicated_job("dataset-initializer", "dataset-initializer"), replicated_job("node"))
    assert (adapter.refusal(with_initializer, spec(submission=submission)) == "") is fits


# --- rendering


def test_a_job_in_kueue_mode_is_the_object_of_the_design() -> None:
    made = adapter.render(spec(command=["python", "train.py"], nodes=4), RUNTIME, KUEUE)
    two = {"dispatch.phpboyscout.uk/job": JOB, "dispatch.phpboyscout.uk/submission": "1"}
    counts = {"dispatch.phpboyscout.uk/admission": "0", "dispatch.phpboyscout.uk/epoch": "1000000"}
    annotations = made["metadata"].pop("annotations")
    assert annotations.pop("dispatch.phpboyscout.uk/spec").startswith("sha256:")
    assert annotations == {"kueue.x-k8s.io/admission-gated-by": "dispatch.phpboyscout.uk/start"}
    pods = {"spec": {"template": {"metadata": {"labels": two, "annotations": counts}}}}
    template = {"metadata": {"labels": two}, "spec": {"replicatedJobs": [{"name": "node", "template": pods}]}}
    field = "metadata.{}['{}']".format
    assert made == {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": NAME, "namespace": "team-a", "labels": {"kueue.x-k8s.io/queue-name": "lq", **two}},
        "spec": {
            "runtimeRef": {"kind": "ClusterTrainingRuntime", "name": "torch-safe"},
            "suspend": True,
            "trainer": {
                "command": ["python", "train.py"],
                "numNodes": 4,
                "env": [
                    {"name": "DISPATCH_JOB", "value": JOB},
                    {"name": "DISPATCH_SUBMISSION", "value": "1"},
                    *(
                        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
                        for name, path in (
                            ("DISPATCH_ADMISSION", field("annotations", "dispatch.phpboyscout.uk/admission")),
                            ("DISPATCH_EPOCH", field("annotations", "dispatch.phpboyscout.uk/epoch")),
                            ("DISPATCH_RESTART", field("labels", "jobset.sigs.k8s.io/restart-attempt")),
                        )
                    ),
                ],
            },
            "runtimePatches": [
                {"manager": "dispatch.phpboyscout.uk/adapter", "trainingRuntimeSpec": {"template": template}}
            ],
        },
    }


def test_a_job_in_plain_mode_has_no_queue_and_both_gates_and_admission_one() -> None:
    made = adapter.render(spec(submission=3), RUNTIME, PLAIN)
    assert "kueue.x-k8s.io/queue-name" not in made["metadata"]["labels"]
    assert made["spec"]["suspend"] is True
    assert made["metadata"]["annotations"]["dispatch.phpboyscout.uk/gate"] == "closed"
    assert made["metadata"]["annotations"]["kueue.x-k8s.io/admission-gated-by"] == "dispatch.phpboyscout.uk/start"
    text = json.dumps(made)
    assert '"dispatch.phpboyscout.uk/admission": "1"' in text
    assert '"dispatch.phpboyscout.uk/epoch": "3000001"' in text


def test_every_field_of_a_spec_finds_its_place() -> None:
    full = spec(
        image="i",
        args=["a"],
        env={"B": "2", "A": "1"},
        procs_per_node=8,
        resources=adapter.Resources({"cpu": "1"}, {"memory": "1Gi"}),
        timeout=60,
        priority="high",
        node_selector={"zone": "a"},
        labels={"team": "x"},
    )
    made = adapter.render(full, RUNTIME, KUEUE)
    trainer, patch = made["spec"]["trainer"], made["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]
    pod = patch["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    assert (trainer["image"], trainer["args"], trainer["numProcPerNode"]) == ("i", ["a"], 8)
    assert [variable["name"] for variable in trainer["env"]][:3] == ["B", "A", "DISPATCH_JOB"]
    assert trainer["resourcesPerNode"] == {"requests": {"cpu": "1"}, "limits": {"memory": "1Gi"}}
    assert made["spec"]["activeDeadlineSeconds"] == 60
    assert made["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "high"
    assert pod["spec"] == {"nodeSelector": {"zone": "a"}}
    for labels in (made["metadata"]["labels"], patch["metadata"]["labels"], pod["metadata"]["labels"]):
        assert labels["team"] == "x"


def test_the_patch_has_one_entry_for_each_replicated_job_all_alike() -> None:
    made = adapter.render(spec(), runtime(replicated_job("launcher"), replicated_job("node")), KUEUE)
    jobs = made["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert [job["name"] for job in jobs] == ["launcher", "node"]
    assert jobs[0]["template"] == jobs[1]["template"]


@PATIENT
@given(SPECS)
def test_a_job_never_starts_by_itself(any_spec: JobSpec) -> None:
    for settings in (KUEUE, PLAIN):
        made = adapter.render(any_spec, RUNTIME, settings)
        assert adapter.is_gated(made)
        assert made["spec"]["suspend"] is True
        assert len(made["spec"]["trainer"]["env"]) == len(any_spec.env) + 5


# --- the answer to the create


def test_an_answer_as_sent_has_no_fault() -> None:
    for settings in (KUEUE, PLAIN):
        sent = adapter.render(spec(), RUNTIME, settings)
        assert adapter.answer_fault(sent, answered(sent)) == ""


def test_plain_mode_without_kueue_has_no_fault() -> None:
    sent = adapter.render(spec(), RUNTIME, PLAIN)
    assert adapter.answer_fault(sent, sent) == ""


@pytest.mark.parametrize(
    ("settings", "path", "value", "fault"),
    [
        (
            PLAIN,
            ("metadata", "labels", "kueue.x-k8s.io/queue-name"),
            "default",
            "it came back with kueue.x-k8s.io/queue",
        ),
        (KUEUE, ("metadata", "labels", "kueue.x-k8s.io/queue-name"), "other", "it came back with kueue.x-k8s.io/queue"),
        (
            KUEUE,
            ("metadata", "labels", "kueue.x-k8s.io/queue-name"),
            None,
            "it came back with kueue.x-k8s.io/queue-name",
        ),
        (KUEUE, ("spec", "suspend"), False, "it came back unsuspended"),
        (PLAIN, ("spec", "suspend"), None, "it came back unsuspended"),
        (
            KUEUE,
            ("metadata", "annotations", "kueue.x-k8s.io/admission-gated-by"),
            None,
            "it came back without its gate",
        ),
        (PLAIN, ("metadata", "annotations", "dispatch.phpboyscout.uk/gate"), "open", "it came back without its gate"),
        (KUEUE, ("spec", "runtimePatches"), [], "Kueue's webhook did not see it"),
    ],
)
def test_an_answer_that_is_not_as_sent_has_a_fault(
    settings: Settings, path: tuple[str, ...], value: object, fault: str
) -> None:
    sent = adapter.render(spec(), RUNTIME, settings)
    answer = answered(sent)
    place = answer
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    assert adapter.answer_fault(sent, answer).startswith(fault)


# --- open, hold and stop


def test_opening_in_kueue_mode_removes_our_gate_and_nothing_else() -> None:
    job = answered(adapter.render(spec(), RUNTIME, KUEUE))
    opened = adapter.opened(job)
    assert opened is not None
    expected = copy.deepcopy(job)
    del expected["metadata"]["annotations"]["kueue.x-k8s.io/admission-gated-by"]
    assert opened == expected


def test_opening_leaves_somebody_elses_gate() -> None:
    job = answered(adapter.render(spec(), RUNTIME, KUEUE))
    job["metadata"]["annotations"]["kueue.x-k8s.io/admission-gated-by"] = "a.io/x, dispatch.phpboyscout.uk/start,b.io/y"
    opened = adapter.opened(job)
    assert opened is not None
    assert opened["metadata"]["annotations"]["kueue.x-k8s.io/admission-gated-by"] == "a.io/x,b.io/y"


def test_opening_in_plain_mode_removes_both_gates_and_resumes() -> None:
    opened = adapter.opened(answered(adapter.render(spec(), RUNTIME, PLAIN)))
    assert opened is not None
    assert not adapter.is_gated(opened)
    assert opened["spec"]["suspend"] is False


def test_opening_a_held_job_in_plain_mode_does_not_resume_it() -> None:
    job = answered(adapter.render(spec(), RUNTIME, PLAIN))
    job["metadata"]["annotations"]["dispatch.phpboyscout.uk/hold"] = "2"
    opened = adapter.opened(job)
    assert opened is not None
    assert opened["spec"]["suspend"] is True


def test_opening_what_is_open_changes_nothing() -> None:
    job = answered(adapter.render(spec(), RUNTIME, PLAIN))
    opened = adapter.opened(job)
    assert opened is not None
    assert adapter.opened({**opened, "spec": {**opened["spec"], "suspend": True}}) is None


@pytest.mark.parametrize(
    ("text", "hold"),
    [(None, None), ("1", 1), ("12", 12), ("released-3", None), ("stop", "stop"), ("", ""), ("x", "x"), ("-1", "-1")],
)
def test_the_hold_annotation_is_read(text: str | None, hold: int | str | None) -> None:
    annotations = {} if text is None else {"dispatch.phpboyscout.uk/hold": text}
    assert adapter.hold_of({"metadata": {"annotations": annotations}}) == hold


def test_stopping_marks_a_job_and_in_plain_mode_suspends_it() -> None:
    for settings in (KUEUE, PLAIN):
        job = adapter.opened(answered(adapter.render(spec(), RUNTIME, settings)))
        assert job is not None
        job["spec"]["suspend"] = False
        marked = adapter.marked_stopping(job)
        assert marked is not None
        assert marked["metadata"]["annotations"]["dispatch.phpboyscout.uk/hold"] == "stop"
        assert marked["spec"]["suspend"] is (settings is PLAIN)  # in Kueue mode that is Kueue's to write
        assert adapter.marked_stopping(marked) is None


def test_deciding_never_changes_the_object_it_was_given() -> None:
    job = answered(adapter.render(spec(), RUNTIME, PLAIN))
    before = copy.deepcopy(job)
    adapter.opened(job)
    adapter.marked_stopping(job)
    assert job == before


# --- the job's other submissions


def trainjob(n: int, *conditions: str) -> Object:
    status = {"conditions": [{"type": c, "status": "True"} for c in conditions]}
    return {"metadata": {"name": f"dj-{JOB}-s{n}"}, "status": status}


def pod(phase: str, **metadata: Any) -> Object:
    return {"metadata": {"name": "p", **metadata}, "spec": {"nodeName": "n"}, "status": {"phase": phase}}


def test_nothing_runs_when_all_has_ended() -> None:
    failed = {"conditions": [{"type": "Failed", "status": "True"}]}
    jobset = {"metadata": {"name": f"dj-{JOB}-s2"}, "status": failed}
    ended = [trainjob(1, "Complete"), trainjob(2, "Failed")]
    assert adapter.may_still_run(ended, [jobset], [pod("Succeeded"), pod("Failed")]) == ""
    assert adapter.may_still_run([], [], []) == ""


@pytest.mark.parametrize("phase", ["Pending", "Running", "Unknown", None])
def test_a_pod_that_has_not_ended_may_still_run(phase: str) -> None:
    terminating = pod(phase, deletionTimestamp="2026-01-01T00:00:00Z")
    assert adapter.may_still_run([], [], [terminating]) == "pod p on n has not ended"


def test_a_suspended_trainjob_may_still_run() -> None:
    assert adapter.may_still_run([trainjob(1, "Suspended")], [], []) == f"TrainJob dj-{JOB}-s1 has not ended"


def test_a_trainjob_that_failed_and_has_no_jobset_may_still_run() -> None:
    words = f"TrainJob dj-{JOB}-s1 has failed and lost its JobSet, which Trainer makes anew"
    failed = trainjob(1, "Failed")
    assert adapter.may_still_run([failed], [], []) == words
    assert adapter.may_still_run([{**failed, "spec": {"suspend": True}}], [], []) == ""
    failed["status"]["conditions"][0]["reason"] = "DeadlineExceeded"
    assert adapter.may_still_run([failed], [], []) == ""


def test_a_jobset_without_a_trainjob_may_still_run() -> None:
    assert adapter.may_still_run([], [{"metadata": {"name": "j"}}], []) == "JobSet j has not ended"


# --- what is left


def owned(name: str, uid: str, owner: str, **labels: str) -> Object:
    reference = {"uid": owner, "controller": True}
    return {"metadata": {"name": name, "uid": uid, "ownerReferences": [reference] if owner else [], "labels": labels}}


def found(*jobsets: Object, pods: tuple[Object, ...] = ()) -> dict[str, list[Object]]:
    return {"JobSet": list(jobsets), "Job": [], "Pod": list(pods), "Workload": []}


def of_jobset(uid: str) -> Object:
    return pod("Running", uid=f"pod-of-{uid}", labels={"jobset.sigs.k8s.io/jobset-uid": uid})


def test_what_is_left_is_found_without_its_trainjob() -> None:
    left = adapter.leftovers("t1", None, found(owned("j", "j1", "t1"), pods=(of_jobset("j1"),)))
    assert [len(left[kind]) for kind in ("TrainJob", "JobSet", "Pod")] == [0, 1, 1]


def test_a_successor_and_what_is_its_own_are_not_ours() -> None:
    successor = {"metadata": {"name": NAME, "uid": "t2"}}
    objects = found(owned("j", "j2", "t2"), pods=(of_jobset("j2"), of_jobset("j1")))
    left = adapter.leftovers("t1", successor, objects)
    assert left["TrainJob"] == left["JobSet"] == []
    assert left["Pod"] == [of_jobset("j1")]


def test_a_jobset_without_an_owner_is_ours() -> None:
    assert adapter.leftovers("t1", None, found(owned("j", "j1", "")))["JobSet"]


def test_what_is_left_is_described_by_kind_name_and_node() -> None:
    pods = [{"metadata": {"name": f"p{i}"}, "spec": {"nodeName": "n1"}} for i in range(5)]
    left = {"TrainJob": [], "JobSet": [owned("j", "", "")], "Pod": pods}
    assert adapter.described(left) == "JobSet j, Pod p0 on n1, Pod p1 on n1, Pod p2 on n1, 2 more of kind Pod"
