"""The API server's audit log: who asked what."""

from __future__ import annotations

import json
import pathlib
import uuid
from typing import Any

from .api import Api, ApiError
from .waiting import wait

Call = tuple[str, str, str, str]  # verb, API group, resource, subresource
Event = dict[str, Any]


class Audit:
    """Reads the log. An event is written after its answer was sent, so a reader first makes sure it is up to date."""

    def __init__(self, api: Api, log: pathlib.Path) -> None:
        self._api, self._log = api, log

    def mark(self) -> int:
        """The place in the log behind everything that was answered until now."""
        return self._catch_up()

    def calls(self, user: str, since: int) -> set[Call]:
        """The kinds of requests a user made; paths that are no resource (/version) are left out."""
        found = set()
        for event in self.events(user, since):
            target = event.get("objectRef", {})
            group, subresource = target.get("apiGroup", ""), target.get("subresource", "")
            if "resource" in target:
                found.add((event["verb"], group, target["resource"], subresource))
        return found

    def events(self, user: str | None, since: int) -> list[Event]:
        """One event per request, oldest first; of a request with several stages, the first one logged."""
        until = self._catch_up()
        with self._log.open("rb") as file:
            file.seek(since)
            lines = file.read(until - since).splitlines()
        needle = json.dumps(user).encode() if user else b""
        found: dict[str, Event] = {}
        for line in lines:
            if needle in line:  # parsing is slow, and most lines are others'
                event = json.loads(line)
                if user in (None, event.get("user", {}).get("username")):
                    found.setdefault(event["auditID"], event)
        return list(found.values())

    def _catch_up(self) -> int:
        """Leaves a mark in the log by a request of its own, waits for it, and returns the place behind it."""
        start = self._log.stat().st_size
        mark = f"/dispatch-test-mark/{uuid.uuid4()}"
        try:
            self._api.request("GET", mark)
        except ApiError as error:
            if error.status != 404:
                raise

        def place() -> int:
            with self._log.open("rb") as file:
                file.seek(start)
                before, found, after = file.read().partition(mark.encode())
            end = after.find(b"\n")
            return start + len(before) + len(found) + end + 1 if found and end >= 0 else 0

        return wait(place, "the audit log is up to date", timeout=20, interval=0.02)
