"""The advice how to install an extra: never by a name that PyPI would look up."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from rocserve.core import extras
from rocserve.core.extras import install_command

LINES = (
    "numpy>=1.26",
    "pillow>=10.1; extra == 'tools'",
    "matplotlib<4,>=3.8; extra == 'tools'",
    'obstore<1,>=0.12; python_version > "3" and extra == "remote"',
)


def origin(folder: Path, *, editable: bool) -> str:
    return json.dumps({"url": folder.as_uri(), "dir_info": {"editable": True} if editable else {}})


@pytest.mark.parametrize("editable", [False, True])
def test_a_checkout_is_named_by_its_folder(tmp_path: Path, editable: bool) -> None:
    folder = tmp_path / "my checkout"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    words = shlex.split(extras._command("tools", origin(folder, editable=editable), LINES))
    assert words == ["pip", "install", *(["-e"] if editable else []), f"{folder}[tools]"]


def test_the_command_for_a_wheel_names_the_packages() -> None:
    wheel = json.dumps({"url": "file:///tmp/rocserve-0.1.0-py3-none-any.whl", "archive_info": {}})
    for recorded in (wheel, "{}"):
        command = extras._command("tools", recorded, LINES)
        assert shlex.split(command) == ["pip", "install", "pillow>=10.1", "matplotlib<4,>=3.8"]
    assert extras._command("remote", "{}", LINES) == "pip install 'obstore<1,>=0.12'"


def test_a_checkout_that_is_gone_is_not_named(tmp_path: Path) -> None:
    assert extras._command("remote", origin(tmp_path, editable=True), LINES) == "pip install 'obstore<1,>=0.12'"


def test_no_text_asks_pip_for_the_name_on_pypi() -> None:
    assert "rocserve[" not in install_command("cpu").partition("[")[0]
    root = Path(__file__).parents[3]
    texts = [root / name for name in ("README.md", "pyproject.toml", "CHANGELOG.md", "Makefile")]
    kinds = {"server": "*.py", "clients": "*.py", "docs": "*.md", "docker": "*", "deploy": "*"}
    for folder, pattern in kinds.items():
        texts += [path for path in (root / folder).rglob(pattern) if path.is_file()]
    asks = re.compile(r"""rocserve\[\w|install ['"]?rocserve\b(?!_)""")
    found = [path for path in texts if asks.search(path.read_text(errors="ignore"))]
    assert found == []
