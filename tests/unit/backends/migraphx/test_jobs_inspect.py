"""The jobs that describe MIGraphX and its program of a model, in real children on the real MIGraphX."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from support.migraphx_models import mlp, two_in_two_out

from rocserve.backends.base import ModelSource
from rocserve.backends.migraphx.binding.program_text import read_program_text
from rocserve.backends.migraphx.configuration.options import CompileOptions, ServingOptions, Target
from rocserve.backends.migraphx.installation import find_installation
from rocserve.backends.migraphx.jobs.child import migraphx_jobs
from rocserve.backends.migraphx.jobs.probe import InspectJob, InspectResult, LibraryJob, LibraryResult
from rocserve.backends.migraphx.planning.plan import plan_programs
from rocserve.backends.migraphx.planning.recipe import ProgramEnvironment, ProgramRecipe
from rocserve.core.model_config import InstanceKind, ModelConfig
from rocserve.jobs.messages import JobError
from rocserve.jobs.runner import JobRunner
from rocserve.settings import EngineSettings

_SECONDS = 60.0

Inspect = Callable[[InspectJob], InspectResult]


@pytest.fixture
def runner(migraphx_root: Path) -> JobRunner:
    installation = find_installation(EngineSettings(migraphx_root=str(migraphx_root)))
    return JobRunner(migraphx_jobs(installation), lambda _: None, logging.getLogger("test"))


@pytest.fixture
def inspect(runner: JobRunner) -> Inspect:
    return lambda job: runner.run(job, InspectResult, timeout_seconds=_SECONDS)


def _recipe(folder: Path, content: bytes, batch_size: int) -> ProgramRecipe:
    file = folder / "model.onnx"
    file.write_bytes(content)
    source = ModelSource(
        name="m",
        version=1,
        model_folder=folder,
        version_folder=folder,
        model_file=file,
        config=ModelConfig("m", max_batch_size=batch_size),
        instance_kind=InstanceKind.CPU,
        device=None,
        instance_count=1,
    )
    serving = ServingOptions((batch_size,))
    return plan_programs(source, CompileOptions(Target.REF), serving, ProgramEnvironment("")).recipes[0]


def test_what_is_installed(runner: JobRunner, migraphx_root: Path) -> None:
    library = runner.run(LibraryJob(), LibraryResult, timeout_seconds=_SECONDS)
    assert library.version.startswith("2.")
    assert library.library.startswith(str(migraphx_root))
    assert library.binding == "c_api"
    assert library.targets["ref"] == ""
    assert "libmigraphx_gpu.so" in library.targets["gpu"]


def test_a_model_as_it_is_read(inspect: Inspect, tmp_path: Path) -> None:
    read = inspect(InspectJob("m", recipe=_recipe(tmp_path, two_in_two_out(), 3)))
    assert [(tensor.name, tensor.datatype, tensor.shape) for tensor in read.parameters] == [
        ("left", "float", (3, 4)),
        ("right", "float", (3, 4)),
    ]
    assert [tensor.shape for tensor in read.outputs] == [(3, 4), (3, 6)]
    operators = {one.operator for one in read_program_text(read.text)}
    assert {"@param", "@literal", "sub", "mul", "dot", "@return"} <= operators


def test_the_print_counts_in_bytes(inspect: Inspect, tmp_path: Path) -> None:
    read = inspect(InspectJob("m", recipe=_recipe(tmp_path, mlp(), 2)))
    instructions = list(read_program_text(read.text))
    by_name = {one.name: one for one in instructions}
    assert by_name["x"].bytes == 2 * 16 * 4
    weights = sum(one.bytes for one in instructions if one.operator == "@literal")
    assert weights == 4 * (16 * 32 + 32 + 32 * 10 + 10)


def test_what_migraphx_refuses(inspect: Inspect, tmp_path: Path) -> None:
    (tmp_path / "m.mxr").write_bytes(b"nothing of the kind")
    with pytest.raises(JobError, match="inspecting the file failed while reading the compiled program: "):
        inspect(InspectJob("the file", program_file=str(tmp_path / "m.mxr")))
