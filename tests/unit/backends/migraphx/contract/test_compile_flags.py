"""The flags fast_math and exhaustive_tune from a recipe to MIGraphX: on the reference target they change nothing.
Quantised programs give nearly the same values, over every binding; the bounds are at most three times the measured
differences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import migraphx_models as models
from support.cached_programs import a_recipe
from support.migraphx_programs import ProgramFactory

from rocserve.backends.migraphx.binding import Array, Program
from rocserve.backends.migraphx.c_api import CBinding
from rocserve.backends.migraphx.compiling.compile_job import CompileJob
from rocserve.backends.migraphx.compiling.recipe import ProgramSource, SourceKind
from rocserve.backends.migraphx.options import CompileOptions, Precision, Target
from rocserve.cache.digests import file_digest

pytestmark = pytest.mark.in_migraphx_process


def compile_mlp(factory: ProgramFactory, folder: Path, **options: Any) -> Array:
    """Compile in this process as a child does, and return what the saved program makes of ones."""
    file = factory.file(models.mlp())
    recipe = a_recipe(
        source=ProgramSource(SourceKind.ONNX, str(file), file_digest(file)),
        options=CompileOptions(Target.REF, **options),
        batch_size=2,
        input_shapes={"x": (2, models.MLP_WIDTH)},
    )
    CompileJob("m", str(folder), recipe, str(folder / "m.mxr")).perform(factory.binding, lambda text: None)
    return factory.binding.load(folder / "m.mxr").run({"x": np.ones((2, models.MLP_WIDTH), np.float32)})[0]


def test_a_compile_quantises_to_the_precision_of_its_recipe(factory: ProgramFactory, tmp_path: Path) -> None:
    exact, *found = (compile_mlp(factory, tmp_path, precision=one) for one in list(Precision)[:3])
    assert exact.shape == (2, 10)
    for scores, tolerance in zip(found, (0.01, 0.1), strict=True):  # FP16 and BF16
        assert not np.array_equal(scores, exact)
        np.testing.assert_allclose(scores, exact, atol=tolerance)


@pytest.mark.parametrize("fast_math", [True, False])
@pytest.mark.parametrize("exhaustive_tune", [True, False])
def test_a_compile_takes_the_flags_of_its_recipe(
    factory: ProgramFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast_math: bool, exhaustive_tune: bool
) -> None:
    given: dict[str, object] = {}
    call = CBinding.call

    def recorded(binding: CBinding, name: str, *arguments: Any) -> None:
        if name.startswith("compile_options_set_"):
            given[name.removeprefix("compile_options_set_")] = arguments[-1]
        call(binding, name, *arguments)

    monkeypatch.setattr(CBinding, "call", recorded)
    compile_mlp(factory, tmp_path, fast_math=fast_math, exhaustive_tune=exhaustive_tune)
    if factory.binding.name == "c_api":  # The module takes the flags as keywords.
        assert given.pop("exhaustive_tune_flag", False) is exhaustive_tune
        assert given == {"offload_copy": True, "fast_math": fast_math}


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
