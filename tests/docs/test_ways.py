"""Checks that the files and functions in CONTRIBUTING's ways of a request and of a drop exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.migraphx import CHECKOUT

PACKAGE = CHECKOUT / "server/rocserve"
STEP = re.compile(r"^\|[^|]*\| \d+\. ([^|]+) \|", re.MULTILINE)
STEPS = STEP.findall((CHECKOUT / "CONTRIBUTING.md").read_text())


def test_both_ways_are_found() -> None:
    assert len(STEPS) == 12 + 12


@pytest.mark.parametrize("step", STEPS)
def test_what_a_step_names_is_there(step: str) -> None:
    file = Path()
    for word in re.findall(r"`([^`]+)`", step):
        if word.endswith(".py"):
            file = PACKAGE / word
            assert file.is_file()
            continue
        for name in word.split("."):
            assert re.search(rf"\b(?:def|class) {name}\b", file.read_text()), f"{file} has no {name}"
