"""The packaged controller for tests: interpreters of a minor version, and a build in a folder of its own."""

from __future__ import annotations

import functools
import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
NAME = "dispatch-admission.pyz"
COMMIT = "0123456789abcdef0123456789abcdef01234567"  # that of every build here


@functools.cache
def find_interpreter(version: str) -> str | None:
    """A Python of this minor version, as in "3.13": from the PATH, or pyenv's."""
    pyenv = sorted((pathlib.Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python{version}"))
    for candidate in (shutil.which(f"python{version}"), *map(str, pyenv)):
        command = [candidate or "false", "-I", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return candidate
    return None


def interpreter(version: str) -> str:
    """The same; skips the test where there is none."""
    found = find_interpreter(version)
    if not found:
        pytest.skip(f"Python {version} is not here: put python{version} on the PATH, or `pyenv install {version}`")
    return found


def build(folder: pathlib.Path) -> pathlib.Path:
    """Runs `./build.sh` on a copy of what it needs, in `folder`; returns the archive. Skips without Python 3.13."""
    python = interpreter("3.13")
    copy(folder)
    done = run(folder, python)
    assert done.returncode == 0, done.stderr
    return folder / "dist" / NAME


def copy(folder: pathlib.Path) -> None:
    """A checkout with no more than packaging needs."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("admission.py", "build.sh"):
        shutil.copy2(ROOT / name, folder)
    shutil.copytree(ROOT / "requirements", folder / "requirements", ignore=shutil.ignore_patterns("__pycache__"))


def run(
    folder: pathlib.Path, python: str, *arguments: str, cwd: str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a checkout's build.sh."""
    return subprocess.run(
        [str(folder / "build.sh"), *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHON": python, "COMMIT": COMMIT, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
