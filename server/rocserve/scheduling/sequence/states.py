"""The states of sequences that the server keeps: what a model gave with one answer, it gets with the next request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rocserve.core.datatypes import DataType
from rocserve.core.errors import internal
from rocserve.core.model_config import ModelConfig, SequenceState
from rocserve.core.tensors import Buffer, Tensor


@dataclass(frozen=True, slots=True)
class StateValue:
    """The value of one state."""

    shape: tuple[int, ...]
    """With the batch dimension where the model batches, which is 1."""
    data: Buffer


class SequenceStates:
    """Those of one sequence, in the order of the configuration."""

    __slots__ = ("values",)

    def __init__(self, values: Sequence[StateValue]) -> None:
        self.values = list(values)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple([value.shape for value in self.values])


class StateKeeper:
    """Begins the states of sequences, and takes them out of their answers."""

    def __init__(self, config: ModelConfig, initial: Mapping[str, bytes]) -> None:
        """`initial`: by input name, the content of those that begin with a file."""
        batching = config.sequence_batching
        self.states: tuple[SequenceState, ...] = batching.states if batching is not None else ()
        lead = (1,) if config.max_batch_size > 0 else ()
        self._initial = [_initial(state, lead, initial.get(state.input_name)) for state in self.states]
        self._places = {state.output_name: (place, state.datatype) for place, state in enumerate(self.states)}

    def begin(self) -> SequenceStates:
        return SequenceStates(self._initial)

    def take(self, outputs: Sequence[Tensor], states: SequenceStates) -> None:
        """Keep the values of those states that are among the outputs.

        Raises:
            ServeError: INTERNAL, one is of another datatype than the configuration says; none is kept.
        """
        found: list[tuple[int, StateValue]] = []
        for tensor in outputs:
            place, datatype = self._places.get(tensor.name, (-1, tensor.datatype))
            if place < 0:
                continue
            if tensor.datatype is not datatype:
                raise internal(
                    f"the model gave state '{tensor.name}' as {tensor.datatype.value}, its configuration says"
                    f" {datatype.value}"
                )
            found.append((place, StateValue(tuple(tensor.shape), bytes(tensor.data))))
        for place, value in found:
            states.values[place] = value


def zeros(datatype: DataType, shape: Sequence[int]) -> bytes:
    """The bytes of a tensor of zeros; of empty elements for BYTES, whose lengths take 4 bytes each."""
    return bytes(math.prod(shape) * (datatype.itemsize or 4))


def _initial(state: SequenceState, lead: tuple[int, ...], content: bytes | None) -> StateValue:
    """A dimension of any size is 1 until the model says more."""
    dims = state.initial_states[0].dims if state.initial_states else state.dims
    shape = (*lead, *(1 if size == -1 else size for size in dims))
    return StateValue(shape, zeros(state.datatype, shape) if content is None else content)
