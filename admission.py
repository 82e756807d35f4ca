"""dispatch-admission: the readmission gate, an external AdmissionCheck controller for Kueue.

Kueue readmits a preempted TrainJob as soon as its Jobs count no active pods; pods that still terminate, or hang on a
lost node, do not count, so two attempts can write one checkpoint. This controller answers Kueue's question "may this
Workload be admitted?" with yes only when every pod of the job's earlier attempt is gone or finished, and numbers each
attempt.

What it guarantees, for the jobs that dispatch's adapter creates:

- No check is set Ready while a pod of an earlier admission remains. The evidence is a fresh list of pods per approval.
- The admission count A is raised before each admission and never repeats; the pods see it, and the epoch with it.
- Every write carries the resourceVersion it was decided on. Safety does not rest on the Lease, or on there being one
  controller: two can at worst conflict.
- Jobs of anybody else are approved at once.

What it does not: it is asked once per admission. Pods that start within one (a `suspend` flipped by hand, a JobSet
deleted by hand, a pod that its Job replaces) are not seen. It never rejects, evicts or deletes to make a job wait.

How it behaves when the API server does not answer, all times with jitter:

- A read is repeated for 20 s, from 0.1 s doubling to 5 s, or after the server's Retry-After; a write never is. After a
  write whose answer was lost, the object is read again and decided anew.
- A watch that ends or fails is reopened after 0.1 s doubling to 5 s, or after the server's Retry-After (at most a
  minute), at the version reached; one that is silent for 70 s is dead. A version that is too old (410) starts a full
  pass at once.
- A Workload on which something failed is taken again after 0.1 s, doubling to 5 s, or after the server's Retry-After
  (at most a minute); after a 404 or 422 when it changes, or with the next pass.
- The Lease is lost when no renewal has succeeded for 10 s: the process exits 1, to be started again.

Runs on Python 3.11 and newer with the `kubernetes` client 36.0.3, against Kueue v0.20 (v1beta2), Trainer v2.3
(v1alpha1) and JobSet v0.12 (v1alpha2). To try it: `python3 admission.py -kubeconfig ~/.kube/config`
"""

from __future__ import annotations

import collections
import contextlib
import copy
import datetime
import faulthandler
import json
import math
import os
import random
import re
import select
import signal
import socket
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from queue import Empty, SimpleQueue
from typing import Any

import urllib3
import yaml
from kubernetes.client import ApiClient, Configuration
from kubernetes.config import ConfigException, load_incluster_config

VERSION = "0.1.0"
PROGRAM = "dispatch-admission"

# ======================================================================================================================
# Names
# ======================================================================================================================

CONTROLLER = "dispatch.phpboyscout.uk/admission"  # an AdmissionCheck's spec.controllerName
PATCH_MANAGER = "dispatch.phpboyscout.uk/adapter"  # the adapter's entry in a TrainJob's spec.runtimePatches
ADMISSION = "dispatch.phpboyscout.uk/admission"  # pod annotation in that entry: the admission count A
EPOCH = "dispatch.phpboyscout.uk/epoch"  # pod annotation in that entry: submission x 1,000,000 + A
HOLD = "dispatch.phpboyscout.uk/hold"  # TrainJob annotation: "<n>" held, "released-<n>", "stop"
EPOCH_BOUND = 1_000_000  # A, and the submission, are below it
JOB_NAME = re.compile(r"dj-[0-7][0-9a-hjkmnp-tv-z]{25}-s[1-9][0-9]{0,5}")  # the adapter's TrainJobs

TRAINER_GROUP = "trainer.kubeflow.org"
TRAINER_CONTROLLER = "trainer.kubeflow.org/trainjob-controller"  # Trainer's own value of spec.managedBy
JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"  # JobSet's label on its pods
MESSAGE_LIMIT = 1024  # characters; Kueue's limit for a check's message is 32,768

WORKERS = 8

# ======================================================================================================================
# Errors and values
# ======================================================================================================================

Object = dict[str, Any]  # an API object as the server sent it
Key = tuple[str, str]  # a Workload's namespace and name


class UsageError(Exception):
    """The command line cannot be carried out: one line, then the usage, exit 2."""


class StartError(Exception):
    """Something else prevents the start: one line that says what and what to do, exit 1."""


class Unread(StrEnum):
    """A fact that has not been read yet."""

    UNREAD = "unread"


UNREAD = Unread.UNREAD


