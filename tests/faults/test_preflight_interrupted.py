"""Preflight meets faults: whatever happens, no object of a probe is left, or the error says which."""

from __future__ import annotations

import json
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

import adapter
from adapter import Conflict, Unreachable
from tests import adapters
from tests.adapters import World
from tests.cluster.api import Object
from tests.faults.proxy import Proxy

PROBE = "dispatch.phpboyscout.uk/probe"
CREATE = r"/trainjobs$"  # a dry run has a query


def preflight(world: World, tmp_path: pathlib.Path) -> subprocess.Popen[str]:
    """The command line, in another process."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(world.settings))
    argv = [sys.executable, "adapter.py", "-c", str(config), "preflight"]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# --- Ctrl-C

MOMENTS = [
    ("POST", r"/selfsubjectaccessreviews"),
    ("POST", r"/trainjobs\?dryRun"),
    ("POST", CREATE),
    ("GET", r"/pods\?"),
    ("PUT", r"/trainjobs/"),
    ("DELETE", r"/trainjobs/"),
]


@pytest.mark.parametrize("acted", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("method", "path"), MOMENTS)
def test_ctrl_c_leaves_no_probe(
    world: World, proxy: Proxy, tmp_path: pathlib.Path, method: str, path: str, acted: bool
) -> None:
    world = world.through(proxy)
    with proxy.stall(method, path, times=1, acted=acted) as rule, preflight(world, tmp_path) as process:
        world.wait(lambda: rule.hits and (not acted or rule.hits[0].server_status), "the request is there")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
        proxy.cut(method, path)
    assert (process.returncode, errors) == (130, "")
    assert world.left() == []
    assert world.pods_created() == 0


def test_a_create_that_arrives_after_ctrl_c_leaves_a_probe_that_the_next_preflight_names(
    plain: World, proxy: Proxy, tmp_path: pathlib.Path
) -> None:
    plain = plain.through(proxy)
    with proxy.stall("POST", CREATE, times=1) as rule, preflight(plain, tmp_path) as process:
        plain.wait(lambda: rule.hits, "the request is there")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
        assert process.returncode == 130
    (probe,) = plain.wait(lambda: plain.namespace.list("TrainJob", labels=PROBE), "it arrives")
    assert adapter.is_gated(probe)
    assert probe["metadata"]["name"] in adapter.connect(plain.settings, read_only=True).leftovers[0]
    assert plain.pods_created() == 0


@pytest.mark.timeout(1800)
def test_ctrl_c_at_any_moment_leaves_no_probe(
    world: World, tmp_path: pathlib.Path, count: Callable[[int, int], int]
) -> None:
    chance, codes = random.Random(6), []
    for _ in range(count(10, 100)):
        with preflight(world, tmp_path) as process:
            time.sleep(chance.uniform(0.5, 4))  # there is nothing to wait for: any moment will do
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=120)
        codes.append(process.returncode)
        assert world.left() == []
    assert set(codes) <= {0, 130, 1, -signal.SIGINT}  # before or after the program itself: Python's own
    assert 130 in codes


# --- errors


@pytest.mark.parametrize(("method", "path"), [("POST", CREATE), ("PUT", r"/trainjobs/"), ("DELETE", r"/trainjobs/")])
def test_a_lost_answer_changes_nothing(world: World, proxy: Proxy, method: str, path: str) -> None:
    world = world.through(proxy)
    with proxy.lose_answer(method, path, times=1) as rule:
        assert adapters.prove(world).observe_only == ""
    assert len(rule.hits) >= 1
    assert len(set(world.created_trainjobs())) == 1


def test_a_create_that_gets_no_answer_leaves_nothing(
    plain: World, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is carried out, and the server fails from then on."""
    adapters.impatient(monkeypatch)
    plain = plain.through(proxy)
    with proxy.lose_answer("POST", CREATE, times=1), proxy.answer(500, "POST", CREATE):
        with pytest.raises(Unreachable) as error:
            adapters.prove(plain)
    assert str(error.value).startswith(f"dispatch: unreachable: preflight probe: TrainJob {plain.namespace.name}/dj-")


