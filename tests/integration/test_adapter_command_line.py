"""The adapter's command line: what it prints, where, and its exit codes."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import adapter
from adapter import Handle, JobSpec, State
from tests import adapters
from tests.adapters import World
from tests.cluster.cluster import Cluster


@pytest.fixture
def world(cluster: Cluster) -> Iterator[World]:
    with adapters.world(cluster, "plain") as made:
        yield made


@pytest.fixture
def config(world: World, tmp_path: pathlib.Path) -> str:
    file = tmp_path / "my config.json"
    file.write_text(json.dumps(world.settings))
    return str(file)


def run(
    *arguments: str, stdin: str | None = None, cwd: pathlib.Path | None = None, **environment: str
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    argv, env = [sys.executable, str(pathlib.Path("adapter.py").resolve()), *arguments], os.environ | environment
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=120, cwd=cwd, env=env)
    return done.returncode, done.stdout, done.stderr


def test_a_job_from_its_start_to_its_stop(world: World, config: str) -> None:
    spec = world.spec()
    code, out, err = run("-c", config, "start", "-", stdin=json.dumps(spec.to_json()))
    assert (code, err) == (0, "")
    handle = Handle.parse(out.strip())
    assert world.trainjob(handle)["metadata"]["uid"] == handle.uid
    assert run("-c", config, "open", str(handle)) == (0, "", "")
    world.running(handle)
    code, out, _ = run("-c", config, "inspect", str(handle))
    assert code == 0
    assert out.splitlines()[0] == "state     running"
    assert f"pod       0 {handle.name}-node-0-0-" in out
    assert run("-c", config, "find", handle.job) == (0, f"{handle}\n", "")
    assert run("-c", config, "list") == (0, f"{handle}\n", "")
    assert run("-c", config, "stop", str(handle)) == (0, "", "")
    assert world.left() == []


def test_results_as_json(world: World, config: str, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "job.json"
    file.write_text(json.dumps(world.spec().to_json()))
    code, out, _ = run("-c", config, "-o", "json", "start", str(file))
    handle = Handle.from_json(json.loads(out))
    assert code == 0
    status = json.loads(run("-c", config, "-o", "json", "inspect", str(handle))[1])
    assert (status["state"], status["handle"]) == ("gated", handle.to_json())
    assert json.loads(run("-c", config, "-o", "json", "find", handle.job)[1]) == [handle.to_json()]
    assert json.loads(run("-c", config, "-o", "json", "list")[1]) == [handle.to_json()]
    assert json.loads(run("-c", config, "-o", "json", "open", str(handle))[1]) is None


def test_stop_takes_a_job_too(world: World, config: str) -> None:
    handle = world.started()
    assert run("-c", config, "stop", handle.job) == (0, "", "")
    assert world.left() == []


def test_the_settings_are_config_json_where_it_is_run(world: World, tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(world.settings))
    assert run("list", cwd=tmp_path) == (0, "", "")


def test_a_refusal_exits_4_with_the_reason_on_stderr(world: World, config: str) -> None:
    spec = world.spec()
    world.backend.start(spec)
    other = json.dumps(world.spec(job=spec.job, nodes=3).to_json())
    code, out, err = run("-c", config, "start", "-", stdin=other)
    assert (code, out) == (4, "")
    assert err.startswith("dispatch: conflict: TrainJob ")
    code, _, err = run("-c", config, "start", "-", stdin=json.dumps(world.spec(runtime={"name": "x"}).to_json()))
    assert (code, err.split(":")[1]) == (4, " unsupported")


def test_a_job_that_is_not_there_exits_1(world: World, config: str) -> None:
    handle = Handle(world.namespace.name, f"dj-{adapter.new_job()}-s1", "u")
    code, out, err = run("-c", config, "inspect", str(handle))
    assert (code, out) == (1, "")
    assert err.startswith("dispatch: not found: ")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["launch"],
        ["start"],
        ["list", "-x"],
        ["-o", "yaml", "list"],
        ["inspect", "no-handle"],
        ["find", "no-job"],
        ["start", "/nowhere.json"],
        ["-c", "/nowhere.json", "list"],
    ],
)
def test_a_usage_error_exits_2(config: str, arguments: list[str]) -> None:
    code, out, err = run("-c", config, *arguments)
    assert (code, out) == (2, "")
    assert err


def test_a_server_that_is_away_exits_6(
    world: World, config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    adapters.impatient(monkeypatch)
    world.cluster.kill("kube-apiserver")
    try:
        assert adapter.main(["-c", config, "list"]) == 6
    finally:
        world.cluster.start("kube-apiserver")
    assert capsys.readouterr().err.startswith("dispatch: unreachable: ")


def test_ctrl_c_exits_130(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(adapter.Backend, "list", interrupted)
    assert adapter.main(["-c", config, "list"]) == 130


README = pathlib.Path("README.md").read_text()


def test_the_example_of_the_readme_sees_a_job_through(world: World, config: str) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    argv = [sys.executable, "-c", code]
    env = {**os.environ, "PYTHONPATH": str(pathlib.Path().resolve())}
    where, pipe = pathlib.Path(config).parent, subprocess.PIPE
    pathlib.Path(config).rename(where / "config.json")
    with subprocess.Popen(argv, cwd=where, env=env, stdout=pipe, stderr=pipe, text=True) as process:
        (handle,) = world.wait(world.backend.list, "the job is started")
        for pod in world.running(handle, 4):
            world.cluster.pods.succeed(pod)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert out.splitlines()[-1].startswith("succeeded None")


def test_the_preflight_of_the_readme_is_real(kueue: World, tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(kueue.settings))
    (shown,) = re.findall(r"\$ python adapter.py preflight\n(.*?)```", README, re.DOTALL)
    assert run("preflight", cwd=tmp_path) == (0, shown, "")


def test_every_operation_is_in_the_readme() -> None:
    table = README.partition("| call | what for |\n|---|---|\n")[2].partition("\n\n")[0]
    named = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == {name for name in vars(adapter.Backend) if not name.startswith("_")}


def test_help_names_every_verb() -> None:
    code, out, _ = run("--help")
    assert code == 0
    for verb, _, _ in adapter.VERBS:
        assert f"\n    {verb} " in out


def test_a_failed_job_is_told_and_its_inspection_is_no_error(world: World, config: str) -> None:
    handle = world.opened()
    world.end(handle, code=1)
    world.state(handle, State.FAILED)
    code, out, _ = run("-c", config, "inspect", str(handle))
    assert (code, out.splitlines()[0]) == (0, "state     failed (program)")


def test_watch_prints_a_line_for_each_change_until_the_end(world: World, config: str) -> None:
    handle = world.opened()
    world.end(handle)
    code, out, err = run("-c", config, "watch", str(handle))
    assert (code, err) == (0, "")
    (line,) = out.splitlines()
    assert f" {handle.name} succeeded" in line
    code, out, _ = run("-c", config, "-o", "json", "watch", str(handle))
    assert (code, json.loads(out)["state"]) == (0, "succeeded")


def test_watching_a_job_that_fails_exits_5(world: World, config: str) -> None:
    handle = world.opened()
    world.end(handle, code=1)
    code, out, _ = run("-c", config, "watch", str(handle))
    assert code == 5
    assert f" {handle.name} failed" in out


def test_watch_without_a_handle_tells_of_all_jobs_until_ctrl_c(world: World, config: str) -> None:
    first = world.started()
    argv = [sys.executable, "adapter.py", "-c", config, "-o", "json", "watch"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = [json.loads(process.stdout.readline())]
        second = world.opened()
        while told[-1]["state"] != "running":
            told.append(json.loads(process.stdout.readline()))
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    assert [told[0]["handle"], told[-1]["handle"]] == [first.to_json(), second.to_json()]
    assert told[0]["state"] == "gated"


def test_logs_prints_what_was_printed_and_no_escapes(world: World, config: str) -> None:
    handle = world.opened()
    first, second = sorted(world.running(handle), key=lambda pod: str(pod["metadata"]["name"]))
    world.cluster.pods.log(first, "\x1b[31mred\x1b[0m\tünï\u202e")
    world.cluster.pods.log(second, "two")
    assert run("-c", config, "logs", str(handle)) == (0, "0: \\x1b[31mred\\x1b[0m\tünï\\u202e\n1: two\n", "")
    assert run("-c", config, "logs", str(handle), "--rank", "1", "--since", "5m") == (0, "two\n", "")
    _, out, err = run("-c", config, "logs", str(handle), "--rank", "0", PYTHONIOENCODING="ascii")
    assert (out, err) == ("\\x1b[31mred\\x1b[0m\t\\xfcn\\xef\\u202e\n", "")
    code, out, _ = run("-c", config, "-o", "json", "logs", str(handle), "--tail", "1")
    assert code == 0
    line = json.loads(out)
    assert [line[name] for name in ("rank", "admission", "restart", "text")] == [1, 1, 0, "two"]
    world.end(handle)
    code, out, err = run("-c", config, "logs", str(handle), "-f", "--tail", "1")
    assert (code, out, err) == (0, "1: two\n", "")


@pytest.mark.parametrize("since", ["", "5", "m", "-5m", "5 m"])
def test_a_time_that_is_none_exits_2(config: str, since: str) -> None:
    assert run("-c", config, "logs", "a/b@c", "--since", since)[0] == 2


def unread(stdout: int, *arguments: str) -> tuple[int, str]:
    """Exit code and stderr of a command that writes there."""
    argv = [sys.executable, "adapter.py", *arguments]
    done = subprocess.run(argv, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(stdout)
    return done.returncode, done.stderr


@pytest.mark.parametrize("output", ["text", "json"])
def test_a_reader_that_is_gone_and_a_full_disk_exit_1_without_a_traceback(
    world: World, config: str, output: str
) -> None:
    world.started()
    reader, writer = os.pipe()
    os.close(reader)
    assert unread(writer, "-c", config, "-o", output, "list") == (1, "")
    code, err = unread(os.open("/dev/full", os.O_WRONLY), "-c", config, "-o", output, "list")
    assert (code, err) == (1, "dispatch: error: [Errno 28] No space left on device\n")


# --- preflight


def test_what_the_cluster_says_does_nothing_to_the_terminal(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    with adapters.world(cluster, "kueue") as world:
        name = f"{world.namespace.name}-red"
        check = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "AdmissionCheck", "metadata": {"name": name}}
        cluster.create({**check, "spec": {"controllerName": "\x1b[31mred"}})
        strategy = {"admissionChecks": [{"name": world.namespace.check}, {"name": name}]}
        cluster.patch("ClusterQueue", world.namespace.name, None, {"spec": {"admissionChecksStrategy": strategy}})
        world.settings["kueue"]["admissionCheck"] = name
        (tmp_path / "config.json").write_text(json.dumps(world.settings))
        for arguments in (["preflight"], ["start", "-"]):
            code, out, err = run(*arguments, cwd=tmp_path, stdin=json.dumps(world.spec().to_json()))
            assert code == 3
            assert f'{name} names controller "\\x1b[31mred", not' in out + err
        cluster.delete("AdmissionCheck", name)


def test_preflight_prints_what_it_found(world: World, config: str) -> None:
    code, out, err = run("-c", config, "preflight")
    assert (code, err) == (0, "")
    assert (
        out
        == """\
