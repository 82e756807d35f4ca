"""What the gate decided on has changed by the time it writes: its write is refused, and it decides anew.

Each test changes the world between the gate's last read and its write; beside each, the same with the precondition
off shows what would happen.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests import jobs
from tests.cluster.api import ApiError, Object
from tests.cluster.cluster import Cluster
from tests.cluster.gate import account
from tests.cluster.namespaces import Namespace
from tests.faults.proxy import Proxy, Request


def last_read(namespace: Namespace) -> str:
    """The list of a job's pods, after which everything is decided."""
    return rf"/{namespace.name}/pods\?"


def writes(proxy: Proxy, pattern: str) -> list[int | None]:
    return [request.status for request in proxy.requests("PUT", pattern)]


def hold_in_between(cluster: Cluster, proxy: Proxy, namespace: Namespace, *guards_off: str) -> Iterator[str]:
    """A job is held while the gate is about to raise; yields it when the gate has written."""
    with cluster.controller(kubeconfig=proxy.kubeconfig(account(cluster)), guards_off=guards_off, resync="10m"):
        namespace.wait_served()
        job = jobs.new_name()

        def hold(_: Request) -> None:
            namespace.patch("TrainJob", job, {"metadata": {"annotations": {jobs.HOLD: "1"}}})

        proxy.call(hold, "GET", last_read(namespace), times=1)
        jobs.submit(namespace, jobs.trainjob(job))
        cluster.wait(lambda: writes(proxy, f"/trainjobs/{job}"), "the gate has written the TrainJob")
        yield job


def test_a_job_that_is_held_meanwhile_is_not_raised(cluster: Cluster, proxy: Proxy, namespace: Namespace) -> None:
    for job in hold_in_between(cluster, proxy, namespace):
        jobs.wait_message(namespace, job, "held: instance 1")
        assert jobs.admission_of(namespace, job) == 0
        assert writes(proxy, f"/trainjobs/{job}") == [409]


def test_on_any_version_of_the_trainjob_a_held_job_runs(cluster: Cluster, proxy: Proxy, namespace: Namespace) -> None:
    for job in hold_in_between(cluster, proxy, namespace, "trainjob-version"):
        jobs.running(namespace, job, epoch="1000001")
        assert jobs.HOLD not in namespace.get("TrainJob", job)["metadata"].get("annotations", {})


@pytest.fixture
def shared(cluster: Cluster) -> Iterator[Namespace]:
    """A namespace whose queue lists another controller's check, too."""
    with cluster.namespace(extra_checks=["other"]) as made:
        made.activate()
        yield made


def answer_in_between(cluster: Cluster, proxy: Proxy, namespace: Namespace, *guards_off: str) -> Iterator[str]:
    """Another controller answers its check while the gate is about to approve; yields the job when the gate has."""
    with cluster.controller(kubeconfig=proxy.kubeconfig(account(cluster)), guards_off=guards_off, resync="10m") as gate:
        job = jobs.new_name()

        def answer(_: Request) -> None:
            while True:
                workload = namespace.workload(job)
                other = entry_of(workload, "other")
                other.update(state="Ready", message="its other controller says so")
                try:
                    cluster.update(workload, "status")
                except ApiError as error:
                    if error.status != 409:
                        raise
                else:
                    return

        proxy.call(answer, "GET", last_read(namespace), times=1)
        jobs.submit(namespace, jobs.trainjob(job))
        gate.wait_log("msg=approved")
        yield job


def entry_of(workload: Object, check: str) -> Object:
    entries: list[Object] = workload["status"]["admissionChecks"]
    return next(entry for entry in entries if entry["name"].endswith(f"-{check}"))


def test_what_another_controller_has_written_meanwhile_stays(cluster: Cluster, proxy: Proxy, shared: Namespace) -> None:
    for job in answer_in_between(cluster, proxy, shared):
        jobs.running(shared, job, epoch="1000001")
        assert entry_of(shared.workload(job), "other")["message"] == "its other controller says so"
        assert jobs.admission_of(shared, job) == 1
        assert 409 in writes(proxy, f"/{shared.name}/workloads/")


def test_on_any_version_of_the_workload_it_is_overwritten(cluster: Cluster, proxy: Proxy, shared: Namespace) -> None:
    """The server takes what the gate read before the other's answer. What becomes of it then is anybody's."""
    for _ in answer_in_between(cluster, proxy, shared, "workload-version"):
        first = proxy.requests("PUT", f"/{shared.name}/workloads/")[0]
        assert first.status == 200
        assert entry_of(json.loads(first.body), "other")["state"] == "Pending"
