"""Programs that children compile, the cache keeps, and another child tries: on the real MIGraphX, target ref."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import migraphx_models as networks
from support.cached_programs import being_built
from support.graphdef import classifier
from support.migraphx_compiling import MLP, Bench
from support.waiting import PATIENCE_SECONDS

from rocserve.backends.migraphx.compiling.child_process import migraphx_jobs
from rocserve.backends.migraphx.compiling.compiler import ProgramCompiler
from rocserve.backends.migraphx.installation import find_installation
from rocserve.backends.migraphx.options import CompileOptions, Precision, Target
from rocserve.core.errors import StatusCode
from rocserve.jobs.messages import JobError
from rocserve.jobs.runner import JobRunner
from rocserve.settings import EngineSettings

pytestmark = [pytest.mark.in_migraphx_process, pytest.mark.long, pytest.mark.usefixtures("jobs_here")]


@pytest.fixture
def bench(migraphx_root: Path, tmp_path: Path) -> Bench:
    return Bench(migraphx_root, tmp_path)


@pytest.mark.usefixtures("jobs_in_children")
def test_a_program_is_compiled_saved_and_tried(bench: Bench) -> None:
    recipe = bench.recipe(networks.mlp(), 2, MLP)
    program = bench.program(recipe)
    assert bench.reports == [
        f"compiling batch size 2 of model 'x': {phase}"
        for phase in ("reading the model", "compiling", "saving", "trying the saved program")
    ]
    about = program.about
    assert (about.model, about.source_file, about.recipe) == ("x", "model.onnx", recipe)
    assert [(tensor.name, tensor.datatype, tensor.shape) for tensor in about.inputs] == [("x", "float", (2, 16))]
    assert [(tensor.datatype, tensor.shape) for tensor in about.outputs] == [("float", (2, 10))]
    assert about.compile_seconds > 0
    assert about.scratch_bytes is None


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.FP8])
@pytest.mark.parametrize(("own", "batch"), [("batch", 2), (1, 2)])
def test_a_program_is_quantised_with_calibration_data(
    bench: Bench, precision: Precision, own: int | str, batch: int
) -> None:
    recipe = bench.calibrated(networks.mlp(own), batch, precision)
    bench.program(replace(recipe, rebatched=own != "batch"))
    title = "compiling batch size 2 of model 'x'"
    assert bench.reports[1:4] == [
        f"{title}: reading the calibration data",
        f"{title}: quantising to {precision.value}",
        f"{title}: compiling",
    ]


def test_calibration_data_that_have_been_changed_meanwhile_are_not_used(bench: Bench) -> None:
    recipe = bench.calibrated(networks.mlp(), 1, Precision.INT8)
    np.savez(bench.folder / "samples.npz", x=np.ones((5, networks.MLP_WIDTH), np.float32))
    error = bench.error(recipe)
    assert error.text.endswith("while reading the calibration data: the calibration data changed during the compile")


def test_a_file_that_has_been_changed_meanwhile_is_not_compiled_under_the_old_key(bench: Bench) -> None:
    recipe = bench.recipe(networks.mlp(), 1, MLP)
    Path(recipe.source.path).write_bytes(networks.mini_resnet())
    error = bench.error(recipe)
    assert error.text.endswith("while reading the model: file model.onnx changed during the compile")
    assert bench.cache.find(recipe.key) is None


@pytest.mark.usefixtures("jobs_in_children")
def test_a_compile_can_be_called_off(bench: Bench) -> None:
    recipe = bench.recipe(networks.slow_to_compile(), 1, {"x": (4,)})
    begun = threading.Event()
    errors: list[JobError] = []

    def report(text: str) -> None:
        begun.set()

    thread = threading.Thread(target=lambda: errors.append(bench.error(recipe, report=report, timeout_seconds=0)))
    thread.start()
    assert begun.wait(PATIENCE_SECONDS)
    bench.runner.call_off()
    thread.join(PATIENCE_SECONDS)
    assert [error.text for error in errors] == ["compiling batch size 1 of model 'x' was called off"]


@pytest.mark.usefixtures("jobs_in_children")
def test_what_migraphx_writes_is_kept_with_the_program_and_logged(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MIGRAPHX_TRACE_PASSES", "1")
    with caplog.at_level(logging.INFO, "test.compiler"):
        messages = bench.program(bench.recipe(networks.mlp(), 1, MLP)).about.messages
    logged = [record.message for record in caplog.records]
    assert messages
    assert f"compiling batch size 1 of model 'x': {messages[0]}" in logged


@pytest.mark.parametrize(("miopen_tuning", "search"), [(True, "3"), (False, "")])
@pytest.mark.usefixtures("jobs_in_children")
def test_a_child_that_compiles_for_a_gpu_keeps_what_miopen_finds_in_the_cache(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, miopen_tuning: bool, search: str
) -> None:
    """The loader is a script that records the child's environment."""
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "5")
    seen, script = tmp_path / "seen", tmp_path / "see"
    script.write_text(
        f'#!/bin/sh\necho $HIP_VISIBLE_DEVICES,$MIOPEN_USER_DB_PATH,$MIOPEN_FIND_ENFORCE >{seen}\nexec "$@"\n'
    )
    script.chmod(0o700)
    found = find_installation(EngineSettings(migraphx_root=str(bench.root)))
    installation = replace(found, loader=(str(script), *found.loader))
    runner = JobRunner(migraphx_jobs(installation), lambda text: None, logging.getLogger("test.compiler"))
    compiler = ProgramCompiler(runner, bench.cache, model_name="x", model_folder=bench.folder)
    options = CompileOptions(Target.GPU, miopen_tuning=miopen_tuning)
    with pytest.raises(JobError, match=r"libmigraphx_gpu\.so"):
        compiler.program(bench.recipe(networks.mlp(), 1, MLP, options=options), timeout_seconds=PATIENCE_SECONDS)
    assert seen.read_text() == f"5,{bench.cache.tuning_folder},{search}\n"


