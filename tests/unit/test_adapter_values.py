"""Handles, settings, errors and names: what is accepted, what is refused, and with which words."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import pytest
import ulid
from hypothesis import given
from hypothesis import strategies as st

import adapter
from adapter import Conflict, DispatchError, Handle, Invalid, Runtime, Settings, State

JOB = "01arz3ndektsv4rrffq69g5fav"
EXAMPLES = pathlib.Path("examples")


# --- errors and names


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Unsupported", "unsupported"),
        ("ReadOnly", "read-only"),
        ("Unauthorized", "unauthorized"),
        ("Unreachable", "unreachable"),
        ("Invalid", "invalid"),
        ("NotFound", "not found"),
        ("Conflict", "conflict"),
        ("StaleHold", "stale hold"),
    ],
)
def test_an_errors_text_starts_with_its_kind(name: str, kind: str) -> None:
    assert str(getattr(adapter, name)("TrainJob a/b: gone")) == f"dispatch: {kind}: TrainJob a/b: gone"


def test_every_error_is_a_dispatch_error_and_a_stale_hold_is_a_conflict() -> None:
    classes = [getattr(adapter, n) for n in ("Unsupported", "ReadOnly", "Unauthorized", "Unreachable", "Invalid")]
    assert all(issubclass(c, DispatchError) for c in [*classes, adapter.NotFound, Conflict])
    assert issubclass(adapter.StaleHold, Conflict)


def test_an_unknown_state_is_invalid_and_the_text_names_the_known_ones() -> None:
    with pytest.raises(Invalid, match=r"^dispatch: invalid: 'lost' is no state: known are queued, gated, held, "):
        State("lost")


def test_the_known_names_are_those_of_the_design() -> None:
    assert " ".join(State) == "queued gated held starting running stopping succeeded failed stopped"
    assert " ".join(adapter.Cause) == (
        "program out-of-memory timeout preempted evicted node-lost no-capacity image config rejected queue-stopped "
        "stopped unknown"
    )
    assert [s for s in State if s.final] == [State.SUCCEEDED, State.FAILED, State.STOPPED]


def test_a_new_job_is_a_lowercase_ulid() -> None:
    job = adapter.new_job()
    assert re.fullmatch("[0-7][0-9a-hjkmnp-tv-z]{25}", job)
    assert ulid.ULID.from_str(job)


# --- handles

HANDLES = st.builds(
    lambda namespace, job, n, uid: Handle(namespace, f"dj-{job}-s{n}", str(uid)),
    st.from_regex(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True),
    st.integers(0, 2**128 - 1).map(lambda n: str(ulid.ULID.from_int(n)).lower()),
    st.integers(1, 999_999),
    st.uuids(),
)


@given(HANDLES)
def test_a_handle_survives_its_text(handle: Handle) -> None:
    assert Handle.parse(str(handle)) == handle


@given(HANDLES)
def test_a_handle_survives_json(handle: Handle) -> None:
    assert Handle.from_json(json.loads(json.dumps(handle.to_json()))) == handle


def test_a_handle_tells_job_and_submission() -> None:
    handle = Handle.parse(f"team-a/dj-{JOB}-s12@0f3c")
    assert (handle.job, handle.submission) == (JOB, 12)


@pytest.mark.parametrize(
    "text",
    [
        *("", "team-a", f"team-a/dj-{JOB}-s1", f"dj-{JOB}-s1@u", f"team-a/dj-{JOB}-s0@u", f"team-a/dj-{JOB}-s01@u"),
        *(f"team-a/dj-{JOB}-s1000000@u", f"team-a/dj-{JOB.upper()}-s1@u", f"../dj-{JOB}-s1@u", f"team-a/dj-{JOB}-s1@"),
        *(f"team-a/dj-{JOB}-s1@u\n", f"team-a/job-{JOB}-s1@u", f"team-a/dj-8{JOB[1:]}-s1@u", f"a/b/dj-{JOB}-s1@u"),
    ],
)
def test_what_is_no_handle_is_invalid(text: str) -> None:
    with pytest.raises(Invalid, match=r"^dispatch: invalid: handle: "):
        Handle.parse(text)


# --- settings


MINIMAL: dict[str, Any] = {"namespace": "team-a", "probeRuntime": {"name": "torch-safe"}}


def test_the_example_settings_are_kueue_mode() -> None:
    settings = Settings.load(EXAMPLES / "config.json")
    assert settings.kueue == adapter.Kueue("lq", "dispatch-admission", "dispatch-system/dispatch-admission")
    assert settings.probe_runtime == Runtime("torch-safe", "ClusterTrainingRuntime")


def test_a_file_and_a_dict_are_the_same_settings() -> None:
    file = EXAMPLES / "config.json"
    assert Settings.load(file) == Settings.load(str(file)) == Settings.load(json.loads(file.read_text()))


def test_without_a_kueue_section_it_is_plain_mode() -> None:
    assert Settings.load(MINIMAL) == Settings("team-a", Runtime("torch-safe"), None, None, 30.0, None)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"namespace": None}, "namespace: None is not the name of a namespace"),
        ({"namespace": ""}, "namespace: '' is not"),
        ({"namespace": "Team"}, "namespace: 'Team' is not"),
        ({"namespace": "a/b"}, "namespace: 'a/b' is not"),
        ({"namespace": "a\n"}, "namespace: 'a\\n' is not"),
        ({"namespace": 7}, "namespace: 7 is not"),
        ({"namespaces": "a"}, "settings: unknown 'namespaces': known are namespace, probeRuntime, kubeconfig"),
        ({"probeRuntime": "torch"}, "probeRuntime: runtime: 'torch' is not an object"),
        ({"probeRuntime": {}}, "probeRuntime: runtime: name is missing"),
        ({"probeRuntime": {"name": "x", "kind": "Runtime"}}, "probeRuntime: runtime: kind: 'Runtime' is not one of"),
        (
            {"probeRuntime": {"name": "x", "kind": ["Runtime"]}},
            "probeRuntime: runtime: kind: ['Runtime'] is not one of",
        ),
        ({"probeRuntime": {"name": "x", "more": 1}}, "probeRuntime: runtime: unknown 'more'"),
        ({"kubeconfig": ""}, "kubeconfig: '' is not a text"),
        ({"context": 1}, "context: 1 is not a text"),
        ({"probeTimeout": "30"}, "probeTimeout: '30' is not a number"),
        ({"probeTimeout": 0}, "probeTimeout: 0 is not"),
        ({"probeTimeout": True}, "probeTimeout: True is not"),
        ({"probeTimeout": float("nan")}, "probeTimeout: nan is not"),
        ({"kueue": None}, "kueue: None is not an object"),
        ({"kueue": {}}, "kueue: localQueue is missing"),
        ({"kueue": {"localQueue": ""}}, "kueue.localQueue: '' is not the name"),
        ({"kueue": {"localQueue": "q" * 64}}, "kueue.localQueue: "),
        ({"kueue": {"localQueue": "lq", "admissionCheck": ""}}, "kueue.admissionCheck: '' is not the name"),
        ({"kueue": {"localQueue": "lq", "admissionCheck": None}}, "kueue.admissionCheck: None is not the name"),
        (
            {"kueue": {"localQueue": "lq", "admissionLease": "lease"}},
            "kueue.admissionLease: 'lease' is not <namespace>",
        ),
        ({"kueue": {"localQueue": "lq", "admissionLease": "a/b/c"}}, "kueue.admissionLease: 'a/b/c' is not"),
        ({"kueue": {"localQueue": "lq", "queue": "lq"}}, "kueue: unknown 'queue': known are localQueue"),
    ],
)
def test_wrong_settings_are_invalid_and_name_the_key(change: dict[str, Any], text: str) -> None:
    with pytest.raises(Invalid) as error:
        Settings.load({**MINIMAL, **change})
    assert str(error.value).startswith(f"dispatch: invalid: kubeflow settings: {text}")


@pytest.mark.parametrize("missing", ["namespace", "probeRuntime"])
def test_a_missing_setting_is_invalid(missing: str) -> None:
    given_ = {name: value for name, value in MINIMAL.items() if name != missing}
    with pytest.raises(Invalid, match=f"^dispatch: invalid: kubeflow settings: settings: {missing} is missing"):
        Settings.load(given_)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"namespace": "a"', "\udcff"])
def test_a_file_without_settings_is_invalid(tmp_path: pathlib.Path, content: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(Invalid, match=r"^dispatch: invalid: kubeflow settings: "):
        adapter.connect(file)


def test_a_missing_file_is_invalid_and_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(Invalid, match=r"^dispatch: invalid: kubeflow settings: .*nowhere\.json: "):
        adapter.connect(tmp_path / "nowhere.json")
