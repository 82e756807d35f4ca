"""Job specs: what is accepted, what is refused, how they are written and told apart."""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
from typing import Any

import pytest
import ulid
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import adapter
from adapter import Handle, Invalid, JobSpec, Resources, Runtime, Settings

JOB = "01arz3ndektsv4rrffq69g5fav"
EXAMPLE: dict[str, Any] = json.loads(pathlib.Path("examples/job.json").read_text())

# --- any spec that is accepted (the API server is asked about the same ones)

_REFUSED = "\0\ufeff\ufffe\uffff" + "".join(map(chr, range(0x7F, 0xA0)))
_TEXT = st.text(st.characters(codec="utf-8", exclude_characters=_REFUSED), max_size=30)
_LABEL = st.text("abyz0189-", min_size=1, max_size=10).map(lambda text: text.strip("-") or "x")
_SUBDOMAIN = _LABEL | st.builds("{}.{}".format, _LABEL, _LABEL)
_LABEL_NAME = st.text("abzABZ0189-_.", min_size=1, max_size=63).map(lambda text: text.strip("-_.") or "X")
_LABEL_KEY = _LABEL_NAME | st.builds("{}/{}".format, _SUBDOMAIN, _LABEL_NAME)
_LABELS = st.dictionaries(_LABEL_KEY, st.just("") | _LABEL_NAME, max_size=3)
_ENV_NAME = st.text("abzABZ0189-_.", min_size=1, max_size=20)
_QUANTITY = st.builds("{}{}".format, st.integers(0, 4000), st.sampled_from(["", "k", "M", "Gi", "Ki", "Mi"])) | (
    st.sampled_from(["0", "0.5Gi", "1.5k", "1.250M", "01", "000.5Ki", "1E", "2.5Ti", "9007199254740991"])
)
_CPU = st.sampled_from(["1", "0", "250m", "1.5", "0.001", "2", "1k", "0.1", "1000m", "64"])


@st.composite
def _resources(draw: st.DrawFn) -> Resources:
    shared = st.dictionaries(st.sampled_from(["memory", "ephemeral-storage"]), _QUANTITY)
    requests = {**draw(shared), **draw(st.dictionaries(st.just("cpu"), _CPU))}
    limits = {**draw(shared), **draw(st.dictionaries(st.just("cpu"), _CPU))}
    own = draw(st.dictionaries(st.builds("{}/{}".format, _SUBDOMAIN, _LABEL_NAME), _QUANTITY, max_size=2))
    return Resources({**requests, **(own if draw(st.booleans()) else {})}, {**limits, **own})


def _spec(**fields: Any) -> JobSpec | None:
    try:
        return JobSpec(**fields)
    except Invalid:  # a request above its limit, a reserved name: what is left is what is accepted
        return None


PATIENT = settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # a busy machine is no failure
_MAYBE: st.SearchStrategy[JobSpec | None] = st.builds(
    _spec,
    job=st.integers(0, 2**128 - 1).map(lambda n: str(ulid.ULID.from_int(n))),
    runtime=st.builds(Runtime, _SUBDOMAIN, st.sampled_from([*adapter.RUNTIME_KINDS])),
    submission=st.just(1) | st.integers(1, 999_999),
    image=st.none() | st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40),
    command=st.lists(_TEXT, max_size=4),
    args=st.lists(_TEXT, max_size=4),
    env=st.dictionaries(_ENV_NAME, _TEXT, max_size=4),
    nodes=st.none() | st.integers(1, 100_000),
    procs_per_node=st.none() | st.integers(1, 2**31 - 1),
    resources=_resources(),
    timeout=st.none() | st.integers(1, 2**31 - 1),
    priority=st.none() | _SUBDOMAIN,
    node_selector=_LABELS,
    labels=_LABELS,
)
SPECS: st.SearchStrategy[JobSpec] = _MAYBE.filter(bool)  # type: ignore[assignment]


