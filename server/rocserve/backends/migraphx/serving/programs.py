"""Runs batches through compiled programs: cut and padded to the sizes that there are, on buffers that are used again.

A program takes the one shape that it was compiled for and gives its outputs in full; runners fit batches to it.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence

import numpy as np

from rocserve.backends.batch_sizes import Arrays, Piece, pieces
from rocserve.backends.migraphx.binding.interface import Array, Program
from rocserve.backends.migraphx.serving.layout import ProgramLayout, ServedTensor
from rocserve.core.errors import ServeError, invalid_argument

NO_ROOM: Arrays = {}


class ProgramRunner(abc.ABC):
    """Programs that together serve a model. One call at a time; `run` may be called while programs are added."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name

    @property
    @abc.abstractmethod
    def batch_sizes(self) -> str:
        """That are in service, for people: "1, 2, 4" or "1 to 8"; "" without a batch dimension."""

    @abc.abstractmethod
    def run(self, inputs: Arrays, wanted: Sequence[str], room: Arrays = NO_ROOM) -> dict[str, Array]:
        """The outputs `wanted`, on memory of their own or in the arrays of `room` (see Batch).

        Raises:
            ServeError: INVALID_ARGUMENT, an input is not of a shape that there is a program for.
            MigraphxError: MIGraphX could not run it.
        """

    @abc.abstractmethod
    def warm_up(self) -> None:
        """Run every program there is once, on zeros.

        Raises:
            MigraphxError: MIGraphX could not run one.
        """


class LoadedProgram:
    """One compiled program of a fixed shape, with its staging memory. One call at a time."""

    def __init__(self, program: Program, layout: ProgramLayout, pad_with_first_row: bool = True) -> None:
        self.layout = layout
        self._program = program
        self._pad_with_first_row = pad_with_first_row
        self._staging: dict[str, Array] = {}

    def run_into(self, inputs: Arrays, outputs: Sequence[Array | None]) -> None:
        """One run, of inputs with the program's rows or fewer, into arrays of the program's shapes with as many rows.

        An output that is None is not wanted.
        """
        self._program.run_into(self._staged_inputs(inputs), outputs)

    def run(self, inputs: Arrays) -> Sequence[Array]:
        """One run, of inputs of the program's very shapes, whatever shapes its outputs then have."""
        return self._program.run(self._staged_inputs(inputs))

    def warm_up(self) -> None:
        """One run on zeros."""
        zeros = {tensor.name: np.zeros(tensor.shape, tensor.datatype.numpy_dtype) for tensor in self.layout.inputs}
        self.run_into(zeros, [None] * len(self.layout.outputs))

    def _staged_inputs(self, inputs: Arrays) -> dict[str, Array]:
        return {tensor.name: self._staged(tensor, inputs[tensor.name]) for tensor in self.layout.inputs}

    def _staged(self, tensor: ServedTensor, rows: Array) -> Array:
        """The rows as the program wants them: themselves where they are so already, else copied and padded."""
        flags = rows.flags
        if not tensor.channels_last and rows.shape == tensor.shape and flags.c_contiguous and flags.aligned:
            return rows
        staging = self._staging.get(tensor.name)
        if staging is None:
            # Zeros, not just any bytes: what pads a batch is computed on, and an index must be one.
            staging = np.zeros(tensor.program_shape, tensor.datatype.numpy_dtype)
            self._staging[tensor.name] = staging
        destination = as_client(staging, tensor)
        if rows.shape == tensor.shape:
            destination[...] = rows
            return staging
        destination[: len(rows)] = rows
        if self._pad_with_first_row:
            destination[len(rows) :] = rows[:1]
        return staging


def as_client(array: Array, tensor: ServedTensor) -> Array:
    """The program's array in the client's layout, on the same memory."""
    return np.moveaxis(array, 1, -1) if tensor.channels_last else array


class SizedRunner(ProgramRunner):
    """Programs for some batch sizes: a batch is padded up to the next, one above the largest runs in pieces."""

    def __init__(self, model_name: str) -> None:
        super().__init__(model_name)
        self._programs: Mapping[int, LoadedProgram] = {}
        """Ascending. Replaced as a whole: a run that has begun goes on with those that it found."""

    @property
    def batch_sizes(self) -> str:
        return ", ".join(map(str, self._programs))

    def add(self, batch_size: int, program: LoadedProgram) -> None:
        """Take the program into service. From one thread."""
        programs = {**self._programs, batch_size: program}
        self._programs = dict(sorted(programs.items()))

    def run(self, inputs: Arrays, wanted: Sequence[str], room: Arrays = NO_ROOM) -> dict[str, Array]:
        programs = self._programs
        layout = next(iter(programs.values())).layout
        rows = _row_count(inputs, layout, self._model_name)
        whole = [
            _place(tensor, (rows, *tensor.program_shape[1:]), room) if tensor.name in wanted else None
            for tensor in layout.outputs
        ]
        fitting = next((program for batch_size, program in programs.items() if batch_size >= rows), None)
        if fitting is not None:
            fitting.run_into(inputs, whole)
        else:
            for part in pieces(rows, tuple(programs)):
                programs[part.batch_size].run_into(
                    {name: array[part.start : part.start + part.rows] for name, array in inputs.items()},
                    [_rows_of(array, part) for array in whole],
                )
        return _as_clients(layout, whole)

    def warm_up(self) -> None:
        for program in self._programs.values():
            program.warm_up()


