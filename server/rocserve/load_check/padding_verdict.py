"""The padding check's findings about a model's dimensions, and its texts for users."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rocserve.core.load_check import PADDING, LoadCheckReport
from rocserve.core.padding import PaddedDimension, Padding
from rocserve.core.printable import listed


class PaddingState(enum.Enum):
    ALLOWED = "allowed"
    REFUSED = "refused"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class DimensionVerdict:
    """Whether one dimension may be padded."""

    label: str
    state: PaddingState
    reason: str
    """A clause for log and index."""


@dataclass(frozen=True, slots=True)
class PaddingVerdict:
    """Whether the dimensions of a padding may be padded, in their order."""

    dimensions: tuple[DimensionVerdict, ...]
    values: Mapping[str, float]
    """Input -> the value to pad with, if not 0."""
    runs: int = 0
    is_lasting: bool = True
    """Whether another check would find the same; False if the time ended it."""

    def in_state(self, state: PaddingState) -> Sequence[DimensionVerdict]:
        return [one for one in self.dimensions if one.state is state]

    @property
    def allows_all(self) -> bool:
        return len(self.in_state(PaddingState.ALLOWED)) == len(self.dimensions)

    @property
    def refusals(self) -> str:
        """Why dimensions must not be padded; "" = they may be, as far as known."""
        return listed([*dict.fromkeys(one.reason for one in self.in_state(PaddingState.REFUSED))], "; ")

    def report(self, warns_of_undecided: bool) -> LoadCheckReport:
        """Return the report for a written `sizes`: it is obeyed, with a warning if answers change, and with
        `warns_of_undecided` also if nothing is known of them."""
        refused, undecided = self.in_state(PaddingState.REFUSED), self.in_state(PaddingState.UNDECIDED)
        doubts = dict.fromkeys(one.reason for one in (*refused, *(undecided if warns_of_undecided else ())))
        return LoadCheckReport(
            tuple(dict.fromkeys(one.reason for one in self.dimensions)),
            f"padded as configured, but {listed([*doubts], '; ')}" if doubts else "",
            (PADDING,) if refused else (),
        )


def undecided(padding: Padding, reason: str, is_lasting: bool = False) -> PaddingVerdict:
    """Return the verdict if nothing is known of any dimension."""
    return all_dimensions(padding, PaddingState.UNDECIDED, unclear(padding.dimensions, reason), is_lasting)


def all_dimensions(padding: Padding, state: PaddingState, reason: str, is_lasting: bool = True) -> PaddingVerdict:
    """Return the verdict if one reason applies to all dimensions."""
    verdicts = tuple(DimensionVerdict(one.label, state, reason) for one in padding.dimensions)
    return PaddingVerdict(verdicts, padding.values, is_lasting=is_lasting)


def named(dimensions: Sequence[PaddedDimension]) -> str:
    names = listed([f"'{one.label}'" for one in dimensions])
    return f"dimension{'s' if len(dimensions) > 1 else ''} {names}"


def refused(dimensions: Sequence[PaddedDimension], why: str) -> str:
    return f"{named(dimensions)} must not be padded: {why}"


def unclear(dimensions: Sequence[PaddedDimension], why: str) -> str:
    return f"padding of {named(dimensions)} not checked: {why}"
