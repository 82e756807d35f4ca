"""Container images for the real node, made of what is on this machine, without a registry: `docker save` archives."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from typing import Any

from . import supervisor

PAUSE, PYTHON, CONTROLLER = (f"dispatch-test/{name}:local" for name in ("pause", "python", "controller"))
ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
# Parts of the standard library that no program here needs, and other people's packages.
LEFT_OUT = {"__pycache__", "site-packages", "dist-packages", "test", "idlelib", "ensurepip", "turtledemo", "tkinter"}
ACCOUNTS = {
    "/etc/passwd": "root:x:0:0:root:/:/bin/false\nnonroot:x:65532:65532:nonroot:/tmp:/bin/false\n",
    "/etc/group": "root:x:0:\nnonroot:x:65532:\n",
}


def write_pause(archive: pathlib.Path, program: pathlib.Path) -> None:
    """The image of every pod's first container."""
    with _Layer() as layer:
        layer.file("/pause", program)
    _save(archive, PAUSE, layer, {"Entrypoint": ["/pause"], "User": "65535:65535"})


def write_python(archive: pathlib.Path) -> None:
    """The Python that runs this, as `python3` and `python`, with its standard library and no shell."""
    with _Layer() as layer:
        program = _put_python(layer, sys.executable, bytecode=False)
        for name in ("python3", "python"):
            layer.link(f"/usr/bin/{name}", program)
        for path, text in ACCOUNTS.items():
            layer.text(path, text)
    environment = ["PATH=/usr/bin", "PYTHONUNBUFFERED=1", "PYTHONDONTWRITEBYTECODE=1", "LANG=C.UTF-8"]
    _save(archive, PYTHON, layer, {"Env": environment, "Entrypoint": ["/usr/bin/python3"], "WorkingDir": "/"})


def write_controller(archive: pathlib.Path, zipapp: pathlib.Path, python: str) -> None:
    """What the Dockerfile makes, with `python`, a 3.13 of this machine, at the place of the one in its base."""
    dockerfile = (supervisor.ROOT / "Dockerfile").read_text()
    user, entrypoint = (re.findall(rf"^{word} (.*)$", dockerfile, re.MULTILINE)[-1] for word in ("USER", "ENTRYPOINT"))
    argv = json.loads(entrypoint)
    with _Layer() as layer:
        layer.folder("/tmp", 0o1777)
        program = _put_python(layer, python, bytecode=True)
        if argv[0] != program:
            raise ValueError(f"the image starts {argv[0]}, and {python} is none")
        layer.file(argv[-1], zipapp)
        for path, text in ACCOUNTS.items():
            layer.text(path, text)
    config = {"Env": ["PATH=/usr/bin", "LANG=C.UTF-8"], "Entrypoint": argv, "User": user, "WorkingDir": "/"}
    _save(archive, CONTROLLER, layer, config)


_WHERE = """
import json, sys, sysconfig
print(json.dumps([sys.base_prefix, sysconfig.get_path("stdlib"), sysconfig.get_python_version()]))
"""


def _put_python(layer: _Layer, python: str, *, bytecode: bool) -> str:
    """Puts an interpreter into /usr/bin, its standard library beside it, and what both load; returns its path there.

    The bytecode is made as the Dockerfile makes it.
    """
    told = subprocess.run([python, "-I", "-c", _WHERE], check=True, capture_output=True, text=True).stdout
    base, library, version = json.loads(told)
    prefix, stdlib = pathlib.Path(base).resolve(), pathlib.Path(library).resolve()
    place = pathlib.Path("/usr") / stdlib.relative_to(prefix)
    program = (prefix / f"bin/python{version}").resolve()
    layer.file(f"/usr/bin/python{version}", program)
    binaries = [program]
    for folder, below, names in os.walk(stdlib):
        below[:] = [name for name in below if name not in LEFT_OUT and not name.startswith("config-")]
        for file in (pathlib.Path(folder, name) for name in names):
            layer.file(str(place / file.relative_to(stdlib)), file)
            if file.suffix == ".so":
                binaries.append(file)
    for shared in _libraries(binaries):
        layer.file(shared, pathlib.Path(shared))
    if bytecode:
        with tempfile.TemporaryDirectory(prefix="dispatch-bytecode-") as cache:
            compileall = ["-B", "-X", f"pycache_prefix={cache}", "-W", "ignore", "-m", "compileall", "-q"]
            where = ["--invalidation-mode", "checked-hash", "-s", str(stdlib), "-p", str(place), str(stdlib)]
            out = "|".join(LEFT_OUT)
            subprocess.run([python, "-I", *compileall, "-x", rf"/({out}|config-[^/]*)/", *where], check=True)
            made = pathlib.Path(cache, str(stdlib).lstrip("/"))
            for file in made.rglob("*.pyc"):
                layer.file(str(place / file.relative_to(made).parent / "__pycache__" / file.name), file)
    return f"/usr/bin/python{version}"


