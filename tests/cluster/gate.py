"""The readmission gate as a test runs it, from source or packaged: a process under the cluster's supervisor."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from . import supervisor
from .api import ApiError, Object
from .waiting import WaitTimeout, unique, wait

if TYPE_CHECKING:
    from .cluster import Cluster

NAMESPACE, ACCOUNT = "dispatch-system", "dispatch-admission"
USER = f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}"  # whom the audit log names
# The ClusterRole of the installation page.
RULES: list[Object] = [
    {"apiGroups": [group], "resources": resources, "verbs": verbs}
    for group, resources, verbs in (
        ("kueue.x-k8s.io", ["workloads"], ["get", "list", "watch", "update"]),
        ("kueue.x-k8s.io", ["workloads/status", "admissionchecks/status"], ["update"]),
        ("kueue.x-k8s.io", ["admissionchecks"], ["get", "list", "watch"]),
        ("trainer.kubeflow.org", ["trainjobs"], ["get", "list", "update"]),
        ("jobset.x-k8s.io", ["jobsets"], ["get"]),
        ("", ["pods"], ["list"]),
        ("coordination.k8s.io", ["leases"], ["get", "list", "watch", "create", "update"]),
    )
]


class PodFiles:
    """The credentials that a pod finds below /var/run, in a folder of their own: `token` may be exchanged any time."""

    def __init__(self, cluster: Cluster, host: str, port: int) -> None:
        self.env = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": str(port)}
        folder = cluster.folder / "config" / f"run-{unique()}"
        self._account = folder / "secrets/kubernetes.io/serviceaccount"
        self._account.mkdir(parents=True)
        (self._account / "ca.crt").write_bytes(cluster.components.authority.read_bytes())
        (self._account / "namespace").write_text(NAMESPACE)
        place = pathlib.Path("/var/run").resolve()  # a link to /run
        self.wrapper = [sys.executable, "-m", "tests.cluster.private_etc", f"{folder}:{place}"]

    def set_token(self, token: str) -> None:
        """Puts a token in the place of the one before, at once, as a kubelet does."""
        draft = self._account / ".token"
        draft.write_text(token)
        draft.rename(self._account / "token")


class Gate:
    """A gate that runs between `start` (or the begin of a `with` block) and `stop`, `kill` or the block's end.

    It serves every check of the cluster, so a test usually runs one at a time. Each has a Lease of its own, unless
    `lease` names one that several contend for: a killed gate does not release it, and the next would wait for 15 s.
    Without `leads` it starts as a candidate, and nothing is waited for.
    A pass finds the checks of namespaces that are made after it has started: hence the short `resync`.
    It acts as the ServiceAccount of the installation page, under that page's ClusterRole, unless `kubeconfig` is given,
    or `in_cluster`: a folder that it sees as /var/run, as in a pod, with the credentials below (see `PodFiles`).
    `guards_off` names guards of `unguarded.GUARDS` that it runs without, `settings` gives constants of admission.py
    other values (`{"Connection.SILENCE": 5}`), and `arguments` are more of its flags. `zipapp` runs this archive, not
    the source, on `python`, behind the program `wrapper`.
    """

    def __init__(
        self,
        cluster: Cluster,
        identity: str,
        *,
        resync: str = "1s",
        guards_off: Sequence[str] = (),
        settings: Mapping[str, float] | None = None,
        kubeconfig: pathlib.Path | None = None,
        in_cluster: PodFiles | None = None,
        lease: str | None = None,
        arguments: Sequence[str] = (),
        env: dict[str, str] | None = None,
        leads: bool = True,
        zipapp: pathlib.Path | None = None,
        python: str = sys.executable,
        wrapper: Sequence[str] = (),
    ) -> None:
        self.identity = identity
        self._cluster, self._processes = cluster, cluster.processes
        number = unique()
        self._name = f"gate-{identity}-{number}"
        self._log = cluster.folder / supervisor.LOGS / f"{self._name}.log"
        self._leads = leads
        changes = [*guards_off, *(f"{name}={value}" for name, value in (settings or {}).items())]
        script = ["-m", "tests.cluster.unguarded", *changes, "--"] if changes else ["admission.py"]
        if zipapp:
            script = ["-I", str(zipapp)]
        wrapper = [*(in_cluster.wrapper if in_cluster else []), *wrapper]
        access = ["-in-cluster"] if in_cluster else ["-kubeconfig", str(kubeconfig or account(cluster))]
        self.lease = lease or f"{ACCOUNT}-{number}"
        flags = [*access, "-resync", resync, "-lease-name", self.lease]
        self._argv = [*wrapper, python, *script, *flags, *arguments]
        self._env = {"POD_NAME": identity, **(in_cluster.env if in_cluster else {}), **(env or {})}

    @property
    def log(self) -> list[str]:
        """The lines that it has written so far."""
        return self._log.read_text(errors="replace").splitlines() if self._log.exists() else []

    @property
    def pid(self) -> int:
        return self._process().pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number when one killed it."""
        return self._process().exit_code

    def start(self) -> Gate:
        """Starts it, again after it ended; returns when it leads, or at once when `leads` is False."""
        seen = len(self.log)
        self._processes.start(self._name, self._argv, self._env, essential=False)
        if self._leads:
            self.wait_log("msg=leading", since=seen)
        return self

    def wait_log(self, text: str, *, since: int = 0, timeout: float = 60) -> str:
        """The first line with `text`, from line `since` on. Raises WaitTimeout with the log, at once when it ended."""

        def line() -> str:
            ended = self.exit_code is not None  # asked first: a line written just before the end counts
            found = next((line for line in self.log[since:] if text in line), "")
            if ended and not found:
                raise WaitTimeout(f"gate {self.identity} ended without {text!r} in its log:\n{self._tail()}")
            return found

        try:
            return wait(line, f"gate {self.identity} logs {text!r}", timeout, interval=0.05, check=self._check)
        except WaitTimeout as error:
            raise WaitTimeout(f"{error}\n{self._tail()}") from None

    def wait_end(self, timeout: float = 60) -> int:
        """Its exit code, once it has ended by itself."""
        wait(lambda: self.exit_code is not None, f"gate {self.identity} ends", timeout, check=self._cluster.check)
        code = self.exit_code
        assert code is not None
        return code

    def stop(self) -> int | None:
        """SIGTERM; returns its exit code."""
        return self._processes.stop(self._name)

    def kill(self) -> None:
        """SIGKILL, and gone."""
        self._processes.kill(self._name)

    def pause(self) -> None:
        """SIGSTOP."""
        self._processes.pause(self._name)

    def resume(self) -> None:
        """SIGCONT."""
        self._processes.resume(self._name)

    def __enter__(self) -> Gate:
        self._cluster.gates.append(self)
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cluster.gates.remove(self)
        self._processes.forget(self._name)

    def _process(self) -> supervisor.Process:
        return next(process for process in self._processes.status() if process.name == self._name)

    def _check(self) -> None:
        self._cluster.check()

    def _tail(self) -> str:
        return supervisor.tail(self._log)


def account(cluster: Cluster) -> pathlib.Path:
    """A kubeconfig of the gate's ServiceAccount, with the page's ClusterRole."""
    kubeconfig = cluster.token_kubeconfig(NAMESPACE, ACCOUNT)
    try:
        cluster.grant(NAMESPACE, ACCOUNT, RULES, name=ACCOUNT)
    except ApiError as error:
        if error.reason != "AlreadyExists":
            raise
    return kubeconfig
