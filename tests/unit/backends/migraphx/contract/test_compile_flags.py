"""The flags fast_math and exhaustive_tune from a recipe to MIGraphX: on the reference target they change nothing.
Quantised programs give nearly the same values, over every binding; the bounds are at most three times the measured
differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import migraphx_models as models
from support.cached_programs import a_recipe
from support.migraphx_programs import ProgramFactory, onnx_runtime

from rocserve.backends.migraphx.binding.c_api import Library
from rocserve.backends.migraphx.binding.interface import Array, Program, Shapes
from rocserve.backends.migraphx.configuration.options import CompileOptions, Target
from rocserve.backends.migraphx.jobs.compile import CompileJob
from rocserve.backends.migraphx.planning.recipe import ProgramSource, SourceKind
from rocserve.cache.digests import file_digest

pytestmark = pytest.mark.in_migraphx_process

SETTINGS = [(True, False), (False, False), (True, True), (False, True)]


@pytest.mark.parametrize(("fast_math", "exhaustive_tune"), SETTINGS)
def test_every_setting_compiles(factory: ProgramFactory, fast_math: bool, exhaustive_tune: bool) -> None:
    model = models.mlp()
    program = factory.parse(model, 2)
    program.compile("ref", fast_math=fast_math, exhaustive_tune=exhaustive_tune)
    inputs = models.random_inputs(model, 2)
    np.testing.assert_allclose(program.run(inputs)[0], onnx_runtime(model, inputs)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("fast_math", "exhaustive_tune"), SETTINGS)
def test_the_c_library_is_told(
    factory: ProgramFactory, monkeypatch: pytest.MonkeyPatch, fast_math: bool, exhaustive_tune: bool
) -> None:
    if factory.binding.name != "c_api":
        pytest.skip("the module takes them as keywords")
    options: dict[str, object] = {}
    call = Library.call

    def recorded(library: Library, name: str, *arguments: Any) -> None:
        if name.startswith("compile_options_set_"):
            options[name.removeprefix("compile_options_set_")] = arguments[-1]
        call(library, name, *arguments)

    monkeypatch.setattr(Library, "call", recorded)
    factory.parse(models.mlp()).compile("ref", fast_math=fast_math, exhaustive_tune=exhaustive_tune)
    assert options.pop("exhaustive_tune_flag", False) is exhaustive_tune
    assert options == {"offload_copy": True, "fast_math": fast_math}


class Recorder:
    """The real binding, which records the flags of its compiles."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.flags: list[Mapping[str, bool]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def parse_onnx(self, path: Path, shapes: Shapes) -> Any:
        program = Recorder(self._real.parse_onnx(path, shapes))
        program.flags = self.flags
        return program

    def compile(self, target: str, **flags: bool) -> None:
        self.flags.append(flags)
        self._real.compile(target, **flags)


@pytest.mark.parametrize(("fast_math", "exhaustive_tune"), SETTINGS)
def test_a_compile_takes_those_of_its_recipe(
    factory: ProgramFactory, tmp_path: Path, fast_math: bool, exhaustive_tune: bool
) -> None:
    file = factory.file(models.mlp())
    recipe = a_recipe(
        options=CompileOptions(Target.REF, fast_math=fast_math, exhaustive_tune=exhaustive_tune),
        batch_size=2,
        input_shapes={"x": (2, models.MLP_WIDTH)},
    )
    recipe = replace(recipe, source=ProgramSource(SourceKind.ONNX, str(file), file_digest(file)))
    recorder: Any = Recorder(factory.binding)
    CompileJob("m", str(tmp_path), recipe, str(tmp_path / "m.mxr")).perform(recorder, lambda text: None)
    assert recorder.flags == [{"offload_copy": True, "fast_math": fast_math, "exhaustive_tune": exhaustive_tune}]


ROWS = 8
SAMPLES = [models.random_inputs(models.mini_resnet(), ROWS, seed) for seed in range(4)]

Quantise = Callable[[Program], None]


def mini_resnet(factory: ProgramFactory, quantise: Quantise | None = None) -> Array:
    program = factory.parse(models.mini_resnet(), ROWS)
    if quantise is not None:
        quantise(program)
    program.compile("ref")
    assert program.parameters["image"].datatype == program.outputs[0].datatype == "float"
    return program.run(models.random_inputs(models.mini_resnet(), ROWS, seed=99))[0]


def relative_error(got: Array, expected: Array) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


QUANTISED: dict[str, tuple[Quantise, float]] = {
    "fp16": (lambda program: program.quantize("fp16"), 0.01),
    "bf16": (lambda program: program.quantize("bf16"), 0.08),
    "int8": (lambda program: program.quantize("int8", "ref", SAMPLES), 0.03),
    "fp8": (lambda program: program.quantize("fp8", "ref", SAMPLES), 0.11),
}


@pytest.mark.parametrize("kind", list(QUANTISED))
def test_a_quantised_network_is_near_the_whole_one(factory: ProgramFactory, kind: str) -> None:
    quantise, bound = QUANTISED[kind]
    error = relative_error(mini_resnet(factory, quantise), mini_resnet(factory))
    assert 0 < error < bound


def test_two_quantisations_one_after_the_other(factory: ProgramFactory) -> None:
    def quantise(program: Program) -> None:
        program.quantize("fp16")
        program.quantize("int8", "ref", SAMPLES)

    assert 0 < relative_error(mini_resnet(factory, quantise), mini_resnet(factory)) < 0.05


def test_a_quantised_program_is_saved_and_loaded(factory: ProgramFactory) -> None:
    program = factory.parse(models.mini_resnet(), ROWS)
    program.quantize("int8", "ref", SAMPLES)
    program.compile("ref", fast_math=False, exhaustive_tune=False)
    program.save(factory.folder / "int8.mxr")
    loaded = factory.binding.load(factory.folder / "int8.mxr")
    np.testing.assert_array_equal(loaded.run(SAMPLES[0])[0], program.run(SAMPLES[0])[0])
    assert loaded.parameters == program.parameters
    assert loaded.outputs == program.outputs
