"""`watch` and `output` when connections are cut or stall, versions expire, and the API server is away."""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import time
from collections.abc import Iterator

import pytest
import yaml

import adapter
from adapter import Backend, Cause, Conflict, Gap, Handle, JobSpec, Line, State, Unreachable
from tests import adapters, jobs
from tests.adapters import World
from tests.cluster.api import Object
from tests.cluster.cluster import Cluster
from tests.faults.proxy import Proxy
from tests.integration.test_adapter_inspect import helped
from tests.integration.test_adapter_output import Lines, ranks
from tests.integration.test_adapter_watch import Statuses

WATCHES = ("GET", "watch=true")


@pytest.fixture
def world(world: World, proxy: Proxy) -> World:
    return world.through(proxy)


@pytest.fixture
def plain(plain: World, proxy: Proxy) -> World:
    return plain.through(proxy)


def open_watches(world: World, proxy: Proxy) -> None:
    count = 3 if world.mode == "kueue" else 2
    world.wait(lambda: len(proxy.open_requests(*WATCHES)) == count, f"{count} watches are open")


def test_a_watch_survives_cuts_at_any_point(world: World, proxy: Proxy) -> None:
    """Each connection is cut after some bytes, in the middle of an event, and those that stay open now and then."""
    handle = world.started()
    for size in (1, 300, 3000, 20000):
        proxy.cut_after(size, *WATCHES, times=2)
    statuses = Statuses(world.backend.watch(handle))
    world.wait(lambda: statuses.seen, "it is told of")
    world.backend.open(handle)
    for _ in range(3):
        proxy.cut(*WATCHES)
        world.running(handle)
    world.wait(lambda: statuses.states()[-1] is State.RUNNING, "it is told of as running")
    proxy.cut(*WATCHES)
    world.end(handle)
    told = statuses.ended()
    order = [State.GATED, State.QUEUED, State.STARTING, State.RUNNING, State.SUCCEEDED]
    assert [state for state in order if state in statuses.states()] == statuses.states()
    assert all(a != b for a, b in itertools.pairwise(told))


def test_an_expired_version_is_listed_anew(world: World, proxy: Proxy) -> None:
    """What changed meanwhile arrives, and a job that went meanwhile is told of as stopped."""
    first, second = world.started(), world.started()
    with world.backend.watch() as watch:
        statuses = Statuses(watch)
        world.wait(lambda: len(statuses.seen) == 2, "they are told of")
        open_watches(world, proxy)
        gone = proxy.answer(410, *WATCHES, times=6)
        with proxy.lose_request(*WATCHES):
            proxy.cut(*WATCHES)
            world.connect(kubeconfig=str(world.cluster.kubeconfig)).stop(first)
            world.annotate(second, adapters.HOLD, "7")
        world.wait(lambda: statuses.states(first)[-1] is State.STOPPED, "the first has gone")
        world.wait(lambda: statuses.states(second)[-1] is State.HELD, "the second is held")
        assert gone.hits


def test_what_tells_the_cause_is_waited_for_again_when_its_successor_fails(plain: World, proxy: Proxy) -> None:
    """It took the name while there was no connection. The pod of it that ended first is reported last."""
    direct = plain.connect(kubeconfig=str(plain.cluster.kubeconfig))
    with jobs.runtime(plain.cluster, helped) as runtime, plain.backend.watch() as watch:
        spec = plain.spec(runtime={"name": runtime}, nodes=1)
        statuses = Statuses(watch)
        first, (helper, _) = opened(plain, direct, spec)
        plain.cluster.pods.fail(helper, 1)
        plain.wait(lambda: statuses.states(first)[-1:] == [State.FAILED], "the first has failed")
        failed = time.monotonic()
        plain.wait(lambda: time.monotonic() > failed + adapter.CAUSE, "that is long ago")
        open_watches(plain, proxy)
        with proxy.lose_request(*WATCHES):
            proxy.cut(*WATCHES)
            direct.stop(first)
            second, (helper, trainer) = opened(plain, direct, spec)
            gone = proxy.answer(410, *WATCHES)  # so what is listed next has the second already
        plain.wait(lambda: statuses.states(second)[-1:] == [State.RUNNING], "the second is told of")
        gone.remove()
        open_watches(plain, proxy)
        plain.cluster.pods.stick(trainer)
        plain.cluster.pods.fail(helper, 1)
        plain.wait(lambda: jobs.condition(plain.trainjob(second), "Failed"), "the second has failed")
        plain.cluster.pods.status(trainer, out_of_memory_before)
        plain.wait(lambda: statuses.states(second)[-1:] == [State.FAILED], "that is told")
        plain.cluster.pods.unstick(trainer)
    assert statuses.seen[-1].cause is Cause.OUT_OF_MEMORY


