"""`Cluster`: what a test holds in its hand."""

from __future__ import annotations

import contextlib
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import kubernetes

from . import real_node, supervisor
from .api import MERGE, Api, Object
from .audit import Audit, Call, Event
from .certificates import Pair
from .components import DEFAULT, Command, Override
from .gate import Gate
from .namespaces import Namespace, Queue
from .nodes import Nodes
from .pods import Pods
from .supervisor import Process, Processes
from .waiting import unique, wait

T = TypeVar("T")


class ClusterError(Exception):
    """A cluster cannot be had, or cannot do something; the text says why, and what to do."""


class Unsupported(ClusterError):
    """This cluster cannot do what a test asks of it: the test is skipped."""


class Place(Protocol):
    """Where a cluster runs, as far as `Cluster` has to know: `Components` on this machine, `remote.Remote` elsewhere.

    What a place does not have raises Unsupported when it is asked for.
    """

    folder: pathlib.Path  # of the cluster's files

    @property
    def ports(self) -> dict[str, int]: ...
    @property
    def authority(self) -> pathlib.Path: ...
    @property
    def serving(self) -> Pair: ...
    @property
    def audit_log(self) -> pathlib.Path: ...
    @property
    def pod_logs(self) -> pathlib.Path: ...
    def kubeconfig(self) -> pathlib.Path: ...
    def write_kubeconfig(self, path: pathlib.Path, token: str, namespace: str = "default") -> None: ...
    def command(self, name: str, override: Override = DEFAULT) -> Command: ...
    def ready(self, name: str, api: Api) -> bool: ...


class ComponentDied(Exception):
    """A component ended that nobody asked to; the text has the end of its log. No wait takes it for "not yet"."""


