"""Fixed batch sizes, and batches of any size that run at them; and the search for the number of rows that fit into
memory, with an engine that tells what the process takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rocserve.backends import batch_sizes
from rocserve.backends.batch_sizes import Arrays, default_batch_sizes, parse_batch_sizes, pieces, rows_that_fit
from rocserve.backends.host import Host
from rocserve.backends.onnx.runs import SizedRun
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.requests import TensorSpec


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [(0, ()), (1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8)), (100, (1, 2, 4, 8, 16, 32, 64, 100))],
)
def test_default_sizes(largest: int, sizes: tuple[int, ...]) -> None:
    assert default_batch_sizes(largest) == sizes


@pytest.mark.parametrize(
    ("text", "sizes"), [("1, 4, 8", (1, 4, 8)), ("8 4,4", (4, 8)), (" 2 ", (2,)), ("[1, 2]", (1, 2)), ("3", (3,))]
)
def test_sizes_that_are_written_down(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_batch_sizes(text, 8) == sizes


@pytest.mark.parametrize("text", ["", "0", "9", "1, two", "-1", "1.5", "1,,,9", "\u00b2", "1" * 5000])
def test_sizes_that_cannot_be(text: str) -> None:
    with pytest.raises(
        ServeError, match="parameter 'batch_sizes' must be at most 64 whole numbers from 1 to"
    ) as caught:
        parse_batch_sizes(text, 8)
    assert caught.value.code is StatusCode.INVALID_ARGUMENT


def test_too_many_sizes() -> None:
    with pytest.raises(ServeError, match="at most 64 whole numbers"):
        parse_batch_sizes(",".join(map(str, range(1, 100))), 1000)


def test_sizes_of_a_model_without_a_batch_dimension() -> None:
    with pytest.raises(ServeError, match=r"the accelerator's 'batch' is \"4\", but max_batch_size is 0"):
        parse_batch_sizes("4", 0, "the accelerator's 'batch'")


@pytest.mark.parametrize(
    ("rows", "sizes", "expected"),
    [
        (1, (1, 2, 4), [(0, 1, 1)]),
        (3, (1, 2, 4), [(0, 3, 4)]),
        (4, (1, 2, 4), [(0, 4, 4)]),
        (9, (1, 2, 4), [(0, 4, 4), (4, 8, 4), (8, 9, 1)]),
        (7, (1, 2, 4), [(0, 4, 4), (4, 7, 4)]),
        (2, (8,), [(0, 2, 8)]),
        (3, (1,), [(0, 1, 1), (1, 2, 1), (2, 3, 1)]),
    ],
)
def test_pieces(rows: int, sizes: tuple[int, ...], expected: list[tuple[int, int, int]]) -> None:
    assert [(own.start, own.stop, size) for own, size in pieces(rows, sizes)] == expected


class Doubling:
    """A session that doubles, and records its inputs."""

    def __init__(self) -> None:
        self.given: list[np.ndarray[Any, Any]] = []

    def __call__(self, wanted: Sequence[str], inputs: Arrays) -> Sequence[np.ndarray[Any, Any]]:
        self.given.append(inputs["X"])
        return [inputs["X"] * 2]


def run(session: Doubling, sizes: Sequence[int], batch: np.ndarray[Any, Any], first: bool = True) -> Any:
    return SizedRun(dict.fromkeys(sizes, session), first)(["Y"], {"X": batch})[0]


@pytest.mark.parametrize("rows", range(1, 12))
@pytest.mark.parametrize("first", [True, False])
def test_rows_do_not_depend_on_how_they_run(rows: int, first: bool) -> None:
    model = Doubling()
    batch = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3) + 1
    np.testing.assert_array_equal(run(model, (1, 2, 4), batch, first), batch * 2)
    assert {len(given) for given in model.given} <= {1, 2, 4}
    assert all(given.flags.c_contiguous for given in model.given)


def test_what_padding_holds() -> None:
    model = Doubling()
    run(model, (4,), np.array([[5, 6], [7, 8], [9, 9]]))
    assert model.given[-1].tolist() == [[5, 6], [7, 8], [9, 9], [5, 6]]
    run(model, (2,), np.array([[5, 6]]), first=False)
    assert model.given[-1].tolist() == [[5, 6], [0, 0]]
    run(model, (2,), np.array([["a"]], dtype=np.object_), first=False)
    assert model.given[-1].tolist() == [["a"], ["a"]]


def test_a_batch_of_one_of_the_sizes_is_not_copied() -> None:
    model = Doubling()
    batch = np.ones((4, 2))
    run(model, (2, 4), batch)
    assert np.shares_memory(model.given[-1], batch)


def test_a_batch_of_one_keeps_its_row_when_the_model_squeezes_it_away() -> None:
    """PyTorch's squeeze() gives (3,) for one row of a declared [batch, 3]."""

    def squeezed(wanted: Sequence[str], inputs: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
        return [inputs["X"].squeeze()]

    run = SizedRun(dict.fromkeys((1, 2), squeezed), False, (TensorSpec("Y", DataType.FP32, (-1, 3)),))
    for rows in (1, 2, 3):
        batch = np.arange(3 * rows, dtype=np.float32).reshape(rows, 3)
        np.testing.assert_array_equal(run(["Y"], {"X": batch})[0], batch)


def test_an_output_without_the_batch_is_refused() -> None:
    one_row = SizedRun({4: lambda wanted, inputs: [inputs["X"][:1]]}, pad_with_first_row=True)
    with pytest.raises(ServeError, match=r"output 'Y' has shape \[1, 2\] for a batch of 4"):
        one_row(["Y"], {"X": np.ones((3, 2))})


ROW = 64 << 20
"""Bytes."""
LOADED = 1 << 30
"""Bytes that the process has before the first run."""


class Keeping:
    """An engine that keeps the memory of its runs."""

    def __init__(self) -> None:
        self._rows = 0

    def run(self, rows: int) -> None:
        self._rows = max(self._rows, rows)

    def private_bytes(self) -> int:
        return LOADED + self._rows * ROW


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Keeping:
    engine = Keeping()
    monkeypatch.setattr(batch_sizes, "private_bytes", engine.private_bytes)
    return engine


def host(tmp_path: Path, free: int) -> Host:
    (tmp_path / "meminfo").write_text(f"MemTotal: {1 << 30} kB\nMemAvailable: {free >> 10} kB\n")
    return Host(system=tmp_path, processes=tmp_path, variables={})


@pytest.mark.parametrize(("batches", "rows"), [(1, 12), (2, 6), (100, 1)])
def test_free_memory_bounds_all_batches(engine: Keeping, tmp_path: Path, batches: int, rows: int) -> None:
    assert rows_that_fit(engine.run, batches, 0, host(tmp_path, 10 * ROW + ROW // 2)) == rows


def test_what_the_process_may_have_bounds_too(engine: Keeping, tmp_path: Path) -> None:
    limit = LOADED + 6 * ROW + ROW // 2
    assert rows_that_fit(engine.run, 1, limit, host(tmp_path, 100 * ROW)) == 6


@pytest.mark.usefixtures("engine")
def test_runs_that_take_nothing_are_not_bounded(tmp_path: Path) -> None:
    assert rows_that_fit(lambda rows: None, 1, 0, host(tmp_path, ROW)) is None