@dataclass(frozen=True, slots=True)
class Raised:
    """Our own last raise of a TrainJob: its `metadata.generation` in the answer, and the admission count."""

    generation: int
    admission: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What `decide` knows: the Workload, and of the rest what has been read so far. `None`: read, and not there."""

    workload: Object
    checks: frozenset[str]  # the AdmissionChecks that this controller serves
    trainjob: Object | Unread | None = UNREAD
    jobset: Object | Unread | None = UNREAD
    pods: list[Object] | Unread = UNREAD  # all pods of the JobSet's name, from a quorum read
    raised: Raised | None = None


class Action(StrEnum):
    """What a Decision asks for."""

    NOTHING = "nothing"
    READ = "read"  # the fact `fact`, then decide again
    APPROVE = "approve"  # our pending checks become Ready
    RAISE = "raise"  # the count becomes `admission`, then our pending checks become Ready
    LEAVE = "leave"  # Pending with the message, looked at again every 5 s
    COMPLAIN = "complain"  # the same, and an error in the log: a person has to act
    WAIT = "wait"  # Pending with the message, looked at again as soon as it can have changed
    REJECT = "reject"  # our pending checks become Rejected


@dataclass(frozen=True, slots=True)
class Decision:
    """One row of the table in `decide`, applied."""

    row: str
    action: Action
    message: str = ""
    fact: str = ""  # READ: the field of Facts
    admission: int = 0  # RAISE, and APPROVE after it: the new count


# ======================================================================================================================
# Decisions
# ======================================================================================================================


def decide(facts: Facts) -> Decision:
    """Says what to do with one Workload. Never raises, whatever JSON the objects are. The first row that fits wins.

    ====  ==========================================  ===================================  ============================
    row   Workload                                    its TrainJob                         then
    ====  ==========================================  ===================================  ============================
    1     no QuotaReserved=True, or none of our                                            nothing
          checks Pending
    2     Evicted=True, Finished=True, spec.active                                         nothing: a state written
          false, or being deleted                                                          now would outlive it
    3     no controller owner that is a TrainJob,                                          approve: not dispatch's
          no pod set with the annotation ADMISSION
    3a    the same, but a pod set carries it                                               Pending, error: unsupported
    4     owner is a TrainJob                         gone, or another UID                 nothing
    5                                                 not dispatch's                       approve: not dispatch's
    6                                                 being deleted, Complete or Failed    nothing
    7                                                 without the adapter's patch, or the  Pending, error: unreadable
                                                      counts in it are unreadable
    7a                                                spec.managedBy not Trainer's own     Pending, error: managed by
    8                                                 the hold annotation is a number, or  Pending: held, being stopped
                                                      `stop` (or unknown: fail closed)
    9                                                 spec.suspend not true                Pending: not suspended
    10                                                its JobSet does not stand still      wait: the JobSet still runs
    11                                                pods neither Succeeded nor Failed    wait: names them
    12                                                admission + 1 >= EPOCH_BOUND         Rejected: exhausted
    13                                                otherwise                            raise, then approve
    ====  ==========================================  ===================================  ============================

    Row 13 does not raise again what our own raise already did: when the TrainJob is still at the generation that the
    raise returned, no admission has started since (a start changes the spec), so the same number is approved, the last
    one (row 12) too.
    """
    workload = facts.workload
    if not _is_true(workload, "QuotaReserved") or not pending_checks(workload, facts.checks):
        return Decision("1", Action.NOTHING)
    evicted_or_finished = _is_true(workload, "Evicted") or _is_true(workload, "Finished")
    if evicted_or_finished or _at(workload, "spec", "active") is False or _is_deleted(workload):
        return Decision("2", Action.NOTHING)
    owner = _controller_owner(workload)
    if not _is_trainjob(owner):
        if any(ADMISSION in _annotations(p, "template") for p in _objects(_at(workload, "spec", "podSets"))):
            return _complain("3a", f"unsupported: owned by {_at(owner, 'kind') or 'nobody'}")
        return Decision("3", Action.APPROVE, "not dispatch's")
    if facts.trainjob is UNREAD:
        return Decision("4", Action.READ, fact="trainjob")
    return _decide_for_trainjob(facts, facts.trainjob, owner)


def _decide_for_trainjob(facts: Facts, trainjob: Object | None, owner: Object) -> Decision:
    """Rows 4 to 13."""
    if trainjob is None or _at(trainjob, "metadata", "uid") != owner.get("uid"):
        return Decision("4", Action.NOTHING)
    if not is_dispatchs(trainjob):
        return Decision("5", Action.APPROVE, "not dispatch's")
    if _is_deleted(trainjob) or _is_true(trainjob, "Complete") or _is_true(trainjob, "Failed"):
        return Decision("6", Action.NOTHING)
    admission, unreadable = read_admission(trainjob)
    if unreadable:
        return _complain("7", f"the admission count is unreadable: {unreadable}")
    manager = _at(trainjob, "spec", "managedBy")
    if manager not in (None, "", TRAINER_CONTROLLER):
        return _complain("7a", f"managed by {manager}: its pods cannot be seen")
    held = _held(_annotations(trainjob).get(HOLD))
    if held:
        return Decision("8", Action.LEAVE, held[:MESSAGE_LIMIT])
    if _at(trainjob, "spec", "suspend") is not True:
        return Decision("9", Action.LEAVE, "the TrainJob is not suspended")
    if facts.jobset is UNREAD:
        return Decision("10", Action.READ, fact="jobset")
    if facts.jobset is not None and not _stands_still(facts.jobset):
        return Decision("10", Action.WAIT, "the JobSet still runs")
    if facts.pods is UNREAD:
        return Decision("11", Action.READ, fact="pods")
    remaining = [pod for pod in facts.pods if remains(pod)]
    if remaining:
        return Decision("11", Action.WAIT, waiting_for(remaining))
    raised = facts.raised
    if raised and raised.admission == admission and raised.generation == _at(trainjob, "metadata", "generation"):
        return Decision("13", Action.APPROVE, f"admission {admission}", admission=admission)
    if admission + 1 >= EPOCH_BOUND:
        return Decision("12", Action.REJECT, "the admission count is exhausted")
    return Decision("13", Action.RAISE, f"admission {admission + 1}", admission=admission + 1)


def pending_checks(workload: Object, checks: frozenset[str]) -> list[Object]:
    """The Workload's check entries that are ours and Pending."""
    return [
        entry
        for entry in _objects(_at(workload, "status", "admissionChecks"))
        if isinstance(entry.get("name"), str) and entry["name"] in checks and entry.get("state") == "Pending"
    ]


def is_dispatchs(trainjob: Object) -> bool:
    """Whether the adapter made this TrainJob: by its name, or by its runtime patch."""
    name = _at(trainjob, "metadata", "name")
    return bool(_patches(trainjob)) or (isinstance(name, str) and JOB_NAME.fullmatch(name) is not None)


def read_admission(trainjob: Object) -> tuple[int, str]:
    """The admission count in the adapter's patch, or why it cannot be read (then the count means nothing)."""
    patches = _patches(trainjob)
    if not patches:
        return 0, "the TrainJob has no runtime patch of the adapter"
    jobs = [_replicated_jobs(patch) for patch in patches]
    if len(jobs) != 1 or not jobs[0]:
        return 0, "the adapter's patch names no replicated job" if len(jobs) == 1 else "two patches of the adapter"
    counts = set()
    for job in jobs[0]:
        annotations = _annotations(job, "template", "spec", "template")
        admission, epoch = (str(annotations.get(name, "missing")) for name in (ADMISSION, EPOCH))
        if not re.fullmatch(r"0|[1-9][0-9]{0,5}", admission):
            return 0, f"{ADMISSION} is {admission[:40]!r}"
        if not re.fullmatch(r"0|[1-9][0-9]{0,11}", epoch) or int(epoch) % EPOCH_BOUND != int(admission):
            return 0, f"{EPOCH} is {epoch[:40]!r} at admission {admission}"
        counts.add((admission, epoch))
    if len(counts) > 1:
        return 0, "its replicated jobs differ"
    return int(counts.pop()[0]), ""


def raised_counts(trainjob: Object) -> Object:
    """A copy of a TrainJob whose counts are readable, with admission and epoch one higher throughout the patch."""
    changed = copy.deepcopy(trainjob)
    for patch in _patches(changed):
        for job in _replicated_jobs(patch):
            annotations = _annotations(job, "template", "spec", "template")
            for name in (ADMISSION, EPOCH):
                annotations[name] = str(int(annotations[name]) + 1)
    return changed


def with_check_state(workload: Object, checks: frozenset[str], state: str, message: str, now: str) -> Object | None:
    """A copy of the Workload in which our Pending checks have this state and message; None when they have them already.

    `lastTransitionTime` moves only with the state, as Kueue's own helper has it; every other field stays as it was.
    """
    changed = copy.deepcopy(workload)
    entries = [e for e in pending_checks(changed, checks) if (e.get("state"), e.get("message")) != (state, message)]
    for entry in entries:
        if entry["state"] != state:
            entry["lastTransitionTime"] = now
        entry.update(state=state, message=message)
    return changed if entries else None


