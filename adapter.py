"""dispatch's adapter for Kubeflow: launches, finds, inspects and stops supervised training jobs as TrainJobs.

One file, to be copied into an orchestrator's project; a command line tool as well. It needs the `kubernetes` client and
`python-ulid`, nothing else.

    import adapter
    backend = adapter.connect("config.json")
    spec = adapter.JobSpec(adapter.new_job(), adapter.Runtime("torch-safe"), command=["python", "train.py"], nodes=4)
    handle = backend.start(spec)      # exists, cannot run yet: record the handle
    backend.open(handle)              # may run now
    print(backend.inspect(handle).state)

What it guarantees:

- No job is lost and none runs twice. `start` creates a job that cannot run, under a name that the caller chose (job and
  submission): a crash at any point leaves one object, which `find` finds and `start` returns again, or none.
- Every write is made on the version that was read, and on no object of another UID. A write that met a conflict is
  decided anew on the fresh object; one whose answer was lost is looked up, never assumed done or undone.
- Proof before trust: `connect` proves the cluster's gates by a probe that cannot run; else it observes, and says why.
- A hold stays until this very instance is released. In plain mode a release never overlaps attempts.
- `stop` returns when nothing of the job is left, or says what is.
- "Unreachable" is an error, never a verdict about a job.

What it does not: it is no controller. Between two calls nothing happens here; that a preempted job is readmitted only
when its earlier attempt is gone is the work of the admission controller (Kueue mode), or of nobody but this adapter
resuming a job (plain mode).

How it behaves when the API server does not answer: a read is repeated for 20 s, from 0.1 s doubling to 5 s with jitter,
or after the server's Retry-After; a write is repeated for 30 s, from a fresh read each time. Then: `Unreachable`.

Thread-safe, synchronous. Python 3.11 and newer, `kubernetes` 36.0.3 or 37, python-ulid 4; Trainer v2.3 (v1alpha1),
JobSet v0.12 (v1alpha2) and, in Kueue mode, Kueue v0.20 (v1beta2).
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import datetime
import email.utils
import hashlib
import heapq
import io
import itertools
import json
import math
import os
import queue
import random
import re
import socket
import sys
import threading
import time
import urllib.parse
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Never, TypeVar

import urllib3
import yaml
from kubernetes.client import ApiClient, Configuration
from kubernetes.config import ConfigException, load_incluster_config, load_kube_config
from ulid import ULID

if TYPE_CHECKING:
    import argparse

VERSION = "0.1.0"
PROGRAM = "dispatch-adapter"

# ======================================================================================================================
# Names
# ======================================================================================================================

JOB = "dispatch.phpboyscout.uk/job"  # label of TrainJob, JobSet and pods: the job's ULID in lower case
SUBMISSION = "dispatch.phpboyscout.uk/submission"  # label of the same: N
PROBE = "dispatch.phpboyscout.uk/probe"  # label of a preflight probe, which is nobody's job
SPEC = "dispatch.phpboyscout.uk/spec"  # TrainJob annotation: the hash of the JobSpec it was made from
GATE = "dispatch.phpboyscout.uk/gate"  # TrainJob annotation, plain mode: "closed" until `open`
HOLD = "dispatch.phpboyscout.uk/hold"  # TrainJob annotation: "<n>" held, "released-<n>", "stop"; never removed
ADMISSION = "dispatch.phpboyscout.uk/admission"  # pod annotation in the adapter's runtime patch: the admission count A
EPOCH = "dispatch.phpboyscout.uk/epoch"  # pod annotation in the adapter's runtime patch: N x 1,000,000 + A
START_GATE = "dispatch.phpboyscout.uk/start"  # the adapter's entry in GATED_BY
PATCH_MANAGER = "dispatch.phpboyscout.uk/adapter"  # the adapter's entry in a TrainJob's spec.runtimePatches
EPOCH_BOUND = 1_000_000  # A and N are below it
JOB_NAME = re.compile(r"dj-([0-7][0-9a-hjkmnp-tv-z]{25})-s([1-9][0-9]{0,5})")  # a TrainJob's name: job, submission

QUEUE_NAME = "kueue.x-k8s.io/queue-name"  # Kueue's label on a job: its LocalQueue
PRIORITY_CLASS = "kueue.x-k8s.io/priority-class"  # Kueue's label on a job: its WorkloadPriorityClass
GATED_BY = "kueue.x-k8s.io/admission-gated-by"  # Kueue's annotation on a job: a comma list, entries can only be removed
JOB_UID = "kueue.x-k8s.io/job-uid"  # Kueue's label on a Workload: the UID of the job it is for
KUEUE_MANAGER = "kueue.x-k8s.io/manager"  # Kueue's entry in spec.runtimePatches; without it Kueue cannot start the job

JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"  # JobSet's label on its Jobs and pods
JOBSET_UID = "jobset.sigs.k8s.io/jobset-uid"  # the same
RESTART = "jobset.sigs.k8s.io/restart-attempt"  # the same: how often the JobSet has restarted within one admission
REPLICATED_JOB = "jobset.sigs.k8s.io/replicatedjob-name"  # the same: the name of the replicated job
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"  # a node's taint: an administrator says that the machine is off
UNREACHABLE_NODE = "node.kubernetes.io/unreachable"  # the node controller's taint on a node that it does not hear of
RANK = "batch.kubernetes.io/job-completion-index"  # the Job controller's annotation on an indexed Job's pods
TRAINER_JOB = TRAINER_CONTAINER = "node"  # Trainer's names of the replicated job and the container that train

RUNTIME_KINDS = {"ClusterTrainingRuntime": "clustertrainingruntimes", "TrainingRuntime": "trainingruntimes"}
RESERVED_LABELS = ("controller-uid", "job-name")  # by these, and those below, the system finds what is its own
RESERVED_PREFIXES = (
    *("dispatch.phpboyscout.uk/", "trainer.kubeflow.org/"),
    *("kueue.x-k8s.io/", "jobset.sigs.k8s.io/", "batch.kubernetes.io/"),
)
RESERVED_ENV = frozenset(  # Trainer sets these for torch, XGBoost and MPI, and refuses a job that does
    [f"PET_{name}" for name in ("NNODES", "NPROC_PER_NODE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")]
    + [f"DMLC_{name}" for name in ("TRACKER_URI", "TRACKER_PORT", "TASK_ID", "NUM_WORKER")]
    + [f"OMPI_MCA_orte_{name}" for name in ("default_hostfile", "keep_fqdn_hostnames", "set_default_slots")]
    + ["OMPI_MCA_plm_rsh_args"]
)

CONTROLLER = "dispatch.phpboyscout.uk/admission"  # the admission controller's AdmissionChecks have it as controllerName

Object = dict[str, Any]  # an API object as the server sent it
T = TypeVar("T")

# ======================================================================================================================
# Errors
# ======================================================================================================================


class DispatchError(Exception):
    """What went wrong, with which object, and what to do. Its text starts with `dispatch: <kind>: `.

    DispatchError
    ├── Unsupported    this cluster, runtime or mode cannot do it
    ├── ReadOnly       the backend does not write
    ├── Unauthorized   the credentials are missing, refused or not enough
    ├── Unreachable    no answer, or not all is done yet: says nothing about the job; try again
    ├── Invalid        what was given is wrong; nothing was sent, or the server refused it as such
    ├── NotFound       the object is not there (any more), or its name is another object's now
    └── Conflict       the object is in a state that forbids it
        └── StaleHold  a hold instance is older than the one in place, or not the one in place
    """

    kind: ClassVar[str] = "error"

    def __str__(self) -> str:
        return f"dispatch: {self.kind}: {super().__str__()}"


class Unsupported(DispatchError):
    kind = "unsupported"


class ReadOnly(DispatchError):
    kind = "read-only"


class Unauthorized(DispatchError):
    kind = "unauthorized"


class Unreachable(DispatchError):
    kind = "unreachable"


class Invalid(DispatchError):
    kind = "invalid"


class NotFound(DispatchError):
    kind = "not found"


class Conflict(DispatchError):
    kind = "conflict"


class StaleHold(Conflict):
    kind = "stale hold"


# ======================================================================================================================
# Values
# ======================================================================================================================


class _Known(StrEnum):
    """Names of which no others are understood: an unknown one is `Invalid`, not a guess."""

    @classmethod
    def _missing_(cls, value: object) -> Never:
        raise Invalid(f"{value!r} is no {cls.__name__.lower()}: known are {', '.join(cls)}")


class State(_Known):
    """Where a job stands: `classify` says when it is which."""

    QUEUED = "queued"
    GATED = "gated"
    HELD = "held"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def final(self) -> bool:
        """Whether nothing follows."""
        return self in (State.SUCCEEDED, State.FAILED, State.STOPPED)


class Fault(_Known):
    """Whose doing it is."""

    PROGRAM = "program"
    CLUSTER = "cluster"
    PERSON = "person"
    UNKNOWN = "unknown"


class Cause(_Known):
    """Why a job is in its state, or what interrupted it: `classify` says on what evidence. See docs/causes.md."""

    PROGRAM = "program"
    OUT_OF_MEMORY = "out-of-memory"
    TIMEOUT = "timeout"
    PREEMPTED = "preempted"
    EVICTED = "evicted"
    NODE_LOST = "node-lost"
    NO_CAPACITY = "no-capacity"
    IMAGE = "image"
    CONFIG = "config"
    REJECTED = "rejected"
    QUEUE_STOPPED = "queue-stopped"
    STOPPED = "stopped"
    UNKNOWN = "unknown"

    @property
    def fault(self) -> Fault:
        """Whose it is: the program's, the cluster's, or that of a person who set something up or asked for it."""
        match self:
            case Cause.OUT_OF_MEMORY | Cause.TIMEOUT | Cause.PROGRAM:
                return Fault.PROGRAM
            case Cause.PREEMPTED | Cause.NODE_LOST | Cause.EVICTED | Cause.NO_CAPACITY | Cause.REJECTED:
                return Fault.CLUSTER
            case Cause.IMAGE | Cause.CONFIG | Cause.QUEUE_STOPPED | Cause.STOPPED:
                return Fault.PERSON
            case Cause.UNKNOWN:
                return Fault.UNKNOWN

    @property
    def retry(self) -> Answer:
        """Whether it is sensible to start the same spec once more, when the job has ended of it."""
        match self:
            case Cause.PREEMPTED | Cause.NODE_LOST:
                return Answer.YES
            case Cause.EVICTED | Cause.REJECTED | Cause.UNKNOWN:
                return Answer.UNKNOWN
            case Cause.OUT_OF_MEMORY | Cause.TIMEOUT | Cause.IMAGE | Cause.CONFIG | Cause.PROGRAM:
                return Answer.NO
            case Cause.NO_CAPACITY | Cause.QUEUE_STOPPED | Cause.STOPPED:
                return Answer.NO

    @property
    def sentence(self) -> str:
        """What happened, for a person."""
        return _TOLD[self][0]

    @property
    def advice(self) -> str:
        """What a person does next."""
        return _TOLD[self][1]


_TOLD = {
    Cause.PROGRAM: ("the program failed, or was killed by who knows whom", "read the program's output"),
    Cause.OUT_OF_MEMORY: ("a process used up its container's memory, and was killed", "raise the limit, or use less"),
    Cause.TIMEOUT: ("it ran longer than it was allowed to", "raise the timeout, or go on from a checkpoint"),
    Cause.PREEMPTED: ("it had to make room for another job", "wait: Kueue admits it again when there is room"),
    Cause.NODE_LOST: (
        "a node is gone, or does not answer",
        "see to the node: until it is gone, its pods may still run",
    ),
    Cause.EVICTED: (
        "the cluster took it, or a pod of it, off its nodes",
        "read what the node lacked, or who drained it",
    ),
    Cause.IMAGE: ("an image cannot be pulled", "correct the image's name, or the access to its registry"),
    Cause.CONFIG: ("it cannot be made or started as it is described", "correct the command, or what the runtime says"),
    Cause.NO_CAPACITY: ("there is no room for it", "wait; when it can never fit, ask for less or for more quota"),
    Cause.REJECTED: ("an admission check refused it for good", "ask whoever runs that check"),
    Cause.QUEUE_STOPPED: ("its queue is stopped, inactive or missing", "have it started, or correct the settings"),
    Cause.STOPPED: ("somebody deactivated its Workload", "ask who: it goes on when spec.active is true again"),
    Cause.UNKNOWN: ("nothing that is left tells why", "read the detail and the program's output"),
}


class Capability(_Known):
    """What a backend may be able to do."""

    READMISSION_GATE = "ReadmissionGate"
    ATTEMPT_INJECTION = "AttemptInjection"
    HOLD = "Hold"
    OUTPUT_READ = "OutputRead"
    OUTPUT_FOLLOW = "OutputFollow"


class Answer(_Known):
    """Unknown is a value."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


class Source(_Known):
    """Where an answer comes from: preflight established it, or the adapter states it."""

    PROBED = "probed"
    DECLARED = "declared"


@dataclass(frozen=True, slots=True)
class Support:
    """Whether a capability is there, how that is known, and why not."""

    value: Answer
    source: Source
    reason: str = ""


class _Found:
    """What is found out about a job."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """All fields, in camelCase; times as RFC 3339."""
        return dict(_plain(self))


@dataclass(frozen=True, slots=True)
class Ceased(_Found):
    """Whether nothing of a submission can run any more, and what says so."""

    value: Answer
    evidence: str


def new_job() -> str:
    """A new job's name: a ULID in lower case. Choose it, record it, then start it."""
    return str(ULID()).lower()


@dataclass(frozen=True, slots=True)
class Handle:
    """One submission of a job on the cluster. Text: `<namespace>/<name>@<uid>`, which `parse` reads back."""

    namespace: str
    name: str
    uid: str

    def __post_init__(self) -> None:
        _check_name(self.namespace, "handle: namespace", 63, _LABEL)
        if not isinstance(self.name, str) or not JOB_NAME.fullmatch(self.name):
            raise Invalid(f"handle: name: {_shown(self.name)} is not dj-<lowercase ULID>-s<N>")
        if not isinstance(self.uid, str) or not re.fullmatch(r"[0-9A-Za-z-]{1,128}", self.uid):
            raise Invalid(f"handle: uid: {_shown(self.uid)} is not an object's UID")

    @property
    def job(self) -> str:
        """The job's ULID, in lower case."""
        return self.name[3:29]

    @property
    def submission(self) -> int:
        """N."""
        return int(self.name[31:])

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}@{self.uid}"

    @classmethod
    def parse(cls, text: str) -> Handle:
        """Reads a handle's text. Raises Invalid."""
        match = re.fullmatch(r"([^/@]+)/([^/@]+)@([^/@]+)", text) if isinstance(text, str) else None
        if match is None:
            raise Invalid(f"handle: {_shown(text)} is not <namespace>/<name>@<uid>")
        return cls(*match.groups())

    def to_json(self) -> dict[str, str]:
        """The three fields."""
        return {"namespace": self.namespace, "name": self.name, "uid": self.uid}

    @classmethod
    def from_json(cls, value: object) -> Handle:
        """Reads `to_json`'s object back. Raises Invalid."""
        return cls(**_object(value, "handle", required=("namespace", "name", "uid")))


@dataclass(frozen=True, slots=True)
class Runtime:
    """A Trainer runtime: the template that a job is made from."""

    name: str
    kind: str = "ClusterTrainingRuntime"

    def __post_init__(self) -> None:
        _check_name(self.name, "runtime: name")
        if not isinstance(self.kind, str) or self.kind not in RUNTIME_KINDS:
            raise Invalid(f"runtime: kind: {_shown(self.kind)} is not one of {', '.join(RUNTIME_KINDS)}")

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"

    def to_json(self) -> dict[str, str]:
        """The fields that are not at their default."""
        return _without_defaults(self)

    @classmethod
    def from_json(cls, value: object) -> Runtime:
        """Reads `to_json`'s object back. Raises Invalid."""
        return cls(**_object(value, "runtime", ("name", "kind"), required=("name",)))


@dataclass(frozen=True, slots=True)
class Resources:
    """What one node of a job asks for, and its limits: Kubernetes quantities by resource name."""

    requests: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("requests", "limits"):  # copies: the caller may change theirs
            if isinstance(value := getattr(self, name), Mapping):
                object.__setattr__(self, name, dict(value))

    def to_json(self) -> dict[str, Any]:
        """The fields that are not at their default."""
        return _without_defaults(self)

    @classmethod
    def from_json(cls, value: object) -> Resources:
        """Reads `to_json`'s object back. Raises Invalid."""
        return cls(**_object(value, "resources", ("requests", "limits")))


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What to run. Checked when it is made: an ill-formed one is `Invalid` before anything is sent.

    What is left out is as the runtime has it. `labels` go on the TrainJob, its JobSet and its pods. The variables of
    `env` are followed by DISPATCH_JOB, _SUBMISSION, _ADMISSION, _EPOCH and _RESTART.
    """

    job: str  # a ULID, in either case
    runtime: Runtime
    submission: int = 1  # N: used once, the next one is N + 1
    image: str | None = None
    command: Sequence[str] = ()
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    nodes: int | None = None
    procs_per_node: int | None = None
    resources: Resources = Resources()  # per node
    timeout: int | None = None  # seconds per admission
    priority: str | None = None  # a WorkloadPriorityClass, Kueue mode only
    node_selector: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("command", "args", "env", "node_selector", "labels"):  # copies: the caller may change theirs
            value, kind = getattr(self, name), tuple if name in ("command", "args") else dict
            if isinstance(value, list if kind is tuple else Mapping):
                object.__setattr__(self, name, kind(value))
        object.__setattr__(self, "job", _ulid(self.job, "job spec: job"))
        validate(self)

    @property
    def name(self) -> str:
        """The TrainJob's name."""
        return f"dj-{self.job}-s{self.submission}"

    def to_json(self) -> dict[str, Any]:
        """The fields that are not at their default, in camelCase."""
        return {_camel(name): value for name, value in _without_defaults(self).items()}

    @classmethod
    def from_json(cls, value: object) -> JobSpec:
        """Reads `to_json`'s object back. Raises Invalid."""
        names = {_camel(f.name): f.name for f in dataclasses.fields(cls)}
        given = {names[k]: v for k, v in _object(value, "job spec", names, required=("job", "runtime")).items()}
        given["runtime"] = Runtime.from_json(given["runtime"])
        if "resources" in given:
            given["resources"] = Resources.from_json(given["resources"])
        return cls(**given)


@dataclass(frozen=True, slots=True)
class PodStatus:
    """One pod of a job."""

    rank: int | None
    pod: str
    node: str  # empty: not scheduled yet
    phase: str


@dataclass(frozen=True, slots=True)
class Interruption:
    """That Kueue evicted a job, how often, and its own words for why."""

    cause: Cause
    count: int
    detail: str


@dataclass(frozen=True, slots=True)
class Status(_Found):
    """What is known about a job at `observed_at`."""

    handle: Handle
    state: State
    cause: Cause | None = None
    detail: str = ""  # what the cluster says, unchanged
    exit_code: int | None = None  # of the container that tells the cause; its pod's node and rank
    node: str | None = None
    rank: int | None = None
    admission: int | None = None
    restart: int | None = None
    epoch: int | None = None
    hold: int | None = None  # the hold instance in place
    interruptions: tuple[Interruption, ...] = ()  # of all its admissions, but for holds
    pods: tuple[PodStatus, ...] = ()
    ungated: bool = False  # Kueue mode: a pod runs that the readmission gate was not asked about
    final: bool = False
    stale_since: datetime.datetime | None = None
    observed_at: datetime.datetime | None = None


@dataclass(frozen=True, slots=True)
class Line(_Found):
    """One line that a job's program printed."""

    rank: int | None
    admission: int | None
    restart: int | None
    time: datetime.datetime  # by the node's clock
    text: str  # without its line end; bytes that are not UTF-8 are lone surrogates: `surrogateescape` gives them back


@dataclass(frozen=True, slots=True)
class Gap(_Found):
    """Lines of one rank may be missing here, which nobody can read any more."""

    rank: int | None
    admission: int | None
    restart: int | None
    since: datetime.datetime | None  # of the last line before; None: there was none
    until: datetime.datetime | None  # of the first line after; None: there is none
    reason: str


@dataclass(frozen=True, slots=True)
class Kueue:
    """The settings' `kueue` section."""

    local_queue: str
    admission_check: str | None = None
    admission_lease: str = "dispatch-system/dispatch-admission"  # namespace/name


@dataclass(frozen=True, slots=True)
class Settings:
    """The adapter's configuration. `kueue` None: plain mode."""

    namespace: str
    probe_runtime: Runtime
    kubeconfig: str | None = None
    context: str | None = None
    probe_timeout: float = 30.0  # seconds
    kueue: Kueue | None = None

    @classmethod
    def load(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> Settings:
        """Reads a JSON file, or the same as a dict. Raises Invalid, `kubeflow settings: …`. Contacts nobody."""
        try:
            if not isinstance(source, Mapping):
                return _settings(json.loads(Path(source).read_text(encoding="utf-8")))
            return _settings(source)
        except (OSError, ValueError, TypeError, RecursionError) as error:  # ValueError: no JSON, or no UTF-8
            raise Invalid(f"kubeflow settings: {source}: {error}") from error
        except Invalid as error:
            raise Invalid(f"kubeflow settings: {error.args[0]}") from None


# ======================================================================================================================
# Decisions: is it well-formed?
# ======================================================================================================================

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"  # a DNS label
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"  # an object's name
_LABEL_NAME = r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]"  # a label's value, and its key after the prefix
_INT32 = 2**31 - 1
_MAX_NODES = 100_000  # the API server's bound for the parallelism of an indexed Job
_MAX_ITEMS = 128  # Trainer's bound for command, args and env
_MAX_SIZE = 256 * 1024  # bytes of the spec as the server stores it; every object made from it must stay below 1.5 MiB
_INJECTED = ("JOB", "SUBMISSION", "ADMISSION", "EPOCH", "RESTART")  # after DISPATCH_
_MILLI: dict[str, int] = {"m": 1, "": 10**3, **{s: 10 ** (3 * i + 6) for i, s in enumerate("kMGTPE")}}
_QUANTITY = re.compile(r"([0-9]{1,15})(?:\.([0-9]{1,9}))?(m|[kMGTPE]|[KMGTPE]i|)")
_MILLI |= {f"{s}i": 1000 * 1024 ** (i + 1) for i, s in enumerate("KMGTPE")}


def validate(spec: JobSpec) -> None:
    """Raises Invalid unless the API server, Trainer, JobSet and the Job controller accept what `render` makes of it."""
    where = "job spec: "
    if not isinstance(spec.runtime, Runtime) or not isinstance(spec.resources, Resources):
        raise Invalid(f"{where}runtime is a Runtime, and resources are Resources")
    _check_whole(spec.submission, where + "submission", 1, EPOCH_BOUND - 1)
    if spec.image is not None and not (isinstance(spec.image, str) and re.fullmatch(r"[!-~]{1,500}", spec.image)):
        raise Invalid(f"{where}image: {_shown(spec.image)} is not 1 to 500 printable characters without a space")
    for name, words in (("command", spec.command), ("args", spec.args)):
        if not isinstance(words, tuple) or len(words) > _MAX_ITEMS:
            raise Invalid(f"{where}{name}: {_shown(words)} is not a list of at most {_MAX_ITEMS} strings")
        for word in words:
            _check_text(word, where + name)
    _check_env(spec.env, where + "env")
    for name, value, most in (
        ("nodes", spec.nodes, _MAX_NODES),
        ("procsPerNode", spec.procs_per_node, _INT32),
        ("timeout", spec.timeout, _INT32),
    ):
        if value is not None:
            _check_whole(value, where + name, 1, most)
    _check_resources(spec.resources, where + "resources")
    if spec.priority is not None:
        _check_name(spec.priority, where + "priority", 63)  # a label's value
    _check_labels(spec.node_selector, where + "nodeSelector")
    _check_labels(spec.labels, where + "labels")
    for key in spec.labels:
        if key.startswith(RESERVED_PREFIXES) or key in RESERVED_LABELS:
            raise Invalid(f"{where}labels: {key} is reserved")
    text = canonical(spec)
    size = len(text) + 5 * sum(map(text.count, "<>&"))  # the server writes these as \u003c
    if size > _MAX_SIZE:
        raise Invalid(f"{where}{size:,} bytes are more than {_MAX_SIZE:,}: put large input into a file or a ConfigMap")


