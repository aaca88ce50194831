"""Finds by running a model what its file does not tell of padded dimensions: which of them must be equal, and which
outputs follow them. Runs are on zeros, or on made-up inputs if the model refuses zeros."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from rocserve.backends.written_sizes import other_size, subject, with_measured_outputs
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

    def __init__(
        self,
        config: ModelConfig,
        zeros: Shapes,
        made: Callable[[Padding], LengthTrials] | None,
        second: Callable[[PaddedDimension], int] = other_size,
    ) -> None:
        """`zeros`: runs on zeros. `made`: runs made-up inputs with open dimensions; None = a length or a value that the
        model does not take might end the process, so only zeros of the dimensions' sizes are tried. `second`: see
        with_measured_outputs."""
        self._config = config
        self._zeros = zeros
        self._make = made
        self._second = second
        self._found: LengthTrials | None = None

    def with_outputs(self, padding: Padding) -> Padding:
        """Return the padding with the outputs that are cut back. Raises ServeError (INVALID_ARGUMENT) if one cannot be
        cut back, or the model cannot be run."""
        return with_measured_outputs(padding, self._config, partial(self._shapes, padding), self._second)

    def groups(self, dimensions: Sequence[PaddedDimension]) -> Sequence[Sequence[int]]:
        """Return the dimensions by their indices, in groups: the lengths of those of a group must be equal."""
        padding, takes = Padding((*dimensions,)), partial(self._takes_zeros, Padding((*dimensions,)))
        if self._make is None:
            found = equal_lengths(takes, padding, tried=[self._second(one) for one in dimensions if one.sizes])
        elif (found := equal_lengths(takes, padding)) is None:
            # The outputs cannot be measured without inputs either, and that error says why.
            with suppress(NoInputs, OutOfTime, MemoryError):
                found = self._made(padding).groups(padding)
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
        why = "of which a wrong one might end the process"
        if self._make is not None:
            trials = self._made(padding)
            try:
                if (outputs := trials.outputs(padding, lengths)) is not None:
                    return {name: values.shape for name, values in outputs.items()}
                why = trials.trials.refusal
            except (NoInputs, OutOfTime, MemoryError) as error:
                why = str(error)
        dims = ", ".join(f"'{one.label}' of {length}" for one, length in zip(padding.dimensions, lengths, strict=True))
        raise invalid_argument(
            f"{subject(self._config)} needs a run that shows which outputs are cut back, and the model takes neither"
            f" zeros with dimension {dims} ({refusal}) nor made-up inputs ({why}); give a warm-up sample"
            " (model_warmup) or check.npz, or if other dimensions must be equal to these, write their names together"
            ' ("a,b=16,32")'
        ) from None

    def _made(self, padding: Padding) -> LengthTrials:
        """Return runs in which at least the dimensions of the first padding are open."""
        assert self._make is not None, "the caller has seen to it"
        self._found = self._found or self._make(padding)
        return self._found
