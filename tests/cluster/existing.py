"""An existing cluster, as it is: the one of `$DISPATCH_TEST_KUBECONFIG`.

It must serve Kueue, Trainer, JobSet and kwok. kwok must play the nodes that have `stages.KUBELET_LABEL` by the Stages
of `stages`, and no other node may take a test's pods. `start` checks all of this, and adds what `remote.furnish` says.
Nothing is stopped, reconfigured or removed: a test that needs that, the audit log or a pod's log is skipped.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterator

import kubernetes
import yaml
from urllib3.exceptions import HTTPError

from . import folder as places
from . import supervisor
from .api import KINDS, Api, ApiError, Object
from .cluster import Cluster, ClusterError
from .remote import REAL, Controls, Remote, furnish
from .stages import KUBELET_LABEL, KUBELET_VALUE, NAMES, STUCK
from .waiting import WaitTimeout

VARIABLE = "DISPATCH_TEST_KUBECONFIG"
# What must be served, where it is explained how to install it, and some kinds of it that are used.
NEEDED = (
    (
        "Kueue v0.20",
        "https://kueue.sigs.k8s.io/docs/getting-started/installation/",
        ("Workload", "ClusterQueue", "AdmissionCheck"),
    ),
    ("Trainer v2.3", "https://github.com/kubeflow/trainer", ("TrainJob", "ClusterTrainingRuntime")),
    ("JobSet v0.12", "https://jobset.sigs.k8s.io/docs/installation/", ("JobSet",)),
    ("kwok v0.7", "https://kwok.sigs.k8s.io/docs/user/kwok-in-cluster/", ("Logs",)),
)
RUNTIME = "torch-distributed"
STAGES = "/apis/kwok.x-k8s.io/v1alpha1/stages"


class ExistingError(ClusterError):
    """The cluster cannot be used; the text says what it lacks."""


def start(folder: pathlib.Path) -> Cluster:
    """The cluster of $DISPATCH_TEST_KUBECONFIG, its local files in `folder`; end it with `local.down`, as a local one.

    The kubeconfig is one file; its current context counts, and must be allowed everything. Raises ExistingError.
    """
    folder = folder.absolute()
    kubeconfig = pathlib.Path(os.environ[VARIABLE]).expanduser().absolute()
    if reason := places.unusable(folder):
        raise ExistingError(reason)
    try:
        lacking = [f"  - {reason}" for reason in check(Api(kubeconfig))]
    except (kubernetes.config.ConfigException, yaml.YAMLError, OSError) as error:
        raise ExistingError(f"${VARIABLE}: {kubeconfig} cannot be used: {error}") from error
    except (ApiError, HTTPError) as error:
        raise ExistingError(f"${VARIABLE}: the cluster of {kubeconfig} cannot be used: {error}") from error
    if lacking:
        raise ExistingError("\n".join([f"${VARIABLE}: the cluster of {kubeconfig} cannot be used:", *lacking]))
    places.empty(folder)
    processes = Controls.launch(folder)
    try:
        place = Remote(folder, kubeconfig, "an existing cluster")
        place.prepare()
        cluster = Cluster(place, processes.serve(place))
        furnish(cluster)
    except (ApiError, HTTPError, WaitTimeout) as error:
        supervisor.shutdown(folder)
        hint = f"kwok must play the nodes with the label {KUBELET_LABEL}={KUBELET_VALUE}"
        raise ExistingError(f"${VARIABLE}: the cluster of {kubeconfig} cannot be used: {error} ({hint})") from error
    except BaseException:
        supervisor.shutdown(folder)
        raise
    return cluster


def check(api: Api) -> Iterator[str]:
    """What a cluster lacks for the tests, one text for each."""
    served = {version: _served(api, version) for version in {KINDS[kind].version for _, _, ks in NEEDED for kind in ks}}
    complete = True
    for project, url, kinds in NEEDED:
        for resource in (KINDS[kind] for kind in kinds):
            if resource.plural not in served[resource.version]:
                complete = False
                yield f"{resource.plural} of {resource.version} are not served: install {project}, see {url}"
    if not complete:
        return
    if api.find("ClusterTrainingRuntime", RUNTIME) is None:
        yield f"there is no ClusterTrainingRuntime {RUNTIME}: install Trainer's stock runtimes"
    try:
        stages: list[Object] = api.request("GET", STAGES)["items"]
    except ApiError as error:
        if error.status != 404:  # else kwok has its Stages from a file, and nobody can look
            raise
    else:
        found = {stage["metadata"]["name"]: json.dumps(stage) for stage in stages}
        if sorted(found) != sorted(NAMES) or STUCK not in found["pod-delete"]:
            yield f"kwok's Stages must be {', '.join(NAMES)} alone, and pod-delete must spare pods with {STUCK}"
    for node in api.list("Node"):
        spec, labels = node["spec"], node["metadata"].get("labels", {})
        closed = spec.get("unschedulable") or any(t["effect"] != "PreferNoSchedule" for t in spec.get("taints", []))
        if labels.get(KUBELET_LABEL) != KUBELET_VALUE and not closed:
            name = node["metadata"]["name"]
            yield f"the node {name} would run tests' pods for real: kubectl taint node {name} {REAL}=:NoSchedule"


def _served(api: Api, version: str) -> set[str]:
    try:
        return {resource["name"] for resource in api.request("GET", f"/apis/{version}")["resources"]}
    except ApiError as error:
        if error.status != 404:
            raise
        return set()
