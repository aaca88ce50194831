"""Runs batches through compiled programs: cut and padded to the sizes that there are, on buffers that are used again.

A program takes the rows that it was compiled for and gives its outputs in full; runners fit batches to it. A
layout has its inputs and outputs in clients' terms: names, KServe datatypes, shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rocserve.backends.batch_sizes import Arrays, pieces
from rocserve.backends.migraphx.binding.interface import Array, DimensionRange, Program, ProgramTensor
from rocserve.backends.migraphx.model_files.graph import IMAGE_RANK, ONNX_DATATYPES
from rocserve.core.datatypes import DataType
from rocserve.core.errors import internal, invalid_argument
from rocserve.core.requests import Signature, TensorSpec

_OWN_NAMES = {"float16": "half", "bfloat16": "bf16"}
_DATATYPES = {_OWN_NAMES.get(name, name): datatype for name, datatype in ONNX_DATATYPES.items()}
"""By MIGraphX's names, which are mostly ONNX's."""


def migraphx_name(datatype: DataType) -> str:
    """Of a datatype that tensors of programs can have."""
    return next(name for name, known in _DATATYPES.items() if known is datatype)


@dataclass(frozen=True, slots=True)
class ServedTensor:
    """An input or output of a program as clients know it."""

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    """At the program's size, in the client's layout; -1 where the values of the inputs decide, of outputs only."""
    channels_last: bool = False
    """The client's layout is NHWC, the program's is NCHW."""

    @property
    def depends_on_values(self) -> bool:
        """Whether the shape is known only once the program has run."""
        return -1 in self.shape

    @property
    def program_shape(self) -> tuple[int, ...]:
        if not self.channels_last:
            return self.shape
        first, *sizes, channels = self.shape
        return (first, channels, *sizes)


@dataclass(frozen=True, slots=True)
class ProgramLayout:
    """Inputs in the clients' order, outputs in the program's."""

    inputs: tuple[ServedTensor, ...]
    outputs: tuple[ServedTensor, ...]

    def signature(self, batching: bool) -> Signature:
        """The signature of all programs of the model: any batch size, where there is one."""
        inputs, outputs = (
            tuple(
                TensorSpec(one.name, one.datatype, (-1, *one.shape[1:]) if batching else one.shape) for one in tensors
            )
            for tensors in (self.inputs, self.outputs)
        )
        return Signature(inputs, outputs, batching)

    def check_batch(self, batch_size: int, model_name: str) -> None:
        """Raises: ServeError: INVALID_ARGUMENT; the first dimension of an input or output is not the batch, or the
        values of inputs decide on an output's shape."""
        for what, tensors in (("input", self.inputs), ("output", self.outputs)):
            for tensor in tensors:
                if tensor.depends_on_values:
                    raise invalid_argument(
                        f"the shape of output '{tensor.name}' of model '{model_name}' depends on the values of its"
                        " inputs: the model cannot be batched; set max_batch_size: 0"
                    )
                if tensor.shape[:1] != (batch_size,):
                    raise invalid_argument(
                        f"{what} '{tensor.name}' of model '{model_name}' has shape {list(tensor.shape)} when compiled"
                        f" for a batch of {batch_size}: its first dimension is not the batch, so the model cannot be"
                        " batched; set max_batch_size: 0"
                    )


def program_layout(
    program: Program, input_order: Sequence[str], output_names: Sequence[str], nhwc: bool = False
) -> ProgramLayout:
    """The layout of a program.

    Args:
        input_order: of the model; an input that the program does not take is left out (no output depends on it), one
            that is not named comes after, by name.
        output_names: as many as the program has outputs, in its order.
        nhwc: 4-d inputs and outputs are NHWC to clients and NCHW to the program, as MIGraphX makes all of them of a
            TensorFlow graph that is NHWC, images or not.

    Raises:
        ServeError: INVALID_ARGUMENT, a tensor cannot be served; INTERNAL, the outputs are not as many as the names.
    """
    parameters = program.parameters
    order = [name for name in input_order if name in parameters]
    order += sorted(parameters.keys() - set(order))
    if len(output_names) != len(program.outputs):
        raise internal(
            f"the program has {len(program.outputs)} outputs, expected {len(output_names)}: {', '.join(output_names)}"
        )
    return ProgramLayout(
        tuple(_served(name, "input", parameters[name], nhwc) for name in order),
        tuple(
            _served(name, "output", tensor, nhwc, varies_with_values(parameters.values(), tensor))
            for name, tensor in zip(output_names, program.outputs, strict=True)
        ),
    )