def remains(pod: object) -> bool:
    """Whether the pod may still run: anything that is not plainly finished, however long it has been terminating."""
    return _at(pod, "status", "phase") not in ("Succeeded", "Failed")


def waiting_for(pods: list[Object]) -> str:
    """Row 11's message: how many pods, and the first three by name, each with its node."""
    named = sorted((str(_at(p, "metadata", "name")), str(_at(p, "spec", "nodeName") or "no node")) for p in pods)
    first = ", ".join(f"{name} on {node}" for name, node in named[:3]) + (", …" if len(named) > 3 else "")
    return f"waiting for {len(named)} pods of the earlier attempt: {first}"[:MESSAGE_LIMIT]


def _complain(row: str, message: str) -> Decision:
    return Decision(row, Action.COMPLAIN, message[:MESSAGE_LIMIT])


def _held(annotation: object) -> str:
    """Row 8's message; empty when the job is not held. What is neither a hold, a release nor a stop holds too."""
    if annotation in (None, "") or re.fullmatch(r"released-[0-9]+", str(annotation)):
        return ""
    return "being stopped" if annotation == "stop" else f"held: instance {annotation}"


def _stands_still(jobset: Object) -> bool:
    """Whether a JobSet is suspended, says so itself, and counts no active Job."""
    counts = [job.get("active", 0) for job in _objects(_at(jobset, "status", "replicatedJobsStatus"))]
    return _at(jobset, "spec", "suspend") is True and _is_true(jobset, "Suspended") and all(c == 0 for c in counts)


def _patches(trainjob: Object) -> list[Object]:
    return [p for p in _objects(_at(trainjob, "spec", "runtimePatches")) if p.get("manager") == PATCH_MANAGER]


def _replicated_jobs(patch: Object) -> list[Object]:
    return _objects(_at(patch, "trainingRuntimeSpec", "template", "spec", "replicatedJobs"))


def _controller_owner(workload: Object) -> Object:
    owners = _objects(_at(workload, "metadata", "ownerReferences"))
    return next((owner for owner in owners if owner.get("controller") is True), {})


def _is_trainjob(owner: Object) -> bool:
    return owner.get("kind") == "TrainJob" and str(owner.get("apiVersion")).partition("/")[0] == TRAINER_GROUP


def _is_deleted(obj: Object) -> bool:
    return _at(obj, "metadata", "deletionTimestamp") is not None


def _is_true(obj: Object, condition: str) -> bool:
    conditions = _objects(_at(obj, "status", "conditions"))
    return any(c.get("type") == condition and c.get("status") == "True" for c in conditions)


def _annotations(obj: Object, *path: str) -> Object:
    annotations = _at(obj, *path, "metadata", "annotations")
    return annotations if isinstance(annotations, dict) else {}


def _at(value: object, *path: str) -> Any:
    """The value at a path of keys; None where a step is missing or no object."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _objects(value: object) -> list[Object]:
    """The objects in a list; nothing where there is no list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


# ======================================================================================================================
# Cluster access: every request that this program makes
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

KUEUE = "/apis/kueue.x-k8s.io/v1beta2"
TRAINER = "/apis/trainer.kubeflow.org/v1alpha1"
JOBSET = "/apis/jobset.x-k8s.io/v1alpha2"
LEASES = "/apis/coordination.k8s.io/v1"


# what the client's loader raises: whatever a file's odd shape trips it with
UNLOADABLE = (ConfigException, OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError)


def connect(options: Options) -> Connection:
    """Loads the credentials that the options name. Contacts nobody. Raises StartError."""

    def load(configuration: Configuration) -> None:
        if options.in_cluster:
            load_incluster_config(client_configuration=configuration)
        else:
            from kubernetes.config import load_kube_config  # brings OAuth: a pod would carry it for nothing

            load_kube_config(options.kubeconfig or None, options.context or None, configuration)

    configuration = Configuration()
    configuration.connection_pool_maxsize = 2 * WORKERS  # workers, watch, Lease and re-checks keep theirs open
    try:
        load(configuration)
    except UNLOADABLE as error:
        reason = " ".join(str(error).split())  # YAML's have several lines
        raise StartError(f"no usable credentials: {reason}: {_credentials_advice(options)}") from error
    client = ApiClient(configuration)
    client.user_agent = f"{PROGRAM}/{VERSION}"

    def renew(client: ApiClient) -> None:
        with contextlib.suppress(*UNLOADABLE):  # then the 401 stands
            load(client.configuration)

    return Connection(client, renew)


def list_checks(api: Connection) -> list[Object]:
    """Every AdmissionCheck whose controller is this one."""
    checks = (check for items, _ in api.pages(f"{KUEUE}/admissionchecks") for check in items)
    return [check for check in checks if _at(check, "spec", "controllerName") == CONTROLLER]


def update_check_status(api: Connection, check: Object) -> None:
    """Writes an AdmissionCheck's status, on the version that was read."""
    api.request("PUT", f"{KUEUE}/admissionchecks/{segment(check['metadata']['name'])}/status", body=check)


def list_workloads(api: Connection) -> Iterator[tuple[list[Object], str]]:
    """Every Workload, page by page, each page with the list's resourceVersion."""
    return api.pages(f"{KUEUE}/workloads")


def watch_workloads(api: Connection, version: str, until: float) -> Iterator[Object]:
    """One connection's watch events of all Workloads."""
    return api.watch(f"{KUEUE}/workloads", None, version, until)


def read_workload(api: Connection, key: Key) -> Object | None:
    """One Workload as it is now. By a list, so that the role needs no `get`."""
    query = {"fieldSelector": f"metadata.name={key[1]}"}
    found = api.read(f"{KUEUE}/namespaces/{segment(key[0])}/workloads", query).get("items") or []
    return found[0] if found else None


def update_workload_status(api: Connection, workload: Object) -> Object:
    """Writes a Workload's status, on the version that was decided on; returns the new one."""
    namespace, name = key_of(workload)
    return api.request(
        "PUT", f"{KUEUE}/namespaces/{segment(namespace)}/workloads/{segment(name)}/status", body=workload
    )


def read_trainjob(api: Connection, namespace: str, name: str) -> Object | None:
    """A Workload's TrainJob; None when there is none, or can be none, of that name."""
    try:
        path = f"{TRAINER}/namespaces/{segment(namespace)}/trainjobs/{segment(name)}"
    except ValueError:  # an owner reference's name is not validated by anybody
        return None
    return _unless_absent(lambda: api.read(path))


