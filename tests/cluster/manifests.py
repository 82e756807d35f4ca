"""The custom resources, webhooks and runtimes that JobSet, Trainer, Kueue and kwok publish, made to fit this cluster.

The controllers run beside the API server, not in it: what their manifests address as a Service is a URL here.
"""

from __future__ import annotations

import base64
import pathlib
from collections.abc import Iterator
from typing import Any

import yaml

from .api import Object
from .components import Components

CRDS = {
    "jobset": "config/components/crd/bases/*.yaml",
    "trainer": "manifests/base/crds/trainer.kubeflow.org_*.yaml",
    "kueue": "config/components/crd/bases/*.yaml",
    "kwok": "kustomize/crd/bases/kwok.x-k8s.io_logs.yaml",
}
WEBHOOKS = {
    "jobset": "config/components/webhook/manifests.yaml",
    "trainer": "manifests/base/webhook/manifests.yaml",
    "kueue": "config/components/webhook/manifests.yaml",
}
# The projects' own manifests all say mutating-webhook-configuration and rename it when they are installed. Mutating
# webhooks run in the order of these names, so they are the ones of a real installation.
WEBHOOK_NAMES = {
    "jobset": ("jobset-mutating-webhook-configuration", "jobset-validating-webhook-configuration"),
    "trainer": ("defaulter.trainer.kubeflow.org", "validator.trainer.kubeflow.org"),
    "kueue": ("kueue-mutating-webhook-configuration", "kueue-validating-webhook-configuration"),
}
# Of Kueue's webhooks, those for the kinds that exist here. JobSet's for pods serve exclusive placement only.
SERVED = {
    "jobset": {("jobset.x-k8s.io", "*")},
    "trainer": {("trainer.kubeflow.org", "*")},
    "kueue": {("kueue.x-k8s.io", "*"), ("trainer.kubeflow.org", "*"), ("batch", "jobs")},
}
# The kinds that an installation of Kueue lets its webhook convert between versions; the others' versions are alike.
CONVERTED = {"localqueues", "clusterqueues", "cohorts", "workloads", "multikueueclusters"}
RUNTIMES = "manifests/base/runtimes/torch_distributed.yaml"

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the CRDs are megabytes: the one in C is ten times as fast


def crds(components: Components, name: str) -> list[Object]:
    """A project's CustomResourceDefinitions."""
    found = [doc for file in _files(components, name, CRDS[name]) for doc in _documents(file)]
    for crd in found:
        if name == "kueue" and crd["spec"]["names"]["plural"] in CONVERTED and len(crd["spec"]["versions"]) > 1:
            client = _client(components, name, "/convert")
            webhook = {"conversionReviewVersions": ["v1"], "clientConfig": client}
            crd["spec"]["conversion"] = {"strategy": "Webhook", "webhook": webhook}
    return found


def webhooks(components: Components, name: str) -> list[Object]:
    """A project's webhook configurations."""
    found = []
    for file in _files(components, name, WEBHOOKS[name]):
        for doc in _documents(file):
            mutating = doc["kind"] == "MutatingWebhookConfiguration"
            doc["metadata"]["name"] = WEBHOOK_NAMES[name][0 if mutating else 1]
            doc["webhooks"] = [hook for hook in doc["webhooks"] if _served(name, hook)]
            for hook in doc["webhooks"]:
                hook["clientConfig"] = _client(components, name, hook["clientConfig"]["service"]["path"])
            found.append(doc)
    return found


def runtimes(components: Components) -> list[Object]:
    """Trainer's stock runtime `torch-distributed`."""
    return list(_documents(components.manifests("trainer") / RUNTIMES))


def priorities() -> list[Object]:
    """For tests that need one job to preempt another: `low` and `high`."""
    # None is called "default": Kueue 0.20 would apply it to every job.
    kind = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "WorkloadPriorityClass"}
    return [{**kind, "metadata": {"name": name}, "value": value} for name, value in (("low", 1), ("high", 1000))]


def _served(name: str, hook: Object) -> bool:
    targets = {
        (group, resource.partition("/")[0])
        for rule in hook["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    served = SERVED[name]
    return any(target in served or (target[0], "*") in served for target in targets)


def _client(components: Components, name: str, path: str) -> dict[str, str]:
    bundle = base64.b64encode(components.authority.read_bytes()).decode()
    return {"url": f"https://127.0.0.1:{components.ports[name]}{path}", "caBundle": bundle}


def _files(components: Components, name: str, pattern: str) -> list[pathlib.Path]:
    folder = components.manifests(name)
    found = sorted(folder.glob(pattern))
    if not found:
        raise FileNotFoundError(f"{folder} has no {pattern}: is it {name}'s source tree?")
    return found


def _documents(file: pathlib.Path) -> Iterator[Any]:
    with file.open() as text:
        yield from (doc for doc in yaml.load_all(text, _LOADER) if doc)  # a safe loader either way
