"""Runs batches through compiled programs: cuts and pads them to the programs' sizes, in reused buffers.

A program takes the number of rows, and the sizes of padded dimensions, that it was compiled for, and gives full
outputs. A runner fits batches to the programs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rocserve.backends.batch_sizes import Arrays, pieces
from rocserve.backends.migraphx.binding import Array, DimensionRange, Program
from rocserve.backends.migraphx.layout import ProgramLayout, program_layout
from rocserve.backends.migraphx.tensors import IMAGE_RANK
from rocserve.core.errors import internal, invalid_argument
from rocserve.core.padding import NO_PADDING, Buckets, Lengths, Padding
from rocserve.core.requests import TensorSpec
from rocserve.core.tensors import scalar


@dataclass(frozen=True, slots=True)
class ProgramTensors:
    """The facts about a program's tensors that the program itself does not have."""

    inputs: tuple[str, ...]
    """In the model's order."""
    outputs: tuple[str, ...]
    """One per output of the program, in its order."""
    rows: DimensionRange | None = None
    """The batch sizes that the program takes; None = no batch dimension."""
    nhwc: bool = False
    """Whether the program is a TensorFlow graph's."""
    pad_with_first_row: bool = True
    scalars: tuple[str, ...] = ()
    """Outputs that have no dimensions in the model's file."""
    sizes: Lengths = ()
    """The program's size of each dimension of `padding`."""
    padding: Padding = NO_PADDING

    def layout(self, program: Program) -> ProgramLayout:
        """Raises ServeError as `program_layout`."""
        return program_layout(program, self.inputs, self.outputs, self.nhwc, self.scalars)

    def open(self, program: Program) -> LoadedProgram:
        """Raises ServeError as `program_layout`."""
        layout = self.layout(program)
        return LoadedProgram(program, layout, self.rows, self.pad_with_first_row, self.sizes, self.padding)


NO_ROOM: Arrays = {}


class LoadedProgram:
    """Holds a compiled program and its staging memory. One call at a time."""

    def __init__(
        self,
        program: Program,
        layout: ProgramLayout,
        rows: DimensionRange | None,
        pad_with_first_row: bool = True,
        sizes: Lengths = (),
        padding: Padding = NO_PADDING,
    ) -> None:
        """`rows`: the batch sizes that the program takes, not checked by MIGraphX; None = no batch dimension. `sizes`:
        its size of each dimension of `padding`."""
        self.layout = layout
        self.rows = rows
        self.sizes = sizes
        self.padding = padding
        self._program = program
        self._pad_with_first_row = pad_with_first_row
        self._staging: dict[str, Array] = {}

    def run_into(self, inputs: Arrays, outputs: Sequence[Array | None]) -> None:
        """Run inputs of at most the program's rows and sizes, into arrays with as many rows, and the program's sizes;
        None discards an output."""
        self._program.run_into(self._staged_inputs(inputs), outputs)

    def run(self, inputs: Arrays) -> Sequence[Array]:
        """Run inputs of exactly the program's shapes. The outputs may have any shape."""
        return self._program.run(self._staged_inputs(inputs))

    def warm_up(self) -> None:
        """Run the program on zeros: on its smallest and its largest batch."""
        for rows in sorted({self.rows.least, self.rows.most}) if self.rows else (0,):
            zeros = {
                tensor.name: np.zeros(_with_rows(tensor.shape, rows), tensor.datatype.numpy_dtype)
                for tensor in self.layout.inputs
            }
            self.run_into(zeros, [None] * len(self.layout.outputs))

    def _staged_inputs(self, inputs: Arrays) -> dict[str, Array]:
        """Return the inputs as the program takes them: unchanged if they fit, else copied and padded."""
        wanted = {}
        for tensor in self.layout.inputs:
            given = wanted[tensor.name] = inputs[tensor.name]
            rows = max(len(given), self.rows.least) if self.rows else 0
            flags = given.flags
            is_image = self.layout.nhwc and given.ndim == IMAGE_RANK
            first = int(self.rows is not None)
            is_smaller = given.shape[first:] != tensor.shape[first:]
            is_whole = not is_smaller and (not rows or rows == len(given))
            if is_whole and not is_image and flags.c_contiguous and flags.aligned:
                continue
            staging = self._staging.get(tensor.name)
            if staging is None:
                shape = _with_rows(self.layout.program_shape(tensor), self.rows.most if self.rows else 0)
                staging = self._staging[tensor.name] = np.empty(shape, tensor.datatype.numpy_dtype)
            staging = wanted[tensor.name] = staging[:rows] if rows else staging
            destination = self.layout.as_client(staging)
            # Added elements never hold the rest of earlier batches, which belongs to other clients.
            if is_smaller:
                destination[...] = scalar(tensor.datatype, self.padding.values.get(tensor.name, 0.0))
            destination[tuple(map(slice, given.shape))] = given
            if rows:
                destination[len(given) :] = destination[:1] if self._pad_with_first_row else 0
        return wanted


