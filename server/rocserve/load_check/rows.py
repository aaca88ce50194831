"""Decides whether the rows of a batch are independent of each other."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from rocserve.load_check.budget import Budget
from rocserve.load_check.facts import GraphFacts
from rocserve.load_check.tensors import CheckedInput, Feed, Run


class Independence(enum.Enum):
    INDEPENDENT = "independent"
    DEPENDENT = "dependent"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class RowsVerdict:
    """Whether rows are independent, and what shows it."""

    state: Independence
    reason: str
    """A clause for log and index: "rows are independent", "rows depend on each other: ...", "not checked: ..."."""
    output: str = ""
    """The output that differs; "" = none, or all of them."""
    difference: float = 0.0
    """How much a row's output changes with its neighbours, relative to its largest value; inf = its shape changes."""
    runs: int = 0


def check_rows(
    run: Run,
    inputs: Sequence[CheckedInput],
    outputs: Sequence[str],
    facts: GraphFacts,
    budget: Budget,
    seed: int,
    samples: Sequence[Feed] = (),
    is_noisy: bool = False,
    fixed_rows: int | None = None,
) -> RowsVerdict:
    """Decide by experiment, and by what the file says, whether the outputs of a row depend on the other rows.

    `outputs` may name tensors of `facts.exposed` that `run` gives beside the model's outputs. `samples` are warm-up
    samples of one or more rows. `is_noisy`: equal runs may differ slightly (GPUs), so a repeated batch tells the
    noise. `fixed_rows`: the engine takes batches of exactly this size. Never raises OutOfTime: a check that runs out
    of time is undecided."""
    raise NotImplementedError
