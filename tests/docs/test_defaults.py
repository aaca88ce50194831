"""Checks that the defaults that pages write after flags, as in `--drain-seconds` (0), are those of the flags' page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.migraphx import CHECKOUT

FLAG = re.compile(r"^\| `--([a-z0-9-]+)[=`].*\(default ([0-9.,]+)[;)]", re.MULTILINE)
DEFAULTS = dict(FLAG.findall((CHECKOUT / "docs/reference/flags.md").read_text()))
QUOTED = re.compile(r"`--([a-z0-9-]+)` \(([0-9][0-9.,]*)( GiB)?")
PAGES = (*CHECKOUT.glob("docs/**/*.md"), CHECKOUT / "README.md")
FOUND = [(page, *quoted) for page in PAGES for quoted in QUOTED.findall(page.read_text())]


def test_defaults_are_found() -> None:
    assert len(FOUND) > 20


@pytest.mark.parametrize(("page", "flag", "number", "unit"), FOUND, ids=[f"{one[0].stem}-{one[1]}" for one in FOUND])
def test_a_page_has_the_default_of_the_flag(page: Path, flag: str, number: str, unit: str) -> None:
    value = float(number.replace(",", "")) * (1 << 30 if unit else 1)
    assert value == float(DEFAULTS[flag])
