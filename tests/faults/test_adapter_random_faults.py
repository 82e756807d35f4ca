"""`watch` and `output` while connections fail at random: the order of states, and each line once."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType

import pytest

import adapter
from adapter import Gap, Handle, Line, State, Status
from tests import jobs
from tests.adapters import World
from tests.faults.proxy import Proxy, Rule
from tests.faults.test_adapter_watch_faults import release, sorted_by_stage
from tests.integration.test_adapter_output import Lines, end_as_a_kubelet, ranks
from tests.integration.test_adapter_watch import Statuses

WATCHES, LOGS, READS = ("GET", "watch=true"), ("GET", "/log\\?"), ("GET", "")


class Trouble(threading.Thread):
    """Has connections fail, each time others and in another way, to the end of its `with` block.

    A request that comes later fails when it comes before the next fault: who asks ever less often is served, too.
    """

    def __init__(self, proxy: Proxy, chance: random.Random, *reads: tuple[str, str]) -> None:
        super().__init__(daemon=True)
        self.proxy, self.chance, self.reads, self.over = proxy, chance, reads, threading.Event()
        self.made: list[str] = []

    def run(self) -> None:
        coming: Rule | None = None
        while not self.over.wait(self.chance.uniform(0.05, 1.0)):
            which = self.chance.choice(self.reads)
            faults = [self.cut, self.stall, self.lose, self.cut_after, self.busy, self.fail]
            fault = self.chance.choice([*faults, self.expire] if which == WATCHES else faults)
            if coming:
                coming.remove()
            coming = fault(*which)
            self.made.append(fault.__name__)

    def cut(self, *which: str) -> None:
        self.proxy.cut(*which)

    def stall(self, *which: str) -> None:
        self.proxy.stall_open(*which)

    def lose(self, *which: str) -> Rule:
        return self.proxy.lose_request(*which, times=self.chance.randint(1, 2))

    def cut_after(self, *which: str) -> Rule:
        return self.proxy.cut_after(self.chance.randint(1, 20_000), *which, times=1)

    def busy(self, *which: str) -> Rule:
        return self.proxy.answer(429, *which, times=1, headers={"Retry-After": self.chance.choice("012")})

    def fail(self, *which: str) -> Rule:
        return self.proxy.answer(self.chance.choice([500, 503]), *which, times=self.chance.randint(1, 2))

    def expire(self, *which: str) -> Rule:
        return self.proxy.answer(410, *which, times=self.chance.randint(1, 2))

    def __enter__(self) -> Trouble:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.over.set()
        self.join()
        self.proxy.clear()


class Life:
    """What becomes of the jobs of one namespace: one thing after the other, in an order of chance."""

    def __init__(self, world: World, chance: random.Random) -> None:
        self.world, self.chance, self.hold = world, chance, 0
        self.due: dict[Handle, State] = {world.started(): State.GATED for _ in range(3)}  # where they are, in the end
        middle = ["held", "preempted" if world.mode == "kueue" else "held"]
        self.plans = {
            handle: ["opened", *chance.choices(middle, k=2), chance.choice(["ended", "failed", "stopped"])]
            for handle in self.due
        }

    def step(self) -> bool:
        """The next thing happens, and has its effect; returns whether more will."""
        handle = self.chance.choice([handle for handle, plan in self.plans.items() if plan])
        getattr(self, self.plans[handle].pop(0))(handle)
        for each, state in self.due.items():
            if state is not State.STOPPED:
                self.world.state(each, state)
        return any(self.plans.values())

    def opened(self, handle: Handle) -> None:
        self.world.backend.open(handle)
        self.due[handle] = State.RUNNING

    def held(self, handle: Handle) -> None:
        self.hold += 1
        hold(self.world, handle, self.hold)
        release(self.world, handle, self.hold)

    def preempted(self, handle: Handle) -> None:
        """With it all others that run."""
        other = jobs.preempt(self.world.namespace, handle.name, cpu="4")
        self.world.namespace.delete("TrainJob", other)

    def ended(self, handle: Handle, code: int = 0) -> None:
        self.world.end(handle, code=code)
        self.due[handle] = State.FAILED if code else State.SUCCEEDED

    def failed(self, handle: Handle) -> None:
        self.ended(handle, 1)

    def stopped(self, handle: Handle) -> None:
        self.world.backend.stop(handle)
        self.due[handle] = State.STOPPED


def hold(world: World, handle: Handle, instance: int) -> None:
    """Returns when its pods are gone."""
    world.backend.hold(handle, instance)
    world.state(handle, State.HELD)


def check_order(told: Sequence[Status]) -> None:
    """Of one job: in order, none twice, and nothing after the final one."""
    states = [(status.admission, status.state) for status in told]
    assert states == sorted_by_stage(states)
    assert [status.final for status in told] == [False] * (len(told) - 1) + [True], states
    assert all(a != replace(b, observed_at=a.observed_at) for a, b in itertools.pairwise(told)), told


@pytest.mark.timeout(3600)
def test_whatever_the_network_does_states_are_told_in_order_and_the_latest_arrives(
    world: World, proxy: Proxy, count: Callable[[int, int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter.Connection, "SILENCE", 4.0)
    for _ in range(count(2, 20)):
        seed = random.randrange(10**6)
        chance = random.Random(seed)
        life, backend = Life(world, chance), world.through(proxy).backend
        print(f"seed {seed}: {list(life.plans.values())}")
        watches = [backend.watch(unreachable_after=600), backend.watch(next(iter(life.due)), unreachable_after=600)]
        every, one = map(Statuses, watches)
        with Trouble(proxy, random.Random(seed), WATCHES, WATCHES, READS) as trouble:
            while life.step():
                if chance.random() < 0.5:
                    wait_told(life, every)
        wait_told(life, every)
        print(f"{len(every.seen)} told, {trouble.made}")
        watches[0].close()
        told = {handle: [status for status in every.ended() if status.handle == handle] for handle in life.due}
        for statuses in [one.ended(), *told.values()]:
            check_order(statuses)
        for handle in life.due:
            world.backend.stop_job(handle.job)


def wait_told(life: Life, every: Statuses) -> None:
    for handle, state in life.due.items():
        life.world.wait(lambda: every.states(handle)[-1] is state, f"{handle.name} is told of as {state}", 90)  # noqa: B023


# --- output


def print_lines(world: World, handle: Handle, written: dict[tuple[int, int], int], batches: int) -> None:
    """Each of its pods prints numbered lines, which are counted by rank and admission."""
    for _ in range(batches):
        for rank, pod in ranks(world.running(handle)).items():
            key = rank, int(pod["metadata"]["annotations"][adapter.ADMISSION])
            first = written.get(key, 0)
            world.cluster.pods.log(pod, "\n".join(f"{number:08}" for number in range(first, first + 10)))
            written[key] = first + 10


def evict(world: World, handle: Handle, instance: int, *, orderly: bool) -> None:
    """Its pods go, as with a kubelet or at once."""
    pods = world.running(handle) if orderly else []
    for pod in pods:
        world.cluster.pods.stick(pod)
    world.backend.hold(handle, instance)
    if pods:
        end_as_a_kubelet(world, pods)
    world.state(handle, State.HELD)


def check_lines(items: Sequence[Line | Gap], written: dict[tuple[int, int], int], last: int, *, expired: bool) -> None:
    """Each line once and in order. Of an admission before the last, those at its end may be missing: a Gap tells it.

    Unless a list did not have the pod yet, and the next one no longer.
    """
    for (rank, admission), count in written.items():
        of_it = [item for item in items if (item.rank, item.admission) == (rank, admission)]
        numbers = [int(item.text) for item in of_it if isinstance(item, Line)]
        gaps = [at for at, item in enumerate(of_it) if isinstance(item, Gap)]
        where = f"rank {rank} of admission {admission}"
        assert numbers == list(range(len(numbers))), f"{where}: {numbers}"
        assert gaps in ([], [len(numbers)]), f"{where}: {gaps} of {len(numbers)}"
        assert len(numbers) == count or gaps or (expired and not of_it and admission < last), (
            f"{where}: {len(numbers)} of {count}, and it is not told"
        )
        assert admission < last or not gaps, f"{where}: its pods are there, but {of_it[-1]}"


@pytest.mark.timeout(3600)
def test_whatever_the_network_does_each_line_comes_once_or_its_absence_is_told(
    world: World, proxy: Proxy, count: Callable[[int, int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter.Connection, "SILENCE", 4.0)
    for _ in range(count(2, 20)):
        seed = random.randrange(10**6)
        chance, written = random.Random(seed), dict[tuple[int, int], int]()
        handle = world.started()
        print(f"seed {seed}")
        with world.through(proxy).backend.output(handle, follow=True) as output:
            lines = Lines(output)
            with Trouble(proxy, random.Random(seed), LOGS, LOGS, WATCHES) as trouble:
                world.backend.open(handle)
                for instance in (1, 2):
                    print_lines(world, handle, written, chance.randint(1, 5))
                    evict(world, handle, instance, orderly=chance.random() < 0.5)
                    release(world, handle, instance)
                print_lines(world, handle, written, chance.randint(5, 20))
                world.end(handle)
            lines.ended(120)
        gaps = [item for item in lines.seen if isinstance(item, Gap)]
        print(f"{sum(written.values())} lines, {len(gaps)} gaps, {trouble.made}")
        check_lines(lines.seen, written, max(admission for _, admission in written), expired="expire" in trouble.made)
