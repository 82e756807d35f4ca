"""Any object of the API server as a plain dict, by its kind: the few verbs that tests and the bring-up need.

No typed client: those drop fields that they do not know, and a test wants to see all of them.
"""

from __future__ import annotations

import json
import pathlib
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import kubernetes
import urllib3

Object = dict[str, Any]

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
APPLY = "application/apply-patch+yaml"
FIELD_MANAGER = "dispatch-test"


class ApiError(Exception):
    """The API server refused: `status` is the HTTP code, `reason` and `message` are its Status object's."""

    def __init__(self, what: str, status: int, reason: str, message: str) -> None:
        super().__init__(f"{what}: {status} {reason}: {message}")
        self.status, self.reason, self.message = status, reason, message


@dataclass(frozen=True)
class Resource:
    """Where the objects of a kind live."""

    version: str  # apiVersion
    plural: str
    namespaced: bool = True


_KUEUE, _TRAINER, _RBAC = "kueue.x-k8s.io/v1beta2", "trainer.kubeflow.org/v1alpha1", "rbac.authorization.k8s.io/v1"
_WEBHOOKS = "admissionregistration.k8s.io/v1"

KINDS = {
    "ConfigMap": Resource("v1", "configmaps"),
    "Event": Resource("v1", "events"),
    "Namespace": Resource("v1", "namespaces", namespaced=False),
    "Node": Resource("v1", "nodes", namespaced=False),
    "Pod": Resource("v1", "pods"),
    "Secret": Resource("v1", "secrets"),
    "Service": Resource("v1", "services"),
    "ServiceAccount": Resource("v1", "serviceaccounts"),
    "Deployment": Resource("apps/v1", "deployments"),
    "Job": Resource("batch/v1", "jobs"),
    "Lease": Resource("coordination.k8s.io/v1", "leases"),
    "NetworkPolicy": Resource("networking.k8s.io/v1", "networkpolicies"),
    "PodDisruptionBudget": Resource("policy/v1", "poddisruptionbudgets"),
    "PriorityClass": Resource("scheduling.k8s.io/v1", "priorityclasses", namespaced=False),
    "Role": Resource(_RBAC, "roles"),
    "RoleBinding": Resource(_RBAC, "rolebindings"),
    "ClusterRole": Resource(_RBAC, "clusterroles", namespaced=False),
    "ClusterRoleBinding": Resource(_RBAC, "clusterrolebindings", namespaced=False),
    "CustomResourceDefinition": Resource("apiextensions.k8s.io/v1", "customresourcedefinitions", namespaced=False),
    "MutatingWebhookConfiguration": Resource(_WEBHOOKS, "mutatingwebhookconfigurations", namespaced=False),
    "ValidatingWebhookConfiguration": Resource(_WEBHOOKS, "validatingwebhookconfigurations", namespaced=False),
    "JobSet": Resource("jobset.x-k8s.io/v1alpha2", "jobsets"),
    "TrainJob": Resource(_TRAINER, "trainjobs"),
    "TrainingRuntime": Resource(_TRAINER, "trainingruntimes"),
    "ClusterTrainingRuntime": Resource(_TRAINER, "clustertrainingruntimes", namespaced=False),
    "AdmissionCheck": Resource(_KUEUE, "admissionchecks", namespaced=False),
    "ClusterQueue": Resource(_KUEUE, "clusterqueues", namespaced=False),
    "Cohort": Resource(_KUEUE, "cohorts", namespaced=False),
    "LocalQueue": Resource(_KUEUE, "localqueues"),
    "ResourceFlavor": Resource(_KUEUE, "resourceflavors", namespaced=False),
    "Topology": Resource(_KUEUE, "topologies", namespaced=False),
    "Workload": Resource(_KUEUE, "workloads"),
    "WorkloadPriorityClass": Resource(_KUEUE, "workloadpriorityclasses", namespaced=False),
    "Logs": Resource("kwok.x-k8s.io/v1alpha1", "logs"),
}


def path(kind: str, namespace: str | None = None, name: str | None = None, subresource: str = "") -> str:
    """The URL path of a kind's list, of one object, or of its subresource; of all namespaces when none is given."""
    resource = KINDS[kind]
    parts = ["api" if "/" not in resource.version else "apis", resource.version]
    if namespace and resource.namespaced:
        parts += ["namespaces", namespace]
    parts.append(resource.plural)
    parts += [part for part in (name, subresource) if part]
    return "/" + "/".join(parts)


def path_of(obj: Object, subresource: str = "") -> str:
    """The URL path of an object."""
    return path(obj["kind"], obj["metadata"].get("namespace"), obj["metadata"]["name"], subresource)


