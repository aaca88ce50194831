"""Samples of a program's inputs, from the files that calibration data may be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rocserve.backends.migraphx.binding.interface import ProgramTensor
from rocserve.backends.migraphx.calibration import read_calibration
from rocserve.backends.migraphx.configuration.options import CompileOptions, Precision, Target
from rocserve.backends.migraphx.planning.recipe import ProgramEnvironment, ProgramRecipe, ProgramSource, SourceKind
from rocserve.backends.migraphx.serving.layout import migraphx_name
from rocserve.backends.pytorch.program import ProgramSignature
from rocserve.core.errors import invalid_argument

Array = np.ndarray[Any, Any]

_ROWS = 32
"""Samples that run together."""
_ROOT = Path("/")


def read_samples(program: ProgramSignature, data: Path, most: int, pipeline: Path | None) -> list[Mapping[str, Array]]:
    """The inputs of one run after the other.

    Args:
        most: how many samples are read.
        pipeline: for images.

    Raises:
        ServeError: INVALID_ARGUMENT; the data cannot be read, or do not fit the inputs, or sizes beside the batch vary.
    """
    for path in (data, *([pipeline] if pipeline else [])):
        if not path.exists():
            raise invalid_argument(f"{path} does not exist")
    shapes = _shapes(program)
    recipe = ProgramRecipe(
        ProgramSource(SourceKind.ONNX, "", ""),
        CompileOptions(Target.REF, Precision.INT8, _within_root(data), _within_root(pipeline), most),
        ProgramEnvironment(""),
        input_shapes=shapes,
    )
    tensors = {
        tensor.names[0]: ProgramTensor(tensor.names[0], migraphx_name(tensor.datatype), shapes[tensor.names[0]])
        for tensor in program.inputs
        if tensor.datatype is not None
    }
    samples = read_calibration(_ROOT, recipe, tensors)
    if not program.batches:
        return list(samples)
    together = [samples[start : start + _ROWS] for start in range(0, len(samples), _ROWS)]
    return [{name: np.stack([sample[name] for sample in rows]) for name in shapes} for rows in together]


def _shapes(program: ProgramSignature) -> Mapping[str, tuple[int, ...]]:
    """Of one sample of each input, without the batch dimension where the program has one."""
    shapes = {}
    for tensor in program.inputs:
        shape = tensor.shape or ()
        shapes[tensor.names[0]] = shape[1:] if program.batches else shape
        if -1 in shapes[tensor.names[0]]:
            raise invalid_argument(
                f"input '{tensor.names[0]}' of the program has the shape {list(shape)}: only a first dimension that all"
                " inputs and outputs share may vary; export it with fixed sizes"
            )
    return shapes


def _within_root(path: Path | None) -> str:
    """As a path relative to the root, which is what calibration data are within."""
    return "" if path is None else str(path.resolve().relative_to(_ROOT))