def _check_env(env: object, where: str) -> None:
    names = _check_mapping(env, where)
    if len(names) > _MAX_ITEMS - len(_INJECTED):
        raise Invalid(f"{where}: {len(names)} variables are more than {_MAX_ITEMS - len(_INJECTED)}")
    for name, value in names.items():
        if not re.fullmatch(r"[-._a-zA-Z][-._a-zA-Z0-9]*", name) or name == "." or name.startswith(".."):
            raise Invalid(f"{where}: {_shown(name)} is not a variable's name")
        if name.startswith("DISPATCH_") or name in RESERVED_ENV:
            raise Invalid(f"{where}: {name} is reserved: {'dispatch' if name.startswith('D') else 'Trainer'} sets it")
        _check_text(value, f"{where}: {name}")


def _check_resources(resources: Resources, where: str) -> None:
    milli: dict[tuple[str, str], int] = {}
    for part, quantities in (("requests", resources.requests), ("limits", resources.limits)):
        for name, value in _check_mapping(quantities, f"{where}: {part}").items():
            prefix, _, rest = name.partition("/")
            extended = "kubernetes.io" not in prefix and not prefix.startswith("requests.")
            if name not in ("cpu", "memory", "ephemeral-storage") and not (
                extended and rest and len(prefix) <= 240 and _is_label_key(name)
            ):
                raise Invalid(f"{where}: {_shown(name)} is not cpu, memory, ephemeral-storage or <domain>/<name>")
            milli[part, name] = _milli(value, f"{where}: {part}: {name}", whole=name != "cpu")
    for (part, name), value in milli.items():
        limit = milli.get(("limits", name))
        if part == "requests" and "/" in name and value != limit:
            raise Invalid(f"{where}: {name} is not shared: its limit must be there, and be the request")
        if part == "requests" and limit is not None and value > limit:
            raise Invalid(f"{where}: {name}: the request is above the limit")


def _milli(value: object, where: str, *, whole: bool) -> int:
    """A quantity in thousandths. Of what Kubernetes reads, the plain forms: no sign, no exponent, no rounding."""
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise Invalid(f"{where}: {_shown(value)} is not a quantity such as 500m, 4, 1.5 or 16Gi")
    billionths: int = int(match[1] + (match[2] or "").ljust(9, "0")) * _MILLI[match[3]]
    milli, rest = divmod(billionths, 10**9)
    if rest or (whole and milli % 1000):
        raise Invalid(f"{where}: {value} is finer than {'1' if whole else '1m'}")
    if milli >= 2**53 * 1000:
        raise Invalid(f"{where}: {value} is too large")
    return milli


def _check_labels(labels: object, where: str) -> None:
    for key, value in _check_mapping(labels, where).items():
        if not _is_label_key(key):
            raise Invalid(f"{where}: {_shown(key)} is not a label's key")
        if not (isinstance(value, str) and len(value) <= 63 and re.fullmatch(rf"({_LABEL_NAME})?", value)):
            raise Invalid(f"{where}: {key}: {_shown(value)} is not a label's value")


def _is_label_key(key: str) -> bool:
    *prefix, name = key.split("/", 1)
    fits = len(name) <= 63 and re.fullmatch(_LABEL_NAME, name) is not None
    return fits and all(len(p) <= 253 and re.fullmatch(_SUBDOMAIN, p) for p in prefix)


def _check_mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise Invalid(f"{where}: {_shown(value)} is not an object with strings as names")
    return value


def _check_text(value: object, where: str) -> None:
    """A string that reaches the process as it is.

    No argument of a process holds NUL. The other characters are those that YAML refuses, or folds (U+0085): Trainer
    applies the JobSet with a patch that the API server reads as YAML, and when that fails only an Event tells.
    """
    if not isinstance(value, str) or re.search("[\0\x7f-\x9f\ud800-\udfff\ufeff\ufffe\uffff]", value):
        raise Invalid(f"{where}: {_shown(value)} is not a string of printable characters, tabs and line ends")