def batch_range(tensors: Iterable[ProgramTensor]) -> DimensionRange | None:
    """The range of the first dimension of a program that takes one. Raises: ServeError: INVALID_ARGUMENT; another
    dimension varies, or they vary differently."""
    ranges: set[DimensionRange | None] = set()
    for tensor in tensors:
        first, *others = tensor.shape or (0,)
        if any(isinstance(dim, DimensionRange) for dim in others):
            raise invalid_argument(
                f"input '{tensor.name}' of the program varies in a dimension beside the first; only the batch may vary."
                " Compile it with fixed sizes"
            )
        ranges.add(first if isinstance(first, DimensionRange) else None)
    if len(ranges) > 1:
        raise invalid_argument(
            "the inputs of the program vary differently in their first dimension; compile it with one batch range"
        )
    return ranges.pop() if ranges else None


def varies_with_values(inputs: Iterable[ProgramTensor], output: ProgramTensor) -> bool:
    """Whether the output varies where no input does."""
    return _varies(output) and not any(map(_varies, inputs))


def _varies(tensor: ProgramTensor) -> bool:
    return any(isinstance(dim, DimensionRange) for dim in tensor.shape)


def _served(name: str, what: str, tensor: ProgramTensor, nhwc: bool, by_values: bool = False) -> ServedTensor:
    datatype = _DATATYPES.get(tensor.datatype)
    if datatype is None:
        raise invalid_argument(
            f"{what} '{name}' has MIGraphX's type {tensor.datatype}, which has no datatype in the KServe protocol;"
            f" those that have are {', '.join(_DATATYPES)}"
        )
    # A range as its least; where values decide on it as -1.
    shape = tuple(dim if isinstance(dim, int) else -1 if by_values else dim.least for dim in tensor.shape)
    if not nhwc or len(shape) != IMAGE_RANK:
        return ServedTensor(name, datatype, shape)
    batch, channels, height, width = shape
    return ServedTensor(name, datatype, (batch, height, width, channels), channels_last=True)


NO_ROOM: Arrays = {}


class LoadedProgram:
    """One compiled program, with its staging memory. One call at a time."""

    def __init__(
        self, program: Program, layout: ProgramLayout, rows: DimensionRange | None, pad_with_first_row: bool = True
    ) -> None:
        """`rows`: the batches that it takes, which MIGraphX itself does not enforce; None = no batch dimension."""
        self.layout = layout
        self.rows = rows
        self._program = program
        self._pad_with_first_row = pad_with_first_row
        self._staging: dict[str, Array] = {}

    def run_into(self, inputs: Arrays, outputs: Sequence[Array | None]) -> None:
        """One run, of inputs with no more rows than the program's, into arrays of its shapes with as many rows.

        An output that is None is not wanted.
        """
        self._program.run_into(self._staged_inputs(inputs), outputs)

    def run(self, inputs: Arrays) -> Sequence[Array]:
        """One run, of inputs of the program's very shapes, whatever shapes its outputs then have."""
        return self._program.run(self._staged_inputs(inputs))

    def warm_up(self) -> None:
        """A run on zeros, for a range of rows of the smallest batch and of the largest."""
        for rows in sorted({self.rows.least, self.rows.most}) if self.rows else (0,):
            zeros = {
                tensor.name: np.zeros(_with_rows(tensor.shape, rows), tensor.datatype.numpy_dtype)
                for tensor in self.layout.inputs
            }
            self.run_into(zeros, [None] * len(self.layout.outputs))

    def _staged_inputs(self, inputs: Arrays) -> dict[str, Array]:
        """The rows as the program wants them: themselves where they are so already, else copied and padded."""
        wanted = {}
        for tensor in self.layout.inputs:
            given = wanted[tensor.name] = inputs[tensor.name]
            rows = max(len(given), self.rows.least) if self.rows else 0
            flags = given.flags
            if not tensor.channels_last and flags.c_contiguous and flags.aligned and (not rows or rows == len(given)):
                continue
            staging = self._staging.get(tensor.name)
            if staging is None:
                shape = _with_rows(tensor.program_shape, self.rows.most if self.rows else 0)
                staging = self._staging[tensor.name] = np.empty(shape, tensor.datatype.numpy_dtype)
            staging = wanted[tensor.name] = staging[:rows] if rows else staging
            destination = as_client(staging, tensor)
            if not rows:
                destination[...] = given
                continue
            destination[: len(given)] = given
            # Never with what earlier batches have left, which is other clients'.
            destination[len(given) :] = given[:1] if self._pad_with_first_row else 0
        return wanted


