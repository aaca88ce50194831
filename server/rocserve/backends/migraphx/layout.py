"""Describes a program's inputs and outputs in clients' terms: names, KServe datatypes, shapes."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rocserve.backends.migraphx.binding import Array, Program
from rocserve.backends.migraphx.tensors import client_tensor, client_view, nchw, varies_with_values
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
