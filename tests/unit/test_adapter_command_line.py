"""The adapter's command line refuses what is wrong before anybody is contacted."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

ADAPTER = pathlib.Path("adapter.py").resolve()
DEEP = "[" * 200_000


@pytest.fixture
def config(tmp_path: pathlib.Path) -> str:
    """Settings without credentials: who gets so far exits 4."""
    runtime = {"name": "torch-safe"}
    settings = {"namespace": "team-a", "probeRuntime": runtime, "kueue": {"localQueue": "lq"}}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(settings))
    return str(file)


def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    argv = [sys.executable, str(ADAPTER), *arguments]
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=60, env={"KUBECONFIG": "/nowhere"})
    return done.returncode, done.stdout, done.stderr


def test_credentials_that_are_not_there_exit_4(config: str) -> None:
    code, out, err = run("-c", config, "list")
    assert (code, out) == (4, "")
    assert err.startswith("dispatch: unauthorized: no usable credentials: ")


@pytest.mark.parametrize("verb", ["open", "inspect", "watch", "logs", "ceased"])
def test_a_handle_that_is_none(config: str, verb: str) -> None:
    text = "dispatch: invalid: handle: 'no-handle' is not <namespace>/<name>@<uid>\n"
    assert run("-c", config, verb, "no-handle") == (2, "", text)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("hold", "0"), "instance: 0 is not a whole number from 1 to 999,999,999,999,999,999"),
        (("release", "-1"), "instance: -1 is not a whole number from 1 to 999,999,999,999,999,999"),
        (("logs", "--rank", "-1"), "rank: -1 is not a whole number from 0 to 2,147,483,647"),
        (("logs", "--tail", "2147483648"), "tail: 2147483648 is not a whole number from 0 to 2,147,483,647"),
    ],
)
def test_a_number_that_is_out_of_range(config: str, arguments: tuple[str, ...], text: str) -> None:
    verb, *more = arguments
    assert run("-c", config, verb, "ns/dj-01arz3ndektsv4rrffq69g5fav-s1@u", *more) == (
        2,
        "",
        f"dispatch: invalid: {text}\n",
    )


@pytest.mark.parametrize("verb", ["find", "stop"])
def test_a_job_that_is_none(config: str, verb: str) -> None:
    text = "dispatch: invalid: job: 'no-job' is not a ULID: new_job() makes one\n"
    assert run("-c", config, verb, "no-job") == (2, "", text)


@pytest.mark.parametrize("verb", ["start", "run"])
@pytest.mark.parametrize(
    ("stdin", "text"),
    [
        ("", "job spec -: Expecting value: line 1 column 1 (char 0)"),
        ("{}", "job spec: job is missing"),
        (DEEP, "job spec -: maximum recursion depth exceeded"),
    ],
)
def test_a_spec_that_is_none(config: str, verb: str, stdin: str, text: str) -> None:
    code, out, err = run("-c", config, verb, "-", stdin=stdin)
    assert (code, out) == (2, "")
    assert err.startswith(f"dispatch: invalid: {text}")


def test_a_spec_from_a_stdin_that_is_closed(config: str) -> None:
    argv = ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, str(ADAPTER), "-c", config, "start", "-"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env={"KUBECONFIG": "/nowhere"})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("dispatch: invalid: job spec -: ")
    assert done.stderr.count("\n") == 1


def test_settings_that_are_too_deep(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "deep.json"
    file.write_text(DEEP)
    code, out, err = run("-c", str(file), "list")
    assert (code, out) == (2, "")
    assert err.startswith(f"dispatch: invalid: kubeflow settings: {file}: maximum recursion depth exceeded")
