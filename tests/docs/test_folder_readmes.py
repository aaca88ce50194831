"""Checks the READMEs of the server's folders: each folder has one, it names each module, and what it names exists; and
that of tests/support."""

from __future__ import annotations

import re
from pathlib import Path

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


def test_each_module_is_named() -> None:
    modules = {path for folder in FOLDERS for path in folder.glob("*.py") if not re.match("_|.*_pb2", path.name)}
    named = {folder / name for folder in FOLDERS for name in _named(folder / "README.md") if "/" not in name}
    assert sorted(map(_name, modules - named)) == []


def test_what_is_named_exists() -> None:
    named = {(_name(readme), name) for readme in READMES for name in _named(readme)}
    exist = {name for _, name in named if (CHECKOUT / name).is_file() or any(p.endswith(f"/{name}") for p in FILES)}
    assert sorted((readme, name) for readme, name in named if name not in exist) == []


def test_each_is_a_screen() -> None:
    assert [_name(readme) for readme in READMES if len(readme.read_text().split()) > LONGEST] == []


def test_the_readme_of_the_tests_support_names_its_modules() -> None:
    support = CHECKOUT / "tests/support"
    paths = (*support.glob("*.py"), *support.glob("parity/*.py"))
    assert _named(support / "README.md") == {
        str(path.relative_to(support)) for path in paths if path.name != "__init__.py"
    }
