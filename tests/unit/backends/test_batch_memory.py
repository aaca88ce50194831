"""How many rows fit, found by runs that take real memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rocserve.backends.batch_memory import rows_that_fit
from rocserve.backends.host import Host
from rocserve.core.heap_trim import private_bytes

ROW = 64 << 20
"""Far more than whatever else a test's process takes meanwhile."""


@pytest.fixture
def run() -> Callable[[int], object]:
    """Keeps what it has worked in, as engines do."""
    kept: list[np.ndarray] = []

    def run_rows(rows: int) -> None:
        missing = rows - len(kept)
        kept.extend(np.ones(ROW, np.uint8) for _ in range(missing))

    return run_rows


def host(tmp_path: Path, free: int) -> Host:
    (tmp_path / "meminfo").write_text(f"MemTotal: {1 << 30} kB\nMemAvailable: {free >> 10} kB\n")
    return Host(system=tmp_path, processes=tmp_path, variables={})


@pytest.mark.parametrize(("batches", "rows"), [(1, 12), (2, 6), (100, 1)])
def test_what_is_free_bounds_all_batches(run: Callable[[int], object], tmp_path: Path, batches: int, rows: int) -> None:
    assert rows_that_fit(run, batches, 0, host(tmp_path, 10 * ROW + ROW // 2)) == rows


def test_what_the_process_may_have_bounds_too(run: Callable[[int], object], tmp_path: Path) -> None:
    limit = private_bytes() + 6 * ROW + ROW // 2
    assert rows_that_fit(run, 1, limit, host(tmp_path, 100 * ROW)) == 6


def test_runs_that_take_nothing_are_not_bounded(tmp_path: Path) -> None:
    assert rows_that_fit(lambda rows: None, 1, 0, host(tmp_path, ROW)) is None
