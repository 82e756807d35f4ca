"""manifest.yaml, installed on the test cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import yaml

from tests import packaged
from tests.cluster.api import Object
from tests.cluster.cluster import Cluster
from tests.cluster.gate import NAMESPACE

NAME = "dispatch-admission"  # of the AdmissionCheck, the Deployment, its container's label, the Lease, …


def documents(file: str) -> list[Object]:
    """The objects in a file of this checkout."""
    found: list[Object] = list(yaml.safe_load_all((packaged.ROOT / file).read_text()))
    return found


@contextlib.contextmanager
def on(cluster: Cluster, change: Callable[[Object], None] = lambda _: None) -> Iterator[list[Object]]:
    """What the API server made of each object of manifest.yaml, edited by `change`. Gone after the `with` block."""
    objects = documents("manifest.yaml")
    for obj in objects:
        change(obj)
    try:
        yield [cluster.apply(obj) for obj in objects]
    finally:
        for kind in ("Deployment", "PodDisruptionBudget", "NetworkPolicy"):
            cluster.delete(kind, NAME, NAMESPACE, missing_ok=True)
        cluster.delete("AdmissionCheck", NAME, missing_ok=True)
        labels = {"pod-security.kubernetes.io/enforce": None, "pod-security.kubernetes.io/warn": None}
        cluster.patch("Namespace", NAMESPACE, None, {"metadata": {"labels": labels}})
        cluster.wait(lambda: not cluster.list("Pod", NAMESPACE), "its pods are gone")
        cluster.delete("Lease", NAME, NAMESPACE, missing_ok=True)


def running(cluster: Cluster) -> list[Object]:
    """The Deployment's pods that run and are not being deleted."""
    pods = cluster.list("Pod", NAMESPACE, labels=f"app={NAME}")
    living = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    return [pod for pod in living if pod["status"].get("phase") == "Running"]
