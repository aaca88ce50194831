"""Finds by running a model what its file does not tell of padded dimensions: which of them must be equal, and which
outputs follow them. Runs are on zeros, or on made-up inputs if the model refuses zeros."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial

from rocserve.backends.written_sizes import SIZES, with_measured_outputs
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.model_config import ModelConfig
from rocserve.core.padding import Lengths, PaddedDimension, Padding, Shape
from rocserve.load_check.budget import OutOfTime
from rocserve.load_check.equal_lengths import equal_lengths
from rocserve.load_check.input_search import NoInputs
from rocserve.load_check.length_trials import LengthTrials

Shapes = Callable[[Padding, Lengths], Mapping[str, Shape]]
"""Runs a model with these lengths of a padding's dimensions, and returns the shapes of its outputs. Raises ServeError
if the model refuses them."""


class PaddingRuns:
    """The runs of one model."""

    def __init__(self, config: ModelConfig, zeros: Shapes, made: Callable[[], LengthTrials]) -> None:
        """`zeros`: runs on zeros. `made`: runs made-up inputs."""
        self._config = config
        self._zeros = zeros
        self._make = made

    def with_outputs(self, padding: Padding) -> Padding:
        """Return the padding with the outputs that are cut back. Raises ServeError (INVALID_ARGUMENT) if one cannot be
        cut back, or the model cannot be run."""
        return with_measured_outputs(padding, self._config, partial(self._shapes, padding))

    def groups(self, dimensions: Sequence[PaddedDimension]) -> Sequence[Sequence[int]]:
        """Return the dimensions by their indices, in groups: the lengths of those of a group must be equal."""
        padding = Padding((*dimensions,))
        found = equal_lengths(partial(self._takes_zeros, padding), padding)
        if found is None:
            # The outputs cannot be measured without inputs either, and that error says why.
            with suppress(NoInputs, OutOfTime, MemoryError):
                found = self._made.groups(padding)
        return [(index,) for index in range(len(dimensions))] if found is None else found

    def _takes_zeros(self, padding: Padding, lengths: Lengths) -> bool:
        try:
            self._zeros(padding, lengths)
        except ServeError:
            return False
        return True

    def _shapes(self, padding: Padding, lengths: Lengths) -> Mapping[str, Shape]:
        try:
            return self._zeros(padding, lengths)
        except ServeError as error:
            refusal = error.text
        try:
            if (outputs := self._made.outputs(padding, lengths)) is not None:
                return {name: values.shape for name, values in outputs.items()}
            why = self._made.trials.refusal
        except (NoInputs, OutOfTime, MemoryError) as error:
            why = str(error)
        each = ", ".join(f"'{one.label}' of {length}" for one, length in zip(padding.dimensions, lengths, strict=True))
        raise invalid_argument(
            f"parameter '{SIZES}' of model '{self._config.name}' needs a run that shows which outputs are cut back, and"
            f" the model takes neither zeros with dimension {each} ({refusal}) nor made-up inputs ({why}); give a"
            " warm-up sample (model_warmup) or check.npz, or if other dimensions must be equal to these, write their"
            f' names together ("a,b=16,32")'
        ) from None

    @cached_property
    def _made(self) -> LengthTrials:
        return self._make()
