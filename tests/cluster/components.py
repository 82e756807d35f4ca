"""How each component of the control plane is configured, started and known to be ready.

This is the only place that knows their flags. Their names here are the names for `Cluster.restart` and its kin.
"""

from __future__ import annotations

import copy
import json
import pathlib
import secrets
import socket
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import yaml

from . import private_etc, stages
from .api import Api, ApiError, Object
from .certificates import Authority, Pair, write_key
from .machine import SERVICE_ADDRESS

# In the order of their start; the last four need the custom resources.
CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
CONTROLLERS = ("jobset", "trainer", "kueue", "kwok")
NAMES = (*CONTROL_PLANE, *CONTROLLERS)
PORTS = (*NAMES, "etcd-peer", "kubelet")

# A documentation range (RFC 2544): unlike 10.0.0.0/24 it is nobody's router, should a pod's service address leak.
SERVICE_RANGE = "198.18.0.0/24"  # and SERVICE_ADDRESS is its first address
ADMIN = "admin"
KUBELET_CLIENT = "kube-apiserver-kubelet-client"  # as whom the API server calls a kubelet
# Each component is a user of its own, so that the audit log tells who did what. kube-controller-manager and
# kube-scheduler have the roles that Kubernetes gives them, the rest may do everything.
USERS = {
    ADMIN: (ADMIN, "system:masters"),
    "kube-controller-manager": ("system:kube-controller-manager", ""),
    "kube-scheduler": ("system:kube-scheduler", ""),
    **{name: (name, "system:masters") for name in CONTROLLERS},
}
NODE_MONITOR_GRACE = 10  # seconds without a heartbeat after which a node's Ready turns Unknown
NODE_LEASE = 8  # seconds; kwok renews at a quarter of it
QPS, BURST = 1000, 2000

# What `Components` puts into the cluster's folder.
FILES = frozenset({"admin.kubeconfig", "cluster.json", "config", "etc", "etcd", "pki", "pod-logs", "trainer"})

AUDIT_POLICY: Object = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata"}],
}


@dataclass(frozen=True)
class Override:
    """What one start of a component does differently: flags, feature gates, and keys merged into its config file."""

    flags: Mapping[str, str] = field(default_factory=dict)
    feature_gates: Mapping[str, bool] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


DEFAULT = Override()


@dataclass(frozen=True)
class Command:
    """A process to start."""

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Programs:
    """Where the programs are, and the manifests of the projects that bring some. `kueue_source` is a source tree."""

    etcd: str
    kubernetes: str
    jobset: str
    trainer: str
    kwok: str
    kueue_binary: str
    kueue_source: str
    given_kueue: bool = False