def update_trainjob(api: Connection, trainjob: Object) -> Object:
    """Writes a TrainJob, on the version that was decided on; returns the new one."""
    namespace, name = key_of(trainjob)
    return api.request("PUT", f"{TRAINER}/namespaces/{segment(namespace)}/trainjobs/{segment(name)}", body=trainjob)


def read_jobset(api: Connection, namespace: str, name: str) -> Object | None:
    """The JobSet of a TrainJob, which has its name."""
    path = f"{JOBSET}/namespaces/{segment(namespace)}/jobsets/{segment(name)}"
    return _unless_absent(lambda: api.read(path))


def list_pods(api: Connection, namespace: str, jobset: str) -> list[Object]:
    """All pods of a JobSet's name: one fresh read (no resourceVersion), the evidence that an approval rests on."""
    found: list[Object] = []
    path, query = f"/api/v1/namespaces/{segment(namespace)}/pods", {"labelSelector": f"{JOBSET_NAME}={jobset}"}
    for items, _ in api.pages(path, query):
        PULSE.beat()
        found += map(_trimmed, items)
    return found


def list_pods_cached(api: Connection, jobsets: Iterable[str]) -> list[Object]:
    """Pods of the JobSets of these names, in any namespace, from the server's cache: a hint, never evidence."""
    query = {"labelSelector": f"{JOBSET_NAME} in ({','.join(sorted(set(jobsets)))})", "resourceVersion": "0"}
    return [_trimmed(pod) for items, _ in api.pages("/api/v1/pods", query) for pod in items]


def _trimmed(pod: Object) -> Object:
    """What is asked of a pod, and no more: a job of a thousand pods must fit into memory."""
    metadata = {name: _at(pod, "metadata", name) for name in ("namespace", "name", "labels")}
    return {
        "metadata": metadata,
        "spec": {"nodeName": _at(pod, "spec", "nodeName")},
        "status": {"phase": _at(pod, "status", "phase")},
    }


def read_lease(api: Connection, namespace: str, name: str, timeout: float) -> Object | None:
    """The Lease, asked for once."""
    path = f"{LEASES}/namespaces/{segment(namespace)}/leases/{segment(name)}"
    return _unless_absent(lambda: api.request("GET", path, timeout=timeout))


def create_lease(api: Connection, lease: Object, timeout: float) -> Object:
    """Creates the Lease."""
    namespace = segment(lease["metadata"]["namespace"])
    return api.request("POST", f"{LEASES}/namespaces/{namespace}/leases", body=lease, timeout=timeout)


def update_lease(api: Connection, lease: Object, timeout: float) -> Object:
    """Writes the Lease, on the version that was read."""
    namespace, name = key_of(lease)
    path = f"{LEASES}/namespaces/{segment(namespace)}/leases/{segment(name)}"
    return api.request("PUT", path, body=lease, timeout=timeout)


def key_of(obj: Object) -> Key:
    """An API object's namespace and name."""
    return str(_at(obj, "metadata", "namespace")), str(_at(obj, "metadata", "name"))


def version_of(obj: Object) -> str:
    """An API object's resourceVersion."""
    return str(_at(obj, "metadata", "resourceVersion"))


def _unless_absent(read: Callable[[], Object]) -> Object | None:
    try:
        return read()
    except ApiError as error:
        if error.status != 404:
            raise
        return None


# ======================================================================================================================
# The pulse
# ======================================================================================================================

STANDSTILL = 120  # seconds; no step waits longer than a silent watch, 75 s


class Pulse:
    """When each thread that has something to do last got on: the process ends when one stands still.

    Why not a liveness probe: over HTTP it needs an open port; as a command, a file to write to and a second interpreter
    within the memory limit. A container that ends is started again just the same, and this one says where it stood.
    """

    def __init__(self) -> None:
        self._last: dict[threading.Thread, float] = {}

    def beat(self) -> None:
        """This thread gets on: its next beat, or its rest, is due within STANDSTILL."""
        self._last[threading.current_thread()] = time.monotonic()

    def rest(self) -> None:
        """This thread has nothing to do."""
        self._last.pop(threading.current_thread(), None)

    def stands_still(self) -> str:
        """The name of a thread that does; else empty, and this is to be asked again within STANDSTILL."""
        faulthandler.dump_traceback_later(STANDSTILL, exit=True, file=2)  # a C thread: needs no Python to run any more
        late = time.monotonic() - STANDSTILL
        return next((thread.name for thread, last in self._last.copy().items() if last < late), "")


PULSE = Pulse()

# ======================================================================================================================
# The Lease
# ======================================================================================================================

LEASE_DURATION = 15  # seconds, as client-go's components have them
RENEW_DEADLINE = 10.0
RETRY_PERIOD = 2.0
CALL_TIMEOUT = 3.0  # of one request: several fit into the renew deadline

LEADING, LOST, ENDED, STOP = "leading", "lost", "ended", "stop"  # what the main thread waits for


