"""The inputs and outputs of a compiled program, in clients' terms: names, KServe datatypes, shapes, layouts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rocserve.backends.migraphx.binding.interface import DimensionRange, Program, ProgramTensor
from rocserve.backends.migraphx.model_files.graph import ONNX_DATATYPES
from rocserve.core.datatypes import DataType
from rocserve.core.errors import internal, invalid_argument
from rocserve.core.requests import Signature, TensorSpec

_OWN_NAMES = {"float16": "half", "bfloat16": "bf16"}
_DATATYPES = {_OWN_NAMES.get(name, name): datatype for name, datatype in ONNX_DATATYPES.items()}
"""By MIGraphX's names, which are mostly ONNX's."""

_IMAGE_DIMENSIONS = 4


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
        return Signature(_specs(self.inputs, batching), _specs(self.outputs, batching), batching)

    def check_batch(self, batch_size: int, model_name: str) -> None:
        """
        Raises:
            ServeError: INVALID_ARGUMENT; the first dimension of an input or output is not the batch, or the values of
                inputs decide on an output's shape.
        """
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
    """The range of the first dimension of a program that takes one.

    Raises:
        ServeError: INVALID_ARGUMENT; another dimension varies, or they vary differently.
    """
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
    if not nhwc or len(shape) != _IMAGE_DIMENSIONS:
        return ServedTensor(name, datatype, shape)
    batch, channels, height, width = shape
    return ServedTensor(name, datatype, (batch, height, width, channels), channels_last=True)


def _specs(tensors: Iterable[ServedTensor], batching: bool) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(tensor.name, tensor.datatype, (-1, *tensor.shape[1:]) if batching else tensor.shape)
        for tensor in tensors
    )
