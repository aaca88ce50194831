"""Runs a model at chosen lengths of its open dimensions, on inputs that it takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rocserve.core.padding import Buckets, Lengths, Padding
from rocserve.load_check.batches import Batches
from rocserve.load_check.budget import Budget, Trials
from rocserve.load_check.facts import GraphFacts
from rocserve.load_check.input_search import find_inputs
from rocserve.load_check.made_inputs import InputMaker, bits_of
from rocserve.load_check.short_inputs import Reading, ShortInputs, unknown_lengths
from rocserve.load_check.tensors import CheckedInput, Feed, Run


class LengthTrials:
    """Runs rows of any lengths. Each run may raise OutOfTime."""

    def __init__(
        self,
        run: Run,
        inputs: Sequence[CheckedInput],
        outputs: Sequence[str],
        facts: GraphFacts,
        budget: Budget,
        seed: int,
        samples: Sequence[Feed] = (),
        fixed_rows: int | None = None,
    ) -> None:
        """Search for inputs. `samples`, `fixed_rows`: as of check_padding. Raises NoInputs, OutOfTime or
        MemoryError."""
        encode = bits_of(inputs)
        self._trials = Trials(lambda feed: run(encode(feed)), budget)
        self._inputs = inputs
        self._maker = InputMaker(inputs, facts, seed, samples)
        self._batches = Batches(self._trials, inputs, outputs, facts.exposed, fixed_rows)
        self._recipe = find_inputs(self._trials, self._batches.single, self._maker).recipe

    @property
    def refusal(self) -> str:
        """What the engine said when it refused an input most recently."""
        return self._trials.refusal

    def usual(self, padding: Padding) -> Lengths:
        """Return lengths of the padding's dimensions that the model takes together."""
        return tuple(self._shorts(padding).usual_lengths())

    def outputs(self, padding: Padding, lengths: Lengths) -> Feed | None:
        """Return the outputs of a row of these lengths; None = the engine refuses it, or none can be made."""
        if unknown_lengths(self._inputs, padding):
            return None
        row = self._shorts(padding).row("a", lengths)
        return self._batches.single(self._repeated(padding, lengths) if row is None else row)

    def takes(self, padding: Padding, lengths: Lengths) -> bool:
        """Return whether the engine takes a row of these lengths."""
        return self.outputs(padding, lengths) is not None

    def _shorts(self, padding: Padding) -> ShortInputs:
        return ShortInputs(self._maker, self._recipe, padding, Reading(padding.values))

    def _repeated(self, padding: Padding, lengths: Lengths) -> Feed:
        """Return a row in which the elements of shorter samples are repeated."""
        row = self._maker.row(self._recipe, "a")
        for name, places in Buckets(padding).inputs.items():
            for place, index in places:
                row[name] = row[name].take(np.arange(lengths[index]) % max(row[name].shape[place], 1), place)
        return row