@dataclass
class Components:
    """The components of one cluster, all of whose files are below `folder`."""

    folder: pathlib.Path
    programs: Programs
    ports: dict[str, int]

    # --- the cluster's files

    def save(self) -> None:
        """Lets a later process find the cluster."""
        text = json.dumps({"programs": asdict(self.programs), "ports": self.ports})
        (self.folder / "cluster.json").write_text(text)

    @classmethod
    def load(cls, folder: pathlib.Path) -> Components:
        saved = json.loads((folder / "cluster.json").read_text())
        return cls(folder, Programs(**saved["programs"]), saved["ports"])

    @property
    def server(self) -> str:
        return f"https://127.0.0.1:{self.ports['kube-apiserver']}"

    @property
    def authority(self) -> pathlib.Path:
        """The certificate that every server here is trusted by."""
        return self.folder / "pki" / "ca.crt"

    @property
    def serving(self) -> Pair:
        return Pair(self.folder / "pki" / "serving.crt", self.folder / "pki" / "serving.key")

    @property
    def audit_log(self) -> pathlib.Path:
        return self.folder / "logs" / "audit.log"

    @property
    def pod_logs(self) -> pathlib.Path:
        return self.folder / "pod-logs"

    def kubeconfig(self, user: str = ADMIN) -> pathlib.Path:
        return self.folder / (f"{ADMIN}.kubeconfig" if user == ADMIN else f"config/{user}.kubeconfig")

    def prepare(self) -> None:
        """Makes the keys, certificates, tokens and kubeconfigs, and the folders that are not the supervisor's."""
        for name in ("pki", "config", "pod-logs"):
            (self.folder / name).mkdir()
        pki = self.folder / "pki"
        authority = Authority(pki)
        names = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"]
        pair = authority.serving("serving", ["127.0.0.1", SERVICE_ADDRESS], names)
        authority.client("kubelet-client", KUBELET_CLIENT)
        write_key(pki / "service-accounts.key")
        private_etc.fill(self.folder / "etc")
        for place in ("pki/webhook", "etc/kueue/metrics/certs", "trainer/k8s-webhook-server/serving-certs"):
            (self.folder / place).mkdir(parents=True, exist_ok=True)
            for source, name in ((pair.certificate, "tls.crt"), (pair.key, "tls.key")):
                (self.folder / place / name).write_bytes(source.read_bytes())
        (self.folder / "config/audit.yaml").write_text(yaml.safe_dump(AUDIT_POLICY))
        (self.folder / "pod-logs/empty").touch()
        self._prepare_users()

    def _prepare_users(self) -> None:
        lines = []
        for name, (user, group) in USERS.items():
            token = secrets.token_hex(16)
            lines.append(f"{token},{user},{user}" + (f',"{group}"' if group else ""))
            self.write_kubeconfig(self.kubeconfig(name), token)
        # The real node's kubelet: the Node authorizer and NodeRestriction apply to it.
        node_token = secrets.token_hex(16)
        lines.append(f'{node_token},system:node:real-0,system:node:real-0,"system:nodes"')
        self.write_kubeconfig(self.kubeconfig("kubelet"), node_token)
        (self.folder / "config/tokens.csv").write_text("\n".join(lines) + "\n")

    def write_kubeconfig(self, path: pathlib.Path, token: str, namespace: str = "default") -> None:
        """A kubeconfig for whoever the token says.

        It names the authority's file: of data in it the kubernetes client makes a file, which stays when it is killed.
        """
        cluster = {"server": self.server, "certificate-authority": str(self.authority)}
        path.write_text(token_kubeconfig(cluster, token, namespace))

    # --- commands

    def command(self, name: str, override: Override = DEFAULT) -> Command:
        """How to start a component; writes its config file."""
        if name not in NAMES:
            raise ValueError(f"no component is called {name!r}; there are {', '.join(NAMES)}")
        recipe: Callable[[Override], Command] = getattr(self, "_" + name.replace("-", "_"))
        return recipe(override)

    def _etcd(self, override: Override) -> Command:
        client, peer = (f"http://127.0.0.1:{self.ports[p]}" for p in ("etcd", "etcd-peer"))
        flags = {
            "--data-dir": str(self.folder / "etcd"),
            "--unsafe-no-fsync": "true",
            "--listen-client-urls": client,
            "--advertise-client-urls": client,
            "--listen-peer-urls": peer,
            "--initial-advertise-peer-urls": peer,
            "--initial-cluster": f"default={peer}",
            "--log-level": "warn",
            "--quota-backend-bytes": str(8 << 30),
        }
        return self._program(self.programs.etcd, "etcd", flags, override)

    def _kube_apiserver(self, override: Override) -> Command:
        pki = self.folder / "pki"
        flags = {
            "--etcd-servers": f"http://127.0.0.1:{self.ports['etcd']}",
            "--bind-address": "127.0.0.1",
            "--secure-port": str(self.ports["kube-apiserver"]),
            "--advertise-address": "127.0.0.1",
            "--endpoint-reconciler-type": "none",
            "--tls-cert-file": str(self.serving.certificate),
            "--tls-private-key-file": str(self.serving.key),
            "--token-auth-file": str(self.folder / "config/tokens.csv"),
            "--client-ca-file": str(self.authority),  # who else may call is published to the other components
            "--authorization-mode": "Node,RBAC",
            "--enable-admission-plugins": "NodeRestriction",
            "--service-account-issuer": "https://kubernetes.default.svc",
            "--service-account-key-file": str(pki / "service-accounts.key"),
            "--service-account-signing-key-file": str(pki / "service-accounts.key"),
            "--service-cluster-ip-range": SERVICE_RANGE,
            "--allow-privileged": "true",
            "--kubelet-certificate-authority": str(self.authority),
            "--kubelet-client-certificate": str(pki / "kubelet-client.crt"),
            "--kubelet-client-key": str(pki / "kubelet-client.key"),
            # A kwok node's Hostname is its name, which resolves nowhere.
            "--kubelet-preferred-address-types": "InternalIP",
            "--audit-policy-file": str(self.folder / "config/audit.yaml"),
            "--audit-log-path": str(self.audit_log),
            "--audit-log-maxsize": "1000000",  # one file: a reader keeps its place in it
            "--enable-priority-and-fairness": "false",
            "--max-requests-inflight": "3000",
            "--max-mutating-requests-inflight": "1000",
            "--profiling": "false",
        }
        return self._program(self.programs.kubernetes, "kube-apiserver", flags, override)

    def _kube_controller_manager(self, override: Override) -> Command:
        flags = {
            "--kubeconfig": str(self.kubeconfig("kube-controller-manager")),
            "--authentication-kubeconfig": str(self.kubeconfig("kube-controller-manager")),
            "--authorization-kubeconfig": str(self.kubeconfig("kube-controller-manager")),
            "--leader-elect": "false",
            **self._health_server("kube-controller-manager"),
            "--service-account-private-key-file": str(self.folder / "pki/service-accounts.key"),
            "--root-ca-file": str(self.authority),
            "--use-service-account-credentials": "true",
            "--node-monitor-grace-period": f"{NODE_MONITOR_GRACE}s",
            "--node-monitor-period": "1s",
            "--node-eviction-rate": "1000",  # several nodes may be lost at once, and at once each gets its taint
            "--concurrent-gc-syncs": "20",
            "--concurrent-namespace-syncs": "20",
            "--kube-api-qps": str(QPS),
            "--kube-api-burst": str(BURST),
            "--profiling": "false",
        }
        return self._program(self.programs.kubernetes, "kube-controller-manager", flags, override)

    def _kube_scheduler(self, override: Override) -> Command:
        config = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "leaderElection": {"leaderElect": False},
            "clientConnection": {
                "kubeconfig": str(self.kubeconfig("kube-scheduler")),
                "qps": QPS,
                "burst": BURST,
            },
            "enableProfiling": False,
        }
        flags = {
            "--config": self._config("kube-scheduler", config, override),
            "--authentication-kubeconfig": str(self.kubeconfig("kube-scheduler")),
            "--authorization-kubeconfig": str(self.kubeconfig("kube-scheduler")),
            **self._health_server("kube-scheduler"),
        }
        return self._program(self.programs.kubernetes, "kube-scheduler", flags, override)

    def _jobset(self, override: Override) -> Command:
        config = {
            "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
            "kind": "Configuration",
            **self._manager("jobset"),
            "internalCertManagement": {"enable": False},
        }
        flags = {"--config": self._config("jobset", config, override), "--metrics-bind-address": "0"}
        return self._program(self.programs.jobset, "jobset", flags, override, self._access("jobset"))

    def _trainer(self, override: Override) -> Command:
        config = {
            "apiVersion": "config.trainer.kubeflow.org/v1alpha1",
            "kind": "Configuration",
            **self._manager("trainer"),
            "certManagement": {"enable": False},
        }
        del config["webhook"]["certDir"]  # it has no such setting, and reads the default place below $TMPDIR
        flags = {"--config": self._config("trainer", config, override)}
        env = {**self._access("trainer"), "TMPDIR": str(self.folder / "trainer")}
        return self._program(self.programs.trainer, "trainer-controller-manager", flags, override, env)

    def _kueue(self, override: Override) -> Command:
        config = {
            "apiVersion": "config.kueue.x-k8s.io/v1beta2",
            "kind": "Configuration",
            "namespace": "kueue-system",
            **self._manager("kueue"),
            "internalCertManagement": {"enable": False},
            "controller": {
                "groupKindConcurrency": {
                    "TrainJob.trainer.kubeflow.org": 5,
                    "Job.batch": 5,
                    "Workload.kueue.x-k8s.io": 10,
                }
            },
            "integrations": {"frameworks": ["trainer.kubeflow.org/trainjob", "batch/job"]},
            # Its visibility server wants a certificate folder of its own, and nobody here asks it anything.
            "featureGates": {"AdmissionGatedBy": True, "VisibilityOnDemand": False, **override.feature_gates},
        }
        flags = {"--config": self._config("kueue", config, override), **override.flags}
        wrapper = [sys.executable, "-m", "tests.cluster.private_etc", str(self.folder / "etc")]
        return Command([*wrapper, self.programs.kueue_binary, *_join(flags)], self._access("kueue"))

    def _kwok(self, override: Override) -> Command:
        config = self.folder / "config/kwok.yaml"
        config.write_text(stages.configuration(self.manifests("kwok"), self.pod_logs / "empty"))
        flags = {
            "--kubeconfig": str(self.kubeconfig("kwok")),
            "--config": str(config),
            "--enable-crds": "Logs",
            "--manage-all-nodes": "false",
            "--manage-nodes-with-label-selector": f"{stages.KUBELET_LABEL}={stages.KUBELET_VALUE}",
            "--server-address": f"127.0.0.1:{self.ports['kwok']}",
            "--tls-cert-file": str(self.serving.certificate),
            "--tls-private-key-file": str(self.serving.key),
            "--node-ip": "127.0.0.1",
            "--node-port": str(self.ports["kwok"]),
            "--cidr": "198.19.0.0/16",
            "--node-lease-duration-seconds": str(NODE_LEASE),
        }
        return self._program(self.programs.kwok, "kwok", flags, override)

    def _program(
        self, folder: str, binary: str, flags: dict[str, str], override: Override, env: dict[str, str] | None = None
    ) -> Command:
        gates = {g: str(on).lower() for g, on in override.feature_gates.items()}
        if gates:
            flags = {**flags, "--feature-gates": ",".join(f"{gate}={on}" for gate, on in gates.items())}
        return Command([f"{folder}/bin/{binary}", *_join({**flags, **override.flags})], env or {})

    def _health_server(self, name: str) -> dict[str, str]:
        return {
            "--bind-address": "127.0.0.1",
            "--secure-port": str(self.ports[name]),
            "--tls-cert-file": str(self.serving.certificate),
            "--tls-private-key-file": str(self.serving.key),
        }

    def _manager(self, name: str) -> dict[str, Any]:
        """What the three controllers, built on the same library, have in common."""
        return {
            "leaderElection": {"leaderElect": False},
            "webhook": {"host": "127.0.0.1", "port": self.ports[name], "certDir": str(self.folder / "pki/webhook")},
            "metrics": {"bindAddress": "0"},
            "health": {"healthProbeBindAddress": "0"},
            "clientConnection": {"qps": QPS, "burst": BURST},
        }

    def _access(self, name: str) -> dict[str, str]:
        return {"KUBECONFIG": str(self.kubeconfig(name))}

    def _config(self, name: str, config: dict[str, Any], override: Override) -> str:
        path = self.folder / "config" / f"{name}.yaml"
        path.write_text(yaml.safe_dump(_merged(config, override.config)))
        return str(path)

    # --- manifests

    def manifests(self, name: str) -> pathlib.Path:
        """The folder that holds a project's manifests, laid out as in its source tree."""
        if name == "kueue":
            return pathlib.Path(self.programs.kueue_source)
        return pathlib.Path(getattr(self.programs, name)) / "manifests"

    # --- readiness

    def ready(self, name: str, api: Api) -> bool:
        """Whether a component serves; False, or an error of the connection, means not yet."""
        if name == "etcd":
            return self._answers(f"http://127.0.0.1:{self.ports[name]}/health")
        if name == "kube-apiserver":
            return bool(api.request("GET", "/readyz", timeout=5) == "ok")
        if name in ("kube-controller-manager", "kube-scheduler", "kwok"):
            return self._answers(f"https://127.0.0.1:{self.ports[name]}/healthz")
        # Asked first: the API server does not call a webhook that it has only just been told of.
        with socket.create_connection(("127.0.0.1", self.ports[name]), timeout=5):
            return webhook_answers(name, api)

    def _answers(self, url: str) -> bool:
        context = ssl.create_default_context(cafile=str(self.authority))
        with urllib.request.urlopen(url, timeout=5, context=context if url.startswith("https") else None) as answer:  # noqa: S310
            return bool(answer.status == 200)