def test_a_server_that_fails_in_the_middle_leaves_nothing(
    world: World, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters.impatient(monkeypatch)
    world = world.through(proxy)
    with (
        proxy.answer(500, "GET", r"/pods\?labelSelector=jobset"),
        pytest.raises(Unreachable, match="preflight probe: "),
    ):
        adapters.prove(world)


def test_a_probe_that_cannot_be_removed_is_named(plain: World, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters.impatient(monkeypatch)
    plain = plain.through(proxy)
    with proxy.answer(500, "DELETE", r"/trainjobs/"), pytest.raises(Unreachable) as error:
        adapter.connect(plain.settings)
    (probe,) = plain.namespace.list("TrainJob")
    name = probe["metadata"]["name"]
    assert str(error.value).startswith(
        f"dispatch: unreachable: preflight probe: TrainJob {plain.namespace.name}/{name}"
    )
    assert str(error.value).endswith(f"; else delete TrainJob {name} by hand")


def test_a_failed_request_of_preflight_says_so(plain: World, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters.impatient(monkeypatch)
    plain = plain.through(proxy)
    for path in ("/apis/jobset", "selfsubjectaccessreviews", r"/trainjobs\?labelSelector"):
        with proxy.answer(500, path=path), pytest.raises(Unreachable, match=r"^dispatch: unreachable: preflight: "):
            adapters.prove(plain)


@pytest.mark.parametrize("kind", ["localqueues", "clusterqueues", "admissionchecks", "leases"])
def test_a_read_of_the_readmission_gate_that_is_not_answered_says_so(
    kueue: World, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    adapters.impatient(monkeypatch)
    kueue = kueue.through(proxy)
    with proxy.lose_answer("GET", f"/{kind}/"), pytest.raises(Unreachable) as error:
        adapters.prove(kueue)
    assert str(error.value).startswith("dispatch: unreachable: preflight: the readmission gate: no answer")


def test_a_probe_whose_name_is_taken_touches_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters.impatient(monkeypatch)
    handle = world.started()
    before = world.trainjob(handle)
    monkeypatch.setattr(adapter, "new_job", lambda: handle.job)
    with pytest.raises(Conflict, match=f"^dispatch: conflict: preflight probe: TrainJob .*/{handle.name}: "):
        adapter.connect(world.settings)
    assert world.trainjob(handle) == before


# --- a crash


def crashed(world: World, tmp_path: pathlib.Path) -> str:
    """The name of the probe of a preflight that was killed."""
    with preflight(world, tmp_path) as process:
        (probe,) = world.wait(lambda: world.namespace.list("TrainJob", labels=PROBE), "the probe is there")
        process.kill()
    return str(probe["metadata"]["name"])


def leftover(world: World) -> str:
    """A TrainJob as a preflight makes it; its name."""
    spec = world.spec(nodes=1)
    probe = adapter.render(spec, adapter.PROBE_RUNTIME, world.backend.settings)
    probe["metadata"]["labels"][PROBE] = "true"
    world.namespace.create(probe)
    return spec.name


def names(world: World) -> list[str]:
    return sorted(obj["metadata"]["name"] for obj in world.namespace.list("TrainJob"))


def test_a_young_probe_is_named_and_left_alone(plain: World) -> None:
    name = leftover(plain)
    (text,) = adapter.connect(plain.settings, read_only=True).leftovers
    assert text.startswith(f"probe TrainJob {plain.namespace.name}/{name}, ")
    assert text.endswith(" old: left alone: it may be another preflight's")
    assert adapter.connect(plain.settings).leftovers[0].endswith("another preflight's")
    assert names(plain) == [name]


def test_an_old_probe_that_is_still_gated_is_removed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    name = leftover(world)
    monkeypatch.setattr(adapter, "LEFTOVER", -1.0)
    (text,) = adapter.connect(world.settings).leftovers
    assert text.startswith(f"probe TrainJob {world.namespace.name}/{name}, ")
    assert text.endswith(" old: removed")
    assert world.left() == []


def test_an_old_probe_that_is_open_is_named_and_left_alone(plain: World, monkeypatch: pytest.MonkeyPatch) -> None:
    name = leftover(plain)
    gates = {adapters.GATED_BY: None, adapter.GATE: None}
    plain.namespace.patch("TrainJob", name, {"metadata": {"annotations": gates}})
    monkeypatch.setattr(adapter, "LEFTOVER", -1.0)
    (text,) = adapter.connect(plain.settings).leftovers
    assert text.endswith(" old: its start gate is open: see what it is, then delete it")
    assert names(plain) == [name]


def test_who_may_not_write_removes_nothing(plain: World, monkeypatch: pytest.MonkeyPatch) -> None:
    name = leftover(plain)
    monkeypatch.setattr(adapter, "LEFTOVER", -1.0)
    (text,) = adapter.connect(plain.settings, read_only=True).leftovers
    assert "not removed: " in text
    assert names(plain) == [name]


def test_what_is_not_labelled_is_never_touched(plain: World, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = plain.started()
    before: Object = plain.trainjob(handle)
    monkeypatch.setattr(adapter, "LEFTOVER", -1.0)
    assert adapter.connect(plain.settings).leftovers == ()
    assert plain.trainjob(handle) == before


def test_the_probe_of_a_crash_is_found_by_the_next_preflight(
    world: World, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = crashed(world, tmp_path)
    with_it = adapter.connect(world.settings)
    assert [name in text for text in with_it.leftovers] == [True]
    monkeypatch.setattr(adapter, "LEFTOVER", -1.0)
    monkeypatch.setattr(adapter, "is_gated", lambda _: True)  # it may have been killed when it had opened the probe
    adapter.connect(world.settings)
    assert world.left() == []
