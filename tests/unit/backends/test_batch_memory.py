"""How many rows fit, found by runs that take real memory in a process of their own: in the tests' process, what earlier
tests have left may be freed between two runs."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from rocserve.backends.batch_sizes import rows_that_fit
from rocserve.backends.host import Host
from rocserve.core.heap_trim import private_bytes

ROW = 64 << 20
"""Far more than whatever else a fresh process takes meanwhile."""


@pytest.fixture
def fresh_process() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


def host(tmp_path: Path, free: int) -> Host:
    (tmp_path / "meminfo").write_text(f"MemTotal: {1 << 30} kB\nMemAvailable: {free >> 10} kB\n")
    return Host(system=tmp_path, processes=tmp_path, variables={})


def rows_of_an_engine_that_keeps_its_memory(batches: int, further_bytes: int, host: Host) -> int | None:
    """The process may have so many bytes more than it has; 0 = any."""
    kept: list[np.ndarray] = []

    def run(rows: int) -> None:
        missing = rows - len(kept)
        kept.extend(np.ones(ROW, np.uint8) for _ in range(missing))

    limit = private_bytes() + further_bytes if further_bytes else 0
    return rows_that_fit(run, batches, limit, host)


@pytest.mark.parametrize(("batches", "rows"), [(1, 12), (2, 6), (100, 1)])
def test_free_memory_bounds_all_batches(
    fresh_process: ProcessPoolExecutor, tmp_path: Path, batches: int, rows: int
) -> None:
    around = host(tmp_path, 10 * ROW + ROW // 2)
    assert fresh_process.submit(rows_of_an_engine_that_keeps_its_memory, batches, 0, around).result() == rows


def test_what_the_process_may_have_bounds_too(fresh_process: ProcessPoolExecutor, tmp_path: Path) -> None:
    around = host(tmp_path, 100 * ROW)
    rows = fresh_process.submit(rows_of_an_engine_that_keeps_its_memory, 1, 6 * ROW + ROW // 2, around).result()
    assert rows == 6


def test_runs_that_take_nothing_are_not_bounded(tmp_path: Path) -> None:
    assert rows_that_fit(lambda rows: None, 1, 0, host(tmp_path, ROW)) is None