class Api:
    """One user's access. Thread-safe. Nothing is ever repeated: a test decides what a lost answer means.

    The kubeconfig's current context counts, with any way to log in that the kubernetes client knows; no proxy is used.
    A kind is one of KINDS. Verbs return the object as the server gave it, and raise ApiError when it refuses.
    """

    def __init__(self, kubeconfig: pathlib.Path) -> None:
        config = kubernetes.client.Configuration()
        kubernetes.config.load_kube_config(str(kubeconfig), client_configuration=config, persist_config=False)
        self._config = config
        self.server: str = config.host
        self._pool = urllib3.PoolManager(
            maxsize=32,
            retries=False,
            cert_reqs="CERT_REQUIRED" if config.verify_ssl else "CERT_NONE",
            ca_certs=config.ssl_ca_cert,
            cert_file=config.cert_file,
            key_file=config.key_file,
            server_hostname=config.tls_server_name,
        )

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        query: dict[str, str] | None = None,
        content: str = "application/json",
        accept: str = "application/json, */*",
        timeout: float = 30,
    ) -> Any:
        """One HTTP request; the answer is decoded when it is JSON, else it is text."""
        url = self.server + path + ("?" + urllib.parse.urlencode(query) if query else "")
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        headers = {**self._headers(content), "Accept": accept}
        response = self._pool.request(method, url, body=data, headers=headers, timeout=timeout)
        text = response.data
        is_json = response.headers.get("Content-Type", "").startswith("application/json")
        answer = json.loads(text) if is_json else text.decode()
        if response.status >= 300:
            status: Object = answer if isinstance(answer, dict) else {"message": answer}
            raise ApiError(f"{method} {path}", response.status, status.get("reason", ""), status.get("message", ""))
        return answer

    def close(self) -> None:
        """Closes its connections."""
        self._pool.clear()

    def _headers(self, content: str) -> dict[str, str]:
        headers = {"User-Agent": FIELD_MANAGER, "Content-Type": content}
        token = self._config.get_api_key_with_prefix("authorization", alias="BearerToken")
        return {**headers, "Authorization": token} if token else headers

    def get(self, kind: str, name: str, namespace: str | None = None) -> Object:
        found: Object = self.request("GET", path(kind, namespace, name))
        return found

    def find(self, kind: str, name: str, namespace: str | None = None) -> Object | None:
        """Like `get`, None when there is none."""
        try:
            return self.get(kind, name, namespace)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def list(self, kind: str, namespace: str | None = None, *, labels: str = "", fields: str = "") -> list[Object]:
        """Every object of a kind, in one namespace or in all. `labels` and `fields` are selectors."""
        query = {name: value for name, value in (("labelSelector", labels), ("fieldSelector", fields)) if value}
        answer: Object = self.request("GET", path(kind, namespace), query=query)
        version = KINDS[kind].version  # the items of a list carry neither
        return [{"apiVersion": version, "kind": kind, **item} for item in answer["items"]]

    def create(self, obj: Object, namespace: str | None = None, *, dry_run: bool = False) -> Object:
        where = path(obj["kind"], namespace or obj["metadata"].get("namespace"))
        made: Object = self.request("POST", where, obj, query={"dryRun": "All"} if dry_run else None)
        return made

    def apply(self, obj: Object, namespace: str | None = None) -> Object:
        """Server-side apply, taking fields over."""
        if namespace:
            obj = {**obj, "metadata": {**obj["metadata"], "namespace": namespace}}
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        applied: Object = self.request("PATCH", path_of(obj), obj, query=query, content=APPLY)
        return applied

    def update(self, obj: Object, subresource: str = "") -> Object:
        """Replaces an object that was read before; 409 when it has changed since."""
        updated: Object = self.request("PUT", path_of(obj, subresource), obj)
        return updated

    def patch(
        self,
        kind: str,
        name: str,
        namespace: str | None,
        patch: Object,
        *,
        subresource: str = "",
        content: str = MERGE,
    ) -> Object:
        """A merge patch: None removes a key, a list is replaced."""
        patched: Object = self.request("PATCH", path(kind, namespace, name, subresource), patch, content=content)
        return patched

    def delete(
        self,
        kind: str,
        name: str,
        namespace: str | None = None,
        *,
        grace: int | None = None,
        propagation: str = "Background",
        missing_ok: bool = False,
    ) -> None:
        """Asks for the deletion; the object may stay for a while (finalizers, a pod's grace period)."""
        try:
            self.request("DELETE", path(kind, namespace, name), _deletion(grace, propagation))
        except ApiError as error:
            if error.status != 404 or not missing_ok:
                raise

    def delete_all(self, kind: str, namespace: str | None, *, grace: int | None = None, labels: str = "") -> None:
        """Asks for the deletion of every object of a kind in a namespace."""
        query = {"labelSelector": labels} if labels else None
        self.request("DELETE", path(kind, namespace), _deletion(grace, "Background"), query=query)

    def follow(self, path: str, *, query: dict[str, str] | None = None, timeout: float = 30) -> Iterator[str]:
        """The lines of an answer that is still being written (a pod's log, a watch); `timeout` between two of them."""
        url = self.server + path + ("?" + urllib.parse.urlencode(query) if query else "")
        response = self._pool.request(
            "GET", url, headers=self._headers("application/json"), timeout=timeout, preload_content=False
        )
        try:
            if response.status >= 300:
                raise ApiError(f"GET {path}", response.status, "", response.read().decode())
            rest = b""
            for chunk in response.stream(4096):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    yield line.decode()
            if rest:
                yield rest.decode()
        finally:
            response.close()


def _deletion(grace: int | None, propagation: str) -> Object:
    options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": propagation}
    if grace is not None:
        options["gracePeriodSeconds"] = grace
    return options