def _libraries(programs: Iterable[pathlib.Path]) -> set[str]:
    """The shared libraries that programs are loaded with, the loader among them, by the paths that it looks for."""
    printed = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True).stdout
    found = set(re.findall(r"(?:=> |^\s+)(/\S+) \(0x", printed, re.MULTILINE))
    # The C library loads this one when a thread ends, as a daemon thread does when Python ends, and aborts without it.
    unwinders = (pathlib.Path(library).with_name("libgcc_s.so.1") for library in found)
    return found | {str(path) for path in unwinders if path.exists()}


class _Layer:
    """A file system in the making: what is put at a path brings the folders above it along, with /bin, /lib and their
    like links into /usr where they are such on this machine."""

    def __init__(self) -> None:
        self.bytes = io.BytesIO()
        self._tar = tarfile.open(fileobj=self.bytes, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115  # __exit__
        self._there = {"/"}

    def __enter__(self) -> _Layer:
        return self

    def __exit__(self, *_: object) -> None:
        self._tar.close()

    def folder(self, path: str, mode: int = 0o755) -> None:
        if path in self._there:
            return
        self.folder(os.path.dirname(path))  # noqa: PTH120  # paths of the image, not of this machine
        if path.count("/") == 1 and pathlib.Path(path).is_symlink():
            target = str(pathlib.Path(path).readlink())
            self.folder("/" + target.lstrip("/"))
            self.link(path, target)
        elif path not in self._there:
            self._add(path, tarfile.DIRTYPE, mode)

    def link(self, path: str, target: str) -> None:
        self._parent(path)
        self._add(path, tarfile.SYMTYPE, 0o777, target)

    def file(self, path: str, source: pathlib.Path) -> None:
        self._put(path, source.read_bytes(), 0o755 if os.access(source, os.X_OK) else 0o644)

    def text(self, path: str, text: str) -> None:
        self._put(path, text.encode(), 0o644)

    def _put(self, path: str, data: bytes, mode: int) -> None:
        if path not in self._there:
            self._parent(path)
            self._add(path, tarfile.REGTYPE, mode, data=data)

    def _parent(self, path: str) -> None:
        self.folder(path.rpartition("/")[0] or "/")

    def _add(self, path: str, kind: bytes, mode: int, target: str = "", data: bytes = b"") -> None:
        entry = tarfile.TarInfo(path.lstrip("/"))
        entry.type, entry.mode, entry.linkname, entry.size = kind, mode, target, len(data)
        self._tar.addfile(entry, io.BytesIO(data))
        self._there.add(path)


def _save(archive: pathlib.Path, tag: str, layer: _Layer, config: dict[str, Any]) -> None:
    contents = layer.bytes.getvalue()
    digest = hashlib.sha256(contents).hexdigest()
    description = json.dumps(
        {
            "architecture": ARCHITECTURE,
            "os": "linux",
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        }
    ).encode()
    manifest = [{"Config": "config.json", "RepoTags": [tag], "Layers": ["layer.tar"]}]
    with tarfile.open(archive, "w") as out:
        files = {"layer.tar": contents, "config.json": description, "manifest.json": json.dumps(manifest).encode()}
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            out.addfile(entry, io.BytesIO(data))
