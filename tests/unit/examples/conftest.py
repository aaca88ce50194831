"""Makes the examples importable: scripts that import each other by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "clients" / "examples"


@pytest.fixture(scope="package", autouse=True)
def examples_on_path() -> Iterator[Path]:
    sys.path.insert(0, str(EXAMPLES))
    yield EXAMPLES
    sys.path.remove(str(EXAMPLES))
