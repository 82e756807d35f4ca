"""One attempt at a time, shown on real processes: by what they wrote while they lived, not by their pods' status."""

from __future__ import annotations

import pytest

from tests import jobs
from tests.cluster.real_node import NAME, RealNode
from tests.node import runs
from tests.node.site import Site, on

PATIENT = 20  # seconds of grace, longer than it takes until quota is back


def test_a_program_sees_its_job_its_epoch_and_its_restart(site: Site) -> None:
    lease = f"lease-{site.namespace.name}"
    with site.cluster.controller(lease=lease):
        backend, spec = site.backend(lease), site.spec()
        handle = backend.start(spec)
        backend.open(handle)
        site.running(handle.name)
        site.end(handle.name)

    (run,) = site.runs(handle.name)
    assert {key: value for key, value in run.variables.items() if key.startswith("DISPATCH_")} == {
        "DISPATCH_JOB": spec.job,
        "DISPATCH_SUBMISSION": "1",
        "DISPATCH_ADMISSION": "1",
        "DISPATCH_EPOCH": "1000001",
        "DISPATCH_RESTART": "0",
    }
    assert run.exit_code == 0


def test_every_node_of_a_job_runs_with_the_same_epoch(real_node: RealNode) -> None:
    with on(real_node, quota="200m") as two, two.cluster.controller():
        job = two.submit(nodes=2)
        two.running(job, "1000001", count=2)
        two.end(job)
        assert [(run.epoch, run.variables["PET_NODE_RANK"]) for run in sorted(two.runs(job), key=lambda r: r.pod)] == [
            ("1000001", "0"),
            ("1000001", "1"),
        ]


def test_a_program_that_ignores_sigterm_keeps_the_gate_shut_until_it_has_ended(real_node: RealNode) -> None:
    with on(real_node, grace=PATIENT, stock=True) as stubborn, stubborn.cluster.controller():
        job = stubborn.submit("--ignore-sigterm")
        (pod,) = stubborn.running(job, "1000001")
        stubborn.preempt(job)

        entry = jobs.wait_message(stubborn.namespace, job, "waiting for")
        name = pod["metadata"]["name"]
        assert entry["message"] == f"waiting for 1 pods of the earlier attempt: {name} on {NAME}"

        stubborn.running(job, "1000002")
        stubborn.end(job)
        first, second = stubborn.runs(job)
        assert (first.epoch, first.exit_code, second.epoch, second.exit_code) == ("1000001", None, "1000002", 0)
        assert runs.overlaps([first, second]) == []
        # It lived on for its grace period: without the gate there was time for the second one.
        assert stubborn.runs()[-1] == second
        assert second.started > first.last


def test_without_the_guard_both_attempts_run_at_one_time(real_node: RealNode) -> None:
    with on(real_node, grace=PATIENT, stock=True) as stubborn:
        with stubborn.cluster.controller(guards_off=["old-pods"]):
            job = stubborn.submit("--ignore-sigterm")
            stubborn.running(job, "1000001")
            stubborn.preempt(job)
            stubborn.cluster.wait(lambda: runs.overlaps(stubborn.runs(job)), "both write at one time", 30)
            assert {run.epoch for run in stubborn.runs(job)} == {"1000001", "1000002"}


def test_a_lost_node_keeps_the_gate_shut_until_it_is_back(site: Site) -> None:
    with site.cluster.controller():
        job = site.submit()
        (pod,) = site.running(job, "1000001")
        site.node.lose()
        site.preempt(job)
        name = pod["metadata"]["name"]
        entry = jobs.wait_message(site.namespace, job, "waiting for")
        assert entry["message"] == f"waiting for 1 pods of the earlier attempt: {name} on {NAME}"
        # Nobody has told its program: it lives, whatever grace period it had.
        (before,) = site.runs(job)
        site.cluster.wait(lambda: site.runs(job)[0].last > before.last, "the program still writes")

        site.node.recover()
        site.running(job, "1000002")
        site.end(job)
        assert [run.epoch for run in site.runs(job)] == ["1000001", "1000002"]
        assert runs.overlaps(site.runs(job)) == []


@pytest.mark.parametrize("preemptions", [3])
def test_no_two_of_many_attempts_overlap(site: Site, preemptions: int) -> None:
    with site.cluster.controller():
        job = site.submit()
        for attempt in range(1, preemptions + 1):
            site.running(job, str(1_000_000 + attempt))
            site.preempt(job)
        site.running(job, str(1_000_001 + preemptions))
        site.end(job)
        attempts = site.runs(job)
        assert [run.epoch for run in attempts] == [str(1_000_001 + n) for n in range(preemptions + 1)]
        assert runs.overlaps(attempts) == []


def test_a_failure_policy_by_exit_code_fails_a_job_that_is_preempted(real_node: RealNode) -> None:
    """Why no runtime should have one: the Job controller takes the end that it has ordered itself for a failure.

    It looks at every pod that has failed, also while the Job is suspended; only its counters leave such pods out. Left
    alone it is a race, which most jobs lose: the kubelet removes the pod right after it has said that it failed. The
    finalizer here gives the Job controller time to see it.
    """
    with on(real_node, exit_code_rule=True) as strict, strict.cluster.controller():
        namespace = strict.namespace
        job = strict.submit()
        (pod,) = strict.running(job, "1000001")
        name, finalizers = pod["metadata"]["name"], pod["metadata"]["finalizers"]
        namespace.patch("Pod", name, {"metadata": {"finalizers": [*finalizers, "dispatch.test/seen"]}})
        strict.preempt(job)

        def failed() -> list[str]:
            (found,) = namespace.list("Job", labels=f"jobset.sigs.k8s.io/jobset-name={job}")
            return [c["message"] for c in found["status"]["conditions"] if c["reason"] == "PodFailurePolicy"]

        message = strict.cluster.wait(failed, "the Job has failed")[0]
        namespace.patch("Pod", name, {"metadata": {"finalizers": []}})
        assert message.endswith("failed with exit code 143 matching FailJob rule at index 1")
        strict.cluster.wait(lambda: jobs.condition(namespace.get("TrainJob", job), "Failed"), f"{job} fails")
        assert [run.epoch for run in strict.runs(job)] == ["1000001"]
