"""Builds the control plane's programs from their published Go modules, once, into a cache.

Each folder below `components/` is a Go module whose go.mod and go.sum pin one upstream project and everything that it
is built from. The programs, and the manifests that are read when a cluster starts, go to
`~/.cache/dispatch-test-cluster/<component>-<key>`, where the key is the hash of those two files and the recipe below:
a changed pin is built again, nothing else is. Go's own build cache would grow to about 10 GB; a throw-away one is used
and removed. What a real node needs (`node_components`) is built only for those who ask for one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

COMPONENTS = pathlib.Path(__file__).parent / "components"
GO_REQUIRED = (1, 26)
SECCOMP_HELP = (
    "for them, install libseccomp's headers and pkg-config (Debian: apt-get install libseccomp-dev pkg-config)"
)
GO_HELP = "install Go 1.26 or newer (https://go.dev/doc/install) and put `go` on the PATH"

Progress = Callable[[str], None]


class BuildError(Exception):
    """A component cannot be built; the text says what to install or where the compiler's output is."""


@dataclass(frozen=True)
class Component:
    """One upstream project: `programs` maps a binary's name to its Go package, `manifests` are globs in its module.

    `tags` and `cgo` are not in the repr, which is part of every key, but in the keys of those that have them.
    """

    name: str
    module: str
    programs: dict[str, str]
    manifests: tuple[str, ...] = ()
    ldflags: str = ""
    tags: str = field(default="", repr=False)
    cgo: bool = field(default=False, repr=False)


ALL = (
    Component("etcd", "go.etcd.io/etcd/server/v3", {"etcd": "go.etcd.io/etcd/server/v3"}),
    Component(
        "kubernetes",
        "k8s.io/kubernetes",
        {p: f"k8s.io/kubernetes/cmd/{p}" for p in ("kube-apiserver", "kube-controller-manager", "kube-scheduler")},
        ldflags="-X k8s.io/component-base/version.gitVersion=v1.37.2",
    ),
    Component(
        "jobset",
        "sigs.k8s.io/jobset",
        {"jobset": "sigs.k8s.io/jobset"},
        ("config/components/crd/bases/*.yaml", "config/components/webhook/manifests.yaml"),
    ),
    Component(
        "trainer",
        "github.com/kubeflow/trainer/v2",
        {"trainer-controller-manager": "github.com/kubeflow/trainer/v2/cmd/trainer-controller-manager"},
        ("manifests/base/crds/*.yaml", "manifests/base/webhook/manifests.yaml", "manifests/base/runtimes/*.yaml"),
    ),
    Component(
        "kueue",
        "sigs.k8s.io/kueue",
        {"kueue": "sigs.k8s.io/kueue/cmd/kueue"},
        ("config/components/crd/bases/*.yaml", "config/components/webhook/manifests.yaml"),
    ),
    Component(
        "kwok",
        "sigs.k8s.io/kwok",
        {"kwok": "sigs.k8s.io/kwok/cmd/kwok"},
        ("kustomize/stage/*/*/*.yaml", "kustomize/crd/bases/*.yaml"),
    ),
)

_CONTAINERD, _PLUGINS = "github.com/containerd/containerd/v2", "github.com/containernetworking/plugins"
# Statically linked, so that they run whatever the node's namespaces show them as the system's libraries.
_STATIC = "urfave_cli_no_docs osusergo netgo"
_NODE = (
    Component(
        "kubelet",
        "k8s.io/kubernetes",
        {"kubelet": "k8s.io/kubernetes/cmd/kubelet"},
        ldflags="-X k8s.io/component-base/version.gitVersion=v1.37.2",
    ),
    Component(
        "containerd",
        _CONTAINERD,
        {name: f"{_CONTAINERD}/cmd/{name}" for name in ("containerd", "containerd-shim-runc-v2", "ctr")},
        ldflags=f"-X {_CONTAINERD}/version.Version=v2.4.2",
        tags=f"{_STATIC} static_build no_btrfs no_devmapper no_zfs no_tracing",
    ),
    Component(
        "cni",
        _PLUGINS,
        {"bridge": f"{_PLUGINS}/plugins/main/bridge", "host-local": f"{_PLUGINS}/plugins/ipam/host-local"},
    ),
    Component("pause", "dispatch.test/pause", {"pause": "dispatch.test/pause"}),
)
_RUNC = Component(
    "runc",
    "github.com/opencontainers/runc",
    {"runc": "github.com/opencontainers/runc"},
    ldflags="-X main.version=1.5.3 -extldflags -static",
    tags=_STATIC,
    cgo=True,  # what enters a container's namespaces is written in C
)
_RUNC_SECCOMP = replace(_RUNC, tags=f"{_STATIC} seccomp")
_UNFILTERED = Component("unfiltered", "dispatch.test/unfiltered", {"unfiltered": "dispatch.test/unfiltered"})


def node_components(progress: Progress) -> tuple[Component, ...]:
    """What a real node needs; where libseccomp is not there to build with, without it, which `progress` is told."""
    if _folder(_RUNC_SECCOMP).is_dir() or _has_libseccomp():
        return (*_NODE, _RUNC_SECCOMP)
    progress(f"pods run without seccomp filters on the real node: {SECCOMP_HELP}")
    return (*_NODE, _RUNC, _UNFILTERED)


def _has_libseccomp() -> bool:
    """Whether a C program can be linked with it, statically."""
    if not (shutil.which("cc") and shutil.which("pkg-config")):
        return False
    program = "#include <seccomp.h>\nint main(void) { return seccomp_api_get() == 0; }"
    link = ["cc", "-static", "-x", "c", "-", "-o", "/dev/null", "-lseccomp"]
    return subprocess.run(link, input=program, text=True, capture_output=True).returncode == 0


