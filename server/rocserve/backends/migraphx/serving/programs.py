"""Runs batches through compiled programs: cuts and pads them to the programs' sizes, in reused buffers.

A program takes the number of rows that it was compiled for, and gives full outputs. A runner fits batches to the
programs. A layout describes a program's inputs and outputs in clients' terms: names, KServe datatypes, shapes.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rocserve.backends.batch_sizes import Arrays, pieces
from rocserve.backends.migraphx.binding.interface import Array, DimensionRange, Program
from rocserve.backends.migraphx.tensors import IMAGE_RANK, client_tensor, client_view, nchw, varies_with_values
from rocserve.core.errors import internal, invalid_argument
from rocserve.core.requests import Signature, TensorSpec


@dataclass(frozen=True, slots=True)
class ProgramLayout:
    """A program's inputs in the clients' order, and its outputs in the program's order, as clients see them. A size of
    an output is -1 if the inputs' values decide it."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    nhwc: bool = False
    """Whether tensors of four dimensions are NHWC for clients, and NCHW in the program."""
    scalars: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Output that has no dimensions for clients -> the shape of its one element in the program."""

    @property
    def varies(self) -> bool:
        """Whether only a run gives an output's shape."""
        return any(-1 in tensor.shape for tensor in self.outputs)

    def program_shape(self, tensor: TensorSpec) -> tuple[int, ...]:
        if tensor.shape == ():
            return self.scalars.get(tensor.name, ())
        return nchw(tensor.shape) if self.nhwc else tensor.shape

    def as_client(self, array: Array) -> Array:
        """Return a view of the program's array in the client's layout."""
        return client_view(array) if self.nhwc else array

    def signature(self, batching: bool) -> Signature:
        """Return the signature that all programs of the model share, with any batch size if the model batches."""
        inputs, outputs = (
            tuple(replace(one, shape=(-1, *one.shape[1:])) if batching else one for one in tensors)
            for tensors in (self.inputs, self.outputs)
        )
        return Signature(inputs, outputs, batching)

    def check_batch(self, batch_size: int, model_name: str) -> None:
        """Raises ServeError (INVALID_ARGUMENT) if the first dimension of an input or output is not the batch, or if an
        output's shape depends on the inputs' values."""
        for what, tensors in (("input", self.inputs), ("output", self.outputs)):
            for tensor in tensors:
                if -1 in tensor.shape:
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
    program: Program,
    input_order: Sequence[str],
    output_names: Sequence[str],
    nhwc: bool = False,
    scalars: Container[str] = (),
) -> ProgramLayout:
    """Return the layout of a program. `input_order`: the inputs in the model's order. Inputs that the program lacks are
    left out (no output depends on them); inputs that the order lacks come last, by name. `output_names`: one per output
    of the program, in its order. `nhwc`, `scalars`: see ProgramTensors. Raises ServeError (INVALID_ARGUMENT) if a
    tensor cannot be served, ServeError (INTERNAL) if the number of outputs and names differs."""
    parameters = program.parameters
    order = [name for name in input_order if name in parameters]
    order += sorted(parameters.keys() - set(order))
    if len(output_names) != len(program.outputs):
        raise internal(
            f"the program has {len(program.outputs)} outputs, expected {len(output_names)}: {', '.join(output_names)}"
        )
    outputs = [
        client_tensor(name, "output", tensor, nhwc, varies_with_values(parameters.values(), tensor))
        for name, tensor in zip(output_names, program.outputs, strict=True)
    ]
    # MIGraphX gives some of them a dimension.
    with_dimensions = {
        one.name: one.shape for one in outputs if one.name in scalars and one.shape and math.prod(one.shape) == 1
    }
    return ProgramLayout(
        tuple(client_tensor(name, "input", parameters[name], nhwc) for name in order),
        tuple(replace(one, shape=()) if one.name in with_dimensions else one for one in outputs),
        nhwc,
        with_dimensions,
    )


@dataclass(frozen=True, slots=True)
class ProgramTensors:
    """What a compiled program does not tell of its tensors."""

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
    """Outputs that have no dimensions, as the model's file tells."""

    def layout(self, program: Program) -> ProgramLayout:
        """Raises ServeError as `program_layout`."""
        return program_layout(program, self.inputs, self.outputs, self.nhwc, self.scalars)

    def open(self, program: Program) -> LoadedProgram:
        """Raises ServeError as `program_layout`."""
        return LoadedProgram(program, self.layout(program), self.rows, self.pad_with_first_row)


