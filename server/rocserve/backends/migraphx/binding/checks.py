"""What is looked at before MIGraphX is called, because it would abort, give wrong numbers, or say something cryptic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from rocserve.backends.migraphx.binding.datatypes import AS_BITS, numpy_dtype
from rocserve.backends.migraphx.binding.interface import Array, DimensionRange, MigraphxError, ProgramTensor

Dimension = int | DimensionRange


def check_file(path: Path) -> None:
    """An empty ONNX file would be a program that aborts when compiled; of unreadable ones MIGraphX says little."""
    try:
        if not path.is_file():
            raise MigraphxError(f"there is no file {str(path)!r}")
        with path.open("rb") as file:
            empty = not file.read(1)
    except OSError as error:
        raise MigraphxError(f"the file {str(path)!r} cannot be read: {error.strerror}") from None
    if empty:
        raise MigraphxError(f"the file {str(path)!r} is empty (0 bytes)")


def check_folder_of(path: Path) -> None:
    if not path.parent.is_dir():
        raise MigraphxError(f"{str(path)!r} cannot be written: there is no folder {str(path.parent)!r}")


def check_shapes(shapes: Mapping[str, Sequence[Dimension]]) -> None:
    """Shapes to parse a model with; a dimension of 0 aborts when it runs."""
    for name, shape in shapes.items():
        for dimension in shape:
            least, most = bounds(dimension)
            if least < 1 or most < least:
                raise MigraphxError(
                    f"input '{name}' cannot have the shape {shape_text(shape)}: dimensions are 1 or more, "
                    "the most not below the least"
                )


def check_names(wanted: Iterable[str], parameters: Sequence[ProgramTensor]) -> None:
    """MIGraphX ignores shapes for inputs that the model does not have."""
    known = [parameter.name for parameter in parameters]
    for name in wanted:
        if name not in known:
            raise MigraphxError(f"a shape is given for input '{name}', but the model's inputs are {names_text(known)}")


def check_calibration(kind: str, samples: Sequence[Mapping[str, Array]], parameters: Sequence[ProgramTensor]) -> None:
    """Without samples the numbers are wrong, with a wrong name too; a wrong shape aborts."""
    if not samples:
        raise MigraphxError(f"{kind} needs calibration data: give it at least one sample of the model's inputs")
    for parameter in parameters:
        if any(isinstance(dimension, DimensionRange) for dimension in parameter.shape):
            raise MigraphxError(
                f"{kind} needs fixed shapes, but input '{parameter.name}' has the shape {shape_text(parameter.shape)}"
            )
    for number, sample in enumerate(samples):
        try:
            check_inputs(sample, parameters)
        except MigraphxError as error:
            raise MigraphxError(f"calibration sample {number}: {error}") from None


def check_inputs(inputs: Mapping[str, Array], parameters: Sequence[ProgramTensor]) -> None:
    known = [parameter.name for parameter in parameters]
    for name in inputs:
        if name not in known:
            raise MigraphxError(f"unexpected input '{name}': the program's inputs are {names_text(known)}")
    for parameter in parameters:
        array = inputs.get(parameter.name)
        if array is None:
            raise MigraphxError(f"input '{parameter.name}' is missing: the program's inputs are {names_text(known)}")
        _check_array(f"input '{parameter.name}'", array, parameter)


def check_outputs(arrays: Sequence[Array | None], outputs: Sequence[ProgramTensor]) -> None:
    """Arrays to run into. Of outputs whose shape varies, only what is known beforehand is checked."""
    if len(arrays) != len(outputs):
        raise MigraphxError(f"the program has {len(outputs)} outputs, but {len(arrays)} arrays are given for them")
    for number, (array, output) in enumerate(zip(arrays, outputs, strict=True)):
        if array is None:
            continue
        _check_array(f"the array for output {number}", array, _with_rows_of(array, output))
        if not array.flags.writeable:
            raise MigraphxError(f"the array for output {number} cannot be written")


def _check_array(what: str, array: Array, tensor: ProgramTensor) -> None:
    if not isinstance(array, np.ndarray):
        raise MigraphxError(f"{what} must be a numpy array, not {type(array).__name__}")
    dtype = numpy_dtype(tensor.datatype)
    if dtype is None:
        raise MigraphxError(f"{what} is of MIGraphX's type {tensor.datatype}, which no array can hold")
    if array.dtype != dtype:
        bits = f", the bits of {tensor.datatype}" if tensor.datatype in AS_BITS else ""
        raise MigraphxError(f"{what} must be of dtype {dtype.name}{bits}; it is of {array.dtype}")
    if not fits(array.shape, tensor.shape):
        raise MigraphxError(f"{what} must have the shape {shape_text(tensor.shape)}; it has {shape_text(array.shape)}")
    if not array.flags.c_contiguous:
        raise MigraphxError(f"{what} must be C-contiguous (numpy.ascontiguousarray makes it so)")


def _with_rows_of(array: Array, output: ProgramTensor) -> ProgramTensor:
    """The output with no more rows than the array has."""
    if isinstance(array, np.ndarray) and array.ndim and output.shape and len(array) < bounds(output.shape[0])[1]:
        return replace(output, shape=(len(array), *output.shape[1:]))
    return output


def fits(shape: Sequence[int], wanted: Sequence[Dimension]) -> bool:
    if len(shape) != len(wanted):
        return False
    for size, dimension in zip(shape, wanted, strict=True):
        least, most = bounds(dimension)
        if not least <= size <= most:
            return False
    return True


def bounds(dimension: Dimension) -> tuple[int, int]:
    return (dimension, dimension) if isinstance(dimension, int) else (dimension.least, dimension.most)


def shape_text(shape: Sequence[Dimension]) -> str:
    """E.g. [1..8, 3]."""
    return "[" + ", ".join(str(d) if isinstance(d, int) else f"{d.least}..{d.most}" for d in shape) + "]"


def names_text(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"
