"""Checks the READMEs of the server's folders: each folder has one, it names each module, and what it names exists; and
that of tests/support."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.migraphx import CHECKOUT

PACKAGE = CHECKOUT / "server/rocserve"
FOLDERS = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))
READMES = sorted(PACKAGE.rglob("README.md"))
FILES = [str(path) for path in PACKAGE.rglob("*.py")]
LONGEST = 900
"""Words, a picture's included: a screen of rules, and the table of modules."""


def _name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def _named(readme: Path) -> set[str]:
    return set(re.findall(r"[\w/]+\.py\b", readme.read_text()))


@pytest.mark.parametrize("folder", FOLDERS, ids=_name)
def test_each_module_is_named(folder: Path) -> None:
    modules = {path.name for path in folder.glob("*.py") if not re.match("_|.*_pb2", path.name)}
    assert not modules - {name for name in _named(folder / "README.md") if "/" not in name}


@pytest.mark.parametrize("readme", READMES, ids=_name)
def test_what_is_named_exists(readme: Path) -> None:
    for name in _named(readme):
        assert (CHECKOUT / name).is_file() or any(path.endswith(f"/{name}") for path in FILES), f"there is no {name}"


@pytest.mark.parametrize("readme", READMES, ids=_name)
def test_it_is_a_screen(readme: Path) -> None:
    assert len(readme.read_text().split()) <= LONGEST


def test_the_readme_of_the_tests_support_names_its_modules() -> None:
    support = CHECKOUT / "tests/support"
    paths = (*support.glob("*.py"), *support.glob("parity/*.py"))
    assert _named(support / "README.md") == {
        str(path.relative_to(support)) for path in paths if path.name != "__init__.py"
    }