class Elector:
    """Leader election on a Lease, with client-go's semantics. Puts LEADING, and LOST when it is over, on `events`.

    Why not the kubernetes client's: 36 has none on Leases; 37's goes on working as leader while a call hangs, keeps its
    worker running after it has lost, and compares wall clocks. Here the end of leadership is a time on this process's
    own monotonic clock: the main thread sees it even while a call hangs, or after the process had been stopped.
    """

    def __init__(self, api: Connection, namespace: str, name: str, identity: str, events: SimpleQueue[str]) -> None:
        self._api, self._namespace, self._name, self._identity, self._events = api, namespace, name, identity, events
        self._seen: object = None  # the Lease's record, and when (monotonic) it was first seen so
        self._seen_at = time.monotonic()
        self._said = ""
        self.leading_until = math.inf  # monotonic; past it the Lease is lost, whatever a call in flight may answer

    def run(self) -> None:
        """Waits for the Lease, then renews it until it is lost."""
        while not self._attempt():
            time.sleep(RETRY_PERIOD * random.uniform(1.0, 2.2))  # client-go's jitter: candidates do not keep step
        self._events.put(LEADING)
        while _at(self._seen, "holderIdentity") == self._identity and time.monotonic() < self.leading_until:
            time.sleep(RETRY_PERIOD)
            if time.monotonic() < self.leading_until:  # the process may have been stopped meanwhile
                self._attempt()
        self._events.put(LOST)

    def _attempt(self) -> bool:
        """Acquires or renews once. False when another holds it, or nothing can be said."""
        PULSE.beat()
        started, failed = time.monotonic(), ""
        try:
            acquired = self._acquire_or_renew(started)
        except (ApiError, NoAnswer) as error:  # 409: somebody else wrote first, the next attempt reads it
            acquired, failed = False, str(error)
        if failed and failed != self._said:
            log("ERROR", "lease", identity=self._identity, lease=f"{self._namespace}/{self._name}", error=failed)
        self._said = failed
        if acquired and time.monotonic() < self.leading_until:
            self.leading_until = started + RENEW_DEADLINE
        return acquired

    def _acquire_or_renew(self, now: float) -> bool:
        lease = read_lease(self._api, self._namespace, self._name, CALL_TIMEOUT)
        spec = _at(lease, "spec") or {}
        if spec != self._seen:
            self._seen, self._seen_at = spec, time.monotonic()  # the read may have taken long
        holder, seconds = spec.get("holderIdentity"), spec.get("leaseDurationSeconds")
        duration = seconds if isinstance(seconds, int) and seconds > 0 else LEASE_DURATION
        if holder and holder != self._identity and now < self._seen_at + duration:  # its duration, on our clock
            return False
        record = self._record(spec)
        if lease is None:
            fresh = {"metadata": {"namespace": self._namespace, "name": self._name}, "spec": record}
            written = create_lease(self._api, fresh, CALL_TIMEOUT)
        else:
            written = update_lease(self._api, {**lease, "spec": record}, CALL_TIMEOUT)
        self._seen, self._seen_at = _at(written, "spec"), now
        return True

    def _record(self, spec: Object) -> Object:
        # the API server parses a Lease's times with six fraction digits and Z, and refuses anything else
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        mine, transitions = spec.get("holderIdentity") == self._identity, spec.get("leaseTransitions") or 0
        return {
            **spec,
            "holderIdentity": self._identity,
            "leaseDurationSeconds": LEASE_DURATION,
            "acquireTime": spec.get("acquireTime") if mine else now,
            "renewTime": now,
            "leaseTransitions": transitions if mine or not spec else transitions + 1,
        }


# ======================================================================================================================
# The controller
# ======================================================================================================================

QUEUED_OBJECTS = 1000  # Workloads that the queue keeps whole (6 KB each); of more it keeps the names only,
QUEUED_BYTES = 2**14  # and of larger ones
REMEMBERED_RAISES = 1000
TICK = 0.1  # seconds between looks at what is due
FAILED_AGAIN = (0.1, 5.0)  # seconds after which a Workload on which something failed is taken again: first, at most
STILL_RUNS_AGAIN = 0.2  # seconds, row 10 for the first time
LEFT_AGAIN = 5.0  # seconds, rows 3a and 7 to 9, and jobs of more than PODS_PER_LIST pods
LIST_AGAIN = 1.0  # seconds between two lists of the pods that are waited for, and for row 10 after the first time
JOBS_PER_LIST = 100
PODS_PER_LIST = 500  # the server's cache answers with all pods at once, so few enough are asked for
WAITING_RATE = 20.0  # requests a second for all that wait; with more of them the periods stretch


