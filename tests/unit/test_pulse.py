"""The pulse: which thread has stood still."""

from __future__ import annotations

import faulthandler
import threading
from collections.abc import Iterator

import pytest

import admission


class Clock:
    """A clock that a test turns."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(admission, "time", made)
    yield made
    faulthandler.cancel_dump_traceback_later()


def test_a_thread_that_does_not_beat_in_time_stands_still(clock: Clock) -> None:
    pulse = admission.Pulse()
    assert pulse.stands_still() == ""
    pulse.beat()
    clock.now += admission.STANDSTILL
    assert pulse.stands_still() == ""
    clock.now += 1
    assert pulse.stands_still() == threading.current_thread().name
    pulse.beat()
    assert pulse.stands_still() == ""


def test_a_thread_that_rests_does_not_stand_still(clock: Clock) -> None:
    pulse = admission.Pulse()
    pulse.beat()
    pulse.rest()
    clock.now += 10 * admission.STANDSTILL
    assert pulse.stands_still() == ""


def test_the_others_do_not_cover_for_one_that_stands_still(clock: Clock) -> None:
    pulse = admission.Pulse()
    thread = threading.Thread(target=pulse.beat, name="stuck")
    thread.start()
    thread.join()
    clock.now += admission.STANDSTILL + 1
    pulse.beat()
    assert pulse.stands_still() == "stuck"