def test_a_model_without_a_batch_dimension(bench: Bench) -> None:
    recipe = bench.recipe(networks.without_batch(), 0, {}, input_shapes={"x": (2, 3)})
    assert bench.program(recipe).about.outputs[0].shape == (3, 2)
    assert bench.reports[0] == "compiling the program of model 'x': reading the model"


# Models that run in another batch size than their file's.


@pytest.mark.parametrize("own", [1, 2, 4])
def test_a_baked_batch_size_can_be_another(bench: Bench, own: int) -> None:
    model = networks.mini_resnet(own)
    recipe = bench.recipe(model, 2 if own != 2 else 3, {"image": networks.IMAGE_SHAPE}, rebatched=True)
    program = bench.program(recipe)
    assert program.about.outputs[0].shape == (recipe.batch_size, 10)
    title = f"compiling batch size {recipe.batch_size} of model 'x'"
    assert bench.reports[-1] == f"{title}: checking it against the model's own batch size, {own}"


def test_a_tensorflow_graph_is_checked_as_well(bench: Bench) -> None:
    recipe = bench.tensorflow_recipe(classifier(1), 3, {"image": (3, 8, 8)}, ("scores",))
    bench.program(replace(recipe, rebatched=True))
    assert bench.reports[-1].endswith("checking it against the model's own batch size, 1")


def test_the_program_of_the_files_own_batch_size_is_taken_from_the_cache(bench: Bench) -> None:
    bench.program(bench.recipe(networks.mlp(1), 1, MLP))
    bench.program(bench.recipe(networks.mlp(1), 3, MLP, rebatched=True))
    assert len(bench.cache.entries()) == 2


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16])
def test_rounding_is_not_taken_for_a_fault(bench: Bench, precision: Precision) -> None:
    bench.program(bench.recipe(networks.mlp(1), 4, MLP, rebatched=True, precision=precision))


REMEDY = (
    "export it with an open batch dimension, or set max_batch_size to {own} and parameter 'batch_sizes' to \"{own}\""
)


@pytest.mark.parametrize("own", [1, 4])
def test_a_reshape_that_holds_the_batch_size_is_found(bench: Bench, own: int) -> None:
    error = bench.error(bench.recipe(networks.reshaped_to_constant(own), 2, {"x": (2, 3)}, rebatched=True))
    assert error.code is StatusCode.INVALID_ARGUMENT
    assert (
        f"model 'x' cannot run at batch size 2: its graph fixes batch size {own} (for example by a Reshape to a"
        " constant shape, or a sum over the batch): "
    ) in error.text
    assert error.text.endswith(REMEDY.format(own=own))


@pytest.mark.parametrize(("own", "batch"), [(1, 2), (4, 1), (4, 8)])
def test_rows_that_depend_on_each_other_are_found(bench: Bench, own: int, batch: int) -> None:
    error = bench.error(bench.recipe(networks.mixing_rows(own), batch, {"x": (4,)}, rebatched=True))
    assert f"output 'y' of random rows differs from that in a batch of {own} (relative error " in error.text
    assert error.text.endswith(REMEDY.format(own=own))


def test_a_model_that_is_refused_in_its_own_batch_size_too_keeps_its_error(bench: Bench) -> None:
    error = bench.error(bench.recipe(networks.unknown_operator(), 2, {"x": (4,)}, rebatched=True))
    assert "Unknown operator: MyFancyOp; " in error.text
    assert "batch size 2:" not in error.text


def test_the_wait_for_another_process_can_be_called_off(bench: Bench) -> None:
    recipe = bench.recipe(networks.mlp(), 1, MLP)

    def report(text: str) -> None:
        assert text == "batch size 1 of model 'x': waiting for another process that compiles it"
        bench.runner.call_off()

    with being_built(bench.cache, recipe.key):
        error = bench.error(recipe, report=report)
    assert (error.is_crash, error.text) == (False, "waiting for batch size 1 of model 'x' was called off")
