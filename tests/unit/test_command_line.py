"""admission.py's command line: every flag, both dash forms, every refusal, and the log's format."""

from __future__ import annotations

import os
import pathlib
import select
import subprocess
import sys
from typing import Any

import pytest

import admission
from admission import Options, UsageError, parse

MODULE = pathlib.Path(admission.__file__)
IMPOSSIBLE = "/nonexistent/kubeconfig"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the controller as a person would, with no cluster to be found by accident."""
    inherited = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **environment}
    command = [sys.executable, str(MODULE), *arguments]
    return subprocess.run(command, env=inherited, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {}),
        (["-in-cluster"], {"in_cluster": True}),
        (["--in-cluster=true"], {"in_cluster": True}),
        (["-in-cluster=1"], {"in_cluster": True}),
        (["-in-cluster=t"], {"in_cluster": True}),
        (["-in-cluster=false", "-kubeconfig", "f"], {"kubeconfig": "f"}),
        (["-in-cluster=0"], {}),
        (["-in-cluster=f"], {}),
        (["-kubeconfig", "f"], {"kubeconfig": "f"}),
        (["--kubeconfig=f=g"], {"kubeconfig": "f=g"}),
        (["-kubeconfig", "-odd"], {"kubeconfig": "-odd"}),
        (["-context", "c"], {"context": "c"}),
        (["--context=c"], {"context": "c"}),
        (["-lease-namespace", "n"], {"lease_namespace": "n"}),
        (["--lease-namespace=n"], {"lease_namespace": "n"}),
        (["-lease-name", "l"], {"lease_name": "l"}),
        (["--lease-name=l"], {"lease_name": "l"}),
        (["-resync", "10s"], {"resync": 10.0}),
        (["--resync=1m30s"], {"resync": 90.0}),
        (["-resync=500ms"], {"resync": 0.5}),
        (["-resync=1.5h"], {"resync": 5400.0}),
        (["-resync=.5s"], {"resync": 0.5}),
        (["-resync=+2m"], {"resync": 120.0}),
        (["-version"], {"version": True}),
        (["--version=true"], {"version": True}),
        (["-resync=1s", "-resync=2s"], {"resync": 2.0}),
        (["-version", "--"], {"version": True}),
    ],
)
def test_flags_are_read_as_go_reads_them(arguments: list[str], expected: dict[str, Any]) -> None:
    assert parse(arguments) == Options(**expected)


@pytest.mark.parametrize("flag", ["-h", "--h", "-help", "--help"])
def test_help_prints_the_usage_and_exits_0(flag: str) -> None:
    done = run(flag)
    assert (done.returncode, done.stdout, done.stderr) == (0, admission.USAGE, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-nonsense"], "flag provided but not defined: -nonsense"),
        (["--nonsense=1"], "flag provided but not defined: -nonsense"),
        (["positional"], "unexpected argument 'positional': everything is said with flags"),
        (["-in-cluster", "true"], "unexpected argument 'true': everything is said with flags"),
        (["--", "-version"], "unexpected argument '--': everything is said with flags"),
        (["---version"], "unexpected argument '---version': everything is said with flags"),
        (["-"], "unexpected argument '-': everything is said with flags"),
        (["-kubeconfig"], "flag needs an argument: -kubeconfig"),
        (["-in-cluster=maybe"], "invalid boolean value 'maybe' for -in-cluster: parse error"),
        (["-version="], "invalid boolean value '' for -version: parse error"),
        (["-resync", "30"], "invalid value '30' for flag -resync: not a duration such as 10s, 1m30s or 500ms"),
        (["-resync="], "invalid value '' for flag -resync: not a duration such as 10s, 1m30s or 500ms"),
        (["-resync=1d"], "invalid value '1d' for flag -resync: not a duration such as 10s, 1m30s or 500ms"),
        (["-resync=0s"], "invalid value '0s' for flag -resync: must be positive"),
        (["-resync=0"], "invalid value '0' for flag -resync: must be positive"),
        (["-resync=-5s"], "invalid value '-5s' for flag -resync: must be positive"),
        (["-resync", "-5s"], "invalid value '-5s' for flag -resync: must be positive"),
        (["-resync=9999999999h"], "invalid value '9999999999h' for flag -resync: must be less than 292 years"),
        (["-lease-name="], "invalid value '' for flag -lease-name: not the name of an object"),
        (["-lease-namespace=A/B"], "invalid value 'A/B' for flag -lease-namespace: not the name of an object"),
        (["-in-cluster", "-kubeconfig=f"], "-in-cluster cannot be used with -kubeconfig or -context"),
        (["-context=c", "-in-cluster"], "-in-cluster cannot be used with -kubeconfig or -context"),
    ],
)
def test_a_usage_error_is_one_line_then_the_usage_and_exit_2(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse(arguments)
    assert str(raised.value) == message


def test_a_usage_error_on_the_command_line() -> None:
    done = run("-nonsense")
    expected = f"dispatch-admission: flag provided but not defined: -nonsense\n{admission.USAGE}"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


def test_an_empty_identity_is_a_usage_error() -> None:
    done = run("-kubeconfig", IMPOSSIBLE, POD_NAME=" ")
    expected = f"dispatch-admission: the identity is empty: set $POD_NAME, or give the host a name\n{admission.USAGE}"
    assert (done.returncode, done.stderr) == (2, expected)


def test_the_identity_is_the_pods_name_else_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_NAME", "gate-0")
    assert admission.own_identity() == "gate-0"
    monkeypatch.delenv("POD_NAME")
    assert admission.own_identity() == os.uname().nodename


def test_version_is_printed() -> None:
    done = run("-version")
    assert (done.returncode, done.stdout) == (0, f"dispatch-admission {admission.VERSION}\n")


@pytest.mark.parametrize(
    ("arguments", "content"),
    [
        (["-kubeconfig", IMPOSSIBLE], None),
        ([], None),
        (["-in-cluster"], None),
        (["-kubeconfig", "FILE"], "clusters: ["),
        (["-kubeconfig", "FILE"], "just a string"),
        (["-kubeconfig", "FILE"], "clusters: 3\ncontexts: 4\nusers: 5\ncurrent-context: 6"),
        (["-kubeconfig", "FILE"], "\x00"),
        (["-kubeconfig", "FILE", "-context", "none"], "apiVersion: v1\nclusters: []\ncontexts: []\nusers: []\n"),
    ],
)
def test_what_else_prevents_the_start_is_one_line_that_says_what_to_do(
    arguments: list[str], content: str | None, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "kubeconfig"
    if content is not None:
        file.write_text(content)
    done = run(*[str(file) if argument == "FILE" else argument for argument in arguments])
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("dispatch-admission: no usable credentials: ")
    assert done.stderr.count("\n") == 1
    assert "-kubeconfig" in done.stderr


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("plain", "plain"),
        ("ns/name-1.2:3", "ns/name-1.2:3"),
        ("", '""'),
        ("two words", '"two words"'),
        ('say "x"', '"say \\"x\\""'),
        ("a=b", '"a=b"'),
        ("line\nbreak", '"line\\nbreak"'),
        ("escape\x1b[31m", '"escape\\u001b[31m"'),
        ("waiting for …", '"waiting for …"'),
        ("…", "…"),
        ("rub\x7fout \x9b31m…", '"rub\\u007fout \\u009b31m\\u2026"'),
        ("next\x85line", '"next\\u0085line"'),
    ],
)
def test_a_log_value_is_quoted_as_slog_does(value: str, written: str, capfd: pytest.CaptureFixture[str]) -> None:
    admission.log("INFO", "leading", identity=value)
    line = capfd.readouterr().err
    assert line.startswith("time=")
    assert line.endswith(f" level=INFO msg=leading identity={written}\n")
    assert line.count("\n") == 1


def test_a_log_line_is_never_longer_than_a_pipe_takes_whole(capfd: pytest.CaptureFixture[str]) -> None:
    admission.log("ERROR", "reconcile", error="x" * 10_000)
    line = capfd.readouterr().err
    assert len(line) == select.PIPE_BUF
    assert line.endswith("x\n")
