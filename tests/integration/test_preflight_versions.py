"""Preflight on a cluster of its own that lacks Kueue, and then more."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

import adapter
from adapter import State, Unsupported
from tests import adapters
from tests.cluster import local, providers
from tests.cluster.cluster import Cluster

pytestmark = pytest.mark.usefixtures("cluster")  # the run's: then all is built
NAMESPACE = "team-a"
SUPPORTED = "this adapter supports Trainer v2.3, JobSet v0.12 and Kueue v0.20"


@pytest.fixture(scope="module")
def without_kueue(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Trainer and JobSet alone, and no nodes."""
    if providers.choose(pytestconfig.option.provider) != "local":
        pytest.skip("a second cluster, with other components, needs the local provider")
    folder = tmp_path_factory.mktemp("without-kueue")
    started = local.start(folder, controllers=("jobset", "trainer"))
    try:
        started.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        adapters.install_runtime(started)
        yield started
    finally:
        local.down(folder, started)


@pytest.fixture
def settings(without_kueue: Cluster) -> dict[str, Any]:
    """Those of the example, in plain mode."""
    kubeconfig: pathlib.Path = adapters.account(without_kueue, NAMESPACE)
    return {"namespace": NAMESPACE, "probeRuntime": {"name": "torch-safe"}, "kubeconfig": str(kubeconfig)}


def refused(settings: dict[str, Any]) -> str:
    with pytest.raises(Unsupported) as error:
        adapter.connect(settings)
    return str(error.value)


def test_plain_mode_needs_nothing_of_kueue(without_kueue: Cluster, settings: dict[str, Any]) -> None:
    backend = adapter.connect(settings)
    assert backend.observe_only == ""
    assert {s.value for s in backend.capabilities().values()} == {adapter.Answer.YES}
    handle = backend.start(adapter.JobSpec(adapter.new_job(), adapter.Runtime("torch-safe")))
    backend.hold(handle, 1)
    backend.open(handle)
    assert backend.inspect(handle).state is State.HELD
    without_kueue.wait(lambda: _released(backend, handle), "it is released")
    backend.stop(handle)
    assert backend.ceased(handle).value is adapter.Answer.YES


def _released(backend: adapter.Backend, handle: adapter.Handle) -> bool:
    with contextlib.suppress(adapter.Conflict):
        backend.release(handle, 1)
        return True
    return False


def test_kueue_mode_is_refused_where_kueue_is_not_installed(settings: dict[str, Any]) -> None:
    settings["kueue"] = {"localQueue": "lq", "admissionCheck": "check"}
    assert refused(settings) == (
        f"dispatch: unsupported: the cluster does not serve kueue.x-k8s.io/v1beta2; {SUPPORTED}"
    )


@pytest.mark.parametrize(("group", "version"), [("jobset.x-k8s.io", "v1alpha2"), ("trainer.kubeflow.org", "v1alpha1")])
def test_a_version_that_is_not_served_is_named(
    without_kueue: Cluster, settings: dict[str, Any], group: str, version: str
) -> None:
    with unserved(without_kueue, group):
        assert refused(settings) == f"dispatch: unsupported: the cluster does not serve {group}/{version}; {SUPPORTED}"
        settings["kueue"] = {"localQueue": "lq", "admissionCheck": "check"}
        assert f"does not serve {group}/{version}, kueue.x-k8s.io/v1beta2; " in refused(settings)


def test_kueue_mode_needs_leases(without_kueue: Cluster, settings: dict[str, Any]) -> None:
    settings["kueue"] = {"localQueue": "lq", "admissionCheck": "check"}
    with without_kueue.reconfigured("kube-apiserver", flags={"--runtime-config": "coordination.k8s.io/v1=false"}):
        text = "the cluster does not serve kueue.x-k8s.io/v1beta2, coordination.k8s.io/v1"
        assert refused(settings) == f"dispatch: unsupported: {text}; {SUPPORTED}"
    assert "coordination" not in refused(settings)


@contextlib.contextmanager
def unserved(cluster: Cluster, group: str) -> Iterator[None]:
    """The group's custom resources are there, and not served."""
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    names = [
        crd["metadata"]["name"] for crd in cluster.api.request("GET", path)["items"] if crd["spec"]["group"] == group
    ]

    def serve(yes: bool) -> None:
        for name in names:
            patch = [{"op": "replace", "path": "/spec/versions/0/served", "value": yes}]
            cluster.api.request("PATCH", f"{path}/{name}", patch, content="application/json-patch+json")

    def listed() -> bool:
        return group in [found["name"] for found in cluster.api.request("GET", "/apis")["groups"]]

    serve(False)
    try:
        cluster.wait(lambda: not listed(), f"{group} is not served")
        yield
    finally:
        serve(True)
        cluster.wait(listed, f"{group} is served")
