"""Numbers for all dimensions of a model's inputs, for MIGraphX compiles no others: from the model, the parameter
`input_shapes` and the configuration's dims; and whether the first dimension is a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rocserve.backends.migraphx.model_files.graph import Dims, GraphTensor
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.model_config import ModelConfig

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BatchDimension:
    """The first dimension of every input and output, where it counts a batch's rows."""

    baked: int = 0
    """The number that the file has in its place; 0 = it is left open."""


def find_batch_dimension(inputs: Sequence[GraphTensor], outputs: Sequence[GraphTensor]) -> BatchDimension | None:
    """None for a model whose tensors share no first dimension: it cannot batch."""
    leads = [_lead(tensor.dims) for tensor in inputs]
    if not leads or None in leads:
        return None
    numbers = {lead for lead in leads if isinstance(lead, int)}
    if not numbers:
        fits = all(isinstance(_lead(output.dims), str) for output in outputs)
        return BatchDimension() if fits else None
    baked = numbers.pop()
    if numbers or not all(isinstance(lead, int) for lead in leads):
        return None
    fits = all(isinstance(lead, str) or lead == baked for lead in (_lead(output.dims) for output in outputs))
    return BatchDimension(baked) if fits else None


def _lead(dims: Dims | None) -> int | str | None:
    """The first dimension; None for a scalar. A tensor of which nothing is known may have any."""
    if dims is None:
        return ""
    return dims[0] if dims else None


class InputShapes:
    """Finds the numbers for one model; dimensions of one name have one number."""

    def __init__(self, config: ModelConfig, given: Mapping[str, Shape], batches: bool) -> None:
        """
        Args:
            given: the parameter `input_shapes`.
            batches: whether the first dimension is the batch, which has no number here.
        """
        self._model = config.name
        self._configured = {
            entry.name: entry.dims if entry.reshape is None else entry.reshape for entry in config.inputs
        }
        self._given = given
        self._batches = batches

    def resolve(self, inputs: Sequence[GraphTensor]) -> dict[str, Shape]:
        """By input; without the batch dimension.

        Raises:
            ServeError: INVALID_ARGUMENT; a dimension has no number, or two.
        """
        names = [tensor.name for tensor in inputs]
        for name in self._given:
            if name not in names:
                raise self._wrong(f"'input_shapes' names '{name}', but the model's inputs are {', '.join(names)}")
        known = {tensor.name: self._known(tensor) for tensor in inputs}
        numbers: dict[str, int] = {}
        for tensor in inputs:
            for symbol, number in zip(self._own_dims(tensor) or (), known[tensor.name], strict=False):
                if not (isinstance(symbol, str) and symbol and isinstance(number, int)):
                    continue
                if numbers.setdefault(symbol, number) != number:
                    raise self._wrong(
                        f"dimension '{symbol}' is {numbers[symbol]} in one input and {number} in '{tensor.name}';"
                        " make 'input_shapes' agree"
                    )
        return {tensor.name: self._completed(tensor, known[tensor.name], numbers) for tensor in inputs}

    def _own_dims(self, tensor: GraphTensor) -> Dims | None:
        """The model's, without the batch dimension."""
        return tensor.dims[1:] if self._batches and tensor.dims is not None else tensor.dims

    def _known(self, tensor: GraphTensor) -> Dims:
        """The model's dims, with what is said about those that are left open."""
        dims = self._own_dims(tensor)
        given = self._given.get(tensor.name)
        configured = self._configured.get(tensor.name)
        if dims is None:
            if given is None and configured is None:
                raise self._wrong(
                    f"input '{tensor.name}' has no shape in the model file; give it one: parameter 'input_shapes'"
                    f' "{tensor.name}: 3x224x224"'
                )
            return given if given is not None else tuple(dim if dim > 0 else "" for dim in configured or ())
        if given is not None:
            return self._checked(tensor, dims, given)
        if configured is None or len(configured) != len(dims):
            # Where the configuration contradicts the model, the server says so when it completes it.
            return dims
        return tuple(
            number if isinstance(dim, str) and number > 0 else dim for dim, number in zip(dims, configured, strict=True)
        )

    def _checked(self, tensor: GraphTensor, dims: Dims, given: Shape) -> Dims:
        if len(given) != len(dims) or any(
            isinstance(dim, int) and dim != number for dim, number in zip(dims, given, strict=True)
        ):
            without = " (without the batch dimension)" if self._batches else ""
            raise self._wrong(
                f"'input_shapes' gives input '{tensor.name}' {_shown(given)}, but the model has {_shown(dims)}"
                f"{without}; only dimensions that it leaves open can be chosen"
            )
        return given

    def _completed(self, tensor: GraphTensor, dims: Dims, numbers: Mapping[str, int]) -> Shape:
        shape: list[int] = []
        for axis, dim in enumerate(dims):
            number = numbers.get(dim) if isinstance(dim, str) else dim
            if number is None:
                raise self._open(tensor, axis + self._batches, str(dim))
            shape.append(number)
        return tuple(shape)

    def _open(self, tensor: GraphTensor, axis: int, symbol: str) -> ServeError:
        named = f" ('{symbol}')" if symbol else ""
        example = "x".join(str(dim) if isinstance(dim, int) else "?" for dim in self._own_dims(tensor) or ())
        batch = ""
        if axis == 0:
            batch = "; if it is the batch, set max_batch_size instead"
        return self._wrong(
            f"dimension {axis}{named} of input '{tensor.name}' is left open by the model, and MIGraphX compiles fixed"
            f" shapes only: give it a number in the configuration's dims or in parameter 'input_shapes'"
            f' "{tensor.name}: {example}"{batch}'
        )

    def _wrong(self, text: str) -> ServeError:
        return invalid_argument(f"model '{self._model}': {text}")


def _shown(dims: Dims) -> str:
    return "[" + ", ".join(str(dim) or "?" for dim in dims) + "]"