# --- how they are written


def test_the_example_spec_is_read_and_written_as_it_is() -> None:
    assert JobSpec.from_json(EXAMPLE).to_json() == EXAMPLE


@PATIENT
@given(SPECS)
def test_a_spec_survives_json(spec: JobSpec) -> None:
    assert JobSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


@PATIENT
@given(SPECS)
def test_a_specs_json_leaves_out_what_is_at_its_default(spec: JobSpec) -> None:
    assert all(value not in (None, [], {}) for value in spec.to_json().values())
    assert ("submission" in spec.to_json()) == (spec.submission != 1)


def test_a_spec_takes_a_ulid_in_either_case() -> None:
    assert JobSpec(JOB.upper(), Runtime("r")) == JobSpec(JOB, Runtime("r"))


def test_a_spec_does_not_change_when_the_callers_lists_and_dicts_do() -> None:
    command, env, requests = ["a"], {"A": "1"}, {"cpu": "1"}
    spec = JobSpec(JOB, Runtime("r"), command=command, env=env, resources=Resources(requests))
    command.append("b")
    env["B"] = requests["memory"] = "2"
    assert (spec.command, spec.env, spec.resources.requests) == (("a",), {"A": "1"}, {"cpu": "1"})


def test_the_hash_is_that_of_the_canonical_json() -> None:
    spec = JobSpec(JOB, Runtime("r"), env={"B": "2", "A": "ü"}, nodes=2)
    text = '{"env":{"A":"\\u00fc","B":"2"},"job":"01arz3ndektsv4rrffq69g5fav","nodes":2,"runtime":{"name":"r"}}'
    assert adapter.canonical(spec) == text
    assert re.fullmatch("sha256:[0-9a-f]{64}", adapter.spec_hash(spec))


