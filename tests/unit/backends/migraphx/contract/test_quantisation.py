"""Quantised programs give nearly the same, over every binding. The bounds are thrice what was measured, or less."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support import migraphx_models as models
from support.migraphx_programs import ProgramFactory

from rocserve.backends.migraphx.binding.interface import Array, CompileFlags, Program

pytestmark = pytest.mark.in_migraphx_process

ROWS = 8
SAMPLES = [models.random_inputs(models.mini_resnet(), ROWS, seed) for seed in range(4)]

Quantise = Callable[[Program], None]


def mini_resnet(factory: ProgramFactory, quantise: Quantise | None = None) -> Array:
    program = factory.parse(models.mini_resnet(), ROWS)
    if quantise is not None:
        quantise(program)
    program.compile("ref", CompileFlags())
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
    program.compile("ref", CompileFlags(fast_math=False, exhaustive_tune=False))
    program.save(factory.folder / "int8.mxr")
    loaded = factory.binding.load(factory.folder / "int8.mxr")
    np.testing.assert_array_equal(loaded.run(SAMPLES[0])[0], program.run(SAMPLES[0])[0])
    assert loaded.parameters == program.parameters
    assert loaded.outputs == program.outputs
