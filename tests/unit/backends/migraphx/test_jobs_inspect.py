"""The jobs that describe MIGraphX and its program of a model, in real children on the real MIGraphX."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.migraphx_compiling import MLP, Bench
from support.migraphx_models import mlp, two_in_two_out
from support.waiting import PATIENCE_SECONDS

from rocserve.backends.migraphx.compiling.probe_jobs import InspectJob, InspectResult, LibraryJob, LibraryResult
from rocserve.backends.migraphx.program_text import read_program_text
from rocserve.jobs.messages import JobError

Inspect = Callable[[InspectJob], InspectResult]


@pytest.fixture
def bench(migraphx_root: Path, tmp_path: Path) -> Bench:
    return Bench(migraphx_root, tmp_path)


@pytest.fixture
def inspect(bench: Bench) -> Inspect:
    return lambda job: bench.runner.run(job, InspectResult, timeout_seconds=PATIENCE_SECONDS)


def test_what_is_installed(bench: Bench, migraphx_root: Path) -> None:
    library = bench.runner.run(LibraryJob(), LibraryResult, timeout_seconds=PATIENCE_SECONDS)
    assert library.version.startswith("2.")
    assert library.library.startswith(str(migraphx_root))
    assert library.binding == "c_api"
    assert library.targets["ref"] == ""
    assert "libmigraphx_gpu.so" in library.targets["gpu"]


def test_a_model_as_it_is_read(inspect: Inspect, bench: Bench) -> None:
    read = inspect(InspectJob("m", recipe=bench.recipe(two_in_two_out(), 3, {"left": (4,), "right": (4,)})))
    assert [(tensor.name, tensor.datatype, tensor.shape) for tensor in read.parameters] == [
        ("left", "float", (3, 4)),
        ("right", "float", (3, 4)),
    ]
    assert [tensor.shape for tensor in read.outputs] == [(3, 4), (3, 6)]
    operators = {one.operator for one in read_program_text(read.text)}
    assert {"@param", "@literal", "sub", "mul", "dot", "@return"} <= operators


def test_the_print_counts_in_bytes(inspect: Inspect, bench: Bench) -> None:
    read = inspect(InspectJob("m", recipe=bench.recipe(mlp(), 2, MLP)))
    instructions = list(read_program_text(read.text))
    by_name = {one.name: one for one in instructions}
    assert by_name["x"].bytes == 2 * 16 * 4
    weights = sum(one.bytes for one in instructions if one.operator == "@literal")
    assert weights == 4 * (16 * 32 + 32 + 32 * 10 + 10)


def test_what_migraphx_refuses(inspect: Inspect, tmp_path: Path) -> None:
    (tmp_path / "m.mxr").write_bytes(b"nothing of the kind")
    with pytest.raises(JobError, match="inspecting the file failed while reading the compiled program: "):
        inspect(InspectJob("the file", program_file=str(tmp_path / "m.mxr")))
