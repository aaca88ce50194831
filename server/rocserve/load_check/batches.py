"""Joins rows to batches, runs them, and takes their outputs apart."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from rocserve.load_check.budget import Trials
from rocserve.load_check.tensors import Array, CheckedInput, Feed


class RowsLost(Exception):
    """The named output does not have one row for each row of the batch."""

    def __init__(self, output: str, shape: Sequence[int], rows: int) -> None:
        given = "1 row gives" if rows == 1 else f"{rows} rows give"
        super().__init__(f"{given} output '{output}' of shape {list(shape)}")
        self.output = output


class Batches:
    """Runs batches of one model."""

    def __init__(
        self,
        trials: Trials,
        inputs: Sequence[CheckedInput],
        outputs: Sequence[str],
        exposed: Collection[str] = (),
        fixed_rows: int | None = None,
    ) -> None:
        self._trials = trials
        self._inputs = inputs
        self._outputs = outputs
        self._exposed = exposed
        self._fixed_rows = fixed_rows

    def single(self, row: Feed) -> Feed | None:
        """Run one row; its outputs may have any shape. None = the engine refuses it."""
        return self._outputs_of([row])

    def run(self, rows: Sequence[Feed]) -> dict[str, Array] | None:
        """Run a batch; each output has a row for each of its rows. None = the engine refuses it. Raises RowsLost."""
        outputs = self._outputs_of(rows)
        return None if outputs is None else self.with_rows(outputs, len(rows))

    def with_rows(self, outputs: Feed, rows: int) -> dict[str, Array]:
        """Return the outputs, without inner tensors that have another number of rows. Raises RowsLost."""
        kept = {}
        for name, values in outputs.items():
            if values.ndim and len(values) == rows:
                kept[name] = values
            elif name not in self._exposed:
                raise RowsLost(name, values.shape, rows)
        return kept

    def _outputs_of(self, rows: Sequence[Feed]) -> dict[str, Array] | None:
        size = self._fixed_rows or len(rows)
        filled = [*rows, *[rows[-1]] * (size - len(rows))]
        outputs = self._trials.run(joined(filled, self._inputs), size)
        if outputs is None:
            return None
        cut: Mapping[str, Array] = {name: np.asarray(outputs[name]) for name in self._outputs}
        return {
            name: values[: len(rows)] if values.ndim and len(values) == size else values for name, values in cut.items()
        }


def joined(rows: Sequence[Feed], inputs: Sequence[CheckedInput]) -> Feed:
    """Return a batch of these rows; inputs without rows are the first one's."""
    with_rows = {given.name for given in inputs if given.has_rows}
    return {
        name: np.concatenate([row[name] for row in rows]) if name in with_rows else values
        for name, values in rows[0].items()
    }