capability        value    source    reason
ReadmissionGate   yes      declared  nothing but the adapter resumes a job
AttemptInjection  yes      declared  -
Hold              yes      probed    -
OutputRead        yes      probed    -
OutputFollow      yes      probed    -

ready: every gate is proven
"""
    )
    assert world.left() == []


def test_preflight_as_json(config: str) -> None:
    code, out, _ = run("-c", config, "-o", "json", "preflight")
    found = json.loads(out)
    assert (code, found["observeOnly"], found["leftovers"]) == (0, "", [])
    assert list(found["capabilities"]) == list(adapter.Capability)
    assert found["capabilities"]["Hold"] == {"value": "yes", "source": "probed", "reason": "", "remedy": ""}


def test_an_observe_only_cluster_exits_3_with_the_remedies(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    with adapters.world(cluster, "kueue", without="get pods/log") as world:
        world.settings["kueue"]["localQueue"] = "nowhere"
        (tmp_path / "config.json").write_text(json.dumps(world.settings))
        code, out, err = run("preflight", cwd=tmp_path)
        reason = f"LocalQueue {world.namespace.name}/nowhere does not exist"
        observing = f"observe-only: the readmission gate is not proven: {reason}"
        queue, grant = "create it, or correct kueue.localQueue", "grant it: examples/adapter-role.yaml has all"
        assert (code, err) == (3, "")
        assert (
            out
            == f"""\
