"""How kwok plays nodes and pods here: its own published Stage files, minus what a test wants to decide itself.

A pod runs until a test says otherwise: kwok's `pod-complete` is left out. A deleted pod is removed at once, unless it
carries the annotation `dispatch.test/stuck`: then it stays Terminating for as long as it does, whatever its grace
period. Unlike a kubelet, kwok removes a pod without a final phase and strips its finalizers; a test that needs the
phase patches it first (`pods.fail(pod); pods.unstick(pod)`).
"""

from __future__ import annotations

import pathlib
from typing import Any

import yaml

STUCK = "dispatch.test/stuck"
# A node carries this label for as long as its kubelet "runs". A label, not an annotation: kwok drops a node whose label
# goes, since the watch it selects by label says so, and never notices that an annotation went.
KUBELET_LABEL, KUBELET_VALUE = "dispatch.test/kubelet", "kwok"

FOLDER = "kustomize/stage"
FILES = (
    "node/fast/node-initialize.yaml",
    "node/heartbeat-with-lease/node-heartbeat-with-lease.yaml",
    "pod/fast/pod-ready.yaml",
    "pod/fast/pod-delete.yaml",
)
NAMES = tuple(pathlib.PurePath(file).stem for file in FILES)  # each file's one Stage is called like it


def configuration(manifests: pathlib.Path, empty_log: pathlib.Path) -> str:
    """kwok's --config: the Stages, and an empty log for each pod that has no Logs object."""
    documents: list[dict[str, Any]] = []
    for name in FILES:
        documents += yaml.safe_load_all((manifests / FOLDER / name).read_text())
    return yaml.safe_dump_all([*fitted(documents), cluster_logs(empty_log)])


def fitted(published: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of kwok's published Stages, those that are used here, as they are used here."""
    found = [stage for stage in published if stage["metadata"]["name"] in NAMES]
    for stage in found:
        if stage["metadata"]["name"] == "pod-delete":
            stage["spec"]["selector"]["matchExpressions"].append(
                {"key": f'.metadata.annotations["{STUCK}"]', "operator": "DoesNotExist"}
            )
    return found


def cluster_logs(empty_log: pathlib.Path) -> dict[str, Any]:
    """The object that gives an empty log to each pod that has no Logs object."""
    return {
        "apiVersion": "kwok.x-k8s.io/v1alpha1",
        "kind": "ClusterLogs",
        "metadata": {"name": "empty"},
        "spec": {"logs": [{"logsFile": str(empty_log)}]},
    }
