"""What tests against a real server share, whether they ask it or hurt it."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """An empty model repository."""
    folder = tmp_path / "repository"
    folder.mkdir()
    return folder
