"""Two controllers that both believe to lead: whatever happens in whatever order, no attempts overlap.

Safety does not rest on the Lease. Here neither controller asks for it (guard "lease" off), and both decide on every
Workload at the same time, while random things happen to the jobs and to the controllers.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from tests import jobs
from tests.attempts import Attempts
from tests.cluster.api import ApiError
from tests.cluster.cluster import Cluster
from tests.cluster.gate import Gate
from tests.cluster.namespaces import Namespace
from tests.cluster.waiting import WaitTimeout

QUOTA = "6"  # in CPUs: three jobs of two pods fit
GONE = (ApiError, LookupError)  # a pod, a Workload: they come and go while an action looks for them


@dataclass
class World:
    """A namespace in which a few jobs live, two controllers, and what can happen to them."""

    namespace: Namespace
    gates: list[Gate]
    jobs: list[str] = field(default_factory=list)
    high: list[str] = field(default_factory=list)
    holds: int = 0

    def submit(self, number: int) -> None:
        """One job more, of at most three; every other one without a start gate."""
        if len(self.jobs) < 3:
            job = jobs.trainjob(gated=bool(number % 2), nodes=1 + number % 2)
            self.namespace.create(job)
            self.jobs.append(job["metadata"]["name"])
            jobs.open_gate(self.namespace, self.jobs[-1])

    def preempt(self, number: int) -> None:
        """A job of high priority wants all the quota, and mostly gets it before anything else happens."""
        if not self.high:
            job = jobs.trainjob(gated=False, cpu=QUOTA, priority="high")
            name: str = job["metadata"]["name"]
            self.namespace.create(job)
            self.high.append(name)
            if number:
                self.namespace.cluster.wait(
                    lambda: jobs.condition(self.namespace.workload(name), "QuotaReserved"), f"{name} has quota"
                )

    def give_back(self, _: int) -> None:
        """The job of high priority goes."""
        while self.high:
            self.namespace.delete("TrainJob", self.high.pop())

    def stick(self, number: int) -> None:
        """The pods that a job has now will not go when they are told to."""
        self._each_pod(number, self.namespace.cluster.pods.stick)

    def unstick(self, number: int) -> None:
        self._each_pod(number, self.namespace.cluster.pods.unstick)

    def hold(self, number: int) -> None:
        """As the adapter holds: the annotation, then the Workload."""
        self.holds += 1
        self._annotate(number, str(self.holds))
        self._set_active(number, active=False)

    def release(self, number: int) -> None:
        self._set_active(number, active=True)
        self._annotate(number, f"released-{self.holds}")

    def deactivate(self, number: int) -> None:
        """Somebody else stops the job at its Workload."""
        self._set_active(number, active=False)

    def activate(self, number: int) -> None:
        self._set_active(number, active=True)

    def restart(self, number: int) -> None:
        """One controller is killed and started again."""
        gate = self.gates[number % 2]
        gate.kill()
        gate.start()

    def settle(self, number: int) -> None:
        """Time passes, until a job runs or is waited for."""
        job = self.jobs[number % len(self.jobs)]

        def settled() -> bool:
            workload = self.namespace.workload(job)
            if not jobs.condition(workload, "QuotaReserved"):
                return bool(self.high) or workload["spec"].get("active") is False
            entry = jobs.check(self.namespace, job)
            if entry["state"] == "Pending":
                return str(entry["message"]).startswith(("waiting for", "held", "the JobSet", "the TrainJob"))
            pods = [pod for pod in self.namespace.pods(job) if "deletionTimestamp" not in pod["metadata"]]
            return any(pod["status"].get("phase") == "Running" for pod in pods)

        self.namespace.cluster.wait(settled, f"{job} runs or is waited for", interval=0.05)

    def heal(self) -> None:
        """Everything that keeps a job from running is undone, and every job runs."""
        self.give_back(0)
        for number, job in enumerate(self.jobs):
            self.release(number)
            self.unstick(number)
            self.namespace.cluster.wait(lambda job=job: self._runs(job), f"{job} runs in the end")  # type: ignore[misc]

    def _runs(self, job: str) -> bool:
        admission = jobs.admission_of(self.namespace, job)
        pods = [pod for pod in self.namespace.pods(job) if "deletionTimestamp" not in pod["metadata"]]
        return bool(pods) and all(
            pod["status"].get("phase") == "Running" and jobs.epoch_of(pod) == str(1_000_000 + admission) for pod in pods
        )

    def _each_pod(self, number: int, act: Callable[[dict[str, object]], None]) -> None:
        for pod in self.namespace.pods(self.jobs[number % len(self.jobs)]):
            with contextlib.suppress(*GONE):
                act(pod)

    def _annotate(self, number: int, hold: str) -> None:
        job = self.jobs[number % len(self.jobs)]
        self.namespace.patch("TrainJob", job, {"metadata": {"annotations": {jobs.HOLD: hold}}})

    def _set_active(self, number: int, *, active: bool) -> None:
        with contextlib.suppress(*GONE):
            name = self.namespace.workload(self.jobs[number % len(self.jobs)])["metadata"]["name"]
            self.namespace.patch("Workload", name, {"spec": {"active": active}})


Actions = list[tuple[str, int]]
UNDO = {"preempt": "give_back", "hold": "release", "deactivate": "activate"}


def rounds(seed: int) -> Actions:
    """Twice: a job loses its quota and gets it back, mostly with pods that hang; anything may come between.

    From one number, which hypothesis chooses: so its examples differ from each other, and one that failed is kept as
    `@example(seed)`.
    """
    dice = random.Random(seed)
    others = ["submit", "unstick", "restart", "settle", *UNDO, *UNDO.values()]

    def between() -> Actions:
        return [(dice.choice(others), dice.randrange(6)) for _ in range(dice.randrange(3))]

    found: Actions = []
    for _ in range(2):
        number, loses = dice.randrange(6), dice.choice(list(UNDO))
        found += [("settle", number)] + [("stick", number)] * (dice.random() < 0.8)
        found += [(loses, number), *between(), (UNDO[loses], number), *between()]
    return found


@contextlib.contextmanager
def pair(cluster: Cluster, *guards_off: str) -> Iterator[list[Gate]]:
    with contextlib.ExitStack() as stack:
        gates = [cluster.controller(f"pair-{n}", guards_off=["lease", *guards_off]) for n in (1, 2)]
        yield [stack.enter_context(gate) for gate in gates]


def play(cluster: Cluster, gates: list[Gate], played: Actions) -> tuple[Attempts, World]:
    """Lets a job run, then does one thing after the other, and in the end has every job run."""
    with cluster.namespace(quota=QUOTA) as namespace, Attempts(namespace) as attempts:
        namespace.wait_served()
        world = World(namespace, gates)
        try:
            for action, number in [("submit", 1), *played, ("settle", 0)]:
                getattr(world, action)(number)
            world.heal()
        except WaitTimeout as error:
            for job in [*world.jobs, *world.high]:
                error.add_note(jobs.as_it_is(namespace, job))
            raise
    return attempts, world


@pytest.mark.timeout(3600)
def test_random_events_never_make_attempts_overlap(cluster: Cluster, count: Callable[[int, int], int]) -> None:
    admitted: list[int] = []
    with pair(cluster) as gates:

        @settings(
            max_examples=count(20, 200),
            derandomize=count(1, 0) == 1,
            phases=[Phase.explicit, Phase.generate],  # a smaller example would cost minutes, and hide the timing
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.integers(0, 2**32))
        def run(seed: int) -> None:
            played = rounds(seed)
            note(f"{played}")
            attempts, world = play(cluster, gates, played)
            admitted.append(max(attempts.counts(job)[-1] for job in world.jobs))
            for job in world.jobs:
                note(f"{job}: counts {attempts.counts(job)}, approvals {attempts.approvals(job)}")
            assert attempts.violations() == []

        run()
    assert sum(admission > 1 for admission in admitted) > len(admitted) / 2  # mostly, there was something to overlap


def test_without_the_guard_two_controllers_let_attempts_overlap(cluster: Cluster) -> None:
    with pair(cluster, "old-pods") as gates:
        attempts, _ = play(cluster, gates, [("settle", 0), ("stick", 0), ("preempt", 1), ("give_back", 0)])
    assert attempts.overlaps()
    assert attempts.early()
