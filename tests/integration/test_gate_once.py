"""A job is admitted under the next number, also when Kueue still writes to its Workload while the gate approves it."""

from __future__ import annotations

from collections.abc import Iterator

from tests import jobs
from tests.cluster.cluster import Cluster
from tests.cluster.namespaces import Namespace

COUNT = 20


def admissions_of_ungated_jobs(namespace: Namespace) -> Iterator[tuple[str, int]]:
    """Jobs that were created without a start gate, one after the other, and the count at which each was approved.

    Such a job has quota within milliseconds of its creation. Kueue's own writes to its Workload, which go on for a
    moment, make the gate's approval fail with a conflict when it has raised the count already. How often, depends on
    the machine: so the test writes to the Workload, too, until some writes after the first raise.
    """
    for _ in range(COUNT):
        job = jobs.trainjob(gated=False, cpu="10m")
        namespace.create(job)
        name: str = job["metadata"]["name"]
        workload, left = jobs.workload_of(namespace, name)["metadata"]["name"], 3
        while left:
            jobs.poke(namespace, workload)
            left -= jobs.admission_of(namespace, name) > 0
        jobs.wait_ready(namespace, name, "admission ")
        yield name, jobs.admission_of(namespace, name)


def test_an_ungated_job_is_admitted_as_number_one(cluster: Cluster, namespace: Namespace) -> None:
    with cluster.controller() as gate:
        namespace.wait_served()
        found = dict(admissions_of_ungated_jobs(namespace))
        assert list(found.values()) == [1] * COUNT
        for name in found:
            jobs.running(namespace, name, epoch="1000001")
        assert sum("raised the admission count" in line for line in gate.log) == COUNT


def test_without_the_guard_numbers_are_skipped(cluster: Cluster, namespace: Namespace) -> None:
    with cluster.controller(guards_off=["raise-once"]):
        namespace.wait_served()
        assert any(admission > 1 for _, admission in admissions_of_ungated_jobs(namespace))