NO_ROOM: Arrays = {}


class LoadedProgram:
    """Holds a compiled program and its staging memory. One call at a time."""

    def __init__(
        self, program: Program, layout: ProgramLayout, rows: DimensionRange | None, pad_with_first_row: bool = True
    ) -> None:
        """`rows`: the batch sizes that the program takes, not checked by MIGraphX; None = no batch dimension."""
        self.layout = layout
        self.rows = rows
        self._program = program
        self._pad_with_first_row = pad_with_first_row
        self._staging: dict[str, Array] = {}

    def run_into(self, inputs: Arrays, outputs: Sequence[Array | None]) -> None:
        """Run inputs of at most the program's rows, into arrays with as many rows; None discards an output."""
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
            if not is_image and flags.c_contiguous and flags.aligned and (not rows or rows == len(given)):
                continue
            staging = self._staging.get(tensor.name)
            if staging is None:
                shape = _with_rows(self.layout.program_shape(tensor), self.rows.most if self.rows else 0)
                staging = self._staging[tensor.name] = np.empty(shape, tensor.datatype.numpy_dtype)
            staging = wanted[tensor.name] = staging[:rows] if rows else staging
            destination = self.layout.as_client(staging)
            if not rows:
                destination[...] = given
                continue
            destination[: len(given)] = given
            # The padding never holds the rest of earlier batches, which belongs to other clients.
            destination[len(given) :] = given[:1] if self._pad_with_first_row else 0
        return wanted


def _with_rows(shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """Return the shape with `rows` rows; 0 = the shape has no batch dimension."""
    return (rows, *shape[1:]) if rows else shape


class ProgramRunner:
    """Serves a model with its programs. A batch is padded to the next size, or cut into pieces if it exceeds the
    largest size; a model without a batch dimension has one program. Only one thread at a time may call `run`; programs
    may be added meanwhile."""

    def __init__(self, model_name: str, program: LoadedProgram, exact: str = "") -> None:
        """`exact`: why a batch must be neither padded nor cut; "" = it may."""
        self._model_name = model_name
        self._exact = exact
        self._layout = program.layout
        """The layout of all programs, which differ only in the batch dimension."""
        self._varies = program.layout.varies
        self._programs: tuple[LoadedProgram, ...] = (program,)
        """By size, ascending. Replaced as a whole: a running batch keeps the programs that it began with."""

    @property
    def batch_sizes(self) -> str:
        """The sizes in service, for people: "1, 2, 4" or "1 to 8"; "" = no batch dimension."""
        ranges = [program.rows for program in self._programs if program.rows]
        return ", ".join(
            str(rows.most) if rows.least == rows.most else f"{rows.least} to {rows.most}" for rows in ranges
        )

    def add(self, program: LoadedProgram) -> None:
        """Put a program into service; it replaces one of the same batch size. Only one thread may call this."""
        others = (one for one in self._programs if one.rows != program.rows)
        self._programs = tuple(sorted((*others, program), key=_most_rows))

    def run(self, inputs: Arrays, wanted: Sequence[str], room: Arrays = NO_ROOM) -> dict[str, Array]:
        """Return the `wanted` outputs, in new memory or in the arrays of `room` (see Batch). Raises ServeError
        (INVALID_ARGUMENT) if no program takes an input's shape, MigraphxError if the run fails."""
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
            for part in pieces(rows, tuple(by_size)):
                by_size[part.batch_size].run_into(
                    {name: array[part.start : part.start + part.rows] for name, array in inputs.items()},
                    [None if array is None else array[part.start : part.start + part.rows] for array in whole],
                )
        return _as_clients(layout, whole)

    def warm_up(self) -> None:
        """Run every present program on zeros. Raises MigraphxError if MIGraphX cannot run a program."""
        for program in self._programs:
            program.warm_up()

    def _row_count(self, inputs: Arrays) -> int:
        """Return the batch's rows, equal in all inputs; 0 = the model has no batch dimension. Raises ServeError
        (INVALID_ARGUMENT) if an input is missing, or no program takes its shape."""
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
    """Return the wanted outputs by name, in the clients' layout."""
    return {
        tensor.name: array.reshape(()) if tensor.name in layout.scalars else layout.as_client(array)
        for tensor, array in zip(layout.outputs, outputs, strict=True)
        if array is not None
    }
