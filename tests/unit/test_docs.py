"""The documents say what the code does."""

from __future__ import annotations

import inspect
import pathlib
import re

import yaml

import admission
from tests.cluster import gate

ROOT = pathlib.Path(admission.__file__).parent
PAGE = (ROOT / "docs/admission.md").read_text()


def rows(section: str) -> list[list[str]]:
    """The cells of a section's table, without its heading."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_flag_is_documented_with_its_default() -> None:
    usage = re.findall(r"^  -([a-z-]+)", admission.USAGE, re.MULTILINE)
    documented = {flag.strip("`-"): default for flag, default, _ in rows("Flags")}
    assert list(documented) == usage
    for flag, default in documented.items():
        value = getattr(admission.Options(), flag.replace("-", "_"))
        if isinstance(value, bool):
            assert default == f"`{str(value).lower()}`"
        elif isinstance(value, float):
            assert default == f"`{value:g}s`"
        elif value:
            assert default == f"`{value}`"


def test_the_rows_are_those_of_decide() -> None:
    table = inspect.getdoc(admission.decide) or ""
    in_the_code = re.findall(r"^([0-9]+a?) {3,}", table, re.MULTILINE)
    assert [row[0] for row in rows("What it does with a Workload")] == in_the_code


def test_every_message_is_in_the_code() -> None:
    source = inspect.getsource(admission)
    for row in rows("What it does with a Workload"):
        for message in re.findall(r"`([^`]*)`", row[3]):
            constant = re.split(r"<[^>]*>", message)[0]
            assert f'"{constant}' in source or f"'{constant}" in source, message


def test_every_log_message_is_documented_and_no_other() -> None:
    source = inspect.getsource(admission)
    logged = set(re.findall(r'\blog\(\s*(?:level|"[A-Z]+"), "([^"]+)"', source))
    assert logged == {row[0].strip("`") for row in rows("Log")}


def test_the_documented_verbs_are_granted_by_the_manifest() -> None:
    assert documented() <= granted([cluster_role()])


def test_the_trimmed_role_grants_the_documented_verbs_and_no_other() -> None:
    objects = list(yaml.safe_load_all((ROOT / "examples/admission-role.yaml").read_text()))
    roles = [obj for obj in objects if obj["kind"] in ("ClusterRole", "Role")]
    assert granted(roles) == documented()
    assert [r["rules"][0]["resources"] for r in roles if r["kind"] == "Role"] == [["leases"]]
    assert roles[0]["metadata"] == {"name": "dispatch-admission"}  # takes the place of the manifest's


def documented() -> set[tuple[str, str]]:
    """What the page's table says: resource, verb."""
    found = set()
    for resource, verbs in rows("Verbs"):
        name, _, subresource = resource.split("`")[1].partition("/")
        base, _, group = name.partition(".")
        target = f"{base}/{subresource}.{group}" if subresource else name
        found |= {(target, verb) for verb in verbs.split(", ")}
    return found


def granted(roles: list[dict[str, list[dict[str, list[str]]]]]) -> set[tuple[str, str]]:
    """What roles allow: resource, verb."""
    return {
        (f"{resource}.{group}" if group else resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_the_tests_run_under_the_manifests_role() -> None:
    assert cluster_role()["rules"] == gate.RULES


def cluster_role() -> dict[str, list[dict[str, list[str]]]]:
    objects = yaml.safe_load_all((ROOT / "manifest.yaml").read_text())
    found: dict[str, list[dict[str, list[str]]]] = next(o for o in objects if o["kind"] == "ClusterRole")
    return found