def webhook_answers(name: str, api: Api) -> bool:
    """Whether jobset, trainer or kueue serves: the API server asks its webhook, which is what will matter."""
    try:
        api.create(_PROBES[name], "default", dry_run=True)
    except ApiError as error:
        if error.status in (404, 409, 500, 503) or "webhook" in error.message:
            return False
        raise
    return True


def token_kubeconfig(cluster: Object, token: str, namespace: str) -> str:
    """A kubeconfig for whoever the token says; `cluster` is such a file's own entry for a cluster."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "test", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}],
    }
    return yaml.safe_dump(config)


_CONTAINERS: Object = {"spec": {"containers": [{"name": "node", "image": "probe"}]}}
_REPLICATED = [
    {
        "name": "node",
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {"template": _CONTAINERS},
        },
    }
]
_PROBES: dict[str, Object] = {
    "jobset": {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "readiness-probe"},
        "spec": {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": _CONTAINERS}}}]},
    },
    "trainer": {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": "readiness-probe"},
        "spec": {"mlPolicy": {"numNodes": 1}, "template": {"spec": {"replicatedJobs": _REPLICATED}}},
    },
    "kueue": {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "ClusterQueue",
        "metadata": {"name": "readiness-probe"},
        "spec": {"namespaceSelector": {}},
    },
}


def _join(flags: Mapping[str, str]) -> list[str]:
    return [f"{flag}={value}" for flag, value in flags.items()]


def _merged(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes` merged in, mapping by mapping; None removes a key."""
    merged = copy.deepcopy(base)
    for key, value in changes.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(merged.get(key), dict):
            merged[key] = _merged(merged[key], value)
        else:
            merged[key] = value
    return merged