def _with_rows(shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """Return the shape with `rows` rows; 0 = the shape has no batch dimension."""
    return (rows, *shape[1:]) if rows else shape


class ProgramRunner:
    """Serves a model with its programs. A batch is padded to the next batch size, or cut into pieces if it exceeds the
    largest; a model without a batch dimension has one program. Where open dimensions are padded, all this holds for the
    programs of each combination of sizes, and a batch whose sizes have no program yet is padded to larger ones. Only
    one thread at a time may call `run`; programs may be added meanwhile."""

    def __init__(self, model_name: str, program: LoadedProgram, exact: str = "") -> None:
        """`program`: takes the largest sizes. `exact`: why a batch must be neither padded nor cut to other rows; "" =
        it may. Raises ServeError as `add`."""
        self._model_name = model_name
        self._exact = exact
        self._buckets = Buckets(program.padding)
        self._layout = program.layout
        """The layout of all programs, which differ only in the batch dimension and in what is padded."""
        self._varies = program.layout.varies
        self._programs: Mapping[Lengths, tuple[LoadedProgram, ...]] = {}
        """By the sizes of the programs; of each by batch size, ascending. Replaced as a whole: a running batch keeps
        the programs that it began with."""
        self.add(program)

    @property
    def batch_sizes(self) -> str:
        """The batch sizes in service, as users read them: "1, 2, 4" or "1 to 8"; "" = no batch dimension."""
        ranges = {program.rows for programs in self._programs.values() for program in programs if program.rows}
        return ", ".join(
            str(rows.most) if rows.least == rows.most else f"{rows.least} to {rows.most}"
            for rows in sorted(ranges, key=lambda rows: rows.most)
        )

    def add(self, program: LoadedProgram) -> None:
        """Put a program into service; it replaces one of the same batch size and sizes. Only one thread may call this.
        Raises ServeError (INVALID_ARGUMENT) if an output has another shape than the padded dimensions tell."""
        first = int(program.rows is not None)
        for own, known in zip(program.layout.outputs, self._layout.outputs, strict=True):
            expected = self._buckets.padded_shape(own.name, known.shape, program.sizes) if self._buckets else ()
            if self._buckets and own.shape[first:] != expected[first:]:
                sizes = ", ".join(
                    f"{dimension.label} {size}"
                    for dimension, size in zip(program.padding.dimensions, program.sizes, strict=True)
                )
                raise invalid_argument(
                    f"output '{own.name}' of model '{self._model_name}' has the shape {list(own.shape)} at {sizes},"
                    f" expected {list(expected)}"
                )
        others = [one for one in self._programs.get(program.sizes, ()) if one.rows != program.rows]
        self._programs = {**self._programs, program.sizes: tuple(sorted((*others, program), key=_most_rows))}

    def run(self, inputs: Arrays, wanted: Sequence[str], room: Arrays = NO_ROOM) -> dict[str, Array]:
        """Return the `wanted` outputs, in new memory or in the arrays of `room` (see Batch). Raises ServeError
        (INVALID_ARGUMENT) if no program takes an input's shape, MigraphxError if the run fails."""
        rows, lengths = self._measured(inputs)
        programs = self._programs_for(rows, lengths)
        layout = programs[0].layout
        if self._varies:
            found = _as_clients(layout, programs[0].run(inputs))
            return {name: array for name, array in found.items() if name in wanted}
        whole: list[Array | None] = []
        for tensor in layout.outputs:
            if tensor.name not in wanted:
                whole.append(None)
                continue
            shape, dtype = _with_rows(layout.program_shape(tensor), rows), tensor.datatype.numpy_dtype
            destination = room.get(tensor.name)
            # The room is used if it has the output's shape and type in the program, too.
            is_image = layout.nhwc and len(shape) == IMAGE_RANK
            if destination is None or destination.shape != shape or destination.dtype != dtype or is_image:
                destination = np.empty(shape, dtype)
            whole.append(destination)
        fitting = next((program for program in programs if _most_rows(program) >= rows), None)
        if self._exact and (fitting is None or (fitting.rows is not None and rows < fitting.rows.least)):
            raise invalid_argument(
                f"model '{self._model_name}' got {rows} rows, and has programs for {self.batch_sizes} rows; its batches"
                f" are neither padded nor cut ({self._exact}): name the size in parameter 'batch_sizes'"
            )
        if fitting is not None:
            fitting.run_into(inputs, whole)
        else:
            by_size = {_most_rows(program): program for program in programs}
            for part, size in pieces(rows, tuple(by_size)):
                by_size[size].run_into(
                    {name: array[part] for name, array in inputs.items()},
                    [None if array is None else array[part] for array in whole],
                )
        answers = _as_clients(layout, whole)
        if programs[0].sizes != lengths:
            for name in answers.keys() & self._buckets.outputs.keys():
                own = self._buckets.padded_shape(name, answers[name].shape, lengths)
                answers[name] = answers[name][tuple(map(slice, own))]
        return answers

    def blank(self, inputs: Arrays, wanted: Sequence[str]) -> dict[str, Array]:
        """Return zeros in the place of the answers to a batch."""
        rows, lengths = self._measured(inputs)
        shapes = {
            tensor.name: self._buckets.padded_shape(tensor.name, _with_rows(tensor.shape, rows), lengths)
            for tensor in self._layout.outputs
        }
        datatypes = {tensor.name: tensor.datatype.numpy_dtype for tensor in self._layout.outputs}
        return {name: np.zeros(shapes[name], datatypes[name]) for name in wanted}

    def warm_up(self) -> None:
        """Run every present program on zeros. Raises MigraphxError if MIGraphX cannot run a program."""
        for programs in self._programs.values():
            for program in programs:
                program.warm_up()

    def _programs_for(self, rows: int, lengths: Lengths) -> Sequence[LoadedProgram]:
        """Return the programs of the sizes at which a batch takes the least work. Raises ServeError (INVALID_ARGUMENT)
        if it is larger than the largest sizes."""
        by_sizes = self._programs
        own = by_sizes.get(lengths)
        if own is not None and (not lengths or (_most_rows(own[-1]) >= rows and not self._exact)):
            return own
        fitting = [sizes for sizes in by_sizes if all(map(int.__ge__, sizes, lengths))]
        if self._exact:
            fitting = [sizes for sizes in fitting if any(_takes(one, rows) for one in by_sizes[sizes])] or fitting
        if not fitting:
            try:
                self._buckets.sizes_for(lengths)
            except ValueError as fault:
                raise invalid_argument(f"model '{self._model_name}': {fault}") from None
            raise internal(f"model '{self._model_name}' has no program for the sizes {list(lengths)}")
        return by_sizes[min(fitting, key=lambda sizes: _elements(by_sizes[sizes], rows))]

    def _measured(self, inputs: Arrays) -> tuple[int, Lengths]:
        """Return a batch's rows, equal in all inputs (0 = the model has no batch dimension), and its lengths in the
        padded dimensions. Raises ServeError (INVALID_ARGUMENT) if an input is missing, or no program takes its
        shape."""
        batches = next(iter(self._programs.values()))[0].rows is not None
        rows = 0
        for tensor in self._layout.inputs:
            array = inputs.get(tensor.name)
            if array is None:
                fault = "is missing; a compiled program takes all of its inputs"
            elif array.dtype != tensor.datatype.numpy_dtype:
                fault = f"must be {tensor.datatype.value}, got an array of {array.dtype}"
            elif not batches and array.shape != (shape := self._expected(tensor, array)):
                fault = (
                    f"must have the shape {list(shape)} that the model is compiled for, got {list(array.shape)};"
                    " configure other shapes with max_batch_size, dims, or parameter 'input_shapes'"
                )
            elif batches and not (
                array.ndim
                and array.shape[1:] == self._expected(tensor, array)[1:]
                and 0 < len(array) == (rows or len(array))
            ):
                expected = ", ".join(map(str, (rows or "rows", *self._expected(tensor, array)[1:])))
                fault = (
                    f"must have the shape [{expected}] that the model is compiled for, with at least one row, got"
                    f" {list(array.shape)}"
                )
            else:
                rows = len(array) if batches else 0
                continue
            raise invalid_argument(f"input '{tensor.name}' of model '{self._model_name}' {fault}")
        if not self._buckets:
            return rows, ()
        try:
            return rows, self._buckets.lengths((name, array.shape) for name, array in inputs.items())
        except ValueError as fault:
            raise invalid_argument(f"model '{self._model_name}': {fault}") from None

    def _expected(self, tensor: TensorSpec, given: Array) -> tuple[int, ...]:
        """Return the shape that an input should have: where it is padded, any size fits here."""
        places = self._buckets.inputs.get(tensor.name, ()) if given.ndim == len(tensor.shape) else ()
        shape = [*tensor.shape]
        for place, _ in places:
            shape[place] = given.shape[place]
        return tuple(shape)


def _takes(program: LoadedProgram, rows: int) -> bool:
    return program.rows is None or program.rows.least <= rows <= program.rows.most


def _elements(programs: Sequence[LoadedProgram], rows: int) -> tuple[int, int]:
    """Return how many elements are computed for a batch of so many rows, and in how many runs."""
    runs = [*_runs(programs, rows)]
    return sum(runs) * math.prod(programs[0].sizes), len(runs)


def _runs(programs: Sequence[LoadedProgram], rows: int) -> Iterator[int]:
    if programs[0].rows is None:
        yield 1
        return
    fitting = next((program for program in programs if _most_rows(program) >= rows), None)
    if fitting is not None and fitting.rows is not None:
        yield max(rows, fitting.rows.least)
    else:
        yield from (size for _, size in pieces(rows, [*map(_most_rows, programs)]))


def _most_rows(program: LoadedProgram) -> int:
    return program.rows.most if program.rows else 0


def _as_clients(layout: ProgramLayout, outputs: Sequence[Array | None]) -> dict[str, Array]:
    """Return the wanted outputs by name, in the clients' layout."""
    return {
        tensor.name: array.reshape(()) if tensor.name in layout.scalars else layout.as_client(array)
        for tensor, array in zip(layout.outputs, outputs, strict=True)
        if array is not None
    }
