"""What goes into a measured run and what comes out of it, as .npz files, and inputs where the user has given none."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rocserve.tools.measuring.messages import MeasuredInput

Array = np.ndarray[Any, Any]


def random_inputs(inputs: Sequence[MeasuredInput], seed: int = 0) -> dict[str, Array]:
    """The same for the same names, shapes and seed: floats from 0 to 1 (images look like this, logarithms and roots
    exist), integers 0 or 1 (they may be indices, masks or counts), booleans."""
    return {one.name: _random(one, seed) for one in inputs}


def read_inputs(path: Path, inputs: Sequence[MeasuredInput]) -> dict[str, Array]:
    """Those of an .npz file."""
    with np.load(path, allow_pickle=False) as file:
        return {one.name: np.ascontiguousarray(file[one.name]) for one in inputs}


def save_inputs(path: Path, inputs: Mapping[str, Array]) -> None:
    named: dict[str, Any] = dict(inputs)
    np.savez(path, **named)


def inputs_of(inputs: Sequence[MeasuredInput], data_file: str) -> Mapping[str, Array]:
    return read_inputs(Path(data_file), inputs) if data_file else random_inputs(inputs)


def save_outputs(path: str, outputs: Sequence[Array]) -> None:
    """As output_0, output_1, ... in the model's order; those that are text are left out."""
    numbers = [output for output in map(np.asarray, outputs) if output.dtype.kind in "biuf"]
    named: dict[str, Any] = {f"output_{number}": output for number, output in enumerate(numbers)}
    np.savez(path, **named)


def read_outputs(path: str) -> list[Array]:
    with np.load(path, allow_pickle=False) as file:
        return [file[f"output_{number}"] for number in range(len(file.files))]


def _random(one: MeasuredInput, seed: int) -> Array:
    generator = np.random.default_rng((seed, zlib.crc32(one.name.encode())))
    datatype = np.dtype(one.datatype)
    if datatype.kind == "f":
        return generator.random(one.shape, dtype=np.float32).astype(datatype)
    return generator.integers(0, 2, one.shape).astype(datatype)
