"""Waiting for a condition, with a deadline: the only way in which a test lets time pass. And names of its own."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import TypeVar

import urllib3

from .api import ApiError

T = TypeVar("T")

# What may be wrong for a moment: an object that is not there yet, a field that is missing, a server that restarts.
TRANSIENT = (ApiError, urllib3.exceptions.HTTPError, OSError, AssertionError, LookupError)


class WaitTimeout(AssertionError):
    """The condition did not come true in time; the text says what was last seen."""


def unique() -> str:
    """Something to end a name with, so that no other object, of this process or of another, has it."""
    return secrets.token_hex(4)


def wait(
    until: Callable[[], T | None],
    what: str,
    timeout: float = 60,
    *,
    interval: float = 0.1,
    check: Callable[[], None] = lambda: None,
) -> T:
    """Returns the first true value of `until()`, asked every `interval` seconds.

    A missing object, an error of the API or the connection, a failed assertion or a missing key mean "not yet". `check`
    is called about once a second, and may raise what ends the wait early. Raises WaitTimeout.
    """
    deadline, next_check, last = time.monotonic() + timeout, time.monotonic() + 1, "nothing"
    while True:
        try:
            value = until()
            if value:
                return value
            last = f"last value: {value!r}"
        except TRANSIENT as error:
            last = f"last error: {type(error).__name__}: {error}"
        now = time.monotonic()
        if now >= next_check:
            check()
            next_check = now + 1
        if now >= deadline:
            raise WaitTimeout(f"after {timeout:g} s still not: {what} ({last})")
        time.sleep(min(interval, max(deadline - now, 0)))