capability        value    source    reason
ReadmissionGate   no       probed    {reason}
AttemptInjection  no       probed    {reason}
Hold              no       probed    the cluster is {observing}
OutputRead        no       probed    not permitted to get pods/log
OutputFollow      no       probed    not permitted to get pods/log

{observing}
  ReadmissionGate: {queue}
  AttemptInjection: {queue}
  Hold: {queue}
  OutputRead: {grant}
  OutputFollow: {grant}
"""
        )
        spec = json.dumps(world.spec().to_json())
        for verb in ("start", "run"):
            code, out, err = run(verb, "-", stdin=spec, cwd=tmp_path)
            assert (code, out) == (3, "")
            text = f"dispatch: unsupported: start in namespace {world.namespace.name}: the cluster is {observing}\n"
            assert err == text
        handle = f"{world.namespace.name}/dj-{adapter.new_job()}-s1@u"
        for arguments in (["open", handle], ["stop", handle], ["hold", handle, "1"], ["release", handle, "1"]):
            code, out, err = run(*arguments, cwd=tmp_path)
            assert (code, out) == (3, "")
            assert err.startswith(f"dispatch: read-only: {arguments[0]} in namespace ")
            assert err.endswith(f": the cluster is {observing}\n")
        assert run("list", cwd=tmp_path) == (0, "", "")


def test_preflight_of_a_cluster_that_is_refused_exits_4(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    with adapters.world(cluster, "plain", without="watch pods") as world:
        (tmp_path / "config.json").write_text(json.dumps(world.settings))
        code, out, err = run("-o", "json", "preflight", cwd=tmp_path)
        assert (code, out) == (4, "")
        assert err.startswith(
            "dispatch: unauthorized: the adapter may not watch pods, so it cannot observe the cluster"
        )


# --- run, hold, release, ceased


def launched(config: str, world: World, **changes: Any) -> tuple[subprocess.Popen[str], JobSpec]:
    """`run` of a job, in the background."""
    spec = world.spec(**changes)
    file = pathlib.Path(config).with_name("job.json")
    file.write_text(json.dumps(spec.to_json()))
    argv = [sys.executable, "adapter.py", "-c", config, "run", str(file)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True), spec


def handle_of(world: World, spec: JobSpec) -> Handle:
    found: tuple[Handle, ...] = world.wait(lambda: world.backend.find(spec.job), "it is started")
    return found[0]


@pytest.mark.parametrize(("code", "ends", "first"), [(0, 0, "state     succeeded"), (1, 5, "state     failed")])
def test_run_sees_a_job_through(world: World, config: str, code: int, ends: int, first: str) -> None:
    process, spec = launched(config, world)
    with process:
        handle = handle_of(world, spec)
        world.cluster.pods.log(world.running(handle)[0], "hello\x1b[0m")
        world.end(handle, code=code)
        out, err = process.communicate(timeout=90)
    assert process.returncode == ends
    line, state = out.splitlines()[:2]
    assert re.fullmatch(r"[01]: hello\\x1b\[0m", line)
    assert state.startswith(first)
    assert err.splitlines()[0] == str(handle)
    told = re.findall(rf"^\S+ {handle.name} (\w+)", err, re.MULTILINE)
    assert "running" in told
    assert told[-1] == first.split()[1]


def test_ctrl_c_leaves_the_job_running_and_says_how_to_follow_and_stop_it(world: World, config: str) -> None:
    process, spec = launched(config, world)
    with process:
        handle = handle_of(world, spec)
        world.running(handle)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert world.backend.inspect(handle).state is State.RUNNING
    commands = [shlex.split(line.partition(":  ")[2]) for line in err.splitlines()[-3:]]
    assert {tuple(command[:4]) for command in commands} == {("python", "adapter.py", "-c", config)}
    assert [command[4] for command in commands] == ["find", "watch", "stop"]
    assert run(*commands[0][2:]) == (0, f"{handle}\n", "")
    assert run(*commands[2][2:]) == (0, "", "")
    assert world.left() == []


def test_hold_release_and_ceased(world: World, config: str) -> None:
    handle = world.started()
    assert run("-c", config, "hold", str(handle), "2") == (0, "", "")
    assert world.backend.inspect(handle).hold == 2
    code, _, err = run("-c", config, "release", str(handle), "1")
    assert (code, err.split(":")[1]) == (4, " stale hold")
    assert run("-c", config, "release", str(handle), "2") == (0, "", "")
    assert run("-c", config, "ceased", str(handle)) == (0, f"no: TrainJob {handle.name} has not ended\n", "")
    code, out, _ = run("-c", config, "-o", "json", "ceased", str(handle))
    assert json.loads(out) == {"value": "no", "evidence": f"TrainJob {handle.name} has not ended"}
    assert run("-c", config, "hold", str(handle), "x")[0] == 2
