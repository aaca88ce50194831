"""An engine whose programs the tests of a file share."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.migraphx_engine import Engine


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def engine(tmp_path: Path, cache: Path) -> Engine:
    """An engine with the shared cache: programs of earlier tests are neither compiled nor tried again."""
    return Engine(tmp_path, cache)
