"""The caller is killed at any point, and goes on: never two objects, never a pod before `open`."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from adapter import Handle, JobSpec, State
from tests import adapters
from tests.adapters import World
from tests.cluster.cluster import Cluster
from tests.faults.proxy import Proxy

# Says when it begins, so that the time at which it is killed is not spent on imports.
CALLER = """
import json, sys
import adapter
spec = adapter.JobSpec.from_json(json.loads(sys.argv[2]))
settings = adapter.Settings.load(json.loads(sys.argv[1]))
backend = adapter.Backend(settings, adapter.credentials(settings))
backend.list()
print("begin", flush=True)
handle = backend.start(spec)
print(handle, flush=True)
backend.open(handle)
print("opened", flush=True)
"""


@pytest.fixture(params=adapters.MODES)
def world(cluster: Cluster, request: pytest.FixtureRequest, _gate: None) -> Iterator[World]:
    with adapters.world(cluster, request.param, quota="1000") as made:
        yield made


def caller(world: World, spec: JobSpec) -> subprocess.Popen[str]:
    """Start and open in another process."""
    argv = [sys.executable, "-c", CALLER, json.dumps(world.settings), json.dumps(spec.to_json())]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": "."})


def call(world: World, spec: JobSpec, seconds: float | None) -> tuple[list[str], float]:
    """Runs the caller, and kills it after so many seconds; what it printed, how long it took."""
    with caller(world, spec) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begin\n"
        begun = time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        took = time.monotonic() - begun
        process.kill()
        return process.stdout.read().split(), took


@pytest.mark.timeout(3600)
def test_a_caller_that_is_killed_anywhere_leaves_one_job_that_is_not_open_or_none(
    world: World, count: Callable[[int, int], int]
) -> None:
    seed, times = random.randrange(10**6), count(20, 200)
    print(f"seed {seed}")
    chance = random.Random(seed)
    _, whole = call(world, world.spec(), None)
    stages: dict[str, int] = {}
    for _ in range(times):
        spec = world.spec(nodes=1)
        printed, _ = call(world, spec, chance.uniform(0, 1.2 * whole))
        found = world.backend.find(spec.job)
        assert len(found) <= 1
        gated = bool(found) and world.backend.inspect(found[0]).state is State.GATED
        stage = "nothing" if not found else "started" if gated else "opened"
        stages[stage] = stages.get(stage, 0) + 1
        if gated or not found:
            assert "opened" not in printed
            assert world.namespace.pods(spec.name) == []
        handle = world.backend.start(spec)
        assert found in ((), (handle,))
        assert printed[:1] in ([], [str(handle)])
        assert [o["metadata"]["name"] for o in world.namespace.list("TrainJob") if spec.job in str(o)] == [spec.name]
        if stage != "opened":
            assert world.namespace.pods(spec.name) == []
        world.backend.open(handle)
        world.running(handle, 1)
        world.namespace.delete("TrainJob", spec.name)
    print(f"{times} times killed within {1.2 * whole:.2f} s: {stages}")


REQUESTS = [
    ("GET", "/clustertrainingruntimes/"),
    ("POST", "/trainjobs"),
    ("GET", "/trainjobs/"),
    ("PUT", "/trainjobs/"),
]


@pytest.mark.parametrize("moment", ["before", "after", "late"])
@pytest.mark.parametrize("request_", REQUESTS, ids=["read-runtime", "create", "read", "update"])
def test_a_caller_that_is_killed_at_a_request(world: World, request_: tuple[str, str], moment: str) -> None:
    """Before the server acts or after it; or the request arrives when its caller is dead, and another has gone on."""
    spec, (method, path) = world.spec(nodes=1), request_
    with Proxy(world.cluster) as proxy:
        kubeconfig = proxy.kubeconfig(pathlib.Path(world.settings["kubeconfig"]))
        proxied = replace(world, settings={**world.settings, "kubeconfig": str(kubeconfig)})
        with proxy.stall(method, path, acted=moment == "after") as rule, caller(proxied, spec) as process:
            world.wait(lambda: rule.hits and (rule.hits[0].server_status or moment != "after"), "the request is there")
            process.kill()
            if moment == "before":
                proxy.cut(method, path)
            else:
                found = world.backend.find(spec.job)
                handle = go_on(world, spec)
        if moment == "before":
            found = world.backend.find(spec.job)
            handle = go_on(world, spec)
        world.wait(lambda: not proxy.open_requests(), "the request has been answered, or cut")
        answers = [request.server_status for request in rule.hits]
        assert answers == {"before": [None], "late": [{"GET": 200}.get(method, 409)]}.get(moment, answers)
    assert len(found) == (path == "/trainjobs/" or (method, moment) == ("POST", "after"))
    assert found in ((), (handle,))
    assert len(world.namespace.list("TrainJob")) == 1
    assert world.pods_created() == 1


def go_on(world: World, spec: JobSpec) -> Handle:
    """What the caller does when it is started again."""
    handle = world.backend.start(spec)
    world.backend.open(handle)
    world.running(handle, 1)
    return handle


def test_the_example_orchestrator_goes_on_wherever_it_was_killed(world: World, tmp_path: pathlib.Path) -> None:
    config, record = tmp_path / "config.json", tmp_path / "record.json"
    config.write_text(json.dumps(world.settings))
    argv = [sys.executable, "examples/orchestrator.py", str(config), "examples/job.json", str(record)]
    env: dict[str, Any] = {**os.environ, "PYTHONPATH": "."}
    chance = random.Random(7)
    for _ in range(20):
        with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(chance.uniform(1.0, 6.0))  # two or three seconds of which are preflight's
            process.kill()
        assert len(world.namespace.list("TrainJob", labels="!dispatch.phpboyscout.uk/probe")) <= 1
    job = json.loads(record.read_text())["job"]
    (handle,) = world.backend.find(job)
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as process:
        world.end(handle)
        printed, _ = process.communicate(timeout=120)
    assert (process.returncode, printed) == (0, "succeeded\n")
    assert json.loads(record.read_text())["outcome"] == "succeeded"
    assert world.left(job) == []
    again = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120)
    assert (again.returncode, again.stdout) == (0, "succeeded\n")
    assert [name for name in world.created_trainjobs() if job in name] == [f"dj-{job}-s1"]
