"""Holds an engine against a reference: the same inputs must give the same outputs, as far as the precision allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rocserve.load_check.budget import Budget
from rocserve.load_check.facts import GraphFacts
from rocserve.load_check.tensors import CheckedInput, Feed, Run


@dataclass(frozen=True, slots=True)
class Case:
    """An input, and what the reference answers to it."""

    name: str
    """What kind of values the input has: "plain", "large", ..."""
    feed: Feed
    outputs: Feed
    noise: Mapping[str, float]
    """Output -> how much the reference's own answer moves when the input moves in its last place."""


@dataclass(frozen=True, slots=True)
class ReferenceVerdict:
    """Whether an engine computes what the reference computes."""

    right: bool
    cases: int
    """How many cases were compared."""
    largest_error: float
    """Relative to the output's largest value."""
    output: str
    """The output with the largest error, or the first wrong one."""
    case: str
    reason: str
    """A clause for log and index; names output, case, difference and limit."""


def reference_cases(
    reference: Run,
    inputs: Sequence[CheckedInput],
    outputs: Sequence[str],
    facts: GraphFacts,
    budget: Budget,
    seed: int,
    rows: int = 0,
    samples: Sequence[Feed] = (),
) -> Sequence[Case]:
    """Make inputs that the reference takes, and run it on them. `rows`: the size of each batch; 0 = inputs have no
    rows, or one. Returns no cases if nothing made-up runs, fewer if the time ends."""
    raise NotImplementedError


def compare(cases: Sequence[Case], candidate: Run, precision: str) -> ReferenceVerdict:
    """Run the candidate on the cases. `precision` is what the engine computes in: "fp32", "fp16", "bf16", "int8"."""
    raise NotImplementedError


def save_cases(path: Path, cases: Sequence[Case]) -> None:
    """Write cases to an .npz file, for another process."""
    raise NotImplementedError


def load_cases(path: Path) -> Sequence[Case]:
    """Read the cases that `save_cases` wrote."""
    raise NotImplementedError