class WorkQueue:
    """Workloads to reconcile: each once, in its latest version, never handed to two workers; urgent ones first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._urgent: collections.OrderedDict[Key, bytes | None] = collections.OrderedDict()
        self._others: collections.OrderedDict[Key, bytes | None] = collections.OrderedDict()
        self._taken: set[Key] = set()

    def put(self, key: Key, workload: Object | None = None, *, urgent: bool) -> None:
        """Queues a Workload: in the version given, or (None) to be read when its turn comes."""
        with self._changed:
            known = self._others.pop(key, None) if urgent else None
            line = self._urgent if urgent or key in self._urgent else self._others
            room = workload is not None and len(self._urgent) + len(self._others) < QUEUED_OBJECTS
            if room and len(text := json.dumps(workload).encode()) <= QUEUED_BYTES:
                line[key] = text  # a tenth of the memory that the parsed object takes
            else:
                line[key] = None if workload is not None else line.get(key, known)
            self._changed.notify()

    def take(self) -> tuple[Key, Object | None]:
        """Waits for the next Workload that nobody works on. `done` must follow."""
        with self._changed:
            while True:
                for line in (self._urgent, self._others):
                    key = next((key for key in line if key not in self._taken), None)
                    if key is not None:
                        self._taken.add(key)
                        workload = line.pop(key)
                        return key, None if workload is None else json.loads(workload)
                self._changed.wait()

    def done(self, key: Key) -> None:
        """Says that the Workload taken is dealt with."""
        with self._changed:
            self._taken.discard(key)
            self._changed.notify()


@dataclass(slots=True)
class Waiting:
    """A Workload that is looked at again although it has not changed."""

    version: str  # its resourceVersion as decided; empty after a failure, so that a pass takes it as well
    row: str = ""
    message: str = ""
    due: float = math.inf  # monotonic, when it is taken again
    cost: float = 0.0  # requests that this takes from WAITING_RATE
    jobset: str = ""  # row 11: not due, but in the lists of pods until they look clear
    pods: int = 0
    delay: float = FAILED_AGAIN[0]  # after the next failure
    asked: float = 0.0  # monotonic, until when the server asked to be left alone: it is due then
    failure: str = ""  # the last one logged


class Gate:
    """Reconciles Workloads: all of them each `resync` seconds, each as it changes, and those that wait."""

    def __init__(self, api: Connection, resync: float) -> None:
        self._api, self._resync = api, resync
        self._queue = WorkQueue()
        self._checks: frozenset[str] = frozenset()
        self._expired = 0  # watches in a row that ended with 410
        self._lock = threading.Lock()  # of the two below
        self._waiting: dict[Key, Waiting] = {}
        # By the TrainJob's UID. Kept after the approval: an older version of the Workload may still be in the queue.
        self._raised: dict[str, Raised] = {}

    # --- which Workloads are taken

    def run_passes(self) -> None:
        """Full passes, and the watch between them, for ever."""
        version = ""
        while True:
            until = time.monotonic() + self._resync
            try:
                self._claim_checks()
                version = self._list()
            except (ApiError, NoAnswer, ValueError) as error:
                log("ERROR", "full pass", error=error)  # the watch goes on from where it was
            version = self._watch(version, until)

    def _claim_checks(self) -> None:
        """Finds the checks that name this controller, and sets Active those that are not; it never sets it False."""
        for _ in range(3):  # Kueue writes its finalizer to a new check at the same time
            PULSE.beat()
            checks = list_checks(self._api)
            try:
                for check in checks:
                    if not _is_true(check, "Active"):
                        update_check_status(self._api, with_active(check, _now()))
                break
            except ApiError as error:
                if error.status not in (404, 409):
                    raise
        self._checks = frozenset(check["metadata"]["name"] for check in checks)

    def _list(self) -> str:
        """Takes every Workload. Returns the version to watch from."""
        with self._lock:
            gone = set(self._waiting)
        version = ""
        for workloads, of_the_list in list_workloads(self._api):
            PULSE.beat()
            version = of_the_list
            for workload in workloads:
                gone.discard(key_of(workload))
                self._take(workload, urgent=False)
        for key in gone:
            self._settle(key)
        return version

    def _watch(self, version: str, until: float) -> str:
        """Takes Workloads as they change, until the time is over. Returns the version reached; empty: too old."""
        delay = FAILED_AGAIN[0]
        while time.monotonic() < until:
            PULSE.beat()
            asked = 0.0
            try:
                for event in watch_workloads(self._api, version, until):
                    PULSE.beat()
                    delay, self._expired = FAILED_AGAIN[0], 0
                    workload = event.get("object") or {}
                    version = _at(workload, "metadata", "resourceVersion") or version
                    if event.get("type") in ("ADDED", "MODIFIED"):
                        self._take(workload, urgent=True)
            except ApiError as error:
                log("ERROR", "watch", error=error)
                asked = _asked(error)
                if error.status == 410:
                    time.sleep(self._expired and min(0.1 * 2**self._expired, FAILED_AGAIN[1]))
                    self._expired = min(self._expired + 1, 10)  # a power of it must stay a float
                    return ""
            except NoAnswer as error:
                log("ERROR", "watch", error=error)
            pause = max(delay * random.uniform(0.5, 1.5), asked)
            time.sleep(max(0.0, min(pause, until - time.monotonic())))
            delay = min(2 * delay, FAILED_AGAIN[1])
        return version

    def _take(self, workload: Object, *, urgent: bool) -> None:
        """Queues a Workload, unless it needs nothing, or waits in this very version already."""
        key = key_of(workload)
        if decide(Facts(workload, self._checks)).action is Action.NOTHING:
            self._settle(key)
            return
        with self._lock:
            waiting = self._waiting.get(key)
        if waiting is None or (waiting.version != version_of(workload) and time.monotonic() >= waiting.asked):
            self._queue.put(key, workload, urgent=urgent)

    def run_rechecks(self) -> None:
        """Looks at the Workloads that wait, for ever, with at most WAITING_RATE requests a second."""
        batches: list[list[Key]] = []
        listed = filled = time.monotonic()
        tokens = 0.0
        while True:
            time.sleep(TICK)
            PULSE.beat()
            now = time.monotonic()
            tokens, filled = min(tokens + (now - filled) * WAITING_RATE, WAITING_RATE * TICK * 2), now
            if not batches and now >= listed + LIST_AGAIN:
                batches, listed = self._batches(), now
            due = self._due(now)
            for key, cost in [entry for entry in due if not entry[1]]:
                self._take_again(key)
                due.remove((key, cost))
            while tokens > 0 and (due or batches):  # by turns: neither kind starves the other
                PULSE.beat()
                if batches:
                    tokens -= 1
                    if asked := self._list_pods_of(batches.pop()):
                        batches, listed = [], now + asked
                if due:
                    key, cost = due.pop()
                    tokens -= cost
                    self._take_again(key)

    def _take_again(self, key: Key) -> None:
        with self._lock:
            if key in self._waiting:
                self._waiting[key].due = math.inf
        self._queue.put(key, urgent=False)

    def _due(self, now: float) -> list[tuple[Key, float]]:
        """What is due, with its cost; what has been due longest comes last."""
        with self._lock:
            due = [(-waiting.due, key, waiting.cost) for key, waiting in self._waiting.items() if waiting.due <= now]
        return [(key, cost) for _, key, cost in sorted(due)]

    def _batches(self) -> list[list[Key]]:
        """The Workloads of row 11, in lists of at most JOBS_PER_LIST jobs and, as last seen, PODS_PER_LIST pods."""
        batches: list[list[Key]] = []
        room = 0
        with self._lock:
            for key, waiting in self._waiting.items():
                if waiting.jobset:
                    if not batches or room < waiting.pods or len(batches[-1]) == JOBS_PER_LIST:
                        batches.append([])
                        room = PODS_PER_LIST
                    batches[-1].append(key)
                    room -= waiting.pods
        return batches

    def _list_pods_of(self, keys: list[Key]) -> float:
        """Takes those Workloads whose pods look gone; makes due those of which fewer or other pods remain.

        Returns for how many seconds the server asks to be left alone.
        """
        with self._lock:
            waiting = {key: w for key in keys if (w := self._waiting.get(key)) and w.jobset}
        try:
            pods = list_pods_cached(self._api, (w.jobset for w in waiting.values())) if waiting else []
        except (ApiError, NoAnswer) as error:
            log("ERROR", "list of pods", error=error)
            return _asked(error)
        remaining: dict[Key, list[Object]] = collections.defaultdict(list)
        for pod in filter(remains, pods):
            metadata = pod["metadata"]
            remaining[metadata["namespace"], metadata["labels"][JOBSET_NAME]].append(pod)
        for key, entry in waiting.items():
            left = remaining.get((key[0], entry.jobset))
            if not left:
                self._queue.put(key, urgent=True)
            elif waiting_for(left) != entry.message:
                with self._lock:
                    entry.due, entry.cost = min(entry.due, time.monotonic()), 4.0
        return 0.0

    # --- what is done with one

    def run_worker(self) -> None:
        """Reconciles Workloads from the queue, for ever, whatever any of them is like."""
        while True:
            key, workload = self._queue.take()
            try:
                self._reconcile(key, workload)
            except Exception as error:  # noqa: BLE001 - an outermost loop: one bad object never stops the others
                self._failed(key, error)
            finally:
                PULSE.rest()
                self._queue.done(key)

    def _reconcile(self, key: Key, workload: Object | None) -> None:
        PULSE.beat()
        workload = workload or read_workload(self._api, key)
        if workload is None:
            self._settle(key)
            return
        facts = Facts(workload, self._checks)
        try:
            while (decision := decide(facts)).action is Action.READ:
                PULSE.beat()
                facts = self._read(facts, decision.fact)
            if decision.action is Action.RAISE:
                self._raise(facts, decision)
        except ApiError as error:
            if decision.row != "4":
                self._tell_refusal(key, workload, error)
            raise
        match decision.action:
            case Action.NOTHING:
                self._settle(key)
            case Action.RAISE | Action.APPROVE:
                self._write_checks(workload, "Ready", decision.message)
                log("INFO", "approved", workload="/".join(key), reason=decision.message)
                self._settle(key)
            case Action.REJECT:
                self._write_checks(workload, "Rejected", decision.message)
                log("ERROR", "rejected", workload="/".join(key), reason=decision.message)
                self._settle(key)
            case _:
                self._wait(key, self._write_checks(workload, "Pending", decision.message), decision, facts)

    def _read(self, facts: Facts, fact: str) -> Facts:
        namespace, _ = key_of(facts.workload)
        if fact == "trainjob":
            trainjob = read_trainjob(self._api, namespace, str(_controller_owner(facts.workload).get("name")))
            with self._lock:
                raised = self._raised.get(str(_at(trainjob, "metadata", "uid")))
            return replace(facts, trainjob=trainjob, raised=raised)
        _, name = key_of(_read_fact(facts.trainjob))
        if fact == "jobset":
            return replace(facts, jobset=read_jobset(self._api, namespace, name))
        return replace(facts, pods=list_pods(self._api, namespace, name))

    def _raise(self, facts: Facts, decision: Decision) -> None:
        """Raises the count on the TrainJob as read, and remembers it: the approval that follows may meet a conflict."""
        written = update_trainjob(self._api, raised_counts(_read_fact(facts.trainjob)))
        metadata = written["metadata"]
        with self._lock:
            while len(self._raised) >= REMEMBERED_RAISES:  # forgotten, one is made once more: a number is skipped
                del self._raised[next(iter(self._raised))]
            self._raised[metadata["uid"]] = Raised(metadata["generation"], decision.admission)
        log("INFO", "raised the admission count", trainjob="/".join(key_of(written)), admission=decision.admission)

    def _tell_refusal(self, key: Key, workload: Object, error: ApiError) -> None:
        """Says on the checks why it cannot go on. From the second time on: the first may pass by itself."""
        with self._lock:
            before = self._waiting.get(key)
        if error.status != 409 and before is not None and before.failure == str(error):
            self._write_checks(workload, "Pending", f"cannot go on: {error}"[:MESSAGE_LIMIT])

    def _write_checks(self, workload: Object, state: str, message: str) -> Object:
        """Writes our pending checks, when that changes them, on the Workload decided on; returns it as it is then."""
        changed = with_check_state(workload, self._checks, state, message, _now())
        return workload if changed is None else update_workload_status(self._api, changed)

    # --- what is remembered

    def _settle(self, key: Key) -> None:
        """Forgets a Workload that needs nothing more."""
        with self._lock:
            self._waiting.pop(key, None)

    def _wait(self, key: Key, workload: Object, decision: Decision, facts: Facts) -> None:
        """Remembers a Workload that waits, and logs the reason when it is another than before."""
        now, waiting = time.monotonic(), Waiting(version_of(workload), decision.row, decision.message)
        with self._lock:
            before = self._waiting.get(key)
            self._waiting[key] = waiting
            if decision.action is not Action.WAIT:
                waiting.due, waiting.cost = now + LEFT_AGAIN, 2.0
            elif decision.row == "10" and (before is None or before.row != "10"):
                waiting.due = now + STILL_RUNS_AGAIN
            elif decision.row == "10":
                waiting.due, waiting.cost = now + LIST_AGAIN, 3.0
            else:
                waiting.pods = len(list(filter(remains, facts.pods))) if isinstance(facts.pods, list) else 0
                if waiting.pods > PODS_PER_LIST:
                    waiting.due, waiting.cost = now + LEFT_AGAIN, 4.0 + waiting.pods / Connection.PAGE
                else:
                    _, waiting.jobset = key_of(_read_fact(facts.trainjob))
        if before is None or before.message != decision.message:
            level = "ERROR" if decision.action is Action.COMPLAIN else "INFO"
            log(level, "waiting", workload="/".join(key), reason=decision.message)

    def _failed(self, key: Key, error: Exception) -> None:
        """Logs a failure once, and has the Workload taken again, unless only a change or the next pass can help."""
        conflict = isinstance(error, ApiError) and error.status == 409
        text = str(error) if isinstance(error, ApiError | NoAnswer) else repr(error)
        with self._lock:
            waiting = self._waiting.setdefault(key, Waiting(""))
            again = not (isinstance(error, ApiError) and error.status in (404, 422))
            waiting.version, waiting.jobset, waiting.cost = "", "", 0.0
            now, asked = time.monotonic(), _asked(error)
            waiting.due, waiting.asked = now + max(waiting.delay, asked) if again else math.inf, now + asked
            waiting.delay = min(2 * waiting.delay, FAILED_AGAIN[1])
            repeated, waiting.failure = text == waiting.failure, text
        if conflict:
            log("INFO", "conflict", workload="/".join(key), error=text)
        elif not repeated:
            log("ERROR", "reconcile", workload="/".join(key), error=text)


def _asked(error: Exception) -> float:
    """For how many seconds the server asks to be left alone; at most a minute."""
    return min(error.retry_after, STANDSTILL / 2) if isinstance(error, ApiError) else 0.0


def _read_fact(fact: object) -> Object:
    """A fact on which a decision rests, and which therefore has been read and is there."""
    if not isinstance(fact, dict):
        raise TypeError(f"{fact!r} is no object")
    return fact


def with_active(check: Object, now: str) -> Object:
    """A copy of an AdmissionCheck whose condition Active is True."""
    status = _at(check, "status") or {}
    condition = {
        "type": "Active",
        "status": "True",
        "reason": "ControllerStarted",
        "message": "the admission controller leads",
        "lastTransitionTime": now,
        "observedGeneration": _at(check, "metadata", "generation") or 0,
    }
    others = [c for c in _objects(_at(status, "conditions")) if c.get("type") != "Active"]
    return {**check, "status": {**status, "conditions": [*others, condition]}}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# ======================================================================================================================
# Log and command line
# ======================================================================================================================


def log(level: str, message: str, **attributes: object) -> None:
    """Writes one line to stderr, as Go's slog text handler has it. In one system call, so that lines never mix.

    A line that nobody takes within a second is lost (`run` has stderr not block): a reader that hangs stops nobody.
    """
    time_ = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    fields = {"time": time_, "level": level, "msg": message, **attributes}
    line = " ".join(f"{name}={_quoted(str(value))}" for name, value in fields.items())
    text = line.encode(errors="replace")[: select.PIPE_BUF - 1] + b"\n"  # so much a pipe takes whole or not at all
    with contextlib.suppress(OSError):  # nobody reads it any more
        try:
            os.write(2, text)
        except BlockingIOError:
            select.select((), (2,), (), 1.0)
            os.write(2, text)


def _quoted(text: str) -> str:
    plain = text.isprintable() and not re.search(r'[\s="]', text)
    return text if text and plain else json.dumps(text, ensure_ascii=not text.isprintable())


@dataclass(frozen=True, slots=True)
class Options:
    """The command line. Empty strings: not given."""

    in_cluster: bool = False
    kubeconfig: str = ""
    context: str = ""
    lease_namespace: str = "dispatch-system"
    lease_name: str = "dispatch-admission"
    resync: float = 30.0  # seconds
    version: bool = False


USAGE = """\
Usage of dispatch-admission:
  -context string
        a context of the kubeconfig file (default: the file's current one)
  -in-cluster
        use the pod's service account
  -kubeconfig string
        a kubeconfig file (default: $KUBECONFIG, else ~/.kube/config)
  -lease-name string
        the Lease's name (default "dispatch-admission")
  -lease-namespace string
        the Lease's namespace (default "dispatch-system")
  -resync duration
        time between full passes (default 30s)
  -version
        print version and exit
"""


def parse(arguments: list[str]) -> Options | None:
    """Reads the command line as Go's flag package does. None: help was asked for. Raises UsageError."""
    given: dict[str, Any] = {}
    rest = collections.deque(arguments)
    while rest:
        argument = rest.popleft()
        match = re.fullmatch(r"--?([^-=][^=]*)(?:=(.*))?", argument, re.DOTALL)
        if match is None:
            if argument == "--" and not rest:
                break
            raise UsageError(f"unexpected argument {argument!r}: everything is said with flags")
        name, value = match[1], match[2]
        attribute = name.replace("-", "_")
        if name in ("h", "help"):
            return None
        if name not in ("context", "in-cluster", "kubeconfig", "lease-name", "lease-namespace", "resync", "version"):
            raise UsageError(f"flag provided but not defined: -{name}")
        if isinstance(getattr(_DEFAULTS, attribute), bool):
            given[attribute] = _boolean(name, "true" if value is None else value)
            continue
        if value is None:
            if not rest:
                raise UsageError(f"flag needs an argument: -{name}")
            value = rest.popleft()
        given[attribute] = _duration(name, value) if name == "resync" else value
    options = replace(_DEFAULTS, **given)
    if options.in_cluster and (options.kubeconfig or options.context):
        raise UsageError("-in-cluster cannot be used with -kubeconfig or -context")
    for flag, value in (("lease-name", options.lease_name), ("lease-namespace", options.lease_namespace)):
        try:
            segment(value)
        except ValueError as error:
            raise UsageError(f"invalid value {value!r} for flag -{flag}: not the name of an object") from error
    return options


_DEFAULTS = Options()


def _boolean(name: str, value: str) -> bool:
    if value in ("1", "t", "T", "true", "TRUE", "True"):
        return True
    if value in ("0", "f", "F", "false", "FALSE", "False"):
        return False
    raise UsageError(f"invalid boolean value {value!r} for -{name}: parse error")


def _duration(name: str, value: str) -> float:
    """Go's time.ParseDuration, in seconds; must be positive."""
    units = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
    one = r"([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)"
    if not re.fullmatch(rf"[-+]?(0|({one})+)", value):
        raise UsageError(f"invalid value {value!r} for flag -{name}: not a duration such as 10s, 1m30s or 500ms")
    seconds = sum(float(number) * units[unit] for number, unit in re.findall(one, value))
    if value.startswith("-") or not seconds:
        raise UsageError(f"invalid value {value!r} for flag -{name}: must be positive")
    if seconds >= 2**63 / 1e9:
        raise UsageError(f"invalid value {value!r} for flag -{name}: must be less than 292 years")
    return seconds


def own_identity() -> str:
    """The holder's name in the Lease. Raises UsageError."""
    identity = os.environ.get("POD_NAME", socket.gethostname()).strip()
    if not identity:
        raise UsageError("the identity is empty: set $POD_NAME, or give the host a name")
    return identity


def main(arguments: list[str] | None = None, build: str = "") -> int:
    """Runs the controller until it is stopped (0) or has lost the Lease (1); 2 after a usage error.

    `build`: what `-version` says besides. The zipapp tells its commit and its packages.
    """
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
        if options is None:
            print(USAGE, end="")
            return 0
        if options.version:
            print(f"{PROGRAM} {VERSION}{build}")
            return 0
        identity = own_identity()
        api = connect(options)
    except UsageError as error:
        print(f"{PROGRAM}: {error}\n{USAGE}", end="", file=sys.stderr)
        return 2
    except StartError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    events: SimpleQueue[str] = SimpleQueue()
    elector = Elector(api, options.lease_namespace, options.lease_name, identity, events)
    return run(Gate(api, options.resync), elector, events, identity)


def run(gate: Gate, elector: Elector, events: SimpleQueue[str], identity: str) -> int:
    """Leads when the Lease is had, until a signal (0), or until the Lease or one of the loops is at its end (1)."""

    def start(loop: Callable[[], None]) -> None:
        def body() -> None:
            try:
                loop()
            except Exception as error:  # noqa: BLE001 - an outermost loop: whatever ends it ends the process
                log("ERROR", "ended", loop=loop.__name__, error=repr(error))
            events.put(ENDED)

        threading.Thread(target=body, daemon=True, name=loop.__name__).start()

    with contextlib.suppress(OSError):
        os.set_blocking(2, os.isatty(2))  # a terminal is the shell's, too
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: events.put(STOP))
    start(elector.run)
    leading, event = False, ""
    while event not in (STOP, LOST, ENDED):
        if thread := PULSE.stands_still():
            log("ERROR", "ended", loop=thread, error=f"it stands still for {STANDSTILL} s")
            faulthandler.dump_traceback(file=2)
            break
        left = elector.leading_until - time.monotonic() if leading else math.inf
        try:
            event = events.get(timeout=min(max(left, 0.0), STANDSTILL / 30))
        except Empty:
            event = LOST if left <= 0 else ""
        if event == LEADING:
            leading = True
            log("INFO", "leading", identity=identity)
            for loop in (gate.run_passes, gate.run_rechecks, *[gate.run_worker] * WORKERS):
                start(loop)
    if leading:
        log("INFO", "stopped leading", identity=identity)
    if event == STOP:
        return 0
    with contextlib.suppress(OSError):
        os.write(2, f"{PROGRAM}: lost the leader-election Lease\n".encode())
    return 1


def _credentials_advice(options: Options) -> str:
    if options.in_cluster:
        return "run it in a pod with a service account token, or use -kubeconfig"
    return "name a kubeconfig file with -kubeconfig, and a context of it with -context, or use -in-cluster in a pod"


if __name__ == "__main__":
    sys.exit(main())
