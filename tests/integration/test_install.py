"""The installation: manifest.yaml on a real control plane, and every command of docs/install.md in its order."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests import installed, jobs, packaged
from tests.cluster.api import ApiError, Object, path
from tests.cluster.cluster import Cluster
from tests.cluster.gate import NAMESPACE
from tests.installed import NAME, documents
from tests.integration.test_package import in_a_pod

ROOT = packaged.ROOT


@pytest.fixture(name="manifest")
def _manifest(cluster: Cluster) -> Iterator[list[Object]]:
    """What the API server made of each object of manifest.yaml."""
    with installed.on(cluster) as made:
        yield made


def test_the_manifest_is_accepted_whole_and_its_pods_run_under_restricted(
    cluster: Cluster, manifest: list[Object]
) -> None:
    assert [made["kind"] for made in manifest] == [obj["kind"] for obj in documents("manifest.yaml")]
    for sent, made in zip(documents("manifest.yaml"), manifest, strict=True):
        for key in sent.keys() - {"metadata"}:
            assert covers(made[key], sent[key]), f"{sent['kind']}: the API server dropped something of {key}"
    pods = cluster.wait(lambda: found if len(found := installed.running(cluster)) == 2 else None, "two pods run")
    assert len({pod["spec"]["nodeName"] for pod in pods}) == 2
    cluster.wait(
        lambda: cluster.get("PodDisruptionBudget", NAME, NAMESPACE)["status"].get("disruptionsAllowed") == 1,
        "one of the two may be evicted",
    )
    rooted: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "rooted"},
        "spec": {"containers": [{"name": "c", "image": "example.invalid/any"}]},
    }
    with pytest.raises(ApiError, match='violates PodSecurity "restricted'):
        cluster.create(rooted, NAMESPACE)


def covers(made: Any, sent: Any) -> bool:
    """Whether everything that was sent is there; the API server adds its defaults."""
    if isinstance(sent, dict):
        return isinstance(made, dict) and all(covers(made.get(key), value) for key, value in sent.items())
    if isinstance(sent, list):
        return len(made or []) == len(sent) and all(map(covers, made or [], sent))
    return bool(made == sent) or (made is None and sent == [])


def evict_one_of_two_that_do_not_run(cluster: Cluster) -> None:
    """As a drain of its node does. Raises ApiError 429 when the PodDisruptionBudget forbids it."""
    pods = cluster.wait(lambda: found if len(found := installed.running(cluster)) == 2 else None, "two pods run")
    for pod in pods:
        cluster.pods.condition(pod, "Ready", "False", "ContainersNotReady")
    cluster.wait(
        lambda: cluster.get("PodDisruptionBudget", NAME, NAMESPACE)["status"].get("currentHealthy") == 0,
        "the budget has seen it",
    )
    name = pods[0]["metadata"]["name"]
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    cluster.api.request("POST", path("Pod", NAMESPACE, name, "eviction"), eviction)


def test_a_pod_that_does_not_run_keeps_no_node_from_being_drained(cluster: Cluster, manifest: list[Object]) -> None:
    assert manifest
    evict_one_of_two_that_do_not_run(cluster)


def test_guard_off_a_pod_that_does_not_run_keeps_its_node_from_being_drained(cluster: Cluster) -> None:
    def change(obj: Object) -> None:
        obj.get("spec", {}).pop("unhealthyPodEvictionPolicy", None)

    with installed.on(cluster, change), pytest.raises(ApiError, match="disruption budget"):
        evict_one_of_two_that_do_not_run(cluster)


def test_with_the_trimmed_role_it_leads_and_admits(
    cluster: Cluster, manifest: list[Object], zipapp: pathlib.Path
) -> None:
    assert manifest
    for obj in documents("examples/admission-role.yaml"):
        cluster.apply(obj)
    pod = in_a_pod(cluster)
    try:
        python = packaged.interpreter("3.13")
        with (
            cluster.controller(in_cluster=pod, zipapp=zipapp, python=python, lease=NAME) as gate,
            cluster.namespace() as namespace,
        ):
            jobs.running(namespace, jobs.submit(namespace), epoch="1000001")
            assert not [line for line in gate.log if "level=ERROR" in line]
        assert cluster.get("Lease", NAME, NAMESPACE)["spec"]["holderIdentity"] == "gate"
    finally:
        cluster.delete("Role", NAME, NAMESPACE)
        cluster.delete("RoleBinding", NAME, NAMESPACE)
        cluster.apply(next(obj for obj in documents("manifest.yaml") if obj["kind"] == "ClusterRole"))


def commands() -> list[str]:
    """The page's shell blocks."""
    return re.findall(r"^```sh\n(.*?)^```$", (ROOT / "docs/install.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.timeout(600)
def test_every_command_of_the_page_works(cluster: Cluster, zipapp: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """With a `docker` that does nothing, and a gate that plays the leading pod: kwok's pods run no program."""
    if not shutil.which("kubectl"):
        pytest.skip("kubectl is not here: install it to run the commands of docs/install.md")
    folder, bin_ = tmp_path / "checkout", tmp_path / "bin"
    packaged.copy(folder)
    for name in ("Dockerfile", "manifest.yaml"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "examples", folder / "examples")
    bin_.mkdir()
    (bin_ / "docker").write_text("#!/bin/sh\n")
    (bin_ / "docker").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{bin_}:{os.environ['PATH']}",
        "PYTHON": packaged.interpreter("3.13"),
        "KUBECONFIG": str(cluster.kubeconfig),
        "BASE_DIGEST": 64 * "0",
        "BUILD_DIGEST": 64 * "1",
    }
    printed = ""
    try:
        with cluster.controller("leader", zipapp=zipapp, python=packaged.interpreter("3.13"), lease=NAME):
            for block in commands():
                done = subprocess.run(
                    ["bash", "-euo", "pipefail", "-c", block],
                    cwd=folder,
                    env=environment,
                    capture_output=True,
                    text=True,
                    check=False,
                )
                assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
                printed += done.stdout
    finally:
        for kind, name in (("AdmissionCheck", NAME), ("Namespace", NAMESPACE)):  # what a failed run has left
            cluster.delete(kind, name, missing_ok=True)
        cluster.wait(lambda: cluster.find("Namespace", NAMESPACE) is None, "the namespace is gone")
        cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    assert "dispatch-admission.pyz holds what this checkout makes\n" in printed
    assert f"{packaged.NAME}: OK\n" in printed
    assert "successfully rolled out\nleader\nTrue\n" in printed