class ExactRunner(ProgramRunner):
    """One program of a model without a batch dimension: requests must have its very shapes."""

    batch_sizes = ""

    def __init__(self, model_name: str, program: LoadedProgram) -> None:
        super().__init__(model_name)
        self._program = program

    def run(self, inputs: Arrays, wanted: Sequence[str], room: Arrays = NO_ROOM) -> dict[str, Array]:
        layout = self._program.layout
        for tensor in layout.inputs:
            array = _input(inputs, tensor, self._model_name)
            if array.shape != tensor.shape:
                raise invalid_argument(
                    f"input '{tensor.name}' of model '{self._model_name}' must have the shape {list(tensor.shape)} that"
                    f" the model is compiled for, got {list(array.shape)}; other shapes need a configuration of their"
                    " own (max_batch_size, dims, or parameter 'input_shapes')"
                )
        if any(tensor.depends_on_values for tensor in layout.outputs):
            found = _as_clients(layout, self._program.run(inputs))
            return {name: array for name, array in found.items() if name in wanted}
        outputs = [
            _place(tensor, tensor.program_shape, room) if tensor.name in wanted else None for tensor in layout.outputs
        ]
        self._program.run_into(inputs, outputs)
        return _as_clients(layout, outputs)

    def warm_up(self) -> None:
        self._program.warm_up()


class DynamicRunner(ProgramRunner):
    """One program for every batch size of a range, which MIGraphX itself does not enforce."""

    def __init__(self, model_name: str, program: Program, layout: ProgramLayout, least: int, most: int) -> None:
        """`layout`: at a batch of 1."""
        super().__init__(model_name)
        self._program = program
        self._layout = layout
        self._least = least
        self._most = most

    @property
    def batch_sizes(self) -> str:
        return f"{self._least} to {self._most}"

    def run(self, inputs: Arrays, wanted: Sequence[str], room: Arrays = NO_ROOM) -> dict[str, Array]:
        rows = _row_count(inputs, self._layout, self._model_name)
        if not self._least <= rows <= self._most:
            raise invalid_argument(
                f"model '{self._model_name}' is compiled for batches of {self._least} to {self._most} rows, got {rows}"
            )
        outputs = [
            _place(tensor, (rows, *tensor.shape[1:]), room) if tensor.name in wanted else None
            for tensor in self._layout.outputs
        ]
        self._program.run_into(
            {tensor.name: np.ascontiguousarray(inputs[tensor.name]) for tensor in self._layout.inputs}, outputs
        )
        return _as_clients(self._layout, outputs)

    def warm_up(self) -> None:
        """On zeros, the smallest batch and the largest."""
        for rows in dict.fromkeys((self._least, self._most)):
            zeros = {
                tensor.name: np.zeros((rows, *tensor.shape[1:]), tensor.datatype.numpy_dtype)
                for tensor in self._layout.inputs
            }
            self.run(zeros, ())


def _place(tensor: ServedTensor, shape: tuple[int, ...], room: Arrays) -> Array:
    """What an output in the program's layout is copied to: its place in the room, where that is of its shape."""
    dtype = tensor.datatype.numpy_dtype
    place = room.get(tensor.name)
    if place is not None and place.shape == shape and place.dtype == dtype and not tensor.channels_last:
        return place
    return np.empty(shape, dtype)


def _rows_of(array: Array | None, part: Piece) -> Array | None:
    return None if array is None else array[part.start : part.start + part.rows]


def _as_clients(layout: ProgramLayout, outputs: Sequence[Array | None]) -> dict[str, Array]:
    """Those that are wanted, by name."""
    return {
        tensor.name: as_client(array, tensor)
        for tensor, array in zip(layout.outputs, outputs, strict=True)
        if array is not None
    }


def _input(inputs: Arrays, tensor: ServedTensor, model_name: str) -> Array:
    array = inputs.get(tensor.name)
    if array is None:
        raise _missing(tensor, model_name)
    if array.dtype != tensor.datatype.numpy_dtype:
        raise invalid_argument(
            f"input '{tensor.name}' of model '{model_name}' must be {tensor.datatype.value}, got an array of"
            f" {array.dtype}"
        )
    return array


def _row_count(inputs: Arrays, layout: ProgramLayout, model_name: str) -> int:
    """The batch's rows, the same in all inputs.

    Raises:
        ServeError: INVALID_ARGUMENT; an input is missing, or of a shape that no program takes.
    """
    rows = -1
    for tensor in layout.inputs:
        shape = _input(inputs, tensor, model_name).shape
        if shape[1:] != tensor.shape[1:] or not shape or shape[0] < 1 or rows not in (-1, shape[0]):
            expected = ["rows" if rows == -1 else rows, *tensor.shape[1:]]
            raise invalid_argument(
                f"input '{tensor.name}' of model '{model_name}' must have the shape"
                f" [{', '.join(map(str, expected))}] that the model is compiled for, with at least one row, got"
                f" {list(shape)}"
            )
        rows = shape[0]
    return rows


def _missing(tensor: ServedTensor, model_name: str) -> ServeError:
    return invalid_argument(
        f"input '{tensor.name}' of model '{model_name}' is missing; a compiled program takes all of its inputs"
    )
