"""The two modules import nothing of each other: what both need stands in both, and is the same."""

from __future__ import annotations

import inspect

import pytest

import adapter
import admission


def test_the_shared_text_is_the_same() -> None:
    texts = []
    for module in (admission, adapter):
        source = inspect.getsource(module)
        begin, end = source.index("# --- shared"), source.index("# --- end of shared")
        texts.append(source[begin:end])
    assert texts[0] == texts[1]
    assert "class Connection" in texts[0]


@pytest.mark.parametrize("name", ["ADMISSION", "EPOCH", "HOLD", "PATCH_MANAGER", "EPOCH_BOUND", "JOBSET_NAME"])
def test_a_name_that_both_must_agree_on_has_one_value(name: str) -> None:
    assert getattr(admission, name) == getattr(adapter, name)


def test_both_know_a_job_by_the_same_names() -> None:
    name = f"dj-{adapter.new_job().lower()}-s999999"
    for candidate in (name, name + "9", name[:-1] + "x", name.replace("-s9", "-s0"), name.upper(), "dj-x-s1"):
        known = [module.JOB_NAME.fullmatch(candidate) is not None for module in (admission, adapter)]
        assert known == [candidate == name] * 2
    assert admission.CONTROLLER == "dispatch.phpboyscout.uk/admission"