@PATIENT
@given(SPECS, SPECS)
def test_the_hash_tells_specs_apart(one: JobSpec, other: JobSpec) -> None:
    assert (adapter.spec_hash(one) == adapter.spec_hash(other)) == (one == other)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"job": "x"}, "job: 'x' is not a ULID: new_job() makes one"),
    ({"job": JOB + "0"}, "job: "),
    ({"job": 7}, "job: 7 is not a ULID"),
    ({"job": "12345678-1234-1234-1234-123456789012"}, "job: "),
    ({"submission": 0}, "submission: 0 is not a whole number from 1 to 999,999"),
    ({"submission": 1_000_000}, "submission: 1000000 is not"),
    ({"submission": True}, "submission: True is not"),
    ({"submission": "1"}, "submission: '1' is not"),
    ({"image": ""}, "image: '' is not"),
    ({"image": " x"}, "image: ' x' is not"),
    ({"image": "i" * 501}, "image: "),
    ({"command": "python train.py"}, "command: 'python train.py' is not a list"),
    ({"command": ["a"] * 129}, "command: "),
    ({"command": ["a\0b"]}, "command: "),
    ({"command": [1]}, "command: 1 is not a string"),
    ({"args": ["\ud800"]}, "args: "),
    *(({"args": [f"a{character}b"]}, "args: ") for character in "\x7f\x80\x85\x9f\ufeff\ufffe\uffff"),
    ({"env": {"DISPATCH_EPOCH": "1"}}, "env: DISPATCH_EPOCH is reserved: dispatch sets it"),
    ({"env": {"DISPATCH_": "1"}}, "env: DISPATCH_ is reserved"),
    ({"env": {"PET_NNODES": "1"}}, "env: PET_NNODES is reserved: Trainer sets it"),
    ({"env": {"OMPI_MCA_plm_rsh_args": "1"}}, "env: OMPI_MCA_plm_rsh_args is reserved"),
    ({"env": {"1A": "1"}}, "env: '1A' is not a variable's name"),
    ({"env": {"": "1"}}, "env: '' is not"),
    ({"env": {"..A": "1"}}, "env: '..A' is not"),
    ({"env": {"A=B": "1"}}, "env: 'A=B' is not"),
    ({"env": {"A\n": "1"}}, "env: 'A\\n' is not"),
    ({"env": {"A": 1}}, "env: A: 1 is not a string"),
    ({"env": {f"A{i}": "" for i in range(124)}}, "env: 124 variables are more than 123"),
    ({"env": ["A=1"]}, "env: ['A=1'] is not an object"),
    ({"nodes": 0}, "nodes: 0 is not a whole number from 1 to 100,000"),
    ({"nodes": 100_001}, "nodes: 100001 is not"),
    ({"nodes": 1.0}, "nodes: 1.0 is not"),
    ({"procsPerNode": 2**31}, "procsPerNode: "),
    ({"timeout": 0}, "timeout: 0 is not"),
    ({"timeout": 2**31}, "timeout: "),
    ({"resources": {"requests": {"cpu": "two"}}}, "resources: requests: cpu: 'two' is not a quantity"),
    ({"resources": {"requests": {"cpu": "-1"}}}, "resources: requests: cpu: '-1' is not"),
    ({"resources": {"requests": {"cpu": "1e3"}}}, "resources: requests: cpu: '1e3' is not"),
    ({"resources": {"requests": {"cpu": 2}}}, "resources: requests: cpu: 2 is not"),
    ({"resources": {"requests": {"cpu": "0.5m"}}}, "resources: requests: cpu: 0.5m is finer than 1m"),
    ({"resources": {"requests": {"memory": "100m"}}}, "resources: requests: memory: 100m is finer than 1"),
    ({"resources": {"requests": {"memory": "9Pi"}}}, "resources: requests: memory: 9Pi is too large"),
    ({"resources": {"requests": {"gpu": "1"}}}, "resources: 'gpu' is not cpu, memory"),
    ({"resources": {"requests": {"hugepages-2Mi": "2Mi"}}}, "resources: 'hugepages-2Mi' is not"),
    ({"resources": {"limits": {"kubernetes.io/x": "1"}}}, "resources: 'kubernetes.io/x' is not"),
    ({"resources": {"limits": {"requests.nvidia.com/gpu": "1"}}}, "resources: 'requests.nvidia.com/gpu' is not"),
    (
        {"resources": {"requests": {"nvidia.com/gpu": "1"}}},
        "resources: nvidia.com/gpu is not shared: its limit must be",
    ),
    ({"resources": {"limits": {"nvidia.com/gpu": "1.5"}}}, "resources: limits: nvidia.com/gpu: 1.5 is finer than 1"),
    (
        {"resources": {"requests": {"nvidia.com/gpu": "1"}, "limits": {"nvidia.com/gpu": "2"}}},
        "resources: nvidia.com/gpu is not shared",
    ),
    (
        {"resources": {"requests": {"memory": "1Gi"}, "limits": {"memory": "1G"}}},
        "resources: memory: the request is above the limit",
    ),
    ({"resources": {"claims": []}}, "unknown 'claims': known are requests, limits"),
    ({"priority": ""}, "priority: '' is not the name"),
    ({"priority": "p" * 64}, "priority: "),
    ({"nodeSelector": {"a b": "c"}}, "nodeSelector: 'a b' is not a label's key"),
    ({"nodeSelector": {"a": "c d"}}, "nodeSelector: a: 'c d' is not a label's value"),
    ({"labels": {"a": "x" * 64}}, "labels: a: "),
    ({"labels": {"a": None}}, "labels: a: None is not a label's value"),
    ({"labels": {"kueue.x-k8s.io/queue-name": "q"}}, "labels: kueue.x-k8s.io/queue-name is reserved"),
    ({"labels": {"dispatch.phpboyscout.uk/probe": "true"}}, "labels: dispatch.phpboyscout.uk/probe is reserved"),
    ({"labels": {"job-name": "x"}}, "labels: job-name is reserved"),
    ({"runtime": {"name": "A"}}, "runtime: name: 'A' is not the name of an object"),
    ({"runtime": "r"}, "runtime: 'r' is not an object"),
    ({"node": 1}, "unknown 'node': known are job, runtime, submission"),
    ({"args": ["x" * 300_000]}, "300,"),
    ({"args": ["<" * 60_000]}, "360,"),
]


