"""The local provider: the real components as processes on the loopback, without a container engine.

`with up(folder) as cluster:` starts a cluster that this process owns; `detach` (the command line's `up`) lets it
outlive it. Whatever goes wrong during the start, nothing is left running.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import pathlib
import time
from collections.abc import Callable, Collection, Iterator
from subprocess import SubprocessError
from typing import Any

from urllib3.exceptions import HTTPError

from . import build, manifests, real_node, supervisor
from . import folder as places
from .api import Api, ApiError, Object
from .cluster import Cluster, ClusterError, ComponentDied
from .components import CONTROLLERS, KUBELET_CLIENT, PORTS, Command, Components, Programs
from .nodes import KWOK_NODES
from .real_node import RealNode
from .supervisor import Processes
from .waiting import WaitTimeout, wait

KUEUE_BINARY, KUEUE_SOURCE = "DISPATCH_TEST_KUEUE_BIN", "DISPATCH_TEST_KUEUE_SRC"
NAMESPACES = ("jobset-system", "kubeflow-system", "kueue-system", "dispatch-system")

# What client-go asks for.
DISCOVERY = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"

Progress = Callable[[str], None]
_FAILURES = (ComponentDied, WaitTimeout, ApiError, HTTPError)


class LocalError(ClusterError):
    """The cluster cannot be started here; the text says what is missing or which component failed, and how."""


def quiet(_: str) -> None:
    """A Progress that says nothing."""


@contextlib.contextmanager
def up(folder: pathlib.Path, *, progress: Progress = quiet) -> Iterator[Cluster]:
    """A cluster for the length of the `with` block, gone even when this process is killed. Raises LocalError."""
    cluster = start(folder, progress=progress)
    try:
        yield cluster
    finally:
        down(folder, cluster)


def start(
    folder: pathlib.Path,
    *,
    with_real_node: bool = False,
    controllers: Collection[str] = CONTROLLERS,
    progress: Progress = quiet,
) -> Cluster:
    """Starts a cluster in `folder`, owned by this process: `down` it, or `cluster.disown()` it.

    Of the `controllers` that are left out the custom resources are not there either, nor kwok's nodes.
    """
    folder = folder.absolute()
    if reason := places.unusable(folder):
        raise LocalError(reason)
    if with_real_node:
        build_node_programs(progress)
    programs = build_programs(progress)
    places.empty(folder)
    supervisor.sweep()
    began = time.monotonic()
    processes = _launch(folder)
    try:
        described = Components(folder, programs, processes.ports(*PORTS))
        described.prepare()
        described.save()
        cluster = _Starting(described, processes, progress, controllers).run()
        if with_real_node:
            add_real_node(cluster, progress)
    except (ClusterError, *_FAILURES) as error:
        down(folder)
        raise LocalError(f"the cluster did not start: {error}\nAll logs are in {folder / supervisor.LOGS}") from error
    except BaseException:  # Ctrl-C too
        down(folder)
        raise
    progress(f"the cluster is up after {time.monotonic() - began:.0f} s")
    return cluster


def add_real_node(cluster: Cluster, progress: Progress = quiet) -> RealNode:
    """Joins a real node to a cluster, whose end is the node's, too. Raises LocalError."""
    if any(cluster.folder.resolve().is_relative_to(place) for place in ("/run", "/var/log")):
        raise LocalError(f"the real node has a /run and a /var/log of its own: {cluster.folder} must be elsewhere")
    node = RealNode(cluster)
    try:
        node.join(build_node_programs(progress), progress)
    except (*_FAILURES, supervisor.SupervisorError, OSError, SubprocessError) as error:
        logs = cluster.folder / supervisor.LOGS
        raise LocalError(f"the real node did not start: {error}\nAll logs are in {logs}") from error
    return node


def attach(folder: pathlib.Path) -> Cluster:
    """The cluster that runs in `folder`. Raises LocalError when none does."""
    folder = folder.absolute()
    if not supervisor.running(folder):
        raise LocalError(f"no cluster runs in {folder}: start one with `python3 -m tests.cluster up {folder}`")
    return Cluster(Components.load(folder), Processes(folder))


def down(folder: pathlib.Path, cluster: Cluster | None = None) -> None:
    """Ends the cluster of `folder`; returns when all its processes are gone. Only the logs stay. May be repeated."""
    folder = folder.absolute()
    if cluster:
        cluster.close()
    supervisor.shutdown(folder)
    places.clear(folder)


