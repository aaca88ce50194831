"""Runs a model at chosen lengths of its open dimensions, on inputs that it accepts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from rocserve.core.padding import Buckets, Lengths, Padding
from rocserve.load_check.batches import Batches
from rocserve.load_check.budget import Budget, Trials
from rocserve.load_check.equal_lengths import equal_lengths
from rocserve.load_check.facts import GraphFacts
from rocserve.load_check.input_search import Found, NoInputs, find_inputs
from rocserve.load_check.made_inputs import InputMaker, bits_of
from rocserve.load_check.short_inputs import Reading, ShortInputs, unknown_lengths
from rocserve.load_check.tensors import CheckedInput, Feed, Run


class LengthTrials:
    """Runs rows of any lengths. The first one searches for inputs. Each may raise NoInputs, OutOfTime, MemoryError."""

    def __init__(
        self,
        run: Run,
        inputs: Sequence[CheckedInput],
        outputs: Sequence[str],
        facts: GraphFacts,
        budget: Budget,
        seed: int,
        samples: Sequence[Feed] = (),
        has_company: bool = False,
        fixed_rows: int | None = None,
    ) -> None:
        """`outputs` may name tensors of `facts.exposed` that `run` gives beside the model's outputs. `has_company`:
        requests share batches. `fixed_rows`: the engine takes batches of exactly this size."""
        encode = bits_of(inputs)
        self.inputs = inputs
        self.facts = facts
        self.has_company = has_company and fixed_rows is None
        self.trials = Trials(lambda feed: run(encode(feed)), budget)
        self.maker = InputMaker(inputs, facts, seed, samples, are_requests=not self.has_company)
        self.batches = Batches(self.trials, inputs, outputs, facts.exposed, fixed_rows)
        self._found: Found | NoInputs | None = None

    @property
    def found(self) -> Found:
        """The inputs that the search has found."""
        if self._found is None:
            try:
                self._found = find_inputs(self.trials, self.batches.single, self.maker)
            except NoInputs as none:
                self._found = none
        if isinstance(self._found, NoInputs):
            raise self._found
        return self._found

    def groups(self, padding: Padding) -> Sequence[Sequence[int]] | None:
        """Return the padding's dimensions by their indices, in groups: the lengths of those of a group must be equal.
        None = unknown."""
        return equal_lengths(partial(self.takes, padding), padding, self.usual(padding))

    def usual(self, padding: Padding) -> Lengths:
        """Return lengths of the padding's dimensions that the model takes together."""
        return tuple(self._shorts(padding).usual_lengths())

    def outputs(self, padding: Padding, lengths: Lengths) -> Feed | None:
        """Return the outputs of a row of these lengths; None = the engine refuses it, or it cannot be made."""
        if unknown_lengths(self.inputs, padding):
            return None
        row = self._shorts(padding).row("a", lengths)
        return self.batches.single(self._repeated(padding, lengths) if row is None else row)

    def takes(self, padding: Padding, lengths: Lengths) -> bool:
        """Return whether the engine takes a row of these lengths."""
        return self.outputs(padding, lengths) is not None

    def _shorts(self, padding: Padding) -> ShortInputs:
        return ShortInputs(self.maker, self.found.recipe, padding, Reading(padding.values))

    def _repeated(self, padding: Padding, lengths: Lengths) -> Feed:
        """Return a row in which the elements of shorter samples are repeated."""
        row = self.maker.row(self.found.recipe, "a")
        for name, places in Buckets(padding).inputs.items():
            for place, index in places:
                row[name] = row[name].take(np.arange(lengths[index]) % max(row[name].shape[place], 1), place)
        return row