def cache_root() -> pathlib.Path:
    """The folder that keeps built components between runs."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "dispatch-test-cluster"


def ensure(
    progress: Progress, *, skip: frozenset[str] = frozenset(), components: Sequence[Component] = ALL
) -> dict[str, pathlib.Path]:
    """Returns each component's folder (`bin/`, `manifests/`), building what the cache lacks.

    Safe to call from several processes at once: one builds, the others wait. Raises BuildError.
    """
    wanted = [c for c in components if c.name not in skip]
    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    folders = {c.name: _folder(c) for c in wanted}
    if all(f.is_dir() for f in folders.values()):
        return folders
    with _lock(root / "lock", progress):
        for left_over in root.glob("tmp-*"):  # a build that was killed; nobody else builds while we hold the lock
            _remove(left_over)
        missing = [c for c in wanted if not folders[c.name].is_dir()]
        if missing:
            _require_go()
            with _scratch(root) as scratch:
                for n, component in enumerate(missing, 1):
                    progress(f"building {component.name} ({n} of {len(missing)}; kept for the next time)")
                    _build(component, folders[component.name], scratch, progress)
    return folders


def _folder(component: Component) -> pathlib.Path:
    return cache_root() / f"{component.name}-{_key(component)}"


def _key(component: Component) -> str:
    digest = hashlib.sha256(repr(component).encode())
    if component.tags or component.cgo:
        digest.update(f"{component.tags} {component.cgo}".encode())
    files = COMPONENTS / component.name
    for file in sorted([*files.glob("go.*"), *files.glob("*.go")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _require_go() -> None:
    if shutil.which("go") is None:
        raise BuildError(f"Go is not installed, and the test cluster's programs are not built yet: {GO_HELP}")
    version = subprocess.run(["go", "env", "GOVERSION"], capture_output=True, text=True, check=False).stdout.strip()
    found = re.match(r"go(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < GO_REQUIRED:
        raise BuildError(f"the test cluster needs Go 1.26, and `go` here is {version or 'unknown'}: {GO_HELP}")


def _build(component: Component, target: pathlib.Path, scratch: pathlib.Path, progress: Progress) -> None:
    module = COMPONENTS / component.name
    staging = scratch / component.name
    (staging / "bin").mkdir(parents=True)
    ldflags = f"-s -w {component.ldflags}".strip()
    if component.cgo and shutil.which("cc") is None:
        raise BuildError(f"{component.name} needs a C compiler: install one (Debian: apt-get install gcc libc6-dev)")
    environment = {"CGO_ENABLED": "1" if component.cgo else "0"}
    for binary, package in component.programs.items():
        arguments = ["-trimpath", "-tags", component.tags, "-ldflags", ldflags, "-o", str(staging / "bin" / binary)]
        _go(["build", *arguments, package], module, scratch, progress, binary, environment)
    source = pathlib.Path(_go(["list", "-m", "-f", "{{.Dir}}", component.module], module, scratch, progress).strip())
    for pattern in component.manifests:
        copy_manifests(source, pattern, staging / "manifests")
    staging.rename(target)


def copy_manifests(source: pathlib.Path, pattern: str, target: pathlib.Path) -> None:
    """Copies what `pattern` matches below `source` to the same place below `target`."""
    found = sorted(source.glob(pattern))
    if not found:
        raise BuildError(f"{source} has no {pattern}: is it the source tree of the version that was built?")
    for file in found:
        copy = target / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())  # the module cache is read-only, the copy is not


def _go(
    arguments: list[str],
    module: pathlib.Path,
    scratch: pathlib.Path,
    progress: Progress,
    what: str = "",
    env: Mapping[str, str] | None = None,
) -> str:
    environment = {
        **os.environ,
        "GOCACHE": str(scratch / "gocache"),
        "GOTMPDIR": str(scratch),
        "GOFLAGS": "-mod=readonly -buildvcs=false",
        "GOTOOLCHAIN": "local",
        "GOWORK": "off",
        **(env or {}),
    }
    log = scratch / "go.log"
    with log.open("w") as errors, _heartbeat(f"building {what}" if what else "", progress):
        done = subprocess.run(
            ["go", *arguments], cwd=module, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    if done.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise BuildError(f"`go {' '.join(arguments)}` failed in {module}:\n{tail}")
    return done.stdout


@contextlib.contextmanager
def _heartbeat(what: str, progress: Progress) -> Iterator[None]:
    """Says every 15 s that `what` still goes on: some programs take minutes to compile."""
    done, started = threading.Event(), time.monotonic()

    def beat() -> None:
        while not done.wait(15):
            progress(f"  {what}: {time.monotonic() - started:.0f} s")

    thread = threading.Thread(target=beat, daemon=True)
    if what:
        thread.start()
    try:
        yield
    finally:
        done.set()
        if what:
            thread.join()


@contextlib.contextmanager
def _lock(path: pathlib.Path, progress: Progress) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another run builds the test cluster's programs; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _scratch(root: pathlib.Path) -> Iterator[pathlib.Path]:
    folder = pathlib.Path(tempfile.mkdtemp(prefix="tmp-", dir=root))
    try:
        yield folder
    finally:
        _remove(folder)


def _remove(folder: pathlib.Path) -> None:
    """Removes a tree that may hold read-only folders, as Go's caches do."""
    for path, _, _ in os.walk(folder):
        pathlib.Path(path).chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)