class Cluster:
    """A running control plane.

    Its verbs on objects (`get`, `list`, `create`, …) are the admin's, see `api.Api`; a kind is a name in `api.KINDS`.
    """

    def __init__(self, components: Place, processes: Processes) -> None:
        self.components, self.processes = components, processes
        self.folder: pathlib.Path = components.folder
        self.kubeconfig: pathlib.Path = components.kubeconfig()
        self.api = Api(self.kubeconfig)
        self.gates: list[Gate] = []  # those within their `with` blocks, the latest last
        self.pods = Pods(self.api, lambda: components.pod_logs)
        self.nodes = Nodes(self.api, self.wait)
        self.get, self.find, self.list = self.api.get, self.api.find, self.api.list
        self.create, self.apply, self.update = self.api.create, self.api.apply, self.api.update
        self.patch, self.delete, self.delete_all = self.api.patch, self.api.delete, self.api.delete_all

    # --- users

    @functools.cached_property
    def admin(self) -> Any:
        """A kubernetes ApiClient that may do everything."""
        return kubernetes.config.new_client_from_config(str(self.kubeconfig))

    def token_kubeconfig(self, namespace: str, account: str, *, seconds: int = 4 * 3600) -> pathlib.Path:
        """A kubeconfig with a real token of a ServiceAccount, which is created when there is none.

        The account may do nothing until a Role says so: see `grant`.
        """
        if self.find("ServiceAccount", account, namespace) is None:
            self.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account}}, namespace)
        token = self._token(namespace, account, {"expirationSeconds": seconds})
        file = self.folder / "config" / f"{namespace}.{account}.{unique()}.kubeconfig"
        self.components.write_kubeconfig(file, token, namespace)
        return file

    def revocable_token(self, namespace: str, account: str) -> tuple[str, str]:
        """A token of a ServiceAccount that lives as long as a Secret does; returns it and the Secret's name."""
        name = f"token-{unique()}"
        secret = self.create({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}}, namespace)
        bound = {"kind": "Secret", "apiVersion": "v1", "name": name, "uid": secret["metadata"]["uid"]}
        return self._token(namespace, account, {"expirationSeconds": 3600, "boundObjectRef": bound}), name

    def _token(self, namespace: str, account: str, spec: Object) -> str:
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        token: str = self.api.request("POST", path, request)["status"]["token"]
        return token

    def grant(
        self, namespace: str, account: str, rules: list[Object], *, inside: str | None = None, name: str | None = None
    ) -> None:
        """Lets a ServiceAccount do what `rules` (as in a Role) say, in the whole cluster or `inside` one namespace.

        The role and its binding are called `name`, else something new each time.
        """
        name = name or f"{namespace}-{account}-{unique()}"
        role, binding = ("Role", "RoleBinding") if inside else ("ClusterRole", "ClusterRoleBinding")
        version = "rbac.authorization.k8s.io/v1"
        self.create({"apiVersion": version, "kind": role, "metadata": {"name": name}, "rules": rules}, inside)
        self.create(
            {
                "apiVersion": version,
                "kind": binding,
                "metadata": {"name": name},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": role, "name": name},
                "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
            },
            inside,
        )

    # --- a test's own corner

    def namespace(self, quota: str = "4", *, check: bool = True, **options: Any) -> Namespace:
        """A fresh namespace with a LocalQueue `lq`; use it in a `with`, or `close()` it. Options: see `Queue`."""
        return Namespace(self, Queue(quota=quota, check=check, **options))

    # --- the components

    def kill(self, component: str) -> None:
        """SIGKILL, and gone."""
        self.processes.kill(component)

    def start(self, component: str) -> None:
        """Starts what was killed, as it ran before; returns when it is ready."""
        self.processes.start(component)
        self.ready(component)

    def pause(self, component: str) -> None:
        """SIGSTOP: connections stay open, nothing is answered."""
        self.processes.pause(component)

    def resume(self, component: str) -> None:
        self.processes.resume(component)

    def restart(
        self,
        component: str,
        *,
        flags: Mapping[str, str] | None = None,
        feature_gates: Mapping[str, bool] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Kills a component and starts it again, with these changes to its default configuration and none that an
        earlier restart made; returns when it is ready.

        `flags` are written with their dashes (`{"--event-ttl": "1m"}`); `config` is merged into the configuration file
        of kube-scheduler, jobset, trainer or kueue, None removing a key.
        """
        override = Override(flags or {}, feature_gates or {}, config or {})
        self._restart(component, override)

    @contextlib.contextmanager
    def reconfigured(
        self,
        component: str,
        *,
        flags: Mapping[str, str] | None = None,
        feature_gates: Mapping[str, bool] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Iterator[None]:
        """`restart` with these changes for the length of a `with` block; its default configuration is back after it."""
        try:
            self.restart(component, flags=flags, feature_gates=feature_gates, config=config)
            yield
        finally:
            self._restart(component, DEFAULT)

    def restore(self) -> None:
        """Resumes and starts again what a test has left paused or killed."""
        for process in self.status():
            if process.essential and process.state == "paused":
                self.resume(process.name)
            elif process.essential and process.state == "stopped":
                self.start(process.name)

    def ready(self, component: str) -> None:
        """Returns when a component serves."""

        def ready() -> bool:
            if component in real_node.NAMES:
                return real_node.ready(self, component)
            return self.components.ready(component, self.api)

        wait(ready, f"{component} is ready", timeout=90, check=self.check)

    def status(self) -> list[Process]:
        """Every process of the cluster: components, and gates that tests started."""
        return self.processes.status()

    def check(self) -> None:
        """Raises ComponentDied when a component ended that nobody asked to."""
        for process in self.status():
            if process.essential and process.state == "died":
                log = supervisor.tail(process.log, process.log_start)
                raise ComponentDied(f"{process.name} ended with exit code {process.exit_code}. Its log ends:\n{log}")

    def _restart(self, component: str, override: Override) -> None:
        command = self.components.command(component, override)
        self.processes.kill(component)
        self.processes.start(component, command.argv, command.env)
        self.ready(component)

    def controller(self, identity: str = "gate", **options: Any) -> Gate:
        """A running gate, from source, for the length of a `with` block. Options: see `Gate`."""
        return Gate(self, identity, **options)

    # --- watching

    def wait(self, until: Callable[[], T | None], what: str, timeout: float = 60, *, interval: float = 0.1) -> T:
        """`waiting.wait`, which a component's death ends at once."""
        return wait(until, what, timeout, interval=interval, check=self.check)

    @functools.cached_property
    def _audit(self) -> Audit:
        return Audit(self.api, self.components.audit_log)

    def audit(self, user: str, *, since: int = 0) -> set[Call]:
        """What a user asked of the API server: {(verb, group, resource, subresource)}, refused requests included.

        A ServiceAccount is `system:serviceaccount:<namespace>:<name>`. Everything that was answered before this call is
        in it.
        """
        return self._audit.calls(user, since)

    def audit_events(self, user: str | None = None, *, since: int = 0) -> list[Event]:
        """The audit events themselves, one for each request (a watch counts when it opens)."""
        return self._audit.events(user, since)

    def audit_mark(self) -> int:
        """A place in the audit log, to be given as `since`: later requests come after it."""
        return self._audit.mark()

    # --- the end

    def disown(self) -> None:
        """Lets the cluster outlive this process; `local.down` ends it."""
        self.processes.disown()

    def close(self) -> None:
        """Ends the cluster and this object's connections."""
        if "admin" in self.__dict__:
            self.admin.close()
        self.api.close()
        self.processes.shutdown()


__all__ = ["MERGE", "Cluster", "ClusterError", "ComponentDied", "Place", "Unsupported"]
