"""What importing the adapter costs and brings."""

from __future__ import annotations

import pathlib
import py_compile
import subprocess
import sys

import pytest

CODE = """
import sys, time
began = time.process_time()
import kubernetes, ulid
theirs, modules = time.process_time(), set(sys.modules)
import adapter
ours = time.process_time()
print((ours - began) / (theirs - began), *sorted(set(sys.modules) - modules))
"""


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """The adapter in a folder of its own, compiled, as a project has it after its first run."""
    copy = tmp_path / "adapter.py"
    copy.write_bytes(pathlib.Path("adapter.py").read_bytes())
    py_compile.compile(str(copy), doraise=True)
    return tmp_path


def imported(folder: pathlib.Path) -> tuple[float, list[str]]:
    argv = [sys.executable, "-c", CODE]
    run = subprocess.run(argv, cwd=folder, env={"PYTHONPATH": "."}, capture_output=True, text=True, check=True)
    ratio, *modules = run.stdout.split()
    return float(ratio), modules


def test_importing_costs_at_most_a_tenth_more_than_its_dependencies(folder: pathlib.Path) -> None:
    assert min(imported(folder)[0] for _ in range(9)) <= 1.1


def test_importing_brings_nothing_but_the_adapter(folder: pathlib.Path) -> None:
    _, modules = imported(folder)
    assert modules == ["adapter"]