def build_programs(progress: Progress) -> Programs:
    """Where the programs are, built when they are not there yet. Raises LocalError."""
    binary, source = os.environ.get(KUEUE_BINARY), os.environ.get(KUEUE_SOURCE)
    if bool(binary) != bool(source):
        here, missing = (KUEUE_BINARY, KUEUE_SOURCE) if binary else (KUEUE_SOURCE, KUEUE_BINARY)
        raise LocalError(f"${here} is set, ${missing} is not: another Kueue needs both its binary and its source tree")
    if binary and source:
        if not os.access(binary, os.X_OK):
            raise LocalError(f"${KUEUE_BINARY}: {binary} is not a program that can be run")
        for needed in (manifests.CRDS["kueue"], manifests.WEBHOOKS["kueue"]):
            if not any(pathlib.Path(source).glob(needed)):
                raise LocalError(f"${KUEUE_SOURCE}: {source} has no {needed}")
    try:
        folders = build.ensure(progress, skip=frozenset({"kueue"} if binary else ()))
    except build.BuildError as error:
        raise LocalError(str(error)) from error
    return Programs(
        **{name: str(folders[name]) for name in ("etcd", "kubernetes", "jobset", "trainer", "kwok")},
        kueue_binary=str(pathlib.Path(binary).absolute()) if binary else str(folders["kueue"] / "bin/kueue"),
        kueue_source=str(pathlib.Path(source).absolute()) if source else str(folders["kueue"] / "manifests"),
        given_kueue=bool(binary),
    )


def build_node_programs(progress: Progress) -> dict[str, pathlib.Path]:
    """Where a real node's programs are, built when they are not there yet. Raises LocalError, where it cannot run.

    What else the cluster lacks is built along with them: kubelet and API server have most of their packages in common.
    """
    if reason := real_node.missing():
        raise LocalError(reason)
    skip = frozenset({"kueue"} if os.environ.get(KUEUE_BINARY) else ())
    try:
        return build.ensure(progress, skip=skip, components=(*build.ALL, *build.node_components(progress)))
    except build.BuildError as error:
        raise LocalError(str(error)) from error


def _launch(folder: pathlib.Path) -> Processes:
    try:
        return Processes.launch(folder)
    except supervisor.SupervisorError as error:
        raise LocalError(str(error)) from error


class _Starting:
    """One start, in the order that the components need, and side by side where they do not."""

    def __init__(
        self, components: Components, processes: Processes, progress: Progress, controllers: Collection[str]
    ) -> None:
        self.components, self.processes, self.progress = components, processes, progress
        self.controllers = [name for name in CONTROLLERS if name in controllers]
        self.cluster = Cluster(components, processes)
        self.api: Api = self.cluster.api

    def run(self) -> Cluster:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            try:
                self.progress("starting etcd and the API server")
                self.launch("etcd", "kube-apiserver")
                parsed = {n: pool.submit(manifests.crds, self.components, n) for n in self.controllers}
                self.cluster.ready("kube-apiserver")
                self.progress("starting the controllers")
                self.launch("kube-controller-manager", "kube-scheduler")
                made = [pool.submit(self.install, name, parsed[name]) for name in self.controllers]
                made += [pool.submit(self.namespace, name) for name in NAMESPACES]
                _finish(made)
                _finish(
                    [pool.submit(self.cluster.ready, name) for name in (*self.controllers, "kube-controller-manager")]
                )
                self.progress("installing the runtime, priorities and nodes")
                objects = [_KUBELET_ACCESS]
                objects += manifests.runtimes(self.components) if "trainer" in self.controllers else []
                objects += manifests.priorities() if "kueue" in self.controllers else []
                _finish([pool.submit(self.api.create, obj) for obj in objects])
                nodes = KWOK_NODES if "kwok" in self.controllers else ()
                for name in nodes:
                    self.cluster.nodes.create(name, ready=False)
                _finish([pool.submit(self.cluster.nodes.wait_ready, name) for name in nodes])
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.processes.shutdown()  # now, so that the threads that still wait for something give up
                raise
        return self.cluster

    def launch(self, *names: str) -> None:
        for name in names:
            command: Command = self.components.command(name)
            self.processes.start(name, command.argv, command.env)

    def install(self, name: str, parsed: concurrent.futures.Future[list[Object]]) -> None:
        """A project's custom resources, then its controller, which does not start without them, and its webhooks."""
        for crd in parsed.result():
            self.api.create(crd)
        for crd in parsed.result():
            served = functools.partial(self.discovered, crd["spec"]["group"], crd["spec"]["names"]["plural"])
            wait(served, f"{crd['metadata']['name']} is served", check=self.cluster.check)
        self.launch(name)
        if name in manifests.WEBHOOKS:
            for configuration in manifests.webhooks(self.components, name):
                self.api.create(configuration)

    def discovered(self, group: str, plural: str) -> bool:
        """Whether clients find a resource: a moment after it is established, and a controller gives up without it."""
        found = self.api.request("GET", "/apis", accept=DISCOVERY)
        served = [item for item in found["items"] if item["metadata"]["name"] == group]
        return any(r["resource"] == plural for item in served for v in item["versions"] for r in v["resources"])

    def namespace(self, name: str) -> None:
        self.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})


# Lets the API server, by its client certificate, ask a kubelet that checks who asks.
_KUBELET_ACCESS: Object = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "ClusterRoleBinding",
    "metadata": {"name": "dispatch-test-kubelet-client"},
    "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:kubelet-api-admin"},
    "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": KUBELET_CLIENT}],
}


def _finish(futures: list[concurrent.futures.Future[Any]]) -> None:
    """Returns when all are done; raises the first failure at once."""
    for future in concurrent.futures.as_completed(futures):
        future.result()