@pytest.mark.parametrize(("change", "text"), BAD, ids=[f"{i}-{text[:30]}" for i, (_, text) in enumerate(BAD)])
def test_what_the_api_server_would_refuse_is_invalid(change: dict[str, Any], text: str) -> None:
    with pytest.raises(Invalid) as error:
        JobSpec.from_json({"job": JOB, "runtime": {"name": "r"}, **change})
    words = str(error.value).removeprefix("dispatch: invalid: ").removeprefix("job spec: ").removeprefix("resources: ")
    assert words.startswith(text.removeprefix("resources: "))


def test_a_spec_without_a_job_or_a_runtime_is_invalid() -> None:
    incomplete: list[Any] = [{"job": JOB}, {"runtime": {"name": "r"}}, [], None]
    for given_ in incomplete:
        with pytest.raises(Invalid, match=r"^dispatch: invalid: job spec: "):
            JobSpec.from_json(given_)


def test_an_object_of_the_wrong_type_is_invalid() -> None:
    changes: list[dict[str, Any]] = [{"runtime": "r"}, {"resources": {"requests": {}}}]
    for change in changes:
        with pytest.raises(Invalid):
            JobSpec(**{"job": JOB, "runtime": Runtime("r"), **change})


GOOD: list[dict[str, Any]] = [
    {"labels": {"app.kubernetes.io/name": "x", "team": ""}},
    {"env": {"_a.b-C": "", ".A": "$(B)"}},
    {"resources": {"limits": {"nvidia.com/gpu": "8"}, "requests": {"nvidia.com/gpu": "8", "cpu": "0.001"}}},
    {"resources": {"requests": {"memory": "0.5Gi"}, "limits": {"memory": "512Mi"}}},
    {"resources": {"requests": {"memory": "1.5k", "ephemeral-storage": "1T"}}},
    {"nodes": 100_000, "procsPerNode": 2**31 - 1, "timeout": 2**31 - 1, "submission": 999_999},
    {"command": ["a"] * 128, "args": ["日本" * 100] * 128},
    {"args": ["\x01\t\r\n\x1b[1m \xa0\u2028\u2029\ufffd\U0001f600\U0010ffff"], "env": {"A": "\x1f: {[\"'"}},
    {"priority": "high", "image": "registry.example:5000/a/b@sha256:0123"},
]


@pytest.mark.parametrize("change", GOOD, ids=range(len(GOOD)))
def test_what_is_plain_is_accepted(change: dict[str, Any]) -> None:
    assert JobSpec.from_json({"job": JOB, "runtime": {"name": "r"}, **change})


_SCALAR = st.none() | st.booleans() | st.integers() | st.text()
_JSON = st.recursive(_SCALAR, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@PATIENT
@given(_JSON)
def test_any_json_is_read_or_invalid_and_never_another_error(value: Any) -> None:
    for read in (JobSpec.from_json, Handle.from_json, Runtime.from_json, Resources.from_json):
        with contextlib.suppress(Invalid):
            read(value)
    with contextlib.suppress(Invalid):
        Settings.load(value if isinstance(value, dict) else {"namespace": value})


@PATIENT
@given(st.dictionaries(st.sampled_from([*EXAMPLE, "labels", "priority", "submission", "nodeSelector"]), _JSON))
def test_any_field_of_a_wrong_type_is_invalid_and_never_another_error(change: dict[str, Any]) -> None:
    with contextlib.suppress(Invalid):
        JobSpec.from_json({**EXAMPLE, **change})
