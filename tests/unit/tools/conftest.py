"""The command that the tests of its verbs run."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tools import Command


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path / "cache", capsys)