def _check_whole(value: object, where: str, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise Invalid(f"{where}: {_shown(value)} is not a whole number from {least:,} to {most:,}")


def _check_name(value: object, where: str, most: int = 253, form: str = _SUBDOMAIN) -> str:
    if not isinstance(value, str) or len(value) > most or not re.fullmatch(form, value):
        what = "an object" if form == _SUBDOMAIN else "a namespace"
        raise Invalid(f"{where}: {_shown(value)} is not the name of {what}")
    return value


def _ulid(value: object, where: str) -> str:
    """A ULID's text in lower case. `ULID.parse` would take a UUID, a number or a date for one too."""
    try:
        return str(ULID.from_str(str(value))).lower()
    except ValueError:
        raise Invalid(f"{where}: {_shown(value)} is not a ULID: new_job() makes one") from None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _object(value: object, where: str, known: Iterable[str] = (), *, required: Sequence[str] = ()) -> dict[str, Any]:
    """A JSON object with these names and no others."""
    given = dict(_check_mapping(value, where))
    names = [*required, *(name for name in known if name not in required)]
    unknown = [name for name in given if name not in names]
    if unknown:
        raise Invalid(f"{where}: unknown {', '.join(map(_shown, unknown))}: known are {', '.join(names)}")
    for name in required:
        if name not in given:
            raise Invalid(f"{where}: {name} is missing")
    return given


def _settings(value: object) -> Settings:
    """Raises Invalid, naming the key."""
    optional = ("kubeconfig", "context", "probeTimeout", "kueue")
    given = _object(value, "settings", optional, required=("namespace", "probeRuntime"))
    for name in ("kubeconfig", "context"):
        if name in given and not (isinstance(given[name], str) and given[name]):
            raise Invalid(f"{name}: {_shown(given[name])} is not a text")
    timeout, kueue = given.get("probeTimeout", 30), None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= 3600:
        raise Invalid(f"probeTimeout: {_shown(timeout)} is not a number of seconds up to 3600")
    if "kueue" in given:
        section = _object(given["kueue"], "kueue", ("admissionCheck", "admissionLease"), required=("localQueue",))
        kueue = Kueue(_check_name(section["localQueue"], "kueue.localQueue", 63))
        if "admissionCheck" in section:
            check = _check_name(section["admissionCheck"], "kueue.admissionCheck")
            kueue = replace(kueue, admission_check=check)
        if "admissionLease" in section:
            lease = section["admissionLease"]
            if not isinstance(lease, str) or not re.fullmatch(rf"{_LABEL}/{_SUBDOMAIN}", lease):
                raise Invalid(f"kueue.admissionLease: {_shown(lease)} is not <namespace>/<name>")
            kueue = replace(kueue, admission_lease=lease)
    try:
        runtime = Runtime.from_json(given["probeRuntime"])
    except Invalid as error:
        raise Invalid(f"probeRuntime: {error.args[0]}") from None
    namespace = _check_name(given["namespace"], "namespace", 63, _LABEL)
    return Settings(namespace, runtime, given.get("kubeconfig"), given.get("context"), float(timeout), kueue)


def _without_defaults(value: Any) -> dict[str, Any]:
    """A value's fields as plain JSON, without those that say nothing."""
    plain = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    for name, item in plain.items():
        if isinstance(item, Runtime | Resources):
            plain[name] = item.to_json()
        elif isinstance(item, tuple | Mapping):
            plain[name] = list(item) if isinstance(item, tuple) else dict(item)
    defaults = {f.name: f.default for f in dataclasses.fields(value)}
    return {k: v for k, v in plain.items() if v not in (None, [], {}) and v != defaults[k]}


def _plain(value: Any) -> Any:
    """A value of `_Found` as JSON."""
    if isinstance(value, datetime.datetime):
        return value.isoformat(timespec="microseconds").replace("+00:00", "Z")
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value):
        return {_camel(f.name): _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return value


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def canonical(spec: JobSpec) -> str:
    """The one JSON text of a spec: fields that are not at their default, names sorted, no spaces, ASCII."""
    return json.dumps(spec.to_json(), sort_keys=True, separators=(",", ":"))


def spec_hash(spec: JobSpec) -> str:
    """What tells one spec from another: `sha256:<hex>` of its canonical JSON."""
    return f"sha256:{hashlib.sha256(canonical(spec).encode()).hexdigest()}"


# ======================================================================================================================
# Decisions: what is created, and what is written later
# ======================================================================================================================


def refusal(runtime: Object, spec: JobSpec) -> str:
    """Why a job of this spec cannot run on this runtime; empty when it can.

    Refused: no replicated job `node` with a container `node`; a JobSet that is deleted some time after its end
    (`ttlSecondsAfterFinished`: the outcome would vanish, and Trainer 2.3 runs a failed job again then); names of pods
    that would be too long (JobSet refuses them, and only an Event tells).
    """
    template = _at(runtime, "spec", "template", "spec")
    jobs = _objects(_at(template, "replicatedJobs"))
    trainers = [job for job in jobs if job.get("name") == TRAINER_JOB]
    containers = _objects(_at(trainers[0], "template", "spec", "template", "spec", "containers")) if trainers else []
    if not any(container.get("name") == TRAINER_CONTAINER for container in containers):
        return f"it has no replicated job {TRAINER_JOB} with a container {TRAINER_CONTAINER}"
    if _at(template, "ttlSecondsAfterFinished") is not None:
        return "its JobSet sets ttlSecondsAfterFinished: the outcome would vanish with it, and a failed job run again"
    for job in jobs:
        pods = _at(job, "template", "spec", "completions") or _at(job, "template", "spec", "parallelism") or 1
        if job is trainers[0]:
            pods = spec.nodes or _at(runtime, "spec", "mlPolicy", "numNodes") or pods
        longest = f"{spec.name}-{job.get('name')}-{(_at(job, 'replicas') or 1) - 1}-{pods - 1}-abcde"
        if len(longest) > 63:
            return f"pod names such as {longest} would be longer than 63 characters: start it as a new job"
    return ""


def render(spec: JobSpec, runtime: Object, settings: Settings) -> Object:
    """The TrainJob of a spec: it cannot run before `open`, and its pods will know their admission and epoch.

    `suspend: true` in both modes. In Kueue mode Kueue sets it anyway; but where Kueue's webhook does not see the job,
    it must not run meanwhile. The variables are declared here once, as annotations of the pod: a trainer's env can
    never be changed, a pod template's annotations can, while the job is suspended.
    """
    kueue = settings.kueue
    ours = {**spec.labels, JOB: spec.job, SUBMISSION: str(spec.submission)}
    labels = {**ours, **({QUEUE_NAME: kueue.local_queue} if kueue else {})}
    if spec.priority:
        labels[PRIORITY_CLASS] = spec.priority
    annotations = {GATED_BY: START_GATE, SPEC: spec_hash(spec), **({} if kueue else {GATE: "closed"})}
    admission = 0 if kueue else 1
    pod = {
        "metadata": {
            "labels": ours,
            "annotations": {ADMISSION: str(admission), EPOCH: str(spec.submission * EPOCH_BOUND + admission)},
        },
        **({"spec": {"nodeSelector": dict(spec.node_selector)}} if spec.node_selector else {}),
    }
    names = [job["name"] for job in _objects(_at(runtime, "spec", "template", "spec", "replicatedJobs"))]
    trainer = {
        "image": spec.image,
        "command": list(spec.command),
        "args": list(spec.args),
        "env": _env(spec),
        "numNodes": spec.nodes,
        "numProcPerNode": spec.procs_per_node,
        "resourcesPerNode": spec.resources.to_json(),
    }
    patch = {
        "metadata": {"labels": ours},
        "spec": {"replicatedJobs": [{"name": name, "template": {"spec": {"template": pod}}} for name in names]},
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {
            "name": spec.name,
            "namespace": settings.namespace,
            "labels": labels,
            "annotations": annotations,
        },
        "spec": {
            "runtimeRef": {"kind": spec.runtime.kind, "name": spec.runtime.name},
            "suspend": True,
            "trainer": {name: value for name, value in trainer.items() if value not in (None, [], {})},
            "runtimePatches": [{"manager": PATCH_MANAGER, "trainingRuntimeSpec": {"template": patch}}],
            **({"activeDeadlineSeconds": spec.timeout} if spec.timeout else {}),
        },
    }


def _env(spec: JobSpec) -> list[Object]:
    """The caller's variables, then ours."""
    paths = {
        "DISPATCH_ADMISSION": f"metadata.annotations['{ADMISSION}']",
        "DISPATCH_EPOCH": f"metadata.annotations['{EPOCH}']",
        "DISPATCH_RESTART": f"metadata.labels['{RESTART}']",
    }
    return [
        *({"name": name, "value": value} for name, value in spec.env.items()),
        {"name": "DISPATCH_JOB", "value": spec.job},
        {"name": "DISPATCH_SUBMISSION", "value": str(spec.submission)},
        *({"name": n, "valueFrom": {"fieldRef": {"fieldPath": path}}} for n, path in paths.items()),
    ]


def answer_fault(sent: Object, answer: Object) -> str:
    """Why the object that a create made is not the one that was asked for, and might run unasked; empty when it is."""
    queue, got = _labels(sent).get(QUEUE_NAME), _labels(answer).get(QUEUE_NAME)
    if queue is None and got is not None:
        return (
            f"it came back with {QUEUE_NAME} {got}: Kueue takes jobs without a queue here (a LocalQueue named default "
            "does that): rename that LocalQueue, or add a kueue section to the settings"
        )
    if got != queue:
        return f"it came back with {QUEUE_NAME} {got} instead of {queue}: look at the webhooks that change TrainJobs"
    if _at(answer, "spec", "suspend") is not True:
        return "it came back unsuspended: look at the webhooks that change TrainJobs"
    for name in (GATED_BY, GATE):
        if _annotations(answer).get(name) != _annotations(sent).get(name):
            return f"it came back without its gate {name}: look at the webhooks that change TrainJobs"
    managers = [patch.get("manager") for patch in _objects(_at(answer, "spec", "runtimePatches"))]
    if queue is not None and KUEUE_MANAGER not in managers:
        return "Kueue's webhook did not see it: check that Kueue's TrainJob integration is on, for this namespace too"
    return ""


def hold_of(trainjob: object) -> int | str | None:
    """The hold in place: an instance, or "stop"; None when there is none or it was released. All else holds too."""
    text = _annotations(trainjob).get(HOLD)
    if text is None or re.fullmatch(r"released-[0-9]+", str(text)):
        return None
    return int(text) if re.fullmatch(r"[0-9]{1,18}", str(text)) else str(text)


def is_gated(trainjob: object) -> bool:
    """Whether the start gate is closed: it has not been opened yet."""
    return START_GATE in _gates(trainjob) or _annotations(trainjob).get(GATE) == "closed"


def is_queued(trainjob: object) -> bool:
    """Whether Kueue manages the job."""
    return QUEUE_NAME in _labels(trainjob)


def is_final(trainjob: object) -> bool:
    """Whether the job has ended, and Trainer says so."""
    return bool(_condition(trainjob, "Complete") or _condition(trainjob, "Failed"))


def opened(trainjob: Object) -> Object | None:
    """The TrainJob with its start gate open: in Kueue mode Kueue may admit it, in plain mode it resumes unless held.

    None when it is open already. Then nothing is resumed: who suspended it later had a reason, and its pods may still
    be there.
    """
    if not is_gated(trainjob):
        return None
    changed = copy.deepcopy(trainjob)
    annotations = changed["metadata"]["annotations"]
    gates = [gate for gate in _gates(trainjob) if gate != START_GATE]
    annotations.pop(GATED_BY, None)
    if gates:  # somebody else's
        annotations[GATED_BY] = ",".join(gates)
    annotations.pop(GATE, None)
    if not is_queued(trainjob) and hold_of(trainjob) is None:
        changed["spec"]["suspend"] = False
    return changed


def marked_stopping(trainjob: Object) -> Object | None:
    """The TrainJob as one that is not to run again: the gate honours the mark; in plain mode it is suspended as well.

    None when it is so already.
    """
    changed = copy.deepcopy(trainjob)
    changed["metadata"].setdefault("annotations", {})[HOLD] = "stop"
    if not is_queued(trainjob):
        changed["spec"]["suspend"] = True
    return None if changed == trainjob else changed


def held(trainjob: Object, instance: int) -> Object | None:
    """The TrainJob with this hold in place; in plain mode suspended as well. None when it is so already.

    Raises StaleHold: instances only grow, across releases too.
    """
    text = str(_annotations(trainjob).get(HOLD, ""))
    last = re.fullmatch(r"(released-)?([0-9]{1,18})", text)
    if text and not last:
        raise Conflict(f"TrainJob {_name(trainjob)}: its annotation {HOLD} is {text!r}, which is not dispatch's")
    if last and instance < int(last[2]) + bool(last[1]):
        state = "was released already" if last[1] else "is in place"
        raise StaleHold(f"TrainJob {_name(trainjob)}: hold instance {instance}: instance {last[2]} {state}")
    changed = copy.deepcopy(trainjob)
    changed["metadata"].setdefault("annotations", {})[HOLD] = str(instance)
    if not is_queued(trainjob):
        changed["spec"]["suspend"] = True
    return None if changed == trainjob else changed


def released(trainjob: Object, instance: int) -> Object | None:
    """The TrainJob without this hold. None when it was released already. Raises StaleHold when it is not in place.

    In plain mode, when it is open, its next attempt begins: it resumes, with the admission count and the epoch raised.
    """
    what, hold = f"TrainJob {_name(trainjob)}", hold_of(trainjob)
    if _annotations(trainjob).get(HOLD) == f"released-{instance}":
        return None
    if hold != instance:
        state = "no hold is in place" if hold is None else f"hold instance {hold} is in place"
        raise StaleHold(f"{what}: release of hold instance {instance}: {state}")
    changed = copy.deepcopy(trainjob)
    changed["metadata"]["annotations"][HOLD] = f"released-{instance}"
    if not is_queued(trainjob) and not is_gated(trainjob):
        admission = _count(_patched_annotations(trainjob).get(ADMISSION))
        if admission is None or admission + 1 >= EPOCH_BOUND:
            raise Conflict(f"{what}: its admission count is unreadable or exhausted: start the next submission")
        epoch = int(_name(trainjob).rpartition("-s")[2]) * EPOCH_BOUND + admission + 1
        for patch in _objects(_at(changed, "spec", "runtimePatches")):
            if patch.get("manager") == PATCH_MANAGER:
                for job in _objects(_at(patch, "trainingRuntimeSpec", "template", "spec", "replicatedJobs")):
                    counts = _annotations(_at(job, "template", "spec", "template"))
                    counts.update({ADMISSION: str(admission + 1), EPOCH: str(epoch)})
        changed["spec"]["suspend"] = False
    return changed


def unquiet(jobsets: Sequence[Object], jobs: Sequence[Object], pods: Sequence[Object]) -> str:
    """Names one thing of a suspended job that still runs, or is about to; empty when it stands still."""
    for pod in pods:
        if remains(pod):
            return f"pod {_name(pod)} on {_at(pod, 'spec', 'nodeName') or 'no node'} has not ended"
    for job in jobs:
        ended = _condition(job, "Complete") or _condition(job, "Failed")
        if not ended and not (_at(job, "spec", "suspend") is True and _condition(job, "Suspended")):
            return f"Job {_name(job)} is not suspended yet"
    for jobset in jobsets:
        if not stands_still(jobset):
            return f"JobSet {_name(jobset)} is not suspended yet"
    return "" if jobsets else "Trainer has not made its JobSet yet"


def may_still_run(trainjobs: Sequence[Object], jobsets: Sequence[Object], pods: Sequence[Object]) -> str:
    """Names one thing of a job's other submissions that runs, or may yet; empty when nothing can."""
    for trainjob in trainjobs:
        if not is_final(trainjob):
            return f"TrainJob {_name(trainjob)} has not ended"
        if runs_anew(trainjob, jobsets):
            return f"TrainJob {_name(trainjob)} has failed and lost its JobSet, which Trainer makes anew"
    for pod in pods:
        if remains(pod):
            return f"pod {_name(pod)} on {_at(pod, 'spec', 'nodeName') or 'no node'} has not ended"
    for jobset in jobsets:
        if not (_condition(jobset, "Completed") or _condition(jobset, "Failed")):
            return f"JobSet {_name(jobset)} has not ended"
    return ""


def runs_anew(trainjob: Object, jobsets: Sequence[Object]) -> bool:
    """Whether Trainer 2.3 runs an ended job once more: it takes Failed away each time, and no JobSet says so again."""
    over = _condition(trainjob, "Complete") or _reason(trainjob, "Failed") == "DeadlineExceeded"
    suspended = _at(trainjob, "spec", "suspend") is True
    return not (over or suspended) and _name(trainjob) not in map(_name, jobsets)


def remains(pod: Object) -> bool:
    """Whether a pod may still run: anything that is not plainly finished, however long it has been terminating."""
    return _at(pod, "status", "phase") not in ("Succeeded", "Failed")


def stands_still(jobset: Object) -> bool:
    """Whether a JobSet is suspended, says so itself, and counts no active Job."""
    counts = [job.get("active", 0) for job in _objects(_at(jobset, "status", "replicatedJobsStatus"))]
    suspended = _at(jobset, "spec", "suspend") is True and bool(_condition(jobset, "Suspended"))
    return suspended and all(count == 0 for count in counts)


def leftovers(uid: str, trainjob: Object | None, found: Mapping[str, Sequence[Object]]) -> dict[str, list[Object]]:
    """What is left of the submission whose TrainJob had this UID, of what its labels find: by kind, TrainJob first.

    A successor under the same name has the same labels. What belongs to another TrainJob's JobSet is not ours.
    """
    foreign = {_uid(j) for j in found["JobSet"] if _owner_uid(j) not in ("", uid)}
    kept = {
        kind: [o for o in objects if _uid(o) not in foreign and _labels(o).get(JOBSET_UID) not in foreign]
        for kind, objects in found.items()
    }
    return {"TrainJob": [trainjob] if trainjob and _uid(trainjob) == uid else [], **kept}


def ceased_by(left: Mapping[str, Sequence[Object]], nodes: Mapping[str, Object | None]) -> Ceased:
    """Whether nothing of a submission can run any more, by all that is left of it and the nodes of its pods, by name.

    No: anything that has not ended, also on an unreachable node. Unknown: a pod whose Node is gone, or newer than the
    pod; the machine may run on. An out-of-service taint is an administrator's word that it does not.
    """
    for kind, ends in (
        ("TrainJob", ("Complete", "Failed")),
        ("JobSet", ("Completed", "Failed")),
        ("Job", ("Complete", "Failed")),
    ):
        for obj in left[kind]:
            if not any(_condition(obj, end) for end in ends):
                return Ceased(Answer.NO, f"{kind} {_name(obj)} has not ended")
    for trainjob in left["TrainJob"]:
        if runs_anew(trainjob, left["JobSet"]):
            return Ceased(Answer.NO, f"TrainJob {_name(trainjob)} has lost its JobSet, which Trainer makes anew")
    found: dict[Answer, list[str]] = {answer: [] for answer in Answer}
    for pod in filter(remains, left["Pod"]):
        name = _at(pod, "spec", "nodeName")
        node, where = nodes.get(str(name)), f"pod {_name(pod)} on {name or 'no node'}"
        taints = {str(taint.get("key")) for taint in _objects(_at(node, "spec", "taints"))}
        if not name:
            found[Answer.NO].append(f"{where} has not ended")
        elif node is None:
            found[Answer.UNKNOWN].append(f"{where}, whose Node is gone: its machine may run on")
        elif str(_at(node, "metadata", "creationTimestamp")) > str(_at(pod, "metadata", "creationTimestamp")):
            found[Answer.UNKNOWN].append(f"{where}, whose Node is another one since: its first machine may run on")
        elif OUT_OF_SERVICE in taints:
            found[Answer.YES].append(f"{where}, which is out of service")
        else:
            found[Answer.NO].append(f"{where}{', which is unreachable,' * (UNREACHABLE_NODE in taints)} has not ended")
    for answer in (Answer.NO, Answer.UNKNOWN, Answer.YES):
        if found[answer]:
            return Ceased(answer, "; ".join(found[answer][:3]))
    ended = len(left["Pod"])
    return Ceased(Answer.YES, f"{ended} pods are left, all have ended" if ended else "no pods are left")


def described(left: Mapping[str, Sequence[Object]]) -> str:
    """What is left, for a person: each by kind and name, pods with their node, the first few of each kind."""
    parts = []
    for kind, objects in left.items():
        nodes = {_name(o): f" on {_at(o, 'spec', 'nodeName')}" for o in objects if _at(o, "spec", "nodeName")}
        parts += [f"{kind} {name}{nodes.get(name, '')}" for name in sorted(map(_name, objects))[:3]]
        parts += [f"{len(objects) - 3} more of kind {kind}"] if len(objects) > 3 else []
    return ", ".join(parts)


# ======================================================================================================================
# Decisions: preflight
# ======================================================================================================================

GROUPS = ("v1", "trainer.kubeflow.org/v1alpha1", "jobset.x-k8s.io/v1alpha2")
KUEUE_GROUPS = ("kueue.x-k8s.io/v1beta2", "coordination.k8s.io/v1")
VERSIONS = "this adapter supports Trainer v2.3, JobSet v0.12 and Kueue v0.20"
RIGHTS = (  # what needs them, verbs, resource. Those on kueue.x-k8s.io in Kueue mode only
    ("observe", "get list watch", "trainjobs.trainer.kubeflow.org"),
    ("observe", "get list watch", "jobsets.jobset.x-k8s.io"),
    ("observe", "get list watch", "jobs.batch"),
    ("observe", "get list watch", "pods"),
    ("observe", "get list watch", "workloads.kueue.x-k8s.io"),
    ("observe", "get", "localqueues.kueue.x-k8s.io"),
    ("write", "create update delete", "trainjobs.trainer.kubeflow.org"),
    ("write", "delete", "jobsets.jobset.x-k8s.io"),
    ("write", "delete", "pods"),
    ("hold", "update", "workloads.kueue.x-k8s.io"),
    ("output", "get", "pods/log"),
    ("node causes", "get", "nodes"),
    ("event causes", "list", "events"),
)
ROLE = "examples/adapter-role.yaml"
UNENFORCED = "Kueue does not enforce admission-gated-by: check the Kueue version and the AdmissionGatedBy feature"
REMEDIES = (  # every reason of preflight, and what to do; docs/preflight.md has the same. The first that fits counts
    ("not permitted to <verb> <resource>", f"grant it: {ROLE} has all"),
    ("kueue.admissionCheck is not set", "set it in the settings"),
    ("LocalQueue <namespace>/<name> does not exist", "create it, or correct kueue.localQueue"),
    ("ClusterQueue <name> does not exist", "create it, or correct the LocalQueue's clusterQueue"),
    ("ClusterQueue <name> does not list AdmissionCheck <check>", "list it, without onFlavors"),
    ("AdmissionCheck <check> does not exist", "create it, or correct kueue.admissionCheck"),
    (f'AdmissionCheck <check> names controller "<x>", not {CONTROLLER}', "correct its controllerName"),
    ("AdmissionCheck <check> is not Active", "deploy or start the admission controller"),
    ("Lease <namespace>/<name> does not exist", "deploy the admission controller, or correct kueue.admissionLease"),
    ("the admission controller's Lease has no holder", "start the admission controller"),
    ("the admission controller's Lease has never been renewed", "start the admission controller"),
    (
        "the admission controller's Lease was last renewed <age> ago, beyond <limit>",
        "restart the admission controller: it is down or stalled, or its clock is wrong",
    ),
    ("pods appeared for the gated probe: <pods>", "look at what lets TrainJobs through besides the gate"),
    (
        "Kueue admitted the gated probe's Workload <name>",
        "check the Kueue version and the AdmissionGatedBy feature",
    ),
    (UNENFORCED, "switch the feature gate AdmissionGatedBy on; it is there from Kueue 0.17"),
    ("the probe: <fault>", "look at the webhooks and policies that change TrainJobs"),
    ("nothing proved it within <time>: <seen>", "see that Trainer, JobSet and Kueue run, or raise probeTimeout"),
    ("preflight probe step <name> failed: <error>", "follow the error's text, then connect again"),
    ("not probed: the backend is read-only", "open it without read_only"),
    (
        "the runtime's Jobs may replace a pod while it terminates",
        "use one with podReplacementPolicy: Failed or a podFailurePolicy, such as examples/runtime.yaml",
    ),
)


def remedy(reason: str) -> str:
    """What to do about a reason of preflight; empty when there is nothing to do."""
    for form, text in REMEDIES:
        if re.search(re.sub(r"<\w+>", ".+", re.escape(form)), reason):
            return text
    return ""


def rights(kueue: bool, *needs: str) -> list[str]:
    """`<verb> <resource>` for these needs, or for all."""
    return [
        f"{verb} {resource}"
        for need, verbs, resource in RIGHTS
        if (not needs or need in needs) and (kueue or not resource.endswith("kueue.x-k8s.io"))
        for verb in verbs.split()
    ]


def go_duration(seconds: float) -> str:
    """As Go writes a duration, to the second: `45s`, `1m30s`, `25h0m0s`."""
    minutes, left = divmod(abs(int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    sign = "-" * (int(seconds) < 0)
    return sign + f"{hours}h" * bool(hours) + f"{minutes}m" * bool(hours or minutes) + f"{left}s"


def readmission_fault(kueue: Kueue, namespace: str, found: Mapping[str, Object | None], now: datetime.datetime) -> str:
    """Why the readmission gate is not proven by the objects, by kind, that were read so far; empty: so far it is."""
    check, queue = kueue.admission_check, _at(found.get("LocalQueue"), "spec", "clusterQueue")
    names = {
        "LocalQueue": f"{namespace}/{kueue.local_queue}",
        "ClusterQueue": queue or "(none)",
        "AdmissionCheck": check,
        "Lease": kueue.admission_lease,
    }
    for kind, obj in found.items():
        if obj is None:
            return f"{kind} {names[kind]} does not exist"
        if kind == "ClusterQueue":
            rules = _objects(_at(obj, "spec", "admissionChecksStrategy", "admissionChecks"))
            if not any(rule.get("name") == check and not rule.get("onFlavors") for rule in rules):
                return f"ClusterQueue {queue} does not list AdmissionCheck {check}"
        if kind == "AdmissionCheck":
            name = _at(obj, "spec", "controllerName")
            if name != CONTROLLER:
                return f'AdmissionCheck {check} names controller "{name}", not {CONTROLLER}'
            if not _condition(obj, "Active"):
                return f"AdmissionCheck {check} is not Active"
        if kind == "Lease":
            renewed = _time(_at(obj, "spec", "renewTime"))
            limit = 2 * (_at(obj, "spec", "leaseDurationSeconds") or 0)
            if not _at(obj, "spec", "holderIdentity"):
                return "the admission controller's Lease has no holder"
            if renewed is None:
                return "the admission controller's Lease has never been renewed"
            age = (now - renewed).total_seconds()
            if abs(age) > limit:  # one that lies ahead proves as little
                return (
                    f"the admission controller's Lease was last renewed {go_duration(age)} ago, "
                    f"beyond {go_duration(limit)}"
                )
    return ""


def start_fault(
    queued: bool, pods: Sequence[Object], workloads: Sequence[Object], jobsets: Sequence[Object]
) -> str | None:
    """Whether the start gate holds the probe back: empty when that is seen, else why not; None: nothing is seen yet."""
    if pods:
        return f"pods appeared for the gated probe: {', '.join(sorted(map(_name, pods)))}"
    for workload in workloads:
        if _condition(workload, "QuotaReserved") or _condition(workload, "Admitted"):
            return f"Kueue admitted the gated probe's Workload {_name(workload)}"
        if START_GATE in _gates(workload) and _falsity(workload, "QuotaReserved"):
            return ""
    return "" if not queued and any(map(stands_still, jobsets)) else None


def supports(
    kueue: bool, read_only: bool, denied: Iterable[str], gate: Support, observe_only: str, hold_fault: str
) -> dict[Capability, Support]:
    """The answers that preflight settles. `observe_only`, `hold_fault`: why; empty when it is not so."""
    unread = "not permitted to get pods/log" if "get pods/log" in denied else ""
    if observe_only:
        hold_fault = f"the cluster is observe-only: {observe_only}"
    elif kueue and "update workloads.kueue.x-k8s.io" in denied:
        hold_fault = "not permitted to update workloads.kueue.x-k8s.io"
    unprobed = Support(Answer.UNKNOWN, Source.DECLARED, "not probed: the backend is read-only")
    output = Support(Answer.NO if unread else Answer.YES, Source.PROBED, unread)
    hold = Support(Answer.NO if hold_fault else Answer.YES, Source.PROBED, hold_fault)
    return {
        Capability.READMISSION_GATE: gate,
        Capability.ATTEMPT_INJECTION: gate if kueue else Support(Answer.YES, Source.DECLARED),
        Capability.HOLD: unprobed if read_only else hold,
        Capability.OUTPUT_READ: output,
        Capability.OUTPUT_FOLLOW: output,
    }


def may_overlap(runtime: Object) -> str:
    """Why two pods of one epoch may run at a time on this runtime; empty when they cannot."""
    for job in _objects(_at(runtime, "spec", "template", "spec", "replicatedJobs")):
        spec = _at(job, "template", "spec")
        safe = _at(spec, "podReplacementPolicy") == "Failed" or _at(spec, "podFailurePolicy") is not None
        if job.get("name") == TRAINER_JOB and not safe:
            return "the runtime's Jobs may replace a pod while it terminates"
    return ""


# ======================================================================================================================
# Decisions: in which state is it?
# ======================================================================================================================


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known about one job: the objects as they were read within one call. `wants` says what else to read."""

    trainjob: Object | None  # None: gone while it was watched
    pods: Sequence[Object] = ()
    workload: Object | None = None  # Kueue mode: None while there is none
    jobs: Sequence[Object] = ()
    queues: Sequence[Object] = ()  # its LocalQueue and ClusterQueue
    nodes: Mapping[str, Object | None] | None = None  # by name, None: it is gone. As a whole None: they were not read
    events: Sequence[Object] | None = None  # None: they were not read
    seen: Sequence[Object] = ()  # pods as they were last seen, which are gone: only who looked before knows them
    read: frozenset[str] = frozenset()  # what was read, or may not be read, of what `wants` asked for


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `classify` makes of the evidence."""

    state: State
    cause: Cause | None = None
    detail: str = ""
    pod: Object | None = None  # the one that tells the cause
    exit_code: int | None = None  # of its container


def classify(evidence: Evidence) -> Verdict:
    """Says in which state a job is, and why. Never raises, whatever JSON the objects are. The first row that fits wins.

    ====  ==================================================================================================  ==========
    row   evidence                                                                                            state
    ====  ==================================================================================================  ==========
    1     the TrainJob is gone while it was watched                                                           stopped
    2     it is being deleted                                                                                 stopping
    3     it is Complete                                                                                      succeeded
    4     it is Failed                                                                                        failed
    5     Workload Finished without the TrainJob's end, or Evicted with a reason DeactivatedDueTo…            failed
    6     pods are left, and it may not run now (held, gated, evicted, suspended); or it is marked `stop`     stopping
    7     the hold is a number; or the Workload was deactivated by somebody else                              held
    8     the start gate is closed                                                                            gated
    9     a pod of the current epoch has a trainer container that has started and not ended                   running
    10    it is admitted (plain mode: not suspended)                                                          starting
    11    otherwise                                                                                           queued
    ====  ==================================================================================================  ==========

    The cause explains the state, or the interruption that led to it. Only evidence of the current attempt counts: its
    epoch, its latest restart. Of several ends the earliest decides, ties by this order; what disrupts a pod beats the
    exit code that it causes. A failure that nothing explains is `unknown`; any other state then has no cause.

    ===  ================================================================================================  =============
    row  evidence                                                                                          cause
    ===  ================================================================================================  =============
    a    container terminated: OOMKilled (exit code 137 alone is not)                                      out-of-memory
    b    TrainJob or Job Failed: DeadlineExceeded; Evicted: DeactivatedDueToMaximumExecutionTimeExceeded   timeout
    c    pod disrupted: PreemptionByScheduler; Workload Evicted: Preempted                                 preempted
    d    pod disrupted: DeletionByTaintManager, DeletionByPodGC; its node gone, unreachable or             node-lost
         out-of-service; Workload Evicted: NodeFailures
    e    pod reason Evicted; pod disrupted: TerminationByKubelet, EvictionByEvictionAPI                    evicted
    f    container waits: ErrImagePull, ImagePullBackOff, InvalidImageName                                 image
    g    container: CreateContainerConfigError, CreateContainerError, RunContainerError, StartError;       config
         Event TrainJobResourcesCreationFailed
    h    pod Unschedulable; Workload waits for quota (the detail says whether it can ever fit)             no-capacity
    i    check Rejected; Workload Evicted: DeactivatedDueToAdmissionCheck                                  rejected
    j    queue stopped, missing or inactive; Workload Evicted: ClusterQueueStopped, LocalQueueStopped      queue-stopped
    k    Workload deactivated, not by our hold                                                             stopped
    l    Workload Evicted: PodsReadyTimeout, when its pods do not tell more, or any other reason           evicted
    m    container terminated with a non-zero exit code                                                    program
    n    none of these                                                                                     unknown
    ===  ================================================================================================  =============
    """
    trainjob, workload = evidence.trainjob, evidence.workload
    if trainjob is None:
        return Verdict(State.STOPPED, detail="the TrainJob is gone")
    if _is_deleted(trainjob):
        return Verdict(State.STOPPING, detail="the TrainJob is being deleted")
    if end := _condition(trainjob, "Complete"):
        return Verdict(State.SUCCEEDED, detail=end)
    if _condition(trainjob, "Failed"):
        return _failed(evidence)
    if end := _condition(workload, "Finished"):
        return Verdict(State.FAILED, Cause.UNKNOWN, f"Workload Finished: {end}")
    eviction = _evicted(evidence)
    if _reason(workload, "Evicted").startswith("DeactivatedDueTo"):
        return replace(eviction, state=State.FAILED)
    hold, suspended = hold_of(trainjob), _at(trainjob, "spec", "suspend") is True
    inactive, evicted = _at(workload, "spec", "active") is False, _condition(workload, "Evicted")
    admitted = not (is_queued(trainjob) or suspended)
    if workload:  # of an evicted one Kueue takes the condition away only later
        admitted = bool(_condition(workload, "Admitted")) and not evicted
    left = [pod for pod in evidence.pods if remains(pod)]
    barred = hold is not None or is_gated(trainjob) or suspended or inactive or evicted or (workload and not admitted)
    if hold == "stop" or (left and barred):
        words = ""
        if hold is not None and workload and admitted and not inactive:  # whoever holds or stops it got no further
            words = f"its Workload is still active: {'stop' if hold == 'stop' else 'hold'} it again"
        return _stopping(evidence, left, eviction if hold is None else Verdict(State.STOPPING, detail=words))
    if hold is not None:
        loose = "held, but its quota is reserved: hold again" if not inactive else ""
        words = loose if _condition(workload, "QuotaReserved") and loose else f"hold instance {hold}"
        return Verdict(State.HELD, detail=words)
    if inactive and eviction.cause not in (None, Cause.STOPPED):  # it waited, evicted, when somebody deactivated it
        words = _joined(eviction.detail, "its Workload is inactive (spec.active)")
        soon = _condition(workload, "DeactivationTarget")  # Kueue did, and is about to say why
        eviction = eviction if soon else replace(eviction, cause=Cause.STOPPED, detail=words)
    if inactive:
        return replace(eviction, state=State.HELD)
    training = any(map(is_training, _attempt(evidence.pods, trainjob)))
    trouble = (_trouble(evidence) if training or admitted else None) or _refused(evidence)
    if is_gated(trainjob):
        return replace(
            trouble or Verdict(State.GATED, detail=_joined("not opened yet", _blind(evidence))), state=State.GATED
        )
    if training or admitted:
        words = "admitted, but the TrainJob is still suspended" if suspended and not training else ""
        trouble = trouble or Verdict(State.STARTING, detail=_joined(words, _blind(evidence)))
        return replace(trouble, state=State.RUNNING if training else State.STARTING)
    waits = trouble or _waiting(evidence)
    detail = _joined(eviction.detail, waits.detail)
    return replace(waits, state=State.QUEUED, cause=eviction.cause or waits.cause, detail=detail)


# The reasons that tell a cause, of containers, pods, Jobs, Workloads and Events: no word means two things.
_REASONS = {
    Cause.OUT_OF_MEMORY: ("OOMKilled",),
    Cause.TIMEOUT: ("DeadlineExceeded", "DeactivatedDueToMaximumExecutionTimeExceeded"),
    Cause.PREEMPTED: ("PreemptionByScheduler", "Preempted"),
    Cause.NODE_LOST: ("DeletionByTaintManager", "DeletionByPodGC", "NodeFailures", "TaintManagerEviction"),
    Cause.EVICTED: ("Evicted", "TerminationByKubelet", "EvictionByEvictionAPI"),
    Cause.IMAGE: ("ErrImagePull", "ImagePullBackOff", "InvalidImageName"),
    Cause.CONFIG: (
        *("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError"),
        "TrainJobResourcesCreationFailed",
    ),
    Cause.NO_CAPACITY: ("Unschedulable",),
    Cause.REJECTED: ("DeactivatedDueToAdmissionCheck",),
    Cause.QUEUE_STOPPED: ("ClusterQueueStopped", "LocalQueueStopped"),
    Cause.STOPPED: ("Deactivated",),
}
_CAUSE_OF = {reason: cause for cause, reasons in _REASONS.items() for reason in reasons}
_ORDER = {cause: order for order, cause in enumerate([*_REASONS, Cause.PROGRAM, Cause.UNKNOWN])}  # that of the table
_HARMLESS = ("ContainerCreating", "PodInitializing", "CrashLoopBackOff")  # the last: its earlier end tells more
_UNREADY = ("PodsReadyTimeout", "DeactivatedDueToRequeuingLimitExceeded")  # of these: what the pods tell comes first
_DISRUPTED = re.compile(r"Pod [^/\s]+/([-.a-z0-9]+) has condition DisruptionTarget")  # in a Job's message
_LOST = ("node.kubernetes.io/unreachable", "node.kubernetes.io/out-of-service")  # taints of nodes
_QUEUE_FAULT = re.compile(r"\b(Local|Cluster)Queue \S+ (doesn't exist|not found|is )")  # Kueue's reasons and messages:
_NO_QUOTA = re.compile(r"insufficient unused quota|preemption|WaitingFor(Quota|Preempted)|TopologyPlacementFailed")
_NEVER_FITS = re.compile(
    r"> maximum capacity|ExceedsMaxQuota|NoMatchingFlavor|unavailable in ClusterQueue|doesn't match node affinity|"
    r"untolerated taint|flavor \S+ not found"
)
_LAST = "~"  # after every time


def _failed(evidence: Evidence) -> Verdict:
    """Why the TrainJob is Failed."""
    end = _condition(evidence.trainjob, "Failed")
    if _reason(evidence.trainjob, "Failed") == "DeadlineExceeded":
        return Verdict(State.FAILED, Cause.TIMEOUT, end)
    trouble = _trouble(evidence, ended=True) or Verdict(State.FAILED, Cause.UNKNOWN)
    if trouble.cause is not Cause.UNKNOWN:
        return replace(trouble, state=State.FAILED, detail=_joined(trouble.detail, end))
    told = [(Cause.TIMEOUT, "") for job in evidence.jobs if _reason(job, "Failed") == "DeadlineExceeded"]
    told += _events(evidence, "Preempted", "TaintManagerEviction")
    jobs = [f"Job {_name(job)}: {text}" for job in evidence.jobs if (text := _condition(job, "Failed"))]
    detail = _joined(trouble.detail, *jobs, *(text for _, text in told), _blind(evidence), end)
    return replace(trouble, state=State.FAILED, cause=next((c for c, _ in told), Cause.UNKNOWN), detail=detail)


def _evicted(evidence: Evidence) -> Verdict:
    """Why its Workload was evicted or deactivated. No cause when it was not, or no longer is: a hold that is over."""
    workload, reason = evidence.workload, _reason(evidence.workload, "Evicted")
    inactive = _at(workload, "spec", "active") is False
    if inactive and not reason:
        soon = _condition(workload, "DeactivationTarget")  # Kueue does it, and is about to say why
        return Verdict(State.HELD, None if soon else Cause.STOPPED, soon or "its Workload is inactive (spec.active)")
    if not reason or (reason == "Deactivated" and not inactive):
        before, preempted = (_falsity(workload, kind).get("message") for kind in ("Evicted", "Preempted"))
        if isinstance(before, str) and before.startswith("Previously: ") and before == preempted:  # it has quota again
            return Verdict(State.QUEUED, Cause.PREEMPTED, f"Workload Preempted: {before}")
        return Verdict(State.QUEUED)
    text = f"Workload Evicted: {_condition(workload, 'Evicted')}"
    trouble = _trouble(evidence, ended=True) if reason in _UNREADY else None
    if trouble and trouble.cause is not Cause.UNKNOWN:
        return replace(trouble, detail=_joined(trouble.detail, text))
    more = [i.detail for i in interruptions(workload) if reason in _UNREADY]
    more += _checks(workload) if reason == "DeactivatedDueToAdmissionCheck" else []
    return Verdict(State.QUEUED, _CAUSE_OF.get(reason, Cause.EVICTED), _joined(text, *more))


def _stopping(evidence: Evidence, left: Sequence[Object], why: Verdict) -> Verdict:
    """Why it is stopping, and what keeps it."""
    names = ", ".join(map(_name, left[:3])) + (", …" if len(left) > 3 else "")
    lost = [t[2] for pod in left for t in _troubles(pod, evidence.nodes) if t[2].cause is Cause.NODE_LOST]
    first = lost[0] if lost and why.cause is None else why
    words = f"pods left: {names}" if left else "it is being stopped"
    more = (t.detail for t in lost[:3])
    checks = _checks(evidence.workload) if _condition(evidence.workload, "QuotaReserved") else []
    return replace(first, state=State.STOPPING, detail=_joined(why.detail, words, *more, *checks))


def _waiting(evidence: Evidence) -> Verdict:
    """Why it is not admitted: what its checks or Kueue say."""
    workload, checks = evidence.workload, _checks(evidence.workload)
    if not is_queued(evidence.trainjob or {}):
        return Verdict(State.QUEUED, detail="suspended by somebody else: hold it, then release it")
    if workload is None:
        cause, text = next(iter(_events(evidence, "WorkloadPriorityClassNotFound")), (None, ""))
        return Verdict(State.QUEUED, cause, _joined("Kueue has made no Workload of it yet", text, _blind(evidence)))
    if rejected := [check for check in checks if ": Rejected: " in check]:
        return Verdict(State.QUEUED, Cause.REJECTED, _joined(*rejected))
    if _condition(workload, "QuotaReserved"):
        return Verdict(State.QUEUED, detail=_joined(*checks))
    condition = _falsity(workload, "QuotaReserved")
    text = _words(condition)
    if _QUEUE_FAULT.search(text):
        return Verdict(State.QUEUED, Cause.QUEUE_STOPPED, _joined(text, *map(_queue_fault, evidence.queues)))
    if condition.get("reason") in ("Misconfigured", "Inadmissible"):
        return Verdict(State.QUEUED, Cause.UNKNOWN, text)
    sets = str(condition.get("message")).split("couldn't assign flavors to pod set ")  # more exact than the reason
    for parts in (sets, [str(condition.get("reason"))]):
        if any(_NEVER_FITS.search(part) and not _NO_QUOTA.search(part) for part in parts):
            return Verdict(State.QUEUED, Cause.NO_CAPACITY, f"can never fit its queue as it is: {text}")
        if any(map(_NO_QUOTA.search, parts)):
            return Verdict(State.QUEUED, Cause.NO_CAPACITY, f"waits for quota: {text}")
    return Verdict(State.QUEUED, detail=text)


def _refused(evidence: Evidence) -> Verdict | None:
    """What Events tell of a job that has no pods: Trainer could not make or resume its JobSet, or the Job its pods.

    An Event stays for an hour: it counts while there is no JobSet, and from when the TrainJob was resumed.
    """
    jobs = _objects(_at(evidence.trainjob, "status", "jobsStatus"))
    resumed = _falsity(evidence.trainjob, "Suspended")
    if evidence.pods or (jobs and not resumed):
        return None
    since = _second(resumed.get("lastTransitionTime")) if jobs else ""
    still = not jobs or any(job.get("suspended") for job in jobs)
    told = _events(evidence, *(["TrainJobResourcesCreationFailed"] if still else []), "FailedCreate", since=since)
    return Verdict(State.STARTING, *told[0]) if told else None


def _events(evidence: Evidence, *reasons: str, since: str = "") -> list[tuple[Cause, str]]:
    """The causes that Events of these reasons tell, and their text, the latest first."""
    uid, found = _at(evidence.trainjob, "metadata", "uid"), []
    for event in evidence.events or ():
        about, reason = event.get("involvedObject"), str(event.get("reason"))
        times = (_at(event, "series", "lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
        when = _second(next(filter(None, times), None))
        other = _at(about, "kind") == "TrainJob" and _at(about, "uid") != uid
        if reason in reasons and when >= since and not (other or "Cancelling deletion" in _words(event)):
            text = f"Event of {_at(about, 'kind')} {_at(about, 'name')}: {_words(event)}"
            found.append((when, _CAUSE_OF.get(reason, Cause.UNKNOWN), text))
    return [(cause, text) for _, cause, text in sorted(found, reverse=True)]


def _blind(evidence: Evidence) -> str:
    return "its Events may not be read" if "events" in evidence.read and evidence.events is None else ""


def _trouble(evidence: Evidence, *, ended: bool = False) -> Verdict | None:
    """What decided the current attempt's fate. `ended`: it is over, then a container that was restarted counts, too."""
    pods, workload = _attempt([*evidence.pods, *evidence.seen], evidence.trainjob), evidence.workload
    found = [trouble for pod in pods for trouble in _troubles(pod, evidence.nodes, ended=ended)]
    evicted = _reason(workload, "Evicted")
    ours = evicted == "Deactivated" and HOLD in _annotations(evidence.trainjob)
    if ended and evicted not in ("", *_UNREADY) and not ours:  # it was suspended, and the program did not end well
        when = [c.get("lastTransitionTime") for c in _conditions(workload) if c.get("type") == "Evicted"]
        cause, text = _CAUSE_OF.get(evicted, Cause.EVICTED), f"Workload Evicted: {_condition(workload, 'Evicted')}"
        found.append((_second(when[0]), _ORDER[cause], Verdict(State.STARTING, cause, text)))
    return min(found, key=lambda trouble: trouble[:2])[2] if found else None


def _troubles(
    pod: Object, nodes: Mapping[str, Object | None] | None, *, ended: bool = False
) -> Iterator[tuple[str, int, Verdict]]:
    """All that a pod tells: when, the order among what was at that time, and the verdict."""
    node = _at(pod, "spec", "nodeName")
    where = f"pod {_name(pod)}" + (f" on {node}" if node else "")

    def trouble(when: object, cause: Cause, text: str, code: int | None = None) -> tuple[str, int, Verdict]:
        return _second(when), _ORDER[cause], Verdict(State.STARTING, cause, f"{where}: {text}", pod, code)

    first, (lost, since), (told, why) = _LAST, _node_fault(node, nodes), _told_to_go(pod)
    statuses = (_at(pod, "status", f"{kind}Statuses") for kind in ("initContainer", "container"))
    for container in (container for status in statuses for container in _objects(status)):
        name, state = f"container {container.get('name')}", container.get("state")
        restarted = _at(container, "lastState", "terminated") if ended or _at(state, "running") is None else None
        for end in _objects([_at(state, "terminated"), restarted]):
            code = end.get("exitCode")
            if type(code) is int and (code != 0 or end.get("reason") == "OOMKilled"):  # its shell may have gone on
                first = min(first, when := _second(end.get("finishedAt")))
                own = when < told and end.get("reason") in ("Error", "Completed", None)
                cause = _CAUSE_OF.get(str(end.get("reason")), Cause.PROGRAM if own else Cause.UNKNOWN)
                words = f"{name}: {_words(end)}, exit code {code}" + (f", after {why}" if when >= told else "")
                yield trouble(when, cause, words, code)
        wait = str(_at(state, "waiting", "reason") or "ContainerCreating")
        if wait not in _HARMLESS:
            yield trouble(None, _CAUSE_OF.get(wait, Cause.UNKNOWN), f"{name}: {_words(_at(state, 'waiting'))}")
    if reason := _at(pod, "status", "reason"):  # the kubelet ended the pod, or did not take it
        yield trouble(first, _CAUSE_OF.get(str(reason), Cause.UNKNOWN), _words(_at(pod, "status")))
    for condition in _conditions(pod):
        kind, status, words = condition.get("type"), condition.get("status"), _words(condition)
        if (kind, status) == ("DisruptionTarget", "True"):
            cause = _CAUSE_OF.get(str(condition.get("reason")), Cause.UNKNOWN)
            when = _second(condition.get("lastTransitionTime"))
            if condition.get("reason") == "TerminationByKubelet":  # written only when the containers have ended
                when = min(first, when)
            checked = "the taint was not checked" if nodes is None else "the node has no such taint"
            words += f" ({lost or checked})" if cause is Cause.NODE_LOST else ""
            yield trouble(when, cause, words)
        elif (kind, status, condition.get("reason")) == ("PodScheduled", "False", "Unschedulable"):
            yield trouble(None, Cause.NO_CAPACITY, words)
    if lost and remains(pod):
        yield trouble(since, Cause.NODE_LOST, lost)


def _told_to_go(pod: Object) -> tuple[str, str]:
    """From when on an exit code is not the program's own, and why: its pod was disrupted, or deleted."""
    if _at(pod, "status", "reason"):
        return "", _words(_at(pod, "status"))
    disruptions = [c for c in _conditions(pod) if c.get("type") == "DisruptionTarget" and c.get("status") == "True"]
    found = [(_second(c.get("lastTransitionTime")), _words(c)) for c in disruptions]
    deleted, grace = (_at(pod, "metadata", f"deletion{key}") for key in ("Timestamp", "GracePeriodSeconds"))
    with contextlib.suppress(ValueError, TypeError, OverflowError):  # the time is the end of its grace period
        asked = datetime.datetime.fromisoformat(deleted) - datetime.timedelta(seconds=grace or 0)
        found.append((_second(asked.isoformat()), "it was deleted"))
    return min(found, default=(_LAST + _LAST, ""))


def _node_fault(name: object, nodes: Mapping[str, Object | None] | None) -> tuple[str, object]:
    """Why a node counts as lost, empty when it does not, or was not read; and since when, as far as it says so."""
    if not isinstance(name, str) or name not in (nodes or {}):
        return "", None
    node = (nodes or {})[name]
    if node is None:
        return f"node {name} is gone", None
    taints = [t for t in _objects(_at(node, "spec", "taints")) if t.get("key") in _LOST]
    since = min((_second(taint.get("timeAdded")) for taint in taints), default=None)
    return (f"node {name} has {taints[0].get('key')}", since) if taints else ("", None)


def _attempt(pods: Iterable[Object], trainjob: Object | None) -> list[Object]:
    """The pods of the current epoch, of their JobSet's latest restart."""
    epoch = _patched_annotations(trainjob).get(EPOCH)
    current = [(_count(_labels(p).get(RESTART)) or 0, p) for p in pods if _annotations(p).get(EPOCH) == epoch]
    latest = max((restart for restart, _ in current), default=0)
    return [pod for restart, pod in current if restart == latest]


def interruptions(workload: Object | None) -> tuple[Interruption, ...]:
    """How often Kueue evicted the job, in all its admissions. Not Deactivated, which a released hold leaves, too."""
    found = []
    for eviction in _objects(_at(workload, "status", "schedulingStats", "evictions")):
        reason, count = str(eviction.get("reason")), eviction.get("count")
        if reason != "Deactivated" and type(count) is int:
            detail = "/".join(filter(None, (reason, str(eviction.get("underlyingCause") or ""))))
            found.append(Interruption(_CAUSE_OF.get(reason, Cause.EVICTED), count, detail))
    return tuple(found)


def wants(evidence: Evidence) -> dict[str, list[str]]:
    """What else to read, as it may tell the cause: fields of the Evidence, and of which objects, by name, to fill them.

    Nothing for a job that is well, and nothing twice.
    """
    verdict, trainjob, name = classify(evidence), evidence.trainjob, _name(evidence.trainjob)
    wanted, disrupted = {"nodes": _doubtful_nodes(evidence)}, _disrupted(evidence)
    if _condition(trainjob, "Failed") and verdict.cause is Cause.UNKNOWN:
        wanted |= {"jobs": [name], "events": disrupted[:3]}
    elif verdict.state is State.QUEUED and verdict.cause is Cause.QUEUE_STOPPED:
        wanted["queues"] = [str(_labels(trainjob).get(QUEUE_NAME))]
    elif not evidence.pods and (
        verdict.state is State.STARTING
        or (verdict.state is State.QUEUED and evidence.workload is None and is_queued(trainjob or {}))
        or (verdict.state in (State.GATED, State.QUEUED) and not _at(trainjob, "status", "jobsStatus"))
    ):
        wanted["events"] = [name, f"{name}-{TRAINER_JOB}-0"]
    return {field: names for field, names in wanted.items() if names and field not in evidence.read}


def _doubtful_nodes(evidence: Evidence) -> list[str]:
    """The first few nodes that may be lost: those of pods that were told to go because of that, or that are not ready
    though their containers are: so the control plane marks the pods of a node that does not answer.
    """
    found = set()
    for pod in evidence.pods:
        unready = bool(_condition(pod, "ContainersReady")) and not _condition(pod, "Ready") and remains(pod)
        if unready or _CAUSE_OF.get(_reason(pod, "DisruptionTarget")) is Cause.NODE_LOST:
            found.add(str(_at(pod, "spec", "nodeName") or ""))
    return sorted(found - {""})[:3]


def _disrupted(evidence: Evidence) -> list[str]:
    """The pods of which a Job says that they were disrupted."""
    return [name for job in evidence.jobs for name in _DISRUPTED.findall(_condition(job, "Failed"))]


def unsettled(evidence: Evidence, now: datetime.datetime) -> bool:
    """Whether what decides a fresh failure may still come: nothing tells its cause, or pods of it have not ended yet.

    The end that is reported last may have been the first.
    """
    failed = [c.get("lastTransitionTime") for c in _conditions(evidence.trainjob) if c.get("type") == "Failed"]
    verdict = classify(evidence)
    if verdict.state is not State.FAILED or verdict.cause is Cause.TIMEOUT or not failed:
        return False
    try:
        fresh = now - datetime.datetime.fromisoformat(str(failed[0])) < datetime.timedelta(seconds=FRESH)
    except (ValueError, TypeError):
        return False
    return fresh and (verdict.cause is Cause.UNKNOWN or any(map(remains, _attempt(evidence.pods, evidence.trainjob))))


def is_training(pod: Object) -> bool:
    """Whether the pod's trainer container has started and not ended."""
    return remains(pod) and _at(_trainer_status(pod), "state", "running") is not None


def _trainer_status(pod: object) -> Object | None:
    statuses = _objects(_at(pod, "status", "containerStatuses"))
    return next((status for status in statuses if status.get("name") == TRAINER_CONTAINER), None)


def status_of(handle: Handle, evidence: Evidence, now: datetime.datetime) -> Status:
    """The Status that the evidence gives."""
    verdict, counts, hold = classify(evidence), _patched_annotations(evidence.trainjob), hold_of(evidence.trainjob)
    current = [pod for pod in evidence.pods if _annotations(pod).get(EPOCH) == counts.get(EPOCH)]
    past_gate = [pod for pod in evidence.pods if _annotations(pod).get(ADMISSION) == "0"]
    pods = [
        PodStatus(
            rank_of(pod),
            _name(pod),
            str(_at(pod, "spec", "nodeName") or ""),
            str(_at(pod, "status", "phase") or "Unknown"),
        )
        for pod in evidence.pods
    ]
    return Status(
        handle,
        verdict.state,
        verdict.cause,
        verdict.detail,
        verdict.exit_code,
        str(_at(verdict.pod, "spec", "nodeName") or "") or None,
        rank_of(verdict.pod),
        admission=_count(counts.get(ADMISSION)),
        restart=max((_count(_labels(pod).get(RESTART)) or 0 for pod in current), default=None),
        epoch=_count(counts.get(EPOCH)),
        hold=hold if isinstance(hold, int) else None,
        interruptions=interruptions(evidence.workload),
        pods=tuple(sorted(pods, key=lambda pod: (pod.rank is None, pod.rank, pod.pod))),
        ungated=is_queued(evidence.trainjob) and bool(past_gate),
        final=verdict.state.final,
        observed_at=now,
    )


# ======================================================================================================================
# Decisions: what a watch keeps, and what a log line says
# ======================================================================================================================

_STEPS = {State.STARTING: 1, State.RUNNING: 2, State.STOPPING: 3}
_UNREAD = {  # of an object, wherever it stands: no decision reads it, and it is large
    *("managedFields", "kubectl.kubernetes.io/last-applied-configuration", "podSets", "containers", "initContainers"),
    *("trainer", "volumes", "volumeMounts", "resources", "allocatedResources", "affinity", "tolerations", "user"),
}
_STAMP = re.compile(rb"([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8})(?:\.([0-9]{1,9}))?(Z|[-+][0-9]{2}:[0-9]{2}) ")
_Stamp = tuple[datetime.datetime, int]  # a time, and its nanoseconds after the last microsecond


def stage_of(status: Status, before: tuple[int, int]) -> tuple[int, int]:
    """The epoch, and how far the job has come in it: 1 starting, 2 running, 3 stopping, 4 not any more; 0 not yet."""
    epoch = status.epoch if status.epoch is not None else before[0]
    reached = before[1] if before[0] == epoch else 0
    return epoch, _STEPS.get(status.state, 4 if reached or status.final else 0)


def latest_attempt(pods: Sequence[Object]) -> tuple[Object, ...]:
    """Of these pods, those with the highest epoch, and in it of the last restart."""
    keys = [(_count(_annotations(pod).get(EPOCH)) or 0, _count(_labels(pod).get(RESTART)) or 0) for pod in pods]
    return tuple(pod for pod, key in zip(pods, keys, strict=True) if key == max(keys))


def job_of(kind: str, obj: object) -> str:
    """The name of the TrainJob that an object belongs to; empty when it is none of dispatch's."""
    labels = _labels(obj)
    name = f"dj-{labels.get(JOB)}-s{labels.get(SUBMISSION)}"
    if kind == "Workload":
        owners = [o for o in _objects(_at(obj, "metadata", "ownerReferences")) if o.get("kind") == "TrainJob"]
        name = str(owners[0].get("name")) if owners else ""
    elif kind == "TrainJob" and name != _name(obj):
        name = ""
    return name if JOB_NAME.fullmatch(name) else ""


def slim(value: Any) -> Any:
    """An object without what is never read, and with each word once in memory: a watch keeps thousands of them."""
    if isinstance(value, dict):
        return {sys.intern(key): slim(item) for key, item in value.items() if key not in _UNREAD}
    if isinstance(value, list):
        return [slim(item) for item in value]
    return sys.intern(value) if isinstance(value, str) and len(value) < 100 else value


def rank_of(pod: object) -> int | None:
    """A pod's rank; None when it is none of those that train."""
    trains = _labels(pod).get(REPLICATED_JOB) == TRAINER_JOB
    return _count(_annotations(pod).get(RANK)) if trains else None


def container_of(pod: object) -> tuple[int, bool]:
    """Which of a pod's trainer containers has run last, by how often it was restarted before, and whether it runs.

    -1: none has.
    """
    status = _trainer_status(pod)
    runs = _at(status, "state", "running") is not None
    has_run = runs or _at(status, "state", "terminated") or _at(status, "lastState", "terminated")
    count = _at(status, "restartCount") or 0
    return (count if has_run and isinstance(count, int) else -1), runs


def served_of(pod: object) -> tuple[int, datetime.datetime | None]:
    """The first of a pod's trainer containers whose log the kubelet serves, and when it began, unless it was the first.

    That before the last that has run. While one is waited for, it serves that last one in the place of both.
    """
    container, status = container_of(pod)[0], _trainer_status(pod)
    waits = _at(status, "state", "waiting") is not None
    return max(container - (not waits), 0), _time(_at(status, "lastState", "terminated", "startedAt"))


def is_rest(line: bytes) -> bool:
    """Whether the first line after a time is the end of one that was begun before: such a one comes without its time.

    So do the kubelet's own words, with which all of these begin.
    """
    return _STAMP.match(line) is None and not line.startswith((b"unable to ", b"failed to "))


def stamped(line: bytes) -> tuple[_Stamp, str]:
    """The time and the text of a log line. NoAnswer: it has no time, so it is the kubelet's word on what went wrong."""
    match = _STAMP.match(line)
    if match is None:
        raise NoAnswer(f"instead of a line came {line[:200].decode(errors='replace')!r}")
    at = datetime.datetime.fromisoformat((match[1] + match[3]).decode()).astimezone(datetime.UTC)
    microseconds, rest = divmod(int((match[2] or b"0").ljust(9, b"0")), 1000)
    return (at.replace(microsecond=microseconds), rest), line[match.end() :].decode(errors="surrogateescape")


# --- reading JSON that anybody may have written


def _at(value: object, *path: str) -> Any:
    """What is at a path of names; None where the path ends early."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _objects(value: object) -> list[Object]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _labels(obj: object) -> Object:
    labels = _at(obj, "metadata", "labels")
    return labels if isinstance(labels, dict) else {}


def _annotations(obj: object) -> Object:
    annotations = _at(obj, "metadata", "annotations")
    return annotations if isinstance(annotations, dict) else {}


def _name(obj: object) -> str:
    return str(_at(obj, "metadata", "name") or "")


def _uid(obj: object) -> str:
    return str(_at(obj, "metadata", "uid") or "")


def _owner_uid(obj: object) -> str:
    """The UID of an object's controller; empty when it has none."""
    owners = _objects(_at(obj, "metadata", "ownerReferences"))
    return next((str(owner.get("uid")) for owner in owners if owner.get("controller") is True), "")


def _is_deleted(obj: object) -> bool:
    return _at(obj, "metadata", "deletionTimestamp") is not None


def _conditions(obj: object) -> list[Object]:
    return _objects(_at(obj, "status", "conditions"))


def _condition(obj: object, name: str) -> str:
    """`<reason>: <message>` of a condition that is True; empty when it is not."""
    found = (c for c in _conditions(obj) if c.get("type") == name and c.get("status") == "True")
    return next((_words(condition) or name for condition in found), "")


def _reason(obj: object, name: str) -> str:
    """The reason of a condition that is True; empty when it is not."""
    found = (c for c in _conditions(obj) if c.get("type") == name and c.get("status") == "True")
    return next((str(condition.get("reason") or name) for condition in found), "")


def _falsity(obj: object, name: str) -> Object:
    """The condition, when there is one that is not True; else empty."""
    return next((c for c in _conditions(obj) if c.get("type") == name and c.get("status") != "True"), {})


def _words(value: object) -> str:
    """`<reason>: <message>` of what has them."""
    return ": ".join(str(_at(value, key)) for key in ("reason", "message") if _at(value, key))


def _joined(*texts: str) -> str:
    return "; ".join(dict.fromkeys(text for text in texts if text))


def _second(time: object) -> str:
    """A time as the server writes it, to the second: such texts compare as the times do."""
    return time[:19] if isinstance(time, str) and time else _LAST


def _checks(workload: object) -> list[str]:
    """What the Workload's admission checks that are not Ready say."""
    checks = [c for c in _objects(_at(workload, "status", "admissionChecks")) if c.get("state") != "Ready"]
    return [f"check {c.get('name')}: {c.get('state')}: {c.get('message') or 'says nothing'}" for c in checks]


def _queue_fault(queue: Object) -> str:
    """Why a LocalQueue or ClusterQueue admits nothing; empty when it does."""
    policy = _at(queue, "spec", "stopPolicy")
    inactive = [_words(c) for c in _conditions(queue) if c.get("type") == "Active" and c.get("status") != "True"]
    words = _joined(f"stopPolicy {policy}" if policy not in (None, "None") else "", *inactive)
    return f"{queue.get('kind')} {_name(queue)}: {words}" if words else ""


def _gates(trainjob: object) -> list[str]:
    text = _annotations(trainjob).get(GATED_BY)
    return [gate.strip() for gate in text.split(",") if gate.strip()] if isinstance(text, str) else []


def _time(value: object) -> datetime.datetime | None:
    try:
        return datetime.datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _count(value: object) -> int | None:
    return int(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value) else None


def _patched_annotations(trainjob: object) -> Object:
    """The pod annotations in the adapter's patch: those of its first replicated job, all are alike."""
    for patch in _objects(_at(trainjob, "spec", "runtimePatches")):
        if patch.get("manager") == PATCH_MANAGER:
            jobs = _objects(_at(patch, "trainingRuntimeSpec", "template", "spec", "replicatedJobs"))
            return _annotations(_at(jobs[0], "template", "spec", "template")) if jobs else {}
    return {}


# ======================================================================================================================
# Cluster access
# ======================================================================================================================

# --- shared: the same text in admission.py and adapter.py, compared by a test
Query = Mapping[str, str] | None


class ApiError(Exception):
    """The API server refused: `status` is the HTTP code; `reason`, `message` and `details` are its Status object's."""

    def __init__(self, status: int, reason: str, message: str, details: Mapping[str, Any], retry_after: float) -> None:
        super().__init__(f"{message or reason} (HTTP {status})")
        self.status, self.reason, self.message, self.details = status, reason, message, details
        self.retry_after = retry_after  # seconds the server asks to be left alone; 0 when it does not say


class NoAnswer(Exception):
    """No answer, or only part of one: refused, cut, or silent for too long. A write may or may not have been done."""


class TooLarge(Exception):
    """An answer of more bytes than was said to be enough."""


class Connection:
    """Plain JSON requests over the kubernetes client's configuration, credentials and TLS pool. Thread-safe.

    Not over its calls: the typed ones drop fields that they do not know, all of them repeat a write whose answer was
    lost, and their signatures differ between 36 and 37. The pool below them is the same in both.
    `request` never repeats anything, except after a 401: then `renew` loads the credentials again, and the request,
    which was refused and so not carried out, is sent once more.
    """

    PAGE = 100  # objects per page of a list: memory does not grow with the cluster
    PAGE_BYTES = 2**23  # of a page; read, it takes three times that. Of larger objects fewer are asked for
    PATIENCE = 20.0  # seconds for which a read is repeated
    # Seconds of silence after which a watch is taken for dead. The server sends a bookmark a minute, but none that says
    # nothing new: on a quiet cluster a healthy watch may be reopened, which costs one request.
    SILENCE = 70.0

    def __init__(self, client: ApiClient, renew: Callable[[ApiClient], None] | None = None) -> None:
        self._client, self._renew, self._renewing = client, renew, threading.Lock()

    def request(
        self, method: str, path: str, query: Query = None, body: object = None, *, timeout: float = 10.0, most: int = 0
    ) -> dict[str, Any]:
        """Returns the answer's JSON object. `timeout`, in seconds, bounds each wait. Raises ApiError, NoAnswer.

        `most`, when given, bounds the bytes of the answer; raises TooLarge.
        """
        try:
            response = self._send(method, path, query, body, timeout, stream=bool(most))
            if not 200 <= response.status < 300:
                raise _api_error(response)
            answer = json.loads(_at_most(response, most) if most else response.data)
        except (urllib3.exceptions.HTTPError, OSError, ValueError, ConfigException) as error:
            raise NoAnswer(f"{method} {path}: {error}") from error
        if not isinstance(answer, dict):
            raise NoAnswer(f"{method} {path}: the answer is no JSON object")
        return answer

    def read(self, path: str, query: Query = None, *, patience: float = PATIENCE, most: int = 0) -> dict[str, Any]:
        """Like `request("GET", …)`, but asks again for `patience` seconds while the server is away, busy or broken."""
        until, delay = time.monotonic() + patience, 0.1
        while True:
            pause = delay * random.uniform(0.5, 1.5)
            try:
                return self.request("GET", path, query, most=most)
            except ApiError as error:
                pause = max(pause, error.retry_after)
                if not (error.status == 429 or error.status >= 500) or time.monotonic() + pause > until:
                    raise
            except NoAnswer:
                if time.monotonic() + pause > until:
                    raise
            time.sleep(pause)
            delay = min(2 * delay, 5.0)

    def pages(self, path: str, query: Query = None, *, limit: int = PAGE) -> Iterator[tuple[list[dict[str, Any]], str]]:
        """Yields a list page by page, each with the list's resourceVersion. ApiError 410: too slow, list again."""
        token = ""
        while True:
            asked = {**(query or {}), "limit": str(limit), **({"continue": token} if token else {})}
            try:
                page = self.read(path, asked, most=self.PAGE_BYTES if limit > 1 else 0)
            except TooLarge:
                limit = max(limit // 10, 1)
                continue
            metadata = page.get("metadata")
            if "items" not in page or not isinstance(metadata, dict):  # nothing listed is no proof of nothing there
                raise NoAnswer(f"GET {path}: the answer is no list")
            yield page["items"] or [], metadata.get("resourceVersion", "")
            token = metadata.get("continue") or ""
            if not token:
                return

    def watch(
        self, path: str, query: Query, version: str, until: float, opened: Callable[[Any], object] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yields one connection's watch events after `version`, bookmarks too, to `until` (monotonic) or its end.

        Raises ApiError (410: the version is too old, list again) and NoAnswer (cut, or silent for SILENCE seconds).
        """
        left = max(until - time.monotonic(), 1.0)
        options = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(math.ceil(left))}
        query = {**(query or {}), **options, "resourceVersion": version}
        with contextlib.closing(self.stream(path, query, timeout=min(self.SILENCE, left + 5.0), opened=opened)) as body:
            for line in _lines(body):
                try:
                    event = json.loads(line)
                except ValueError as error:
                    raise NoAnswer(f"watch {path}: {error}") from error
                if not isinstance(event, dict) or not isinstance(event.get("object"), dict):
                    raise NoAnswer(f"watch {path}: an event without an object")
                if event.get("type") == "ERROR":
                    raise _status_error(event["object"], 0.0)
                yield event
                if time.monotonic() > until:
                    return

    def stream(
        self, path: str, query: Query, *, timeout: float = SILENCE, opened: Callable[[Any], object] | None = None
    ) -> Generator[bytes]:
        """Yields the body of a GET's answer as it comes. `opened` is given the urllib3 response when that begins.

        `timeout`, in seconds, bounds each silence. Raises ApiError and NoAnswer.
        """
        try:
            response = self._send("GET", path, query, None, timeout, stream=True)
            try:
                if response.status != 200:
                    raise _api_error(response)
                if opened is not None:
                    opened(response)
                yield from response.stream(2**16)
            finally:
                response.close()
        except (urllib3.exceptions.HTTPError, OSError, ValueError, ConfigException) as error:
            raise NoAnswer(f"GET {path}: {error}") from error

    def _send(self, method: str, path: str, query: Query, body: object, timeout: float, *, stream: bool) -> Any:
        response = self._send_once(method, path, query, body, timeout, stream)
        if response.status == 401 and self._renew is not None:
            response.drain_conn()
            with self._renewing:
                self._renew(self._client)
            response = self._send_once(method, path, query, body, timeout, stream)
        return response

    def _send_once(self, method: str, path: str, query: Query, body: object, timeout: float, stream: bool) -> Any:
        configuration = self._client.configuration
        headers = {**self._client.default_headers, "Accept": "application/json", "Content-Type": "application/json"}
        for setting in configuration.auth_settings().values():  # this call also re-reads a token that expires
            headers[setting["key"]] = setting["value"]
        return self._client.rest_client.pool_manager.request(
            method,
            f"{configuration.host}{path}" + (f"?{urllib.parse.urlencode(query)}" if query else ""),
            body=None if body is None else json.dumps(body).encode(),
            headers=headers,
            timeout=urllib3.Timeout(connect=min(timeout, 5.0), read=timeout),
            retries=False,
            redirect=False,
            preload_content=not stream,
        )


def _at_most(response: Any, most: int) -> bytearray:
    """The body of an answer. Raises TooLarge, and then leaves the rest unread."""
    body = bytearray()
    for chunk in response.stream(2**16):
        body += chunk
        if len(body) > most:
            response.close()
            raise TooLarge
    return body


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Cuts a stream into its non-empty lines; what follows the last line end is half an event and is dropped."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from filter(bytes.strip, lines)


def _api_error(response: Any) -> ApiError:
    after = response.headers.get("Retry-After", "")
    text = response.data.decode(errors="replace")
    try:
        status = json.loads(text)
    except ValueError:
        status = None
    if not isinstance(status, dict):
        status = {"message": text[:200]}
    return _status_error(
        {**status, "code": response.status}, float(after) if after.isascii() and after.isdigit() else 0.0
    )


def _status_error(status: Mapping[str, Any], retry_after: float) -> ApiError:
    code = status.get("code")
    return ApiError(
        code if isinstance(code, int) else 500,
        str(status.get("reason") or ""),
        str(status.get("message") or ""),
        status.get("details") or {},
        retry_after,
    )


def segment(name: str) -> str:
    """A name as one segment of a request's path. Raises ValueError for what no object's name can be, such as `..`."""
    if not re.fullmatch(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?", name) or len(name) > 253:
        raise ValueError(f"{name!r} is no object's name")
    return name


# --- end of shared

TRAINER = "/apis/trainer.kubeflow.org/v1alpha1"
JOBSET = "/apis/jobset.x-k8s.io/v1alpha2"
KUEUE = "/apis/kueue.x-k8s.io/v1beta2"
BATCH = "/apis/batch/v1"
CORE = "/api/v1"


# what the client's loader raises: whatever a file's odd shape trips it with
UNLOADABLE = (ConfigException, OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError)


def credentials(settings: Settings) -> Connection:
    """Loads the credentials: the settings' kubeconfig, else $KUBECONFIG, else the pod's account, else ~/.kube/config.

    Contacts nobody. Raises Invalid for the settings' own, Unauthorized for what the environment has.
    """

    def load(configuration: Configuration) -> None:
        file = settings.kubeconfig or os.environ.get("KUBECONFIG")
        if not file and not settings.context:
            with contextlib.suppress(ConfigException):  # not in a pod
                load_incluster_config(client_configuration=configuration)
                return
        load_kube_config(file or "~/.kube/config", settings.context, configuration)

    configuration = Configuration()
    try:
        load(configuration)
    except UNLOADABLE as error:
        why = str(error).strip() or type(error).__name__
        if settings.kubeconfig or settings.context:
            raise Invalid(f"kubeflow settings: kubeconfig {settings.kubeconfig or ''}: {why}") from error
        raise Unauthorized(f"no usable credentials: {why}: set $KUBECONFIG, or kubeconfig in the settings") from error
    client = ApiClient(configuration)
    client.user_agent = f"{PROGRAM}/{VERSION}"

    def renew(client: ApiClient) -> None:
        with contextlib.suppress(*UNLOADABLE):  # then the 401 stands
            load(client.configuration)

    return Connection(client, renew)


def read_runtime(api: Connection, namespace: str, runtime: Runtime) -> Object | None:
    """A (Cluster)TrainingRuntime; None when there is none."""
    scope = f"/namespaces/{segment(namespace)}" if runtime.kind == "TrainingRuntime" else ""
    return _or_none(api, f"{TRAINER}{scope}/{RUNTIME_KINDS[runtime.kind]}/{segment(runtime.name)}")


def is_served(api: Connection, version: str) -> bool:
    """Whether the cluster serves a group and version."""
    try:
        return bool(api.read(f"/apis/{version}" if "/" in version else f"/api/{version}"))
    except ApiError as error:
        if error.status != 404:
            raise
        return False


def may(api: Connection, right: str, namespace: str) -> bool:
    """Whether these credentials have a right, `<verb> <resource>`, in a namespace."""
    verb, _, resource = right.partition(" ")
    name, _, group = resource.partition(".")
    name, _, part = name.partition("/")
    scope = {} if name == "nodes" else {"namespace": namespace}
    asked = {"verb": verb, "group": group, "resource": name, "subresource": part, **scope}
    kind = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
    body = {**kind, "spec": {"resourceAttributes": asked}}
    answer = insist(lambda: api.request("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", None, body))
    return _at(answer, "status", "allowed") is True


class _Dated(Connection):
    """Keeps the server's time of the latest answer."""

    def __init__(self, api: Connection) -> None:
        super().__init__(api._client, api._renew)
        self.now = datetime.datetime.now(datetime.UTC)

    def _send(self, *arguments: Any, **options: Any) -> Any:
        response = super()._send(*arguments, **options)
        with contextlib.suppress(KeyError, ValueError):  # a proxy may have removed it
            self.now = email.utils.parsedate_to_datetime(response.headers["Date"])
        return response


def read_dated(api: Connection, path: str, query: Query = None) -> tuple[Object | None, datetime.datetime]:
    """An object, None when there is none, and the server's time when it said so."""
    dated = _Dated(api)
    return _or_none(dated, path, query), dated.now


class _Quick(Connection):
    """Asks once, and in a thread of its own: who waits for the answer goes as soon as it is not wanted any more."""

    def __init__(self, api: Connection, closed: threading.Event) -> None:
        super().__init__(api._client, api._renew)
        self._closed = closed

    def read(self, path: str, query: Query = None, *, patience: float = 0.0, most: int = 0) -> dict[str, Any]:
        del patience
        answers: queue.SimpleQueue[dict[str, Any] | Exception] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answers.put(self.request("GET", path, query, most=most))
            except Exception as error:  # noqa: BLE001  # it is raised to who waits
                answers.put(error)

        threading.Thread(target=ask, daemon=True).start()
        while not self._closed.is_set():
            with contextlib.suppress(queue.Empty):
                answer = answers.get(timeout=0.2)
                if isinstance(answer, Exception):
                    raise answer
                return answer
        raise NoAnswer(f"GET {path}: not waited for")


def create_trainjob(api: Connection, trainjob: Object, *, dry_run: bool = False) -> Object:
    """Creates a TrainJob, or only has the server say what it would make of it; returns it as the server has it."""
    namespace = segment(trainjob["metadata"]["namespace"])
    query = {"dryRun": "All"} if dry_run else None
    return api.request("POST", f"{TRAINER}/namespaces/{namespace}/trainjobs", query, trainjob)


def read_trainjob(api: Connection, namespace: str, name: str) -> Object | None:
    """A TrainJob as it is now (a quorum read, so never older than what was last written); None when there is none."""
    return _or_none(api, f"{TRAINER}/namespaces/{segment(namespace)}/trainjobs/{segment(name)}")


def update_trainjob(api: Connection, trainjob: Object) -> Object:
    """Writes a TrainJob, on the version that was read; returns the new one."""
    namespace, name = trainjob["metadata"]["namespace"], trainjob["metadata"]["name"]
    return api.request("PUT", f"{TRAINER}/namespaces/{segment(namespace)}/trainjobs/{segment(name)}", None, trainjob)


def update_workload(api: Connection, workload: Object) -> Object:
    """Writes a Workload, on the version that was read; returns the new one."""
    namespace, name = workload["metadata"]["namespace"], workload["metadata"]["name"]
    return api.request("PUT", f"{KUEUE}/namespaces/{segment(namespace)}/workloads/{segment(name)}", None, workload)


def read_node(api: Connection, name: str) -> Object | None:
    """A Node; None when there is none."""
    return _or_none(api, f"{CORE}/nodes/{segment(name)}")


def list_trainjobs(api: Connection, namespace: str, selector: str) -> list[Object]:
    """The TrainJobs with these labels. No probes."""
    return _all(api, f"{TRAINER}/namespaces/{segment(namespace)}/trainjobs", f"{selector},!{PROBE}")


def list_jobsets(api: Connection, namespace: str, selector: str) -> list[Object]:
    """The JobSets with these labels."""
    return _all(api, f"{JOBSET}/namespaces/{segment(namespace)}/jobsets", selector)


def list_jobs(api: Connection, namespace: str, jobset: str) -> list[Object]:
    """The Jobs of the JobSet of this name."""
    return _all(api, f"{BATCH}/namespaces/{segment(namespace)}/jobs", f"{JOBSET_NAME}={jobset}")


def list_pods(api: Connection, namespace: str, selector: str) -> list[Object]:
    """The pods with these labels."""
    return _all(api, f"{CORE}/namespaces/{segment(namespace)}/pods", selector)


def list_workloads(api: Connection, namespace: str, uid: str) -> list[Object]:
    """The Workloads of the job with this UID: one, or none yet."""
    return _all(api, f"{KUEUE}/namespaces/{segment(namespace)}/workloads", f"{JOB_UID}={uid}")


BEGIN = 10.0  # seconds for which the beginning of an answer with log lines is waited for


def _socket(response: Any) -> Any:
    """What an answer comes over; None when it has been read to its end."""
    return getattr(response.connection, "sock", None)


def watched(namespace: str, handle: Handle | None, *, kueue: bool) -> dict[str, tuple[str, str]]:
    """Path and label selector, by kind, of what tells the state of one job, or of all in the namespace."""
    scope, selector = f"/namespaces/{segment(namespace)}", _selector(handle.name) if handle else JOB
    found = {
        "TrainJob": (f"{TRAINER}{scope}/trainjobs", f"{selector},!{PROBE}"),
        "Pod": (f"{CORE}{scope}/pods", selector),
        "Workload": (f"{KUEUE}{scope}/workloads", f"{JOB_UID}={handle.uid}" if handle else JOB_UID),
    }
    return {kind: where for kind, where in found.items() if kueue or kind != "Workload"}


def read_pod(api: Connection, pod: Object) -> Object:
    """A pod as it is now."""
    metadata = pod["metadata"]
    return api.request("GET", f"{CORE}/namespaces/{segment(metadata['namespace'])}/pods/{segment(metadata['name'])}")


def read_log(
    api: Connection, pod: Object, query: Query, opened: Callable[[Any], object] | None = None
) -> Generator[tuple[bytes, bool]]:
    """The lines that a pod's trainer container printed, each with its time before it, as they come; are they whole?

    Only the last can be part of one. The answer may not begin before the first line, so not to answer is no failure;
    but what has not begun cannot be cut, so that is not waited for as long as for the next line.
    """

    def begun(response: Any) -> None:
        if (sock := _socket(response)) is not None:
            sock.settimeout(Connection.SILENCE)
        if opened is not None:
            opened(response)

    metadata = pod["metadata"]
    path = f"{CORE}/namespaces/{segment(metadata['namespace'])}/pods/{segment(metadata['name'])}/log"
    query = {"container": TRAINER_CONTAINER, "timestamps": "true", **(query or {})}
    rest: list[bytes] = []
    with contextlib.closing(api.stream(path, query, timeout=BEGIN, opened=begun)) as body:
        for chunk in body:
            first, *more = chunk.split(b"\n")
            rest.append(first)
            for piece in more:
                yield b"".join(rest), True
                rest = [piece]
    if line := b"".join(rest):
        yield line, False


def read_queues(api: Connection, namespace: str, name: str) -> list[Object]:
    """The LocalQueue of this name and its ClusterQueue, as far as they are there and may be read."""
    local = permitted(lambda: _or_none(api, f"{KUEUE}/namespaces/{segment(namespace)}/localqueues/{segment(name)}"))
    cluster = _at(local, "spec", "clusterQueue")
    found = permitted(lambda: _or_none(api, f"{KUEUE}/clusterqueues/{segment(cluster)}")) if cluster else None
    return [queue for queue in (local, found) if queue]


def read_nodes(api: Connection, _: str, *names: str) -> dict[str, Object | None] | None:
    """The nodes of these names, None for one that is gone; as a whole None when they may not be read."""
    return permitted(lambda: {name: read_node(api, name) for name in names})


def list_events(api: Connection, namespace: str, *names: str) -> list[Object] | None:
    """The Events of the objects of these names, of any kind; None when they may not be read."""
    path = f"{CORE}/namespaces/{segment(namespace)}/events"
    queries = [{"fieldSelector": f"involvedObject.name={segment(name)}"} for name in names]
    return permitted(lambda: [event for query in queries for page, _ in api.pages(path, query) for event in page])


# How each field of an Evidence that `wants` may ask for is read: of the objects of these names in a namespace.
FURTHER: dict[str, Callable[..., Any]] = {
    "jobs": list_jobs,
    "nodes": read_nodes,
    "queues": read_queues,
    "events": list_events,
}


def permitted(read: Callable[[], T]) -> T | None:
    """What a read gives; None when the credentials do not allow it."""
    try:
        return read()
    except ApiError as error:
        if error.status != 403:
            raise
        return None


def delete_trainjob(api: Connection, trainjob: Object) -> None:
    """Deletes this very TrainJob, and in the background what it owns.

    Not in the foreground: Trainer recreates a JobSet that goes while its TrainJob, being deleted, is still there.
    """
    _delete(api, f"{TRAINER}/namespaces/{{}}/trainjobs/{{}}", trainjob)


def delete_jobset(api: Connection, jobset: Object) -> None:
    """Deletes this very JobSet, and in the background what it owns."""
    _delete(api, f"{JOBSET}/namespaces/{{}}/jobsets/{{}}", jobset)


def delete_pod(api: Connection, pod: Object) -> None:
    """Deletes this very pod, with its grace period: a shorter one would say it is gone while it runs."""
    _delete(api, f"{CORE}/namespaces/{{}}/pods/{{}}", pod)


def _delete(api: Connection, path: str, obj: Object) -> None:
    metadata = obj["metadata"]
    options = {"preconditions": {"uid": metadata["uid"]}, "propagationPolicy": "Background"}
    try:
        api.request("DELETE", path.format(segment(metadata["namespace"]), segment(metadata["name"])), None, options)
    except ApiError as error:
        if not (_is_absent(error) or error.status == 409):  # 409: another object has its name now
            raise


def _all(api: Connection, path: str, selector: str) -> list[Object]:
    return [item for items, _ in api.pages(path, {"labelSelector": selector}) for item in items]


def _or_none(api: Connection, path: str, query: Query = None) -> Object | None:
    try:
        return api.read(path, query)
    except ApiError as error:
        if not _is_absent(error):
            raise
        return None


def _is_absent(error: ApiError) -> bool:
    """Whether the object is not there. An API that is not served at all is a 404 too, but without a Status object."""
    return error.status == 404 and error.reason == "NotFound"


class Again:
    """Decides whether a write is made once more, from a fresh read: after a conflict, no answer, or a busy server."""

    PATIENCE = 30.0  # seconds

    def __init__(self) -> None:
        self._until, self._delay = time.monotonic() + self.PATIENCE, 0.05

    def pause(self, error: Exception) -> None:
        """Waits a little; raises the error when trying again is no use, or the time is up."""
        pause = self._delay * random.uniform(0.5, 1.5)
        if isinstance(error, ApiError):
            pause = max(pause, error.retry_after)
            if error.status not in (409, 429) and error.status < 500:
                raise error
        if time.monotonic() + pause > self._until:
            raise error
        time.sleep(pause)
        self._delay = min(2 * self._delay, 5.0)


def insist(call: Callable[[], T]) -> T:
    """Makes a request, which it does no harm to repeat, until it is answered."""
    again = Again()
    while True:
        try:
            return call()
        except (ApiError, NoAnswer) as error:
            again.pause(error)


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Turns what the server said, or did not say, about an object into a DispatchError."""
    try:
        yield
    except NoAnswer as error:
        raise Unreachable(f"{what}: no answer from the API server: {error}: try again") from error
    except ApiError as error:
        raise _explanation(error, what) from error


def _explanation(error: ApiError, what: str) -> DispatchError:
    text = error.message or error.reason or f"HTTP {error.status}"
    match error.status:
        case 401:
            return Unauthorized(f"{what}: the API server does not accept the credentials: renew them")
        case 403 if "cannot " in text and "admission webhook" not in text:  # RBAC's own words
            return Unauthorized(f"{what}: {text}: grant it, see examples/adapter-role.yaml")
        case 404 if _is_absent(error):
            return NotFound(f"{what}: {text}")
        case 404:
            return Unsupported(f"{what}: the cluster does not serve this API: install Trainer, JobSet (and Kueue)")
        case 409:
            return Conflict(f"{what}: it kept changing meanwhile: {text}: try again")
        case 429:
            return Unreachable(f"{what}: the API server is busy: {text}: try again")
        case status if status >= 500:
            return Unreachable(f"{what}: the API server failed: {text}: try again")
        case _:
            return Invalid(f"{what}: the cluster refuses it: {text}")


# ======================================================================================================================
# What goes on: watch and output
# ======================================================================================================================

_Take = Callable[[str, str, str, "Object | None"], None]  # kind, job and name of an object
_OnPod = Callable[[str, "Object | None"], None]
_Ordered = tuple[datetime.datetime, "Line | Gap"]  # of one rank, never before the one before

WATCH = 300.0  # seconds for which one watch connection is asked for
UNREACHABLE_AFTER = 60.0  # seconds without a connection after which a watch gives up
STALE = 2.0  # seconds for which a connection may be lost before a status says so
TOGETHER = 0.2  # seconds within which lines of several ranks are put in the order of their times
DRAIN = 3.0  # seconds without a line after which a log is no longer read when its pod is gone
AHEAD = 10_000  # lines that are read ahead of who wants them
LOG_PATIENCE = 20.0  # seconds for which a log is tried once nothing more will follow, or is not to be followed


class Live(Iterator[T]):
    """What `watch` and `output` return: an iterator that waits for what comes next.

    `close`, or the end of its `with` block, ends it within a second, in whichever thread it waits. So does dropping it.
    """

    def __init__(self, following: Callable[[], T], close: Callable[[], None]) -> None:
        self._following, self._close = following, weakref.finalize(self, close)

    def __next__(self) -> T:
        try:
            return self._following()
        except (StopIteration, DispatchError):
            self._close()
            raise

    def close(self) -> None:
        """Ends it. Twice is fine."""
        self._close()

    def __enter__(self) -> Live[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()


class _Streams:
    """The answers that are being read, such that another thread can end them."""

    def __init__(self) -> None:
        self.closed = threading.Event()
        self._lock = threading.Lock()
        self._open: weakref.WeakSet[Any] = weakref.WeakSet()

    def opened(self, response: Any) -> None:
        with self._lock:
            self._open.add(response)
        if self.closed.is_set():
            cut(response)

    def close(self) -> None:
        self.closed.set()
        with self._lock:
            responses = list(self._open)
        for response in responses:
            cut(response)


def cut(response: Any) -> None:
    """Ends an answer that another thread is reading."""
    if (sock := _socket(response)) is not None:
        with contextlib.suppress(OSError):  # the TLS socket's own method drops the state that the reader still uses
            socket.socket.shutdown(sock, socket.SHUT_RDWR)


class _Kind(threading.Thread):
    """Keeps up with the objects of one kind: lists them, watches them, and lists them again when it has missed some.

    One connection at a time. `take` is given kind, job and name of each object of a job's that is new, changed, or gone
    (then None), as soon as that is known; and no job when a list is complete.
    """

    def __init__(self, api: Connection, kind: str, where: tuple[str, str], streams: _Streams, take: _Take) -> None:
        super().__init__(daemon=True, name=f"watch {where[0]}")
        self._api, self._kind, self._streams, self._take = api, kind, streams, take
        self._path, self._query = where[0], {"labelSelector": where[1]}
        self._known: dict[str, tuple[str, str]] = {}  # version and job of each object that was taken, by its name
        self.listed = False
        self.lost: float | None = time.monotonic()  # since when there is no connection (monotonic)
        self.proof = _now()  # when there was one last
        self.error: ApiError | NoAnswer = NoAnswer(f"GET {where[0]}: not answered yet")

    def run(self) -> None:
        closed, version, delay = self._streams.closed, "", 0.1
        while not closed.is_set():
            pause, began = delay * random.uniform(0.5, 1.5), time.monotonic()
            try:
                version = version or self._list()
                until = began + (WATCH if self.lost is None else 5.0)  # short: then one that stalls is noticed soon
                for event in self._api.watch(self._path, self._query, version, until, self._opened):
                    version, delay = self._event(event) or version, 0.1
                pause = 0.0 if time.monotonic() > began + 1.0 else pause
            except (ApiError, NoAnswer) as error:
                self.error, self.lost = error, self.lost or time.monotonic()
                if isinstance(error, ApiError):
                    pause = max(pause, min(error.retry_after, 30.0))
                    version = "" if error.status == 410 else version
            closed.wait(pause)
            delay = min(2 * delay, 5.0)

    def _opened(self, response: Any) -> None:
        self._streams.opened(response)
        self._reached()

    def _reached(self) -> None:
        self.lost, self.proof = None, _now()

    def _event(self, event: Object) -> str:
        """Takes a watch event; returns the version reached."""
        self._reached()
        obj = event.get("object") or {}
        if event.get("type") in ("ADDED", "MODIFIED"):
            self._changed(obj)
        elif event.get("type") == "DELETED":
            self._gone(_name(obj))
        return str(_at(obj, "metadata", "resourceVersion") or "")

    def _list(self) -> str:
        """Takes what is new, and what is gone; returns the version to watch from."""
        gone, version = set(self._known), ""
        for objects, of_the_list in self._api.pages(self._path, self._query):
            self._reached()
            version = of_the_list
            for obj in objects:
                gone.discard(_name(obj))
                self._changed(obj)
        for name in gone:
            self._gone(name)
        self.listed = True
        self._take(self._kind, "", "", None)
        return version

    def _changed(self, obj: Object) -> None:
        name, version, job = _name(obj), str(_at(obj, "metadata", "resourceVersion")), job_of(self._kind, obj)
        if job and self._known.get(name) != (version, job):
            self._known[name] = version, job
            self._take(self._kind, job, name, slim(obj))

    def _gone(self, name: str) -> None:
        if known := self._known.pop(name, None):
            self._take(self._kind, known[1], name, None)


@dataclass(slots=True)
class _Job:
    """What a watch knows about one job."""

    trainjob: Object | None = None
    pods: dict[str, Object] = field(default_factory=dict)
    workloads: dict[str, Object] = field(default_factory=dict)
    seen: tuple[Object, ...] = ()  # pods of the latest attempt that are gone
    last: Status | None = None  # what was told last
    stage: tuple[int, int] = (-1, 0)  # the latest epoch, and how far the job had come in it
    certain: float = 0.0  # when what told the cause of its end has been waited for (monotonic)

    @property
    def told_all(self) -> bool:
        return self.last is not None and self.last.final

    def evidence(self) -> Evidence:
        workloads = [w for w in self.workloads.values() if _labels(w).get(JOB_UID) == _uid(self.trainjob)]
        return Evidence(self.trainjob, (*self.pods.values(),), next(iter(workloads), None), seen=self.seen)


class _Watch:
    """The statuses of one job, until it is final, or of all.

    A thread for each kind notes what changes; who waits for the next status has the job classified then, once for all
    that has changed meanwhile. So it holds no more than what there is, however slowly it is read.
    """

    def __init__(self, backend: Backend, handle: Handle | None, patience: float, on_pod: _OnPod | None = None) -> None:
        self._backend, self._handle, self._patience, self._on_pod = backend, handle, patience, on_pod
        self._namespace = backend.settings.namespace
        self._changed = threading.Condition()
        self._jobs: dict[str, _Job] = {}
        self._due: dict[str, bool] = {}  # the jobs to tell of; False: only whether what was told is stale has changed
        self._gone: collections.deque[Status] = collections.deque()
        self._look_again: dict[str, float] = {}  # when (monotonic)
        self._stale: datetime.datetime | None = None
        self._over = False
        self._streams = _Streams()
        self._quick = copy.copy(backend)
        self._quick._api = _Quick(backend._api, self._streams.closed)
        places = watched(self._namespace, handle, kueue=backend.settings.kueue is not None)
        self._kinds = [_Kind(backend._api, kind, where, self._streams, self._take) for kind, where in places.items()]
        for kind in self._kinds:
            kind.start()

    def close(self) -> None:
        self._streams.close()
        with self._changed:
            self._changed.notify_all()

    # --- what the threads note

    def _take(self, kind: str, name: str, of: str, obj: Object | None) -> None:
        with self._changed:
            self._changed.notify_all()
            if not name:
                return
            job = self._jobs.setdefault(name, _Job())
            if kind == "TrainJob":
                self._take_trainjob(job, obj)
            else:
                objects = job.pods if kind == "Pod" else job.workloads
                before = objects.pop(of, None)
                if obj is not None:
                    objects[of] = obj
                elif kind == "Pod" and before is not None:
                    job.seen = latest_attempt((*job.seen, before))
            if kind == "Pod" and self._on_pod is not None:
                self._on_pod(of, obj)
            if job.trainjob is not None and not job.told_all:
                self._due[name] = True
            if not (job.trainjob or job.pods or job.workloads):
                del self._jobs[name]
                self._due.pop(name, None)

    def _take_trainjob(self, job: _Job, obj: Object | None) -> None:
        """Notes a TrainJob, and that the one before it is gone. Another one of the handle's name is nobody's."""
        if self._handle is not None and _uid(obj) != self._handle.uid:
            obj = None
        before, job.trainjob = job.trainjob, obj
        if before is not None and _uid(before) != _uid(obj):
            handle = self._backend._handle(before)
            known = self._backend._final.pop(handle, None)  # `inspect` may have said so
            if not job.told_all:
                self._gone.append(known or status_of(handle, replace(job.evidence(), trainjob=None), _now()))
            job.seen, job.last, job.stage, job.certain = (), None, (-1, 0), 0.0

    # --- what is told

    def next(self) -> Status:
        while not (self._streams.closed.is_set() or self._over):
            with self._changed:
                self._look_at_connections()
                job, evidence, status, listed = None, None, None, all(kind.listed for kind in self._kinds)
                if self._handle and listed and not any(job.trainjob for job in self._jobs.values()):
                    self._gone.append(status_of(self._handle, Evidence(None), _now()))
                for name in [n for n, at in self._look_again.items() if at <= time.monotonic()]:
                    del self._look_again[name]
                    self._due |= {name: True} if name in self._jobs else {}
                if self._gone:
                    status = self._gone.popleft()
                elif listed and self._due:
                    name, anew = next(iter(self._due.items()))
                    del self._due[name]
                    job = self._jobs[name]
                    evidence = job.evidence() if anew else None
                else:
                    self._changed.wait(0.5)
                    continue
            if job is not None:
                status = self._told(job, evidence)
            if status is not None:
                self._over = self._handle is not None and status.final
                return status
        raise StopIteration

    def _look_at_connections(self) -> None:
        """Has every job told of when the connection is lost, or there again. Raises when it is lost for too long."""
        now = time.monotonic()
        lost = {kind: now - since for kind in self._kinds if (since := kind.lost) is not None}
        if lost and max(lost.values()) >= self._patience:
            with explained(f"the watch in namespace {self._namespace}"):
                raise max(lost, key=lambda kind: lost[kind]).error
        stale = min((kind.proof for kind, seconds in lost.items() if seconds >= STALE), default=None)
        if (stale is None) != (self._stale is None):
            self._stale = stale
            for name, job in self._jobs.items():
                if job.last is not None and not job.told_all:
                    self._due.setdefault(name, False)

    def _told(self, job: _Job, evidence: Evidence | None) -> Status | None:
        """What there is to tell of a job; None when that has been told."""
        status = job.last
        if evidence is not None and evidence.trainjob is not None:
            status = self._classified(job, evidence.trainjob, evidence)
        if status is None:
            return None
        status = replace(status, stale_since=self._stale)
        with self._changed:
            if job.told_all or _uid(job.trainjob) != status.handle.uid:  # it went meanwhile
                return None
            if job.last and replace(status, observed_at=job.last.observed_at) == job.last:
                return None
            job.last = status
        return status

    def _classified(self, job: _Job, trainjob: Object, evidence: Evidence) -> Status | None:
        """A job's status. None: it is not certain yet, and is looked at again.

        Each kind arrives by itself. So a job may seem to be back in a state that it had left, or to be stopping, queued
        again or ended, while its TrainJob, Workload or pods lag behind: then all are read anew, and that is the truth.
        """
        handle = self._backend._handle(trainjob)
        if handle in self._backend._final:
            return self._backend._final[handle]
        try:
            evidence = self._quick._further(handle, evidence)
            status, stage = self._staged(job, handle, evidence)
            if (
                stage < job.stage
                or (stage[1] and -1 < job.stage[0] < stage[0])
                or ((status.final or (stage[1] > 2 and stage != job.stage)) and not is_final(trainjob))
            ):
                evidence = self._quick._look(handle, evidence)
                status, stage = self._staged(job, handle, evidence)
        except (Unreachable, NotFound):  # or it is gone, which is about to be known
            self._look_again[handle.name] = time.monotonic() + 0.5
            return None
        if status.final:
            job.certain = job.certain or time.monotonic() + CAUSE
            if unsettled(evidence, _now()) and time.monotonic() < job.certain:
                self._look_again[handle.name] = time.monotonic() + 0.5
                return None
            status = self._backend._final.setdefault(handle, status)
        job.stage = stage
        return status

    def _staged(self, job: _Job, handle: Handle, evidence: Evidence) -> tuple[Status, tuple[int, int]]:
        """The status that the evidence gives, and its stage. A job that runs does not start again in the same epoch."""
        status = status_of(handle, evidence, _now())
        stage = stage_of(status, job.stage)
        if status.state is State.STARTING and job.stage == (stage[0], 2):  # its pods have ended, or are restarted
            return replace(status, state=State.RUNNING), job.stage
        return status, stage


class _Log:
    """What one pod's trainer prints, each line once, over whatever interrupts the reading.

    The API server serves the current file of the current container, and of the one before. To read on is to ask for
    what was printed since the second of the last line (it knows none finer), and to leave out what is known. When the
    last line is not among it, the file was rotated, and what came between can no longer be read. Or it is that of the
    next container, which may run before its pod's status says so: then the last line is in the log of the one before.
    """

    def __init__(self, api: Connection, pod: Object, since: datetime.datetime | None, streams: _Streams) -> None:
        self._api, self._since, self._streams = api, since, streams
        self.rank, self._admission = rank_of(pod), _count(_annotations(pod).get(ADMISSION))
        self._restart = _count(_labels(pod).get(RESTART))
        self._changed = threading.Condition()
        self._pod, self._is_gone, self._finished = pod, False, 0.0  # since when nothing follows (monotonic)
        self._reading: Any = None  # the answer that is being read
        self._idle = 0.0  # since when nothing has come (monotonic); inf: what came is not taken yet
        self._cut = False  # that it was ended here
        self._container = 0  # which is read: how often it was restarted before
        self._anew = False  # that none of its lines need have been read
        self._done = -1  # the last of which all is read
        self._began = 0.0  # when the answer that is being read, or was last, began
        self._whole = -1  # the one that had ended: to follow it ended at once
        self._last: _Stamp | None = None  # the latest of its lines
        self._recent = collections.Counter[_Stamp]()  # those of its second: the order need not be that of times
        self._before: datetime.datetime | None = None  # the time of the last line of any
        self._order = datetime.datetime.min.replace(tzinfo=datetime.UTC)
        self._trouble = "its pod was gone before it was read"  # why it is not being read now
        self._missing = ""  # why lines may be missing before the next one

    def see(self, pod: Object | None) -> None:
        """Notes how the pod is now; None: it is gone. A watch may be behind a list: no container is taken back."""
        with self._changed:
            if pod is not None and container_of(pod)[0] < container_of(self._pod)[0]:
                return
            before, self._is_gone, self._pod = self._pod, pod is None, pod or self._pod
            self._changed.notify_all()
        if pod is None or (container_of(before)[1] and container_of(pod) != container_of(before)):
            self._end_soon()

    def wake(self) -> None:
        """Has it notice that it is closed."""
        with self._changed:
            self._changed.notify_all()

    def finish(self) -> None:
        """Nothing follows: what cannot be read now is not waited for."""
        self._finished = time.monotonic()

    def lines(self, *, follow: bool, tail: int | None = None, patience: float = LOG_PATIENCE) -> Iterator[_Ordered]:
        """The lines from where it stands: to the last that is there, or with `follow` to the last that will be."""
        delay, failing, last, again = 0.1, 0.0, self._last, False
        if follow and container_of(self._pod)[0] > self._done:  # what was there may not be all
            self._trouble = self._trouble or "its pod was gone before the rest was read"
        while not (self._is_gone or self._streams.closed.is_set()):
            pod, container, runs = self._pod, container_of(self._pod)[0], False
            if container <= self._done:
                if not follow or self._finished or not remains(pod):
                    return
                self._wait(pod, 1.0)
                continue
            asked = time.monotonic()
            try:
                now = read_pod(self._api, pod)
                container, runs = container_of(now)
                if container > self._container:
                    yield from self._rest(now)
                yield from self._read(follow=follow and runs, whole=not runs, tail=tail)
                self._done = self._done if runs else container
                if not follow:
                    return
                delay, failing = 0.1, 0.0
                if runs:
                    # The kubelet ends what is followed when the container has ended, and may remove it at once.
                    self._whole = container if time.monotonic() - self._began < 1.0 else -1
                again = runs and not again
                if runs and not again:
                    self._wait(pod, 1.0)
                    if self._pod is pod and self._whole != container:
                        self._trouble = "the API server stopped sending it"
            except (ApiError, NoAnswer) as error:
                if isinstance(error, ApiError) and error.message == f'pods "{_name(pod)}" not found':
                    return  # any other 404 is that of a kubelet that has just started, and does not know its pods yet
                failing = failing or time.monotonic()
                refused = isinstance(error, ApiError) and error.status in (401, 403)
                if refused and not (self._began and time.monotonic() < failing + LOG_PATIENCE):
                    raise  # else a server that has just started may not know yet who may do what
                if self._cut and not self._is_gone:
                    self._cut = False
                    continue
                silent = isinstance(error.__cause__, urllib3.exceptions.ReadTimeoutError)
                silent = silent and follow and runs and not self._finished
                if self._whole == container or (silent and self._last is None):
                    self._trouble = ""  # of who prints nothing the answer may not begin
                elif not silent or self._began > asked:
                    self._trouble = "it went before its log had ended" if self._cut else str(error)
                if self._last is not last:
                    delay, failing, last = 0.1, time.monotonic(), self._last
                if (self._finished or not follow) and time.monotonic() >= max(failing, self._finished) + patience:
                    return
                self._wait(pod, 0.0 if silent else delay * random.uniform(0.5, 1.5))
                delay = min(2 * delay, 5.0)

    def end(self) -> Iterator[_Ordered]:
        """Tells when lines may be missing after the last."""
        trouble = self._trouble if container_of(self._pod)[0] >= 0 else ""
        if (self._missing or trouble) and not self._streams.closed.is_set():
            yield self._order, self._gap(None, self._missing or trouble)

    def _rest(self, pod: Object) -> Iterator[_Ordered]:
        """What is left of the containers before the one that the kubelet has now: it serves one of them at most."""
        (container, _), (served, began), missing = container_of(pod), served_of(pod), ""
        if served > max(self._done + 1, self._container) and not (self._since and began and began <= self._since):
            self._missing = self._missing or "its container was restarted before all of its log was read"
        if served > self._container:
            self._container, self._anew = served, True
        if self._done < self._container < container:
            missing = yield from self._left()
        if self._container < container:
            self._container, self._anew = container, True
        self._missing = self._missing or missing

    def _left(self) -> Generator[_Ordered, None, str]:
        """What is left of the container before the one that the kubelet has now; returns why lines may be missing."""
        reading = self._reading
        try:
            known = yield from self._read(previous=True)
        except (ApiError, NoAnswer) as error:
            if error.__cause__ or (isinstance(error, ApiError) and (error.status == 429 or error.status >= 500)):
                raise  # it may be there all the same
            return str(error)
        finally:
            self._reading = reading
        return "" if known else "its log was rotated meanwhile"

    def _read(
        self, *, follow: bool = False, previous: bool = False, whole: bool = True, tail: int | None = None
    ) -> Generator[_Ordered, None, bool]:
        """The lines of one request that are new; returns whether there are any, or the last before them was among them.

        `whole`: of the last, too, nothing is still to come.
        """
        start, known = self._last, self._recent.copy()
        query = {"follow": "true"} if follow else {"previous": "true"} if previous else {}
        if since := max((at for at in (self._since, start and start[0]) if at), default=None):
            query["sinceTime"] = since.strftime("%Y-%m-%dT%H:%M:%SZ")
        if tail is not None and start is None:
            query["tailLines"] = str(max(tail, 1))  # one, to know where to read on
        with contextlib.closing(read_log(self._api, self._pod, query, self._opened)) as body:
            for number, (raw, ended) in enumerate(body):
                if since and number == 0 and is_rest(raw):
                    continue
                stamp, text = stamped(raw)
                if not (ended or whole):
                    break
                if known[stamp] > 0:
                    known[stamp] -= 1
                    start = None
                elif start is None or stamp > start:  # else it is older: the end of a long line that was begun before
                    if start is not None and not self._anew:
                        if previous or (yield from self._left()):
                            self._missing = self._missing or "its log was rotated meanwhile"
                        else:
                            self._container += 1
                    start, self._anew = None, False
                    if not (self._since and stamp[0] < self._since):
                        self._idle = math.inf
                        yield from self._line(stamp, text)
                        self._idle = time.monotonic()
        return start is None or self._anew

    def _line(self, stamp: _Stamp, text: str) -> Iterator[_Ordered]:
        at = stamp[0]
        if self._last is None or at.replace(microsecond=0) > self._last[0].replace(microsecond=0):
            self._recent.clear()
        self._recent[stamp] += 1
        self._last, self._order = max(self._last or stamp, stamp), max(self._order, at)
        if self._missing:
            yield self._order, self._gap(at, self._missing)
            self._missing = ""
        self._before = at
        yield self._order, Line(self.rank, self._admission, self._restart, at, text)

    def _gap(self, until: datetime.datetime | None, reason: str) -> Gap:
        return Gap(self.rank, self._admission, self._restart, self._before, until, f"pod {_name(self._pod)}: {reason}")

    def _opened(self, response: Any) -> None:
        self._reading, self._cut, self._trouble, self._began = response, False, "", time.monotonic()
        self._idle = self._began
        self._streams.opened(response)

    def _end_soon(self) -> None:
        """Ends what is being read when it does not end by itself (kwok's does not), nor gives anything any more."""

        def end() -> None:
            if self._is_gone and time.monotonic() < self._idle + DRAIN and not self._streams.closed.is_set():
                self._end_soon()
            elif self._reading is not None:
                self._cut = True
                cut(self._reading)

        timer = threading.Timer(DRAIN, end)
        timer.daemon = True
        timer.start()

    def _wait(self, pod: Object, seconds: float) -> None:
        """Waits for news of the pod, or that nothing is wanted any more."""
        with self._changed:
            closed = self._streams.closed.is_set
            self._changed.wait_for(lambda: self._pod is not pod or self._is_gone or closed(), seconds)


class _Output:
    """The lines of a job's pods, in the order of their times: exactly for what is there, nearly for what follows."""

    def __init__(
        self,
        backend: Backend,
        handle: Handle,
        rank: int | None,
        since: datetime.datetime | None,
        tail: int | None,
        *,
        follow: bool,
    ) -> None:
        self._backend, self._handle, self._rank, self._since, self._tail = backend, handle, rank, since, tail
        self._streams, self._lock = _Streams(), threading.Lock()
        self._logs: dict[str, _Log] = {}
        self._threads: list[threading.Thread] = []
        self._queue: queue.Queue[_Ordered] = queue.Queue(AHEAD)
        self._error: DispatchError | None = None
        self._listed, self._final, self._following = threading.Event(), not follow, False
        self._watch = _Watch(backend, handle, UNREACHABLE_AFTER, self._see) if follow else None
        self._items = self._run()
        self._start(self._there())

    def next(self) -> Line | Gap:
        if self._streams.closed.is_set():
            raise StopIteration
        return next(self._items)

    def close(self) -> None:
        self._streams.close()
        if self._watch is not None:
            self._watch.close()
        self._listed.set()
        for log in list(self._logs.values()):
            log.wake()

    def _run(self) -> Iterator[Line | Gap]:
        while not self._streams.closed.is_set():
            final = self._final and not any(thread.is_alive() for thread in self._threads)
            batch = self._batch()
            yield from (item for _, item in sorted(batch, key=_when))
            if self._error is not None:
                raise self._error
            if final and not batch:
                return

    def _there(self) -> Iterator[_Ordered]:
        """What is there. Then what follows is read, of each pod by itself."""
        if self._watch is None:
            self._see_all()
        else:
            threading.Thread(target=self._keep_up, args=[self._watch], daemon=True).start()
            self._listed.wait()
        patience = 0.0 if self._watch and self._tail is None else LOG_PATIENCE
        there = [log.lines(follow=False, tail=self._tail, patience=patience) for log in list(self._logs.values())]
        merged = heapq.merge(*there, key=_when)
        yield from merged if self._tail is None else collections.deque(merged, self._tail)
        with self._lock:
            self._following = True
            for log in self._logs.values():
                self._follow(log)

    def _keep_up(self, watch: _Watch) -> None:
        """Waits until the job is final. The watch goes on: pods come to their ends even then."""
        try:
            for _ in iter(watch.next, None):
                self._listed.set()
            if not self._streams.closed.is_set():
                self._see_all()  # of pods it may be behind
        except DispatchError as error:
            self._error = error
        self._listed.set()
        with self._lock:
            self._final = True
            for log in self._logs.values():
                log.finish()

    def _see_all(self) -> None:
        with explained(f"the pods of TrainJob {self._handle}"):
            pods = list_pods(self._backend._api, self._handle.namespace, _selector(self._handle.name))
        for pod in pods:
            self._see(_name(pod), pod)

    def _see(self, name: str, pod: Object | None) -> None:
        with self._lock:
            log = self._logs.get(name)
            if log is not None:
                log.see(pod)
            elif pod is not None and self._rank in (None, rank_of(pod)):
                self._logs[name] = log = _Log(self._backend._api, pod, self._since, self._streams)
                if self._following:
                    self._follow(log)

    def _follow(self, log: _Log) -> None:
        self._start(itertools.chain(log.lines(follow=True) if self._watch else (), log.end()))

    def _start(self, items: Iterable[_Ordered]) -> None:
        """Has a thread read them."""

        def run() -> None:
            try:
                with self._explained():
                    for item in items:
                        self._put(item)
            except DispatchError as error:
                self._error = error

        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _put(self, item: _Ordered) -> None:
        while not self._streams.closed.is_set():
            with contextlib.suppress(queue.Full):
                self._queue.put(item, timeout=0.5)
                return

    def _batch(self) -> list[_Ordered]:
        """What arrives together."""
        batch: list[_Ordered] = []
        until = time.monotonic() + TOGETHER
        with contextlib.suppress(queue.Empty):
            while len(batch) < self._queue.maxsize:
                batch.append(self._queue.get(timeout=max(until - time.monotonic(), 0.0)))
        return batch

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        what = f"the output of TrainJob {self._handle}"
        with explained(what):
            try:
                yield
            except ApiError as error:
                if error.status != 403:
                    raise
                raise Unsupported(
                    f"{what}: not permitted to get pods/log: grant it, see examples/adapter-role.yaml"
                ) from error


def _when(item: _Ordered) -> datetime.datetime:
    return item[0]


# ======================================================================================================================
# The backend
# ======================================================================================================================

SETTLE = 30.0  # seconds, besides the pods' own grace periods, that `stop` waits for quiet, and then for all to be gone
APPEAR = 5.0  # seconds that it waits for a JobSet that Trainer has not made yet
LEFTOVER = 3600.0  # seconds after which a probe is nobody's any more
LATE = 2.0  # seconds that preflight waits for an object whose create was interrupted
PROBE_RUNTIME = {
    "spec": {"template": {"spec": {"replicatedJobs": [{"name": TRAINER_JOB}]}}}
}  # unread: it takes a right
PLAIN_REMEDY = (
    "add a kueue section to the settings, or have Kueue leave jobs without a queue alone "
    "(no LocalQueue named default, manageJobsWithoutQueueName off)"
)
CAUSE = 5.0  # seconds that `inspect` waits for what tells the cause of a failure, once for each job
FRESH = 60.0  # seconds after which nothing more is waited for; more than two clocks differ
LOOK_AGAIN = 1.0  # seconds between the two looks that must find nothing left: a controller may just be making something


def connect(
    settings: str | os.PathLike[str] | Mapping[str, Any],
    *,
    read_only: bool = False,
    api_client: ApiClient | None = None,
) -> Backend:
    """Opens a backend on a settings file, or the same as a dict, and proves what it depends on: see docs/preflight.md.

    It is observe-only when it may not write or a gate is not proven: `observe_only` says why. With `read_only` nothing
    is written, and so nothing probed. An idle cluster takes 3 s; the probe waits for `probeTimeout`, and is removed.
    Raises Invalid (the settings; nobody was contacted), Unauthorized (no credentials, or not even reading is allowed),
    Unsupported (an API is missing, or Kueue takes jobs without a queue in plain mode) and Unreachable (also: the probe
    could not be removed).
    """
    loaded = Settings.load(settings)
    backend = Backend(loaded, Connection(api_client) if api_client else credentials(loaded), read_only=read_only)
    backend._preflight()
    return backend


class Backend:
    """The jobs of one namespace. Made by `connect`. Every method may raise Unauthorized and Unreachable."""

    def __init__(self, settings: Settings, api: Connection, *, read_only: bool = False) -> None:
        self.settings, self.read_only = settings, read_only
        self.observe_only = ""  # why it does not write; empty when it does
        self.leftovers: tuple[str, ...] = ()  # what preflight found of probes of others, and did about it
        self._api, self._namespace = api, settings.namespace
        self._denied: frozenset[str] = frozenset()  # rights, as `rights` names them
        self._support = dict.fromkeys(Capability, Support(Answer.UNKNOWN, Source.DECLARED, "not probed"))
        self._final: dict[Handle, Status] = {}

    # --- operations

    def start(self, spec: JobSpec) -> Handle:
        """Creates the job, such that it cannot run before `open`. The same job, submission and spec: the same handle.

        Raises Conflict (another spec under this name; an earlier submission that may still run), Invalid, Unsupported
        (the runtime cannot run it, or the cluster made something else of it: then it is gone again).
        """
        self._may_write("start")
        what = f"TrainJob {self._namespace}/{spec.name}"
        if spec.priority and not self.settings.kueue:
            raise Unsupported(f"{what}: priority {spec.priority} needs Kueue: add a kueue section to the settings")
        if spec.submission > 1 and (overlap := self._overlap(spec)):
            raise Conflict(f"{what}: {overlap}")
        with explained(f"{spec.runtime}, for {what}"):
            runtime = read_runtime(self._api, self._namespace, spec.runtime)
        why = "there is none of that name" if runtime is None else refusal(runtime, spec)
        if runtime is None or why:
            existing = self._read(spec.name)
            if existing is None:
                raise Unsupported(f"{spec.runtime} cannot run {what}: {why}")
            return self._existing(spec, existing)
        trainjob = render(spec, runtime, self.settings)
        with explained(what):
            answer, created = self._create(trainjob)
        if not created:
            return self._existing(spec, answer)
        if fault := answer_fault(trainjob, answer):
            self._withdraw(answer, fault)
        if spec.submission > 1 and (overlap := self._overlap(spec, created=True)):  # somebody else's, made meanwhile
            self._withdraw(answer, overlap, Conflict)
        return self._handle(answer)

    def open(self, handle: Handle) -> None:
        """Opens the start gate: the job may run now (when it is held: once it is released). Again: changes nothing.

        Raises NotFound, Conflict (it is being stopped or deleted), and Unreachable (it is held, and Kueue has made no
        Workload of it yet).
        """
        self._may_write("open")
        deactivated = False

        def change(trainjob: Object) -> Object | None:
            nonlocal deactivated
            self._refuse_other_mode(handle, trainjob)
            if is_gated(trainjob) and isinstance(hold_of(trainjob), int) and is_queued(trainjob):
                self._set_active(handle, False, needed=True)  # first: open and active, it would reserve quota
                deactivated = True
            return opened(trainjob)

        self._update(handle, change)
        if deactivated:
            self._obey(handle)

    def stop(self, handle: Handle) -> None:
        """Stops the job and removes all of it, gracefully. Returns when nothing is left. Twice is fine.

        Raises Unreachable naming what is left when that takes longer than the pods' grace periods and a minute, and
        NotFound when the name is another object's now, which is left alone. When suspending it first gets no answer,
        Unreachable or Conflict says so, and nothing is deleted.
        """
        self._may_write("stop")
        self._of_this_namespace(handle)
        trainjob = self._read(handle.name)
        if trainjob is not None and _uid(trainjob) == handle.uid:
            self._quieten(handle)
            with explained(f"TrainJob {handle}"):
                insist(lambda: delete_trainjob(self._api, trainjob))
        self._clear_away(handle.name, handle.uid)
        self._final.pop(handle, None)
        if trainjob is not None and _uid(trainjob) != handle.uid:
            raise NotFound(f"TrainJob {handle}: its name is another object's, {_uid(trainjob)}, which was left alone")

    def stop_job(self, job: str) -> None:
        """Stops every submission of a job, the latest first, and what is left of those whose TrainJob is gone."""
        self._may_write("stop")
        errors = []
        for name, uid in self._submissions(job):
            try:
                if uid:
                    self.stop(Handle(self._namespace, name, uid))
                else:
                    self._clear_away(name, uid)
            except NotFound:  # a successor: it came meanwhile
                pass
            except DispatchError as error:  # the others are to be stopped all the same
                errors.append(error)
        if errors:
            raise errors[0] if len(errors) == 1 else Unreachable("; ".join(str(error.args[0]) for error in errors))

    def hold(self, handle: Handle, instance: int) -> None:
        """Holds the job back: what runs is stopped gracefully, and nothing starts before `release` of this instance.

        Again: does what is missing. Raises StaleHold (an instance not above all earlier ones), Conflict (it has ended,
        or is being stopped), Unsupported (Hold is `no`), and Unreachable (Kueue has made no Workload: hold it again).
        """
        self._may_hold("hold")
        _check_whole(instance, "hold: instance", 1, 10**18 - 1)

        def change(trainjob: Object) -> Object | None:
            self._refuse_ended(handle, trainjob)
            return held(trainjob, instance)

        self._update(handle, change)
        if self.settings.kueue:
            self._obey(handle)

    def release(self, handle: Handle, instance: int) -> None:
        """Ends a hold: the job goes on, as its next attempt, or waits for `open`. Again: changes nothing.

        Raises StaleHold (this instance is not in place), Conflict (it has ended; in plain mode also: it has not come
        to a standstill yet, release it again later), and Unsupported (Hold is `no`).
        """
        self._may_hold("release")
        _check_whole(instance, "release: instance", 1, 10**18 - 1)
        activated = False

        def change(trainjob: Object) -> Object | None:
            nonlocal activated
            self._refuse_ended(handle, trainjob)
            changed = released(trainjob, instance)
            if changed is not None and is_queued(trainjob):
                self._set_active(handle, True)  # first: the gate still holds it
                activated = True
            elif changed is not None and not is_gated(trainjob):
                self._refuse_unquiet(handle)
            return changed

        try:
            self._update(handle, change)
        except StaleHold:
            if activated:  # a new hold came in between
                self._obey(handle)
            raise
        if activated:
            self._obey(handle)

    def ceased(self, handle: Handle) -> Ceased:
        """Whether nothing of this submission can run any more, with the evidence. Its TrainJob may be gone.

        Raises Unsupported without the permission to get nodes.
        """
        self._of_this_namespace(handle)
        if "get nodes" in self._denied:
            raise Unsupported(f"ceased: TrainJob {handle}: not permitted to get nodes: see examples/adapter-role.yaml")
        with explained(f"what is left of TrainJob {handle}"):
            left = leftovers(handle.uid, self._read(handle.name), self._labelled(handle.name, handle.uid))
            if not any(left.values()):  # pods were listed before what makes them: there may have been some since
                time.sleep(LOOK_AGAIN)
                left = leftovers(handle.uid, self._read(handle.name), self._labelled(handle.name, handle.uid))
            nodes = {_at(pod, "spec", "nodeName") for pod in filter(remains, left["Pod"])}
            return ceased_by(left, {name: read_node(self._api, name) for name in nodes if name})

    def capabilities(self, spec: JobSpec | None = None) -> dict[Capability, Support]:
        """What preflight found this backend able to do; for a spec, also whether its runtime lets it.

        Raises Unsupported for a runtime on which the spec cannot run.
        """
        if spec is None:
            return dict(self._support)
        with explained(str(spec.runtime)):
            runtime = read_runtime(self._api, self._namespace, spec.runtime)
        if why := "there is none of that name" if runtime is None else refusal(runtime, spec):
            raise Unsupported(f"{spec.runtime} cannot run TrainJob {self._namespace}/{spec.name}: {why}")
        lowered = Support(Answer.NO, Source.DECLARED, may_overlap(runtime or {}))
        return {**self._support, **({Capability.ATTEMPT_INJECTION: lowered} if lowered.reason else {})}

    def find(self, job: str) -> tuple[Handle, ...]:
        """Every submission of a job, oldest first."""
        return self._handles(f"{JOB}={_ulid(job, 'job')}")

    def list(self) -> tuple[Handle, ...]:
        """Every submission of every job in the namespace, by name."""
        return self._handles(JOB)

    def inspect(self, handle: Handle) -> Status:
        """The job's status now. Once final it never changes. Raises NotFound when it is gone, or its name is another's.

        Two reads for a job that is well, three in Kueue mode, more where they may tell a cause. It knows what the
        cluster still has: of a failure that is long over that may be less than a watch saw. It waits up to 5 s for the
        cause of a fresh one.
        """
        if handle in self._final:
            self._trainjob(handle)
            return self._final[handle]
        evidence, until, pause = self._look(handle), time.monotonic() + CAUSE, 0.1
        while unsettled(evidence, _now()) and time.monotonic() < until:
            time.sleep(pause)
            pause, evidence = min(2 * pause, 1.0), self._look(handle, evidence)
        status = status_of(handle, evidence, _now())
        return self._final.setdefault(handle, status) if status.final else status

    def watch(self, handle: Handle | None = None, *, unreachable_after: float = UNREACHABLE_AFTER) -> Live[Status]:
        """A job's status now, and each time it changes, to the final one; without a handle those of all jobs, for ever.

        The latest status always comes, none comes twice; what changes while nobody asks, or while there is no
        connection, may come as one. `stale_since` tells since when there is none; after `unreachable_after` seconds
        without one, iterating raises Unreachable. A job that is deleted is `stopped`. Raises NotFound.

            with backend.watch(handle) as statuses:
                for status in statuses:
                    print(status.state)
        """
        if handle is not None:
            self._trainjob(handle)
        watch = _Watch(self, handle, unreachable_after)
        return Live(watch.next, watch.close)

    def output(
        self,
        handle: Handle,
        *,
        rank: int | None = None,
        follow: bool = False,
        since: datetime.datetime | None = None,
        tail: int | None = None,
    ) -> Live[Line | Gap]:
        """What the job's program has printed, of all ranks in the order of time, or of one.

        `follow`: and what it will print, whatever pods it will run in, until it is final. `since`: from this time on.
        `tail`: of what is there, the last lines only. A Gap tells where lines are missing. Raises NotFound, Invalid
        and Unsupported (not permitted).
        """
        if since is not None and since.tzinfo is None:
            raise Invalid(f"output: since: {since} has no time zone")
        for name, number in (("rank", rank), ("tail", tail)):
            if number is not None:
                _check_whole(number, f"output: {name}", 0, _INT32)
        self._trainjob(handle)
        if self._support[Capability.OUTPUT_READ].value is Answer.NO:
            raise Unsupported(f"the output of TrainJob {handle}: {self._support[Capability.OUTPUT_READ].reason}")
        since = since and since.astimezone(datetime.UTC)
        output = _Output(self, handle, rank, since, tail, follow=follow)
        return Live(output.next, output.close)

    # --- what they share

    def _may_write(self, call: str) -> None:
        if self.read_only:
            raise ReadOnly(f"{call} in namespace {self._namespace}: the backend was opened read-only")
        if self.observe_only:
            error = Unsupported if call == "start" else ReadOnly
            raise error(f"{call} in namespace {self._namespace}: the cluster is observe-only: {self.observe_only}")

    def _may_hold(self, call: str) -> None:
        self._may_write(call)
        support = self._support[Capability.HOLD]
        if support.value is Answer.NO:
            raise Unsupported(f"{call} in namespace {self._namespace}: {support.reason}")

    def _of_this_namespace(self, handle: Handle) -> None:
        if handle.namespace != self._namespace:
            raise Invalid(f"handle {handle}: the settings are for namespace {self._namespace}")

    def _read(self, name: str) -> Object | None:
        with explained(f"TrainJob {self._namespace}/{name}"):
            return read_trainjob(self._api, self._namespace, name)

    def _trainjob(self, handle: Handle) -> Object:
        """The handle's TrainJob as it is now, never one that followed under its name."""
        self._of_this_namespace(handle)
        trainjob = self._read(handle.name)
        if trainjob is None:
            raise NotFound(f"TrainJob {handle}: it was deleted: `find` tells what there is of job {handle.job}")
        if _uid(trainjob) != handle.uid:
            raise NotFound(f"TrainJob {handle}: its name is another object's now, {_uid(trainjob)}: `find` it anew")
        return trainjob

    def _look(self, handle: Handle, before: Evidence | None = None) -> Evidence:
        """What there is to know about a job now, with the pods that an earlier look has seen."""
        trainjob = self._trainjob(handle)
        for _ in range(3):
            workload = None
            with explained(f"the state of TrainJob {handle}"):
                pods = list_pods(self._api, self._namespace, _selector(handle.name))
                if is_queued(trainjob) and self.settings.kueue:
                    workload = next(iter(list_workloads(self._api, self._namespace, handle.uid)), None)
            ended = _condition(workload, "Finished") and not is_final(trainjob)
            resumed = _at(trainjob, "spec", "suspend") is True and (pods or _condition(workload, "Admitted"))
            if not (before or ended or resumed):
                break
            earlier, trainjob = trainjob, self._trainjob(handle)  # it may have changed between the reads
            if _at(trainjob, "metadata", "resourceVersion") == _at(earlier, "metadata", "resourceVersion"):
                break
        there = set(map(_uid, pods))
        seen = [pod for pod in [*before.seen, *before.pods] if _uid(pod) not in there] if before else []
        return self._further(handle, Evidence(trainjob, pods, workload, seen=seen))

    def _further(self, handle: Handle, evidence: Evidence) -> Evidence:
        """The evidence with what else may tell the cause."""
        with explained(f"the state of TrainJob {handle}"):
            while wanted := wants(evidence):
                found = {field: FURTHER[field](self._api, self._namespace, *names) for field, names in wanted.items()}
                evidence = replace(evidence, read=evidence.read | set(wanted), **found)
        return evidence

    def _handle(self, trainjob: Object) -> Handle:
        return Handle(self._namespace, _name(trainjob), _uid(trainjob))

    def _handles(self, selector: str) -> tuple[Handle, ...]:
        with explained(f"TrainJobs in namespace {self._namespace}"):
            found = list_trainjobs(self._api, self._namespace, selector)
        handles = [self._handle(trainjob) for trainjob in found if _is_ours(trainjob)]
        return tuple(sorted(handles, key=lambda handle: (handle.job, handle.submission)))

    def _refuse_other_mode(self, handle: Handle, trainjob: Object) -> None:
        """Kueue undoes what plain mode does to a job of its own; and without a queue nobody would admit one."""
        if _is_deleted(trainjob) or hold_of(trainjob) == "stop":
            raise Conflict(f"TrainJob {handle}: it is being stopped: start submission {handle.submission + 1} then")
        if is_queued(trainjob) != (self.settings.kueue is not None):
            mode = "in Kueue mode" if is_queued(trainjob) else "in plain mode"
            raise Conflict(f"TrainJob {handle}: it was started {mode}: use the settings that it was started with")

    def _refuse_ended(self, handle: Handle, trainjob: Object) -> None:
        self._refuse_other_mode(handle, trainjob)
        if is_final(trainjob):
            raise Conflict(f"TrainJob {handle}: it has ended: start submission {handle.submission + 1} instead")

    def _refuse_unquiet(self, handle: Handle) -> None:
        """Plain mode: two attempts must not run at a time. Two looks: a controller may just be resuming something."""
        for look in range(2):
            with explained(f"JobSet and pods of TrainJob {handle}"):
                pods = list_pods(self._api, self._namespace, f"{JOBSET_NAME}={handle.name}")
                jobs = list_jobs(self._api, self._namespace, handle.name)
                jobsets = list_jobsets(self._api, self._namespace, _selector(handle.name))
            if why := unquiet(jobsets, jobs, pods):
                raise Conflict(f"TrainJob {handle}: {why}: release it again when it stands still")
            time.sleep(0 if look else LOOK_AGAIN)

    def _update(self, handle: Handle, change: Callable[[Object], Object | None]) -> None:
        """Writes what `change` makes of the TrainJob as it is now, until it is written or `change` says None: it is so.

        A lost answer needs no more: if the write was done, the next read shows it; if it is done later, it conflicts.
        """
        again = Again()
        with explained(f"TrainJob {handle}"):
            while (changed := change(self._trainjob(handle))) is not None:
                try:
                    update_trainjob(self._api, changed)
                except (ApiError, NoAnswer) as error:
                    again.pause(error)
                else:
                    return

    # --- preflight

    def _preflight(self) -> None:
        """Finds out what the cluster and the credentials allow, in the order of docs/preflight.md."""
        api, kueue = self._api, self.settings.kueue is not None
        gate = Support(Answer.YES, Source.DECLARED, "nothing but the adapter resumes a job")
        versions, asked = (*GROUPS, *(KUEUE_GROUPS if kueue else ())), rights(kueue)
        with ThreadPool(8) as pool, explained("preflight: the API groups and the permissions"):
            served = pool.map(lambda version: is_served(api, version), versions)
            if missing := [version for version, found in zip(versions, served, strict=True) if not found]:
                raise Unsupported(f"the cluster does not serve {', '.join(missing)}; {VERSIONS}")
            allowed = pool.map(lambda right: may(api, right, self._namespace), asked)
        self._denied = frozenset(right for right, yes in zip(asked, allowed, strict=True) if not yes)
        if lacking := self._lacking("observe"):
            raise Unauthorized(f"the adapter may not {lacking}, so it cannot observe the cluster: grant it, see {ROLE}")
        if lacking := self._lacking("write"):
            self.observe_only = f"not permitted to {lacking}"
        if self.settings.kueue:
            with explained("preflight: the readmission gate"):
                gate = self._readmission_gate(self.settings.kueue)
            if gate.value is not Answer.YES and not self.observe_only:
                self.observe_only = f"the readmission gate is not proven: {gate.reason}"
        self.leftovers, hold_fault = self._leftovers(), ""
        if not self.observe_only and not self.read_only:
            fault, hold_fault = self._prove()
            self.observe_only = f"the start gate is not proven: {fault}" if fault else ""
        self._support = supports(kueue, self.read_only, self._denied, gate, self.observe_only, hold_fault)

    def _lacking(self, need: str) -> str:
        return ", ".join(right for right in rights(self.settings.kueue is not None, need) if right in self._denied)

    def _readmission_gate(self, kueue: Kueue) -> Support:
        """Whether its objects are there and its controller lives: reads them one by one, up to the first fault."""
        if kueue.admission_check is None:
            return Support(Answer.NO, Source.PROBED, "kueue.admissionCheck is not set")
        place, lease = kueue.admission_lease.split("/")
        resources = {
            "LocalQueue": f"{KUEUE}/namespaces/{self._namespace}/localqueues/{kueue.local_queue}",
            "ClusterQueue": f"{KUEUE}/clusterqueues/",
            "AdmissionCheck": f"{KUEUE}/admissionchecks/{kueue.admission_check}",
            "Lease": f"/apis/coordination.k8s.io/v1/namespaces/{place}/leases/{lease}",
        }
        found: dict[str, Object | None] = {}
        now = _now()
        for kind, path in resources.items():
            queue = _at(found["LocalQueue"], "spec", "clusterQueue") if kind == "ClusterQueue" else None
            where = path + segment(queue) if queue else path
            try:
                found[kind], now = read_dated(self._api, where) if where[-1] != "/" else (None, now)
            except ApiError as error:
                if error.status != 403:
                    raise
                group = "coordination.k8s.io" if kind == "Lease" else "kueue.x-k8s.io"
                reason = f"not permitted to get {kind.lower()}s.{group}: {error.message}"
                return Support(Answer.UNKNOWN, Source.PROBED, reason)
            if fault := readmission_fault(kueue, self._namespace, found, now):
                return Support(Answer.NO, Source.PROBED, fault)
        return Support(Answer.YES, Source.PROBED)

    def _leftovers(self) -> tuple[str, ...]:
        """Names the probes that are there, and removes those that a crash left: older than an hour, and still gated."""
        with explained("preflight: the probes of earlier times"):
            path = f"{TRAINER}/namespaces/{self._namespace}/trainjobs"
            page, now = read_dated(self._api, path, {"labelSelector": f"{PROBE}=true", "limit": "100"})
        found = []
        for trainjob in _objects(_at(page, "items")):
            age = (now - (_time(_at(trainjob, "metadata", "creationTimestamp")) or now)).total_seconds()
            done = "its start gate is open: see what it is, then delete it"
            if age <= LEFTOVER:
                done = "left alone: it may be another preflight's"
            elif is_gated(trainjob) and _is_ours(trainjob):
                try:
                    self.stop(self._handle(trainjob))
                    done = "removed"
                except DispatchError as error:
                    done = f"not removed: {error.args[0]}"
            found.append(f"probe TrainJob {self._namespace}/{_name(trainjob)}, {go_duration(age)} old: {done}")
        return tuple(found)

    def _prove(self) -> tuple[str, str]:
        """Makes a probe and removes it: why the start gate is not proven, and why holding is not; empty: they are."""
        least = Resources({"cpu": "1m"})
        spec = JobSpec(new_job(), self.settings.probe_runtime, command=["true"], nodes=1, resources=least)
        probe = render(spec, PROBE_RUNTIME, self.settings)
        probe["metadata"]["labels"][PROBE] = "true"
        if self.settings.kueue:
            probe["metadata"]["annotations"][HOLD] = "1"
        with explained(f"preflight probe: TrainJob {self._namespace}/{spec.name}"):
            fault, captured = self._dry_runs(probe)
            if fault:
                return fault, ""
            handle = None
            try:
                made, _ = self._create(probe)
                handle = self._handle(made)
                fault = "" if captured else answer_fault(probe, made)
                fault = f"the probe: {fault}" if fault else self._evidence(handle, captured)
                return fault, "" if fault or self._lacking("hold") else self._hold_steps(handle)
            finally:
                try:
                    self._remove_probe(spec.name, handle)
                except KeyboardInterrupt:  # came only now
                    self._remove_probe(spec.name, handle)
                    raise

    def _dry_runs(self, probe: Object) -> tuple[str, bool]:
        """Has the server say what it would make of the probe: why none must be made, and whether Kueue takes it anyway.

        One that is let through can evict another tenant's job.
        """

        def made(changed: Object) -> Object:
            return insist(lambda: create_trainjob(self._api, changed, dry_run=True))

        loose, ill = copy.deepcopy(probe), copy.deepcopy(probe)
        loose["spec"]["suspend"], ill["metadata"]["annotations"][GATED_BY] = False, "a.b/c,a.b/c"
        captured = self.settings.kueue is None and _at(made(loose), "spec", "suspend") is True
        if captured or self.settings.kueue:
            try:
                made(ill)
            except ApiError as error:
                if GATED_BY not in error.message:
                    raise
            else:
                if captured:
                    raise Unsupported(f"Kueue takes a TrainJob with no queue, and {UNENFORCED}: {PLAIN_REMEDY}")
                return UNENFORCED, False
        fault = answer_fault(probe, made(probe))
        return f"a dry run of the probe: {fault}" if fault and not captured else "", captured

    def _evidence(self, handle: Handle, captured: bool) -> str:
        """Waits for what proves the start gate; returns why it is not proven."""
        api, namespace, timeout = self._api, self._namespace, self.settings.probe_timeout
        until, queued = time.monotonic() + timeout, captured or self.settings.kueue is not None
        while True:
            found = {
                "Pod": list_pods(api, namespace, f"{JOBSET_NAME}={handle.name}"),
                "Workload": list_workloads(api, namespace, handle.uid) if queued else [],
                "JobSet": list_jobsets(api, namespace, _selector(handle.name)),
            }
            if captured and found["Workload"]:
                name = _name(found["Workload"][0])
                raise Unsupported(f"Kueue made Workload {name} for a TrainJob with no queue: {PLAIN_REMEDY}")
            fault = start_fault(queued, found["Pod"], found["Workload"], found["JobSet"])
            if fault is not None:
                return fault
            if time.monotonic() > until:
                return f"nothing proved it within {timeout:g}s: there is {described(found) or 'nothing of it'}"
            time.sleep(0.05)

    def _hold_steps(self, handle: Handle) -> str:
        """Holds the probe, and opens it: it must stay held. Returns which step failed, and why."""

        def is_held() -> None:
            status = self.inspect(handle)
            if status.hold != 1 or status.state is not State.HELD:
                raise Conflict(f"it is {status.state}, with hold {status.hold}, instead of held, with hold 1")

        def open_held() -> None:
            self.open(handle)
            is_held()

        def release_stale() -> None:
            with contextlib.suppress(StaleHold):
                self.release(handle, 2)
                raise Conflict("instance 2 was not refused as stale")

        steps = {"hold": lambda: self.hold(handle, 1), "inspect": is_held, "open": open_held, "release": release_stale}
        for name, step in steps.items():
            try:
                step()
            except DispatchError as error:
                return f"preflight probe step {name} failed: {error.args[0]}"
        return ""

    def _remove_probe(self, name: str, handle: Handle | None) -> None:
        """Without a handle its create was not answered, and may still be carried out for a moment."""
        until = time.monotonic() + LATE
        try:
            while handle is None:
                if (found := self._read(name)) is not None:
                    handle = self._handle(found)
                elif time.monotonic() > until:
                    return
                else:
                    time.sleep(0.1)
            self.stop(handle)
        except DispatchError as error:
            raise type(error)(f"preflight probe: {error.args[0]}; else delete TrainJob {name} by hand") from error

    # --- start

    def _create(self, trainjob: Object) -> tuple[Object, bool]:
        """Creates it, or finds that its name is taken: by itself, when an answer was lost, or another. Is it new?"""
        again = Again()
        while True:
            try:
                return create_trainjob(self._api, trainjob), True
            except (ApiError, NoAnswer) as error:
                if isinstance(error, ApiError) and error.status == 409:
                    existing = read_trainjob(self._api, self._namespace, _name(trainjob))
                    if existing is not None:
                        return existing, False
                again.pause(error)

    def _existing(self, spec: JobSpec, trainjob: Object) -> Handle:
        """The handle of an object that is there already, if it is the one that the spec asks for."""
        what = f"TrainJob {self._namespace}/{spec.name}"
        theirs = _annotations(trainjob).get(SPEC)
        if theirs != spec_hash(spec):
            raise Conflict(
                f"{what}: it exists with another spec ({theirs or 'not dispatch’s'}, not {spec_hash(spec)}): "
                f"start it with that spec, or take submission {spec.submission + 1} when this one has ended"
            )
        if _is_deleted(trainjob):
            raise Conflict(f"{what}: it is being deleted: take submission {spec.submission + 1}")
        if is_queued(trainjob) and _annotations(trainjob).get(GATE) and not self.settings.kueue:
            self._withdraw(trainjob, answer_fault({}, trainjob))  # a crash came between the create and this
        self._refuse_other_mode(self._handle(trainjob), trainjob)
        return self._handle(trainjob)

    def _withdraw(self, trainjob: Object, fault: str, kind: type[DispatchError] = Unsupported) -> Never:
        """Removes what a create made of our job, and says why."""
        what = f"TrainJob {self._namespace}/{_name(trainjob)}"
        try:
            with explained(what):
                insist(lambda: delete_trainjob(self._api, trainjob))
            self._clear_away(_name(trainjob), _uid(trainjob))
        except DispatchError as error:
            raise kind(f"{what}: {fault}. It could not be removed: {error.args[0]}") from error
        raise kind(f"{what}: {fault}. It was removed again")

    def _overlap(self, spec: JobSpec, *, created: bool = False) -> str:
        """Why it must not be started; empty when it may. `created`: it was, just now, and is looked past.

        Two submissions of a job must not run at a time, and a later one must have the larger epoch. Of two that are
        started at once the one that is made last sees the other.
        """
        job = f"{JOB}={spec.job}"
        with explained(f"the other submissions of job {spec.job} in namespace {self._namespace}"):
            trainjobs = [t for t in list_trainjobs(self._api, self._namespace, job) if _is_ours(t)]
            if not created and any(_name(t) == spec.name for t in trainjobs):
                return ""  # then it is the existing one that counts
            trainjobs = [t for t in trainjobs if _name(t) != spec.name]
            others = f"{job},{SUBMISSION}!={spec.submission}"
            pods = list_pods(self._api, self._namespace, others)
            jobsets = list_jobsets(self._api, self._namespace, others)
        latest = max((self._handle(t).submission for t in trainjobs), default=0)
        if latest > spec.submission:
            return f"submission {latest} of its job exists already: take {latest + 1}"
        running = may_still_run(trainjobs, jobsets, pods)
        return running and f"{running}: wait for its end, or stop the job's other submissions first"

    # --- open, stop

    def _set_active(self, handle: Handle, active: bool, *, needed: bool = False) -> None:
        """Makes the job's Workload inactive: Kueue takes its quota, suspends it and keeps it so. Or active again."""
        again, what = Again(), f"the Workload of TrainJob {handle}"
        with explained(what):
            while True:
                found = [w for w in list_workloads(self._api, self._namespace, handle.uid) if not _is_deleted(w)]
                if not found and needed:
                    again.pause(Unreachable(f"{what}: Kueue has not made it yet: see that Kueue runs, then try again"))
                    continue
                try:
                    for workload in found:
                        evicted, finished = _condition(workload, "Evicted"), _condition(workload, "Finished")
                        if active and (finished or evicted.startswith("DeactivatedDueTo")):
                            raise Conflict(f"{what}: Kueue never takes it up again: {finished or evicted}")
                        if (_at(workload, "spec", "active") is not False) != active:
                            spec = (_at(workload, "spec") or {}) | {"active": active}
                            update_workload(self._api, workload | {"spec": spec})
                except (ApiError, NoAnswer) as error:
                    again.pause(error)
                else:
                    return

    def _obey(self, handle: Handle) -> None:
        """Makes the Workload what the hold says, and what it says afterwards: others hold, release and open it, too.

        Not while the start gate is closed: Kueue would write the status of a gated, inactive Workload all the time.
        """
        active = None
        while not is_gated(job := self._trainjob(handle)) and (hold_of(job) is None) is not active:
            active = hold_of(job) is None
            self._set_active(handle, active, needed=not active)

    def _quieten(self, handle: Handle) -> None:
        """Has the job suspended, for good, and waits until it stands still, for a bounded time.

        Never deleted before it was suspended, unless the cluster refuses that for good (the runtime is gone, or a right
        is missing): a controller whose cache is behind makes JobSet and Job anew for a while, and then they are
        suspended, too. After a restart of the API server the Job of a running TrainJob that was deleted started again.
        """
        started, pause = time.monotonic(), 0.1
        gated = ended = False

        def mark(trainjob: Object) -> Object | None:
            nonlocal gated, ended
            gated, ended = is_gated(trainjob), is_final(trainjob)
            return marked_stopping(trainjob)

        with contextlib.suppress(Unauthorized, Invalid, NotFound):
            self._update(handle, mark)
            while True:
                if self.settings.kueue and not (gated or ended):  # again each time: Kueue may have made it anew
                    self._set_active(handle, False)
                with explained(f"JobSet and pods of TrainJob {handle}"):
                    jobsets = list_jobsets(self._api, self._namespace, _selector(handle.name))
                    pods = [p for p in list_pods(self._api, self._namespace, _selector(handle.name)) if remains(p)]
                patience = SETTLE + _grace(pods) if jobsets or pods else APPEAR
                quiet = not pods and (ended or (jobsets and all(map(stands_still, jobsets))))
                if quiet or time.monotonic() > started + patience:
                    return
                time.sleep(pause)
                pause = min(2 * pause, 1.0)

    def _clear_away(self, name: str, uid: str) -> None:
        """Waits until nothing of a submission is left, and deletes what its TrainJob's deletion left behind."""
        started, pause, looks = time.monotonic(), 0.05, 0
        with explained(f"what is left of TrainJob {self._namespace}/{name}"):
            while looks < 2:
                left = leftovers(uid, self._read(name), self._labelled(name, uid))
                if not any(left.values()):
                    looks += 1
                    time.sleep(LOOK_AGAIN if looks < 2 else 0)
                    continue
                looks = 0
                if time.monotonic() > started + SETTLE + _grace(left["Pod"]):
                    seconds = round(time.monotonic() - started)
                    raise Unreachable(
                        f"TrainJob {self._namespace}/{name}: after {seconds} s there is left: {described(left)}: "
                        "see what keeps it, then stop the job again"
                    )
                with contextlib.suppress(NoAnswer):  # the next round sees whether it was done
                    for jobset in left["JobSet"]:
                        if not left["TrainJob"] and not _is_deleted(jobset):  # Trainer would make it anew
                            delete_jobset(self._api, jobset)
                    for pod in left["Pod"]:
                        if not (left["JobSet"] or left["Job"] or _is_deleted(pod)):  # its Job would replace it
                            delete_pod(self._api, pod)
                time.sleep(pause)
                pause = min(2 * pause, 1.0)

    def _labelled(self, name: str, uid: str) -> dict[str, Sequence[Object]]:
        """All that bears the labels of a submission, by kind. Pods first: their JobSet is then in the later list."""
        api, namespace, selector = self._api, self._namespace, _selector(name)
        pods, jobs = list_pods(api, namespace, selector), list_jobs(api, namespace, name)
        return {
            "JobSet": list_jobsets(api, namespace, selector),
            "Job": jobs,
            "Pod": pods,
            "Workload": list_workloads(api, namespace, uid) if uid and self.settings.kueue else [],
        }

    def _submissions(self, job: str) -> Sequence[tuple[str, str]]:
        """Name and UID of every submission of which anything is left, the latest first. No UID: only pods are."""
        selector = f"{JOB}={_ulid(job, 'job')}"
        found = {handle.name: handle.uid for handle in self.find(job)}
        with explained(f"what is left of job {job} in namespace {self._namespace}"):
            jobsets = list_jobsets(self._api, self._namespace, selector)
            for obj in [*jobsets, *list_pods(self._api, self._namespace, selector)]:
                labels = _labels(obj)
                name = f"dj-{labels.get(JOB)}-s{labels.get(SUBMISSION)}"
                if JOB_NAME.fullmatch(name):
                    found.setdefault(name, _owner_uid(obj) if JOBSET_NAME not in labels else "")
        return sorted(found.items(), key=lambda item: int(item[0][31:]), reverse=True)


def _is_ours(trainjob: Object) -> bool:
    """Whether the name and the job's label say the same."""
    match = JOB_NAME.fullmatch(_name(trainjob))
    return match is not None and match[1] == _labels(trainjob).get(JOB)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _selector(name: str) -> str:
    return f"{JOB}={name[3:29]},{SUBMISSION}={name[31:]}"


def _grace(pods: Iterable[Object]) -> float:
    """The longest of their grace periods, in seconds."""
    paths = (("metadata", "deletionGracePeriodSeconds"), ("spec", "terminationGracePeriodSeconds"))
    periods = [_at(pod, *path) for pod in pods for path in paths]
    return float(max((period for period in periods if isinstance(period, int)), default=0))


# ======================================================================================================================
# Command line
# ======================================================================================================================

DONE, ERROR, USAGE, OBSERVE_ONLY, REFUSED, JOB_FAILED, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 4, 5, 6, 130


def _exit_code(error: DispatchError) -> int:
    match error:
        case Unreachable():
            return UNREACHABLE
        case ReadOnly():
            return OBSERVE_ONLY
        case Invalid():
            return USAGE
        case Unsupported() | Unauthorized() | Conflict():
            return REFUSED
        case _:
            return ERROR


READING = ("find", "list", "inspect", "watch", "logs", "ceased")  # these probe nothing
VERBS = (
    ("preflight", "", "prove what the cluster and the credentials allow, and say what is missing"),
    (
        "run",
        "SPEC",
        "start the job of a JSON file (- is stdin), let it run, and print its log until its end; Ctrl-C leaves it",
    ),
    ("start", "SPEC", "create the job of a JSON file (- is stdin), such that it cannot run yet; prints its handle"),
    ("open", "HANDLE", "let a started job run"),
    ("hold", "HANDLE INSTANCE", "hold a job back, with a number that only grows"),
    ("release", "HANDLE INSTANCE", "end a hold: the job goes on"),
    ("find", "JOB", "print the handles of a job's submissions, oldest first"),
    ("list", "", "print the handles of all jobs in the namespace"),
    ("inspect", "HANDLE", "print a job's status"),
    ("watch", "[HANDLE]", "print a job's state as it changes, until its end; or those of all jobs"),
    ("logs", "HANDLE", "print what a job's program prints"),
    ("ceased", "HANDLE", "say whether nothing of a submission can run any more"),
    ("stop", "HANDLE|JOB", "stop one submission, or all of a job, and remove what is left"),
)


def _arguments() -> argparse.ArgumentParser:
    import argparse  # here: who imports the adapter needs no command line

    kinds: dict[str, Callable[[str], Any]] = {  # of arguments; the others are handles
        "SPEC": _spec_file,
        "INSTANCE": _whole("instance", 1, 10**18 - 1),
        "JOB": lambda text: _ulid(text, "job"),
        "HANDLE|JOB": lambda text: Handle.parse(text) if "@" in text else _ulid(text, "job"),
    }
    parser = argparse.ArgumentParser("adapter.py", description="Starts, finds, inspects and stops training jobs.")
    parser.add_argument("-c", "--config", default="config.json", help="the settings file (default: config.json)")
    parser.add_argument("-o", "--output", choices=["text", "json"], default="text", help="how results are printed")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, arguments, text in VERBS:
        sub = verbs.add_parser(verb, help=text, description=text)
        for argument in arguments.split():
            name, kind = "instance" if argument == "INSTANCE" else "what", kinds.get(argument, Handle.parse)
            sub.add_argument(name, metavar=argument.strip("[]"), type=kind, nargs="?" if argument[0] == "[" else None)
        if verb == "logs":
            sub.add_argument("-f", "--follow", action="store_true", help="and what it will print, until its end")
            sub.add_argument("--rank", type=_whole("rank"), help="of this rank only")
            sub.add_argument("--tail", type=_whole("tail"), help="of what is there, so many lines")
            sub.add_argument("--since", type=_ago, help="of what was printed so long ago, such as 90s, 5m or 1h30m")
    return parser


def _whole(name: str, least: int = 0, most: int = _INT32) -> Callable[[str], int]:
    def number(text: str) -> int:
        _check_whole(int(text), name, least, most)
        return int(text)

    return number


def _ago(text: str) -> datetime.datetime:
    match = re.fullmatch(r"(?:([0-9]{1,5})d)?(?:([0-9]{1,5})h)?(?:([0-9]{1,5})m)?(?:([0-9]{1,5})s)?", text)
    if not (text and match):
        raise ValueError(text)
    days, hours, minutes, seconds = (int(number or 0) for number in match.groups())
    return _now() - datetime.timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)


def _run(backend: Backend, options: argparse.Namespace) -> Any:
    """Carries out one verb; returns what there is to print."""
    match options.verb:
        case "preflight":
            answers = {str(c): dataclasses.asdict(s) for c, s in backend.capabilities().items()}
            for answer in answers.values():
                answer["remedy"] = "" if answer["value"] == Answer.YES else remedy(answer["reason"])
            return {"observeOnly": backend.observe_only, "capabilities": answers, "leftovers": backend.leftovers}
        case "run":
            return _see_through(backend, options.what, options)
        case "watch":
            return _printed(backend.watch(options.what), options)
        case "logs":
            wanted = {name: getattr(options, name) for name in ("follow", "rank", "since", "tail")}
            return _printed(backend.output(options.what, **wanted), options)
        case "hold" | "release" as verb:
            return getattr(backend, verb)(options.what, options.instance)
        case "list":
            return backend.list()
        case "stop":
            return (backend.stop if isinstance(options.what, Handle) else backend.stop_job)(options.what)
        case verb:  # start, open, find, inspect, ceased
            return getattr(backend, verb)(options.what)


def _see_through(backend: Backend, spec: JobSpec, options: argparse.Namespace) -> Status:
    """Starts a job, lets it run, and waits for its end: each change goes to stderr, what it prints to stdout."""
    import shlex

    handle, call = None, shlex.join(["python", sys.argv[0], "-c", options.config])
    try:
        handle = backend.start(spec)
        print(handle, file=sys.stderr)
        backend.open(handle)
        with backend.watch(handle) as statuses, _printing(backend, handle, options):
            for status in statuses:
                print(_summary(status), file=sys.stderr)
    except KeyboardInterrupt:
        print(f"interrupted: the job is left as it is\nfind it:    {call} find {spec.job}", file=sys.stderr)
        if handle:
            print(f"follow it:  {call} watch {handle}\nstop it:    {call} stop {handle}", file=sys.stderr)
        raise
    return status


@contextlib.contextmanager
def _printing(backend: Backend, handle: Handle, options: argparse.Namespace) -> Iterator[None]:
    """Prints what a job prints, meanwhile and then to its end."""

    def run() -> None:
        try:
            output.append(backend.output(handle, follow=True))
            _printed(output[0], options)
        except DispatchError as error:
            print(error, file=sys.stderr)
        except BrokenPipeError:  # nobody reads it any more
            pass

    output: list[Live[Line | Gap]] = []
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
        thread.join()
    finally:
        for live in output:
            live.close()


def _printed(live: Live[Any], options: argparse.Namespace) -> Any:
    """Prints each value as it comes, in one line; returns the last of a job."""
    last = None
    with live:
        for value in live:
            text = json.dumps(value.to_json()) if options.output == "json" else _summary(value, options)
            print(text, file=sys.stderr if isinstance(value, Gap) and options.output == "text" else None, flush=True)
            last = value
    return last if isinstance(last, Status) else None


def _summary(value: Status | Line | Gap, options: argparse.Namespace | None = None) -> str:
    """A value as one line for a person."""
    match value:
        case Line():
            alone = options is not None and getattr(options, "rank", None) is not None
            text = value.text if alone else f"{'-' if value.rank is None else value.rank}: {value.text}"
        case Gap():
            since, until = value.since or "the beginning", value.until or "the end"
            text = f"-- rank {value.rank}: lines may be missing from {since} to {until}: {value.reason}"
        case Status():
            at = value.observed_at.isoformat(timespec="seconds").replace("+00:00", "Z") if value.observed_at else ""
            text = f"{at} {value.handle.name} {value.state}" + (f" ({value.cause})" if value.cause else "")
            text += f": {value.detail}" if value.detail else ""
            text += " [ungated: the readmission gate was not asked]" if value.ungated else ""
            text += f" [not heard of since {value.stale_since:%H:%M:%S}]" if value.stale_since else ""
    return _harmless(text)


def _harmless(text: str) -> str:
    """A line that does nothing to a terminal."""
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in text)


def _spec_file(name: str) -> JobSpec:
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
        return JobSpec.from_json(json.loads(text))
    except (OSError, ValueError, RecursionError, AttributeError) as error:  # the last: stdin is closed
        raise Invalid(f"job spec {name}: {error}") from error


def _text(value: Any) -> Iterator[str]:
    """A result as lines for a person."""
    match value:
        case Status():
            yield from _status_text(value)
        case tuple():
            yield from map(str, value)
        case Handle():
            yield str(value)
        case Ceased():
            yield f"{value.value}: {value.evidence}"
        case dict():  # of preflight
            rows = [(c, a["value"], a["source"], a["reason"] or "-") for c, a in value["capabilities"].items()]
            for row in (("capability", "value", "source", "reason"), *rows):
                yield "{:<18}{:<9}{:<10}{}".format(*row)
            yield ""
            yield f"observe-only: {value['observeOnly']}" if value["observeOnly"] else "ready: every gate is proven"
            yield from (f"  {name}: {a['remedy']}" for name, a in value["capabilities"].items() if a["remedy"])
            yield from value["leftovers"]


def _json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_json(item) for item in value]
    return value if value is None or isinstance(value, dict) else value.to_json()


_NEXT = {  # where there is no cause
    State.GATED: "open it",
    State.HELD: "release it",
    State.STOPPING: "wait until its pods are gone",
    State.STOPPED: "start its next submission, if it is to run",
}


def _status_text(status: Status) -> Iterator[str]:
    """A status as lines: state and cause, what it means, what the cluster says, what to do, its attempts, its pods."""
    cause, again = status.cause, f"start it as submission {status.handle.submission + 1}"
    advice = cause.advice if cause else _NEXT.get(status.state, "")
    if cause and status.final:
        advice = again if cause.retry is Answer.YES else f"{advice}, then {again}"
    counts = [f"{n} {getattr(status, n)}" for n in ("admission", "restart", "epoch") if getattr(status, n) is not None]
    evictions = (f"{i.cause} {i.count} times ({i.detail})" for i in status.interruptions)
    lines = {
        "state": f"{status.state}" + (f" ({cause})" if cause else ""),
        "why": cause.sentence if cause else "",
        "detail": status.detail,
        "next": advice,
        "attempt": _joined(", ".join(counts), *evictions),
        "warning": "a pod ran that the readmission gate was not asked about" if status.ungated else "",
    }
    yield from (f"{name:<10}{text}" for name, text in lines.items() if text)
    for pod in status.pods:
        rank = "" if pod.rank is None else f"{pod.rank} "
        yield f"{'pod':<10}{rank}{pod.pod} {pod.phase}" + (f" on {pod.node}" if pod.node else "")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: results on stdout, progress and errors on stderr. Returns the exit code."""
    backend = None
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # its encoding may lack what a program prints
    try:
        options = _arguments().parse_args(arguments)
        backend = connect(options.config, read_only=options.verb in READING)
        result, told = _run(backend, options), options.verb in ("watch", "logs")
        for line in () if told else [json.dumps(_json(result))] if options.output == "json" else _text(result):
            print(_harmless(line))
        print(end="", flush=True)
    except DispatchError as error:
        print(_harmless(str(error)), file=sys.stderr)
        refused = backend is not None and backend.observe_only and options.verb in ("start", "run")
        return OBSERVE_ONLY if refused and isinstance(error, Unsupported) else _exit_code(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:  # stdout: nobody reads it any more (`| head`), or the disk is full
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not isinstance(error, BrokenPipeError):
            print(f"dispatch: error: {error}", file=sys.stderr)
        return ERROR
    if isinstance(result, Status) and options.verb != "inspect" and result.final:
        return DONE if result.state is State.SUCCEEDED else JOB_FAILED
    return OBSERVE_ONLY if options.verb == "preflight" and backend.observe_only else DONE


if __name__ == "__main__":
    sys.exit(main())