def _with_rows(shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """`rows`: 0 = the shape has no batch dimension."""
    return (rows, *shape[1:]) if rows else shape


def as_client(array: Array, tensor: ServedTensor) -> Array:
    """The program's array in the client's layout, on the same memory."""
    return np.moveaxis(array, 1, -1) if tensor.channels_last else array


class ProgramRunner:
    """Programs that together serve a model: a batch is padded up to the next size, one above the largest runs in
    pieces; or the one program of a model without a batch dimension. One call of `run` at a time, also while programs
    are added."""

    def __init__(self, model_name: str, program: LoadedProgram) -> None:
        self._model_name = model_name
        self._layout = program.layout
        """Of all of them, but for the batch dimension."""
        self._varies = any(tensor.depends_on_values for tensor in program.layout.outputs)
        self._programs: tuple[LoadedProgram, ...] = (program,)
        """By size, ascending. Replaced as a whole: a run that has begun goes on with those that it found."""

    @property
    def batch_sizes(self) -> str:
        """That are in service, for people: "1, 2, 4" or "1 to 8"; "" without a batch dimension."""
        ranges = [program.rows for program in self._programs if program.rows]
        return ", ".join(
            str(rows.most) if rows.least == rows.most else f"{rows.least} to {rows.most}" for rows in ranges
        )

    def add(self, program: LoadedProgram) -> None:
        """Take a program of another batch size into service. From one thread."""
        self._programs = tuple(sorted((*self._programs, program), key=_most_rows))

    def run(self, inputs: Arrays, wanted: Sequence[str], room: Arrays = NO_ROOM) -> dict[str, Array]:
        """The outputs `wanted`, on memory of their own or in the arrays of `room` (see Batch). Raises: ServeError:
        INVALID_ARGUMENT, an input is not of a shape that there is a program for. MigraphxError: it cannot be run."""
        programs, layout = self._programs, self._layout
        rows = self._row_count(inputs)
        if self._varies:
            found = _as_clients(layout, programs[0].run(inputs))
            return {name: array for name, array in found.items() if name in wanted}
        whole: list[Array | None] = []
        for tensor in layout.outputs:
            if tensor.name not in wanted:
                whole.append(None)
                continue
            shape, dtype = _with_rows(tensor.program_shape, rows), tensor.datatype.numpy_dtype
            place = room.get(tensor.name)
            # Into the room, where that is of the output's shape.
            if place is None or place.shape != shape or place.dtype != dtype or tensor.channels_last:
                place = np.empty(shape, dtype)
            whole.append(place)
        fitting = next((program for program in programs if _most_rows(program) >= rows), None)
        if fitting is not None:
            fitting.run_into(inputs, whole)
        else:
            by_size = {_most_rows(program): program for program in programs}
            for part in pieces(rows, tuple(by_size)):
                by_size[part.batch_size].run_into(
                    {name: array[part.start : part.start + part.rows] for name, array in inputs.items()},
                    [None if array is None else array[part.start : part.start + part.rows] for array in whole],
                )
        return _as_clients(layout, whole)

    def warm_up(self) -> None:
        """Run every program there is once, on zeros. Raises: MigraphxError: MIGraphX could not run one."""
        for program in self._programs:
            program.warm_up()

    def _row_count(self, inputs: Arrays) -> int:
        """The batch's rows, the same in all inputs; 0 of a model without a batch dimension.

        Refuses an input that is missing, or not of a shape that there is a program for.
        """
        batches = self._programs[0].rows is not None
        rows = 0
        for tensor in self._layout.inputs:
            array = inputs.get(tensor.name)
            if array is None:
                fault = "is missing; a compiled program takes all of its inputs"
            elif array.dtype != tensor.datatype.numpy_dtype:
                fault = f"must be {tensor.datatype.value}, got an array of {array.dtype}"
            elif not batches and array.shape != tensor.shape:
                fault = (
                    f"must have the shape {list(tensor.shape)} that the model is compiled for, got {list(array.shape)};"
                    " other shapes need a configuration of their own (max_batch_size, dims, or parameter"
                    " 'input_shapes')"
                )
            elif batches and not (
                array.ndim and array.shape[1:] == tensor.shape[1:] and 0 < len(array) == (rows or len(array))
            ):
                expected = ", ".join(map(str, (rows or "rows", *tensor.shape[1:])))
                fault = (
                    f"must have the shape [{expected}] that the model is compiled for, with at least one row, got"
                    f" {list(array.shape)}"
                )
            else:
                rows = len(array) if batches else 0
                continue
            raise invalid_argument(f"input '{tensor.name}' of model '{self._model_name}' {fault}")
        return rows


def _most_rows(program: LoadedProgram) -> int:
    return program.rows.most if program.rows else 0


def _as_clients(layout: ProgramLayout, outputs: Sequence[Array | None]) -> dict[str, Array]:
    """Those that are wanted, by name."""
    return {
        tensor.name: as_client(array, tensor)
        for tensor, array in zip(layout.outputs, outputs, strict=True)
        if array is not None
    }