def opened(world: World, backend: Backend, spec: JobSpec) -> tuple[Handle, list[Object]]:
    """A job with a helper that runs, and its two pods; the helper's first."""
    handle = backend.start(spec)
    backend.open(handle)
    return handle, sorted(world.running(handle), key=lambda pod: "-node-" in pod["metadata"]["name"])


def out_of_memory_before(status: Object) -> None:
    oom = {"reason": "OOMKilled", "exitCode": 137, "finishedAt": "2026-01-01T00:00:00Z"}
    status["containerStatuses"][0]["state"] = {"terminated": oom}
    status["phase"] = "Failed"


def test_a_connection_that_stalls_silently_is_noticed(
    world: World, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After SILENCE seconds, which are fewer here."""
    monkeypatch.setattr(adapter.Connection, "SILENCE", 4.0)
    handle = world.started()
    statuses = Statuses(world.backend.watch(handle))
    open_watches(world, proxy)
    proxy.stall_open(*WATCHES)
    world.backend.open(handle)
    world.wait(lambda: statuses.states()[-1] is State.RUNNING, "it is told of all the same")
    world.end(handle)
    statuses.ended()


def test_without_the_bound_on_silence_a_stalled_connection_is_never_noticed(
    plain: World, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter.Connection, "SILENCE", 600.0)
    handle = plain.started()
    statuses = Statuses(plain.backend.watch(handle))
    open_watches(plain, proxy)
    proxy.stall_open(*WATCHES)
    plain.backend.open(handle)
    plain.running(handle)
    for _ in range(10):
        plain.state(handle, State.RUNNING)
    assert statuses.states() == [State.GATED]
    statuses.watch.close()


@pytest.mark.long
def test_a_silent_connection_is_noticed_within_75_seconds(plain: World, proxy: Proxy) -> None:
    """Of its last byte, or of its beginning when none came: each is opened anew, and what changed is told."""
    handle = plain.started()
    statuses = Statuses(plain.backend.watch(handle))
    open_watches(plain, proxy)
    plain.wait(lambda: statuses.seen, "it is told of")
    proxy.stall_open(*WATCHES)
    stalled = proxy.open_requests(*WATCHES)
    plain.backend.open(handle)
    for old in stalled:
        anew = plain.wait(lambda: proxy.requests("GET", f"{old.path}\\?.*watch=true")[1:], "it is opened anew", 100)  # noqa: B023
        took = anew[0].at - max([old.at, *old.passed])
        print(f"{old.path}: noticed after {took:.1f} s")
        assert took <= 75
    plain.wait(lambda: statuses.states()[-1] is State.RUNNING, "it is told of as running")
    plain.end(handle)
    assert statuses.ended()[-1].state is State.SUCCEEDED


def test_the_silence_of_a_healthy_watch_is_neither_stale_nor_unreachable(
    plain: World, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter.Connection, "SILENCE", 2.0)
    plain.started()
    with plain.backend.watch(unreachable_after=1.5) as watch:
        statuses = Statuses(watch)
        plain.wait(lambda: len(proxy.requests(*WATCHES)) > 8, "its watches were reopened several times")
        assert statuses.is_alive()
        assert [status.stale_since for status in statuses.seen] == [None]


def test_a_server_that_is_away_is_told_and_then_raised(plain: World, proxy: Proxy) -> None:
    handle = plain.started()
    statuses = Statuses(plain.backend.watch(handle, unreachable_after=8))
    open_watches(plain, proxy)
    plain.wait(lambda: statuses.seen, "it is told of")
    with proxy.away():
        plain.wait(lambda: statuses.seen[-1].stale_since, "that it may be out of date is told")
        with pytest.raises(Unreachable, match="no answer from the API server"):
            statuses.ended()
    assert [status.state for status in statuses.seen] == [State.GATED, State.GATED]
    assert statuses.seen[0].stale_since is None


def test_when_the_server_is_back_the_status_is_fresh_again(world: World, proxy: Proxy) -> None:
    handle = world.started()
    statuses = Statuses(world.backend.watch(handle))
    open_watches(world, proxy)
    world.wait(lambda: statuses.seen, "it is told of")
    with proxy.away():
        world.wait(lambda: statuses.seen[-1].stale_since, "it is stale")
    world.wait(lambda: statuses.seen[-1].stale_since is None, "it is fresh again")
    world.backend.open(handle)
    world.wait(lambda: statuses.states()[-1] is State.RUNNING, "it goes on")
    world.end(handle)
    statuses.ended()


def test_a_closed_watch_ends_while_the_server_is_away(plain: World, proxy: Proxy) -> None:
    handle = plain.started()
    statuses = Statuses(plain.backend.watch(handle))
    plain.wait(lambda: statuses.seen, "it is told of")
    proxy.stall()
    statuses.watch.close()
    statuses.ended(10)


def evict(world: World, handle: Handle) -> None:
    """Has Kueue take the job's quota, and queue it again when its pods are gone."""
    workload = world.namespace.workload(handle.name)["metadata"]["name"]
    world.namespace.patch("Workload", workload, {"spec": {"active": False}})
    world.wait(lambda: not world.namespace.pods(handle.name), "its pods are gone")
    world.namespace.patch("Workload", workload, {"spec": {"active": True}})


def lagging(kueue: World, cluster: Cluster) -> list[tuple[int | None, State]]:
    """What is told when the watch of TrainJobs stalls while the job is evicted and admitted again."""
    with Proxy(cluster) as proxy:
        world = kueue.through(proxy)
        handle = world.opened()
        statuses = Statuses(world.backend.watch(handle))
        open_watches(world, proxy)
        world.wait(lambda: statuses.seen, "it is told of")
        with proxy.stall_open("GET", "/trainjobs.*watch=true"):
            evict(world, handle)
            world.running(handle)
            on = (State.STARTING, State.RUNNING)  # with the TrainJob as it was it does not seem to run
            world.wait(lambda: statuses.seen[-1].state in on and len(statuses.states()) > 2, "its next attempt is told")
        world.end(handle)
        return [(status.admission, status.state) for status in statuses.ended()]


def test_a_trainjob_that_lags_behind_takes_no_job_back(kueue: World, cluster: Cluster) -> None:
    told = lagging(kueue, cluster)
    assert told == sorted_by_stage(told)
    assert {admission for admission, _ in told} == {1, 2}


def without_reading_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    look = adapter.Backend._look
    monkeypatch.setattr(
        adapter.Backend, "_look", lambda backend, handle, before=None: before or look(backend, handle, before)
    )


def test_without_reading_anew_it_would(kueue: World, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    without_reading_anew(monkeypatch)
    told = lagging(kueue, cluster)
    assert told != sorted_by_stage(told)


@pytest.fixture
def checked(cluster: Cluster, _gate: None) -> Iterator[World]:
    """Kueue mode, with a second check on the queue that nobody answers but the test."""
    with adapters.world(cluster, "kueue", extra_checks=("other",)) as made:
        made.namespace.activate()
        yield made


def approve(world: World, handle: Handle) -> None:
    """Answers the second check, until the job is admitted: Kueue may write over an answer that it has not seen yet."""

    def admitted() -> bool:
        workload = world.namespace.workload(handle.name)
        (other,) = [c for c in workload["status"]["admissionChecks"] if c["name"] == world.namespace.checks[1]]
        if other["state"] != "Ready":
            other.update(state="Ready", message="approved")
            world.cluster.update(workload, "status")
        return jobs.condition(workload, "Admitted")

    world.wait(admitted, "its second check is answered")


def test_pods_that_lag_behind_do_not_stop_the_next_attempt(checked: World, proxy: Proxy) -> None:
    """The gate has let it through, another check has not yet: the pods of the attempt before seem to be left."""
    world = checked.through(proxy)
    handle = world.started()
    world.backend.open(handle)
    approve(world, handle)
    world.running(handle)
    statuses = Statuses(world.backend.watch(handle))
    open_watches(world, proxy)
    world.wait(lambda: statuses.seen, "it is told of")
    with proxy.stall_open("GET", "/pods.*watch=true"):
        evict(world, handle)
        world.wait(lambda: statuses.seen[-1].admission == 2, "its next attempt is told")
        approve(world, handle)
        world.running(handle)
    world.end(handle)
    states = [(status.admission, status.state) for status in statuses.ended()]
    assert states == sorted_by_stage(states)
    assert (2, State.STOPPING) not in states


def lagging_workload(checked: World, cluster: Cluster) -> list[tuple[int | None, State]]:
    """What is told when the watch of Workloads stalls before the second attempt is admitted.

    It is without pods for a while: their Jobs are deleted, which JobSet makes up for.
    """
    with Proxy(cluster) as proxy:
        world = checked.through(proxy)
        handle = world.started()
        world.backend.open(handle)
        approve(world, handle)
        world.running(handle)
        statuses = Statuses(world.backend.watch(handle))
        open_watches(world, proxy)
        evict(world, handle)
        world.wait(lambda: statuses.seen and statuses.seen[-1].admission == 2, "its next attempt is told")
        with proxy.stall_open("GET", "/workloads.*watch=true"):
            approve(world, handle)
            world.running(handle)
            world.wait(lambda: len(statuses.seen[-1].pods) == 2, "its pods are told of")
            cluster.pause("jobset")
            cluster.delete_all("Job", world.namespace.name)
            world.wait(lambda: not statuses.seen[-1].pods, "that they are gone is told")
            cluster.resume("jobset")
            world.running(handle)
        world.end(handle)
        return [(status.admission, status.state) for status in statuses.ended()]


def test_a_workload_that_lags_behind_takes_no_job_back(checked: World, cluster: Cluster) -> None:
    """What was told as running, by what was read anew, is not told as queued by the Workload as it was."""
    told = lagging_workload(checked, cluster)
    assert told == sorted_by_stage(told)
    assert {admission for admission, _ in told} == {1, 2}


def test_without_reading_anew_the_workload_would(
    checked: World, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_reading_anew(monkeypatch)
    told = lagging_workload(checked, cluster)
    assert told != sorted_by_stage(told)


STAGES = {State.STARTING: 1, State.RUNNING: 2, State.STOPPING: 3}


def sorted_by_stage(told: list[tuple[int | None, State]]) -> list[tuple[int | None, State]]:
    """By admission; within one as it must go; before an admission starts it may be queued."""
    ordered: list[tuple[int | None, State]] = []
    for admission, group in itertools.groupby(told, key=lambda item: item[0]):
        items = list(group)
        waiting = list(itertools.takewhile(lambda item: item[1] not in STAGES, items))
        ordered += waiting + sorted(items[len(waiting) :], key=lambda item: STAGES.get(item[1], 4))
        assert all(admission is None or admission >= (before or 0) for before, _ in ordered)
    return ordered


def test_a_rotated_token_is_read_again(plain: World, proxy: Proxy) -> None:
    """The old one is revoked: the next connection is refused, and then made with the one that the file has now."""
    file, name = pathlib.Path(plain.settings["kubeconfig"]), plain.namespace.name
    config = yaml.safe_load(file.read_text())

    def rotate() -> str:
        config["users"][0]["user"]["token"], secret = plain.cluster.revocable_token(name, adapters.ACCOUNT)
        file.write_text(yaml.safe_dump(config))
        return secret

    def refused() -> bool:
        proxy.cut(*WATCHES)
        return any(request.status == 401 for request in proxy.requests(*WATCHES))

    old, handle = rotate(), plain.started()
    statuses = Statuses(plain.connect().watch(handle))
    open_watches(plain, proxy)
    rotate()
    plain.cluster.delete("Secret", old, name)
    plain.wait(refused, "the old token is refused")  # the server trusts it for 10 s more
    plain.backend.open(handle)
    plain.end(handle)
    assert statuses.ended()[-1].state is State.SUCCEEDED


def test_a_kubeconfig_that_is_half_written_just_when_it_is_read_again_is_read_later(plain: World, proxy: Proxy) -> None:
    file, handle = pathlib.Path(plain.settings["kubeconfig"]), plain.started()
    whole = yaml.safe_load(file.read_text())
    statuses = Statuses(plain.connect().watch(handle))
    open_watches(plain, proxy)
    for half in (None, {"name": whole["users"][0]["name"], "user": "tok"}):  # the client's loader trips over both
        file.write_text(yaml.safe_dump({**whole, "users": [half]}))
        refused = proxy.answer(401, *WATCHES, times=4)
        proxy.cut(*WATCHES)
        plain.wait(lambda: len(refused.hits) == 4, "both watches are refused")  # noqa: B023
        file.write_text(yaml.safe_dump(whole))
        open_watches(plain, proxy)
    plain.backend.open(handle)
    plain.end(handle)
    assert statuses.ended()[-1].state is State.SUCCEEDED


def test_a_closed_watch_does_not_wait_for_what_may_tell_the_cause(plain: World, proxy: Proxy) -> None:
    handle = plain.started()
    statuses = Statuses(plain.backend.watch(handle))
    plain.wait(lambda: statuses.seen, "it is told of")
    plain.cluster.pause("jobset")  # without pods, its Events may tell why
    proxy.stall("GET", "/events")
    plain.backend.open(handle)
    plain.wait(lambda: proxy.open_requests("GET", "/events"), "its Events are asked for")
    statuses.watch.close()
    statuses.ended(10)
    plain.cluster.resume("jobset")


def test_a_server_that_answers_slowly_delays_a_status_and_keeps_none_back(plain: World, proxy: Proxy) -> None:
    """That of a job without pods: its Events may tell why."""
    handle = plain.started()
    proxy.delay(2.0, "GET", "/events")
    with plain.backend.watch(handle) as watch:
        statuses = Statuses(watch)
        plain.wait(lambda: statuses.states() == [State.GATED], "it is told of")
        plain.cluster.pause("jobset")
        plain.backend.open(handle)
        plain.wait(lambda: statuses.states()[-1] is State.STARTING, "it is told of as starting")
        plain.cluster.resume("jobset")


# --- output

LOG = ("GET", "/log\\?")


def patient(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Has a log that cannot be read be tried for so many seconds."""
    monkeypatch.setattr(adapter, "BEGIN", seconds / 4)
    monkeypatch.setitem(adapter._Log.lines.__kwdefaults__ or {}, "patience", seconds)


def printing(world: World, handle: Handle, *lines: str) -> Object:
    """Its first pod, once it has printed these lines."""
    pod = ranks(world.running(handle))[0]
    world.cluster.pods.log(pod, "\n".join(lines))
    return pod


@pytest.mark.parametrize("follow", [False, True])
def test_a_closed_output_ends_while_the_server_says_nothing(plain: World, proxy: Proxy, *, follow: bool) -> None:
    handle = plain.opened()
    printing(plain, handle, "line")
    with proxy.stall(*LOG):
        output = plain.backend.output(handle, follow=follow)
        lines = Lines(output)
        plain.wait(lambda: proxy.open_requests(*LOG), "its log is asked for")
        output.close()
        lines.ended(10)


def test_a_log_that_is_not_answered_is_told(plain: World, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    patient(monkeypatch, 2.0)
    handle = plain.opened()
    printing(plain, handle, "line")
    with proxy.stall(*LOG):
        (gap,) = plain.backend.output(handle, rank=0)
    assert isinstance(gap, Gap)
    assert (gap.since, gap.until) == (None, None)
    assert "Read timed out" in gap.reason


def test_following_from_the_last_lines_begins_there_though_the_server_is_busy(plain: World, proxy: Proxy) -> None:
    handle = plain.opened()
    pod = printing(plain, handle, "first")
    plain.cluster.pods.log(pod, "second")
    busy = proxy.answer(503, *LOG, times=3)
    with plain.backend.output(handle, follow=True, tail=1, rank=0) as output:
        lines = Lines(output)
        plain.wait(lambda: lines.texts, "a line comes")
        plain.cluster.pods.log(pod, "third")
        plain.wait(lambda: len(lines.texts) > 1, "the next one comes")
    assert lines.ended(5) == ["second", "third"]
    assert len(busy.hits) == 3


def test_a_log_is_read_to_its_end_though_the_job_ends_while_the_server_is_busy(
    plain: World, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it was followed before: it is tried for as long as ever."""
    patient(monkeypatch, 8.0)
    handle = plain.opened()
    lines = Lines(plain.backend.output(handle, follow=True, rank=0))
    began = time.monotonic()
    pod = printing(plain, handle, "before")
    plain.wait(lambda: lines.texts == ["before"], "the line comes")
    plain.wait(lambda: time.monotonic() > began + 8.0, "it was followed for long")
    with proxy.answer(503, *LOG):
        proxy.cut(*LOG)
        plain.cluster.pods.log(pod, "after")
        plain.end(handle)
        mark = time.monotonic()
        plain.wait(lambda: len(proxy.requests(*LOG, since=mark)) > 1, "its log is asked for when it has ended")
    assert lines.ended() == ["before", "after"]


@pytest.mark.parametrize("status", [401, 403])
def test_a_server_that_does_not_know_yet_who_may_read_logs_is_asked_again(
    plain: World, proxy: Proxy, status: int
) -> None:
    """As one that has just started."""
    handle = plain.opened()
    lines = Lines(plain.backend.output(handle, follow=True, rank=0))
    pod = printing(plain, handle, "before")
    plain.wait(lambda: lines.texts == ["before"], "the line comes")
    refused = proxy.answer(status, *LOG, times=3)
    proxy.cut(*LOG)
    plain.cluster.pods.log(pod, "after")
    plain.wait(lambda: len(lines.texts) > 1, "the next line comes")
    plain.end(handle)
    assert lines.ended() == ["before", "after"]
    assert len(refused.hits) == 3


def test_what_a_stalled_connection_kept_back_of_a_pod_that_is_gone_unseen_is_told(
    plain: World, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch of pods stalls, too: that the pod is gone is known from its log's next request alone."""
    monkeypatch.setattr(adapter.Connection, "SILENCE", 4.0)
    handle = plain.started()
    with plain.backend.output(handle, follow=True, rank=0) as output:
        lines = Lines(output)
        plain.backend.open(handle)
        pod = printing(plain, handle, "before")
        plain.wait(lambda: lines.texts == ["before"], "the line comes")
        proxy.stall("GET", "/pods.*watch=true")
        proxy.stall_open(*LOG)
        plain.cluster.pods.log(pod, "kept back")
        plain.connect(kubeconfig=str(plain.cluster.kubeconfig)).hold(handle, 1)
        plain.state(handle, State.HELD)
        plain.wait(lambda: len(lines.seen) > 1, "it is told")
    before, gap = lines.seen
    assert isinstance(before, Line)
    assert isinstance(gap, Gap)
    assert (gap.since, gap.until) == (before.time, None)


def test_what_a_stalled_connection_kept_back_of_a_pod_that_is_gone_is_told(world: World, proxy: Proxy) -> None:
    handle = world.started()
    lines = Lines(world.backend.output(handle, follow=True, rank=0))
    world.backend.open(handle)
    pod = printing(world, handle, "before")
    world.wait(lambda: lines.texts == ["before"], "the line comes")
    proxy.stall_open(*LOG)
    world.cluster.pods.log(pod, "kept back")
    world.backend.hold(handle, 1)
    world.state(handle, State.HELD)
    world.wait(lambda: len(lines.seen) > 1, "it is told")
    release(world, handle, 1)
    printing(world, handle, "after")
    world.end(handle)
    lines.ended()
    before, gap, after = lines.seen
    assert isinstance(before, Line)
    assert isinstance(gap, Gap)
    assert isinstance(after, Line)
    assert (before.text, after.text) == ("before", "after")
    assert (gap.rank, gap.admission, gap.since, gap.until) == (0, before.admission, before.time, None)


def test_a_watch_that_lags_behind_the_end_of_a_job_takes_no_log_away(plain: World, proxy: Proxy) -> None:
    """It gives the pod as it was at first, after a list gave it as it ended, while its log cannot be read."""
    handle = plain.started()
    lines = Lines(plain.backend.output(handle, follow=True, rank=0))
    open_watches(plain, proxy)
    pods = "/pods.*watch=true"
    (watch,) = proxy.open_requests("GET", pods)
    stalled, _ = proxy.stall_open("GET", pods), proxy.stall_open("GET", pods, lines=watch.lines + 1)
    with proxy.answer(503, *LOG):
        plain.backend.open(handle)
        printing(plain, handle, "line")
        plain.end(handle)
        plain.wait(lambda: proxy.requests(*LOG), "its log is asked for")
        stalled.remove()
        mark = time.monotonic()
        plain.wait(lambda: len(proxy.requests(*LOG, since=mark)) > 1 or not lines.is_alive(), "it is asked for again")
    assert lines.ended() == ["line"]


def test_who_reads_slowly_misses_nothing_of_a_pod_that_goes(plain: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of what was printed has still to be read when it is gone."""
    monkeypatch.setattr(adapter, "DRAIN", 1.0)
    monkeypatch.setattr(adapter, "AHEAD", 2)
    handle = plain.opened()
    with plain.backend.output(handle, follow=True, rank=0) as output:
        printing(plain, handle, *(f"{number:08}" + "." * 100_000 for number in range(400)))
        assert isinstance(next(output), Line)
        plain.backend.hold(handle, 1)
        plain.state(handle, State.HELD)
        release(plain, handle, 1)
        plain.end(handle)
        items = list(output)
    assert [item.text[:8] for item in items if isinstance(item, Line)] == [f"{n:08}" for n in range(1, 400)]


def release(world: World, handle: Handle, instance: int) -> None:
    """Returns when it runs again."""

    def released() -> bool:
        with contextlib.suppress(Conflict):  # its JobSet is about to be suspended
            world.backend.release(handle, instance)
            return True
        return False

    world.wait(released, "it is released")
    world.state(handle, State.RUNNING)


def test_a_restart_of_the_api_server_loses_no_change(plain: World, proxy: Proxy) -> None:
    """The last one here: it may cost the gate its Lease."""
    handle = plain.opened()
    statuses = Statuses(plain.backend.watch(handle))
    lines = Lines(plain.backend.output(handle, follow=True))
    pod = plain.running(handle)[0]
    plain.cluster.pods.log(pod, "before")
    plain.wait(lambda: lines.texts == ["before"], "the line comes")
    with proxy.away():
        plain.cluster.kill("kube-apiserver")
        plain.cluster.start("kube-apiserver")
    plain.cluster.pods.log(pod, "after")
    plain.end(handle)
    assert lines.ended(90) == ["before", "after"]
    assert statuses.ended()[-1].state is State.SUCCEEDED
    assert statuses.states() == [State.RUNNING, State.SUCCEEDED]
