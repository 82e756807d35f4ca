"""`docs/adapter.md` says what the code does."""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
import re

import adapter

PAGE = pathlib.Path("docs/adapter.md").read_text()


def rows(section: str) -> list[list[str]]:
    """The cells of a section's table, without its head."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines[2:]]


def names(cells: list[str]) -> list[str]:
    return [name for cell in cells for name in re.findall(r"`([a-zA-Z_.]+)", cell)]


def test_every_field_of_a_spec_is_there_in_order() -> None:
    assert names([row[0] for row in rows("A job's spec")]) == [
        *("job", "submission", "runtime"),
        *(f.name for f in dataclasses.fields(adapter.JobSpec) if f.name not in ("job", "submission", "runtime")),
    ]


def test_every_state_is_there() -> None:
    assert sorted(names([row[0] for row in rows("States")])) == sorted(adapter.State)


def test_every_error_is_there_with_its_exit_code() -> None:
    for name, code, _ in rows("Errors"):
        assert adapter._exit_code(getattr(adapter, name.strip("`"))("")) == int(code)


def test_every_operation_is_there() -> None:
    methods = {name for name in vars(adapter.Backend) if not name.startswith("_")}
    assert set(names([row[0] for row in rows("Operations")])) == methods


def test_every_setting_is_there() -> None:
    keys = {f"kueue.{f.name}" for f in dataclasses.fields(adapter.Kueue)}
    keys |= {f.name for f in dataclasses.fields(adapter.Settings)} - {"kueue"}
    assert set(names([row[0] for row in rows("Settings")])) == {adapter._camel(key) for key in keys}


def test_every_reason_of_preflight_is_there_with_its_remedy() -> None:
    page = pathlib.Path("docs/preflight.md").read_text()
    table = page.partition("\n## Reasons\n")[2].partition("\n## ")[0]
    cells = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")][2:]
    assert [(reason.strip()[1:-1], text.strip()) for reason, text in cells] == list(adapter.REMEDIES)


def test_every_refusal_of_preflight_begins_as_the_code_says_it() -> None:
    page = pathlib.Path("docs/preflight.md").read_text().partition("\n## Refused\n")[2]
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| ")][1:]
    texts = [row[2].strip(" `") for row in rows]
    source = inspect.getsource(adapter)
    assert len(texts) == 8
    for text in texts:
        assert f'"{re.split("<|…|Kueue does", text)[0]}' in source


def test_every_verb_is_there() -> None:
    verbs = [cell.split()[0] for row in rows("Command line") for cell in re.findall(r"`([a-z]+[^`]*)`", row[0])]
    assert sorted(verbs) == sorted([*(verb for verb, _, _ in adapter.VERBS), "stop"])
