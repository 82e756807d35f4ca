"""What a spec's validation accepts, the API server accepts: the TrainJob, and the JobSet, Job and pods made of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings

import adapter
from adapter import JobSpec, Runtime
from tests import adapters
from tests.adapters import World
from tests.cluster.api import Object
from tests.cluster.cluster import Cluster
from tests.unit.test_adapter_specs import GOOD, JOB, SPECS


@pytest.fixture(scope="module", params=adapters.MODES)
def world(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[World]:
    with adapters.world(cluster, request.param, check=False) as made:
        yield made


def asked(world: World, spec: JobSpec) -> None:
    """Has the API server check the TrainJob, and the Job that JobSet makes of it, without creating either."""
    runtime = world.cluster.get("ClusterTrainingRuntime", "torch-safe")
    if spec.runtime != Runtime("torch-safe"):
        spec = JobSpec.from_json({**spec.to_json(), "runtime": {"name": "torch-safe"}})
    trainjob = adapter.render(spec, runtime, adapter.Settings.load(world.settings))
    answer = world.namespace.create(trainjob, dry_run=True)
    assert adapter.answer_fault(trainjob, answer) == ""
    world.namespace.create(job_of(spec, answer, runtime), dry_run=True)


def job_of(spec: JobSpec, trainjob: Object, runtime: Object) -> Object:
    """The Job of a TrainJob, as Trainer and JobSet make it."""
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    trainer = trainjob["spec"]["trainer"]
    patched = trainjob["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    pod, pod_patch = job["template"]["spec"]["template"], patched["template"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    container = {**container, **{k: v for k, v in trainer.items() if k in ("image", "command", "args", "env")}}
    container["resources"] = trainer.get("resourcesPerNode", {})
    template = {
        "metadata": pod_patch["metadata"],
        "spec": {**pod["spec"], **pod_patch.get("spec", {}), "containers": [container]},
    }
    nodes = spec.nodes or 1
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"{trainjob['metadata']['name']}-node-0"},
        "spec": {
            **job["template"]["spec"],
            "template": template,
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "suspend": True,
        },
    }


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(spec=SPECS)
def test_what_is_accepted_the_api_server_accepts(world: World, spec: JobSpec) -> None:
    if world.mode == "plain" and spec.priority:
        spec = JobSpec.from_json({k: v for k, v in spec.to_json().items() if k != "priority"})
    asked(world, spec)


@pytest.mark.parametrize("change", GOOD, ids=range(len(GOOD)))
def test_what_is_at_the_bounds_the_api_server_accepts(world: World, change: Object) -> None:
    asked(world, JobSpec.from_json({"job": JOB, "runtime": {"name": "torch-safe"}, **change}))


LARGE = [
    {"args": ["x" * 261_000]},
    {"args": ["<" * 43_000]},
    {"args": ["\u2028" * 42_000]},
    {"env": {f"V{i}": "ü" * 300 for i in range(123)}},
    {"labels": {f"{'d' * 60}.example.org/{'n' * 50}-{i}": "v" * 63 for i in range(1_000)}},
]


@pytest.mark.parametrize("change", LARGE, ids=range(len(LARGE)))
def test_the_largest_specs_become_jobsets_and_pods(world: World, change: Object) -> None:
    handle = world.backend.start(world.spec(nodes=1, **change))
    world.settled(handle)
    world.backend.open(handle)
    world.running(handle, 1)
    world.backend.stop(handle)


CAREFUL = settings(
    max_examples=30,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@CAREFUL
@given(spec=SPECS)
def test_what_is_accepted_reaches_the_job_as_it_is(world: World, spec: JobSpec) -> None:
    """Not only asked: Trainer makes the JobSet, and JobSet the Job. What they refuse, only an Event tells."""
    fields = {
        **spec.to_json(),
        "runtime": {"name": "torch-safe"},
        "job": adapter.new_job(),
        "nodes": 1,
        "submission": 1,
    }
    fields.pop("priority", None)
    handle = world.backend.start(JobSpec.from_json(fields))
    job = world.wait(lambda: world.namespace.find("Job", f"{handle.name}-node-0"), "the Job is there", 20)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert (container.get("command", []), container.get("args", [])) == ([*spec.command], [*spec.args])
    values = {variable["name"]: variable.get("value", "") for variable in container["env"]}
    assert {name: values[name] for name in spec.env} == spec.env
    assert spec.labels.items() <= job["spec"]["template"]["metadata"]["labels"].items()
    world.namespace.delete("TrainJob", handle.name)
