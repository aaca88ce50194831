"""Actions: what a campaign does to its servers, drawn from one seed and repeatable one by one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from campaign.stage import Stage

SEED_BITS = 32


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    """`subject.what`: campaigns may be restricted to a subject."""
    run: Callable[[Stage, random.Random], None]
    """Does it, leaves the stage as it was, and raises an AssertionError where the server did not do its part."""
    weight: int = 4
    """How often it is drawn, compared with the others."""
    is_alone: bool = False
    """No other action is under way meanwhile: it would not know of the server's end."""


@dataclass(frozen=True, slots=True)
class Action:
    """One of a kind, with a seed of its own: it does the same again wherever it is repeated."""

    kind: str
    seed: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.seed:x}"

    @classmethod
    def parse(cls, text: str) -> Action:
        kind, _, seed = text.strip().partition(":")
        return cls(kind, int(seed, 16))


def drawn(seed: int, kinds: Sequence[Kind]) -> Iterator[Action]:
    """Actions without end, the same ones for the same seed and kinds."""
    generator = random.Random(seed)
    weights = [kind.weight for kind in kinds]
    while True:
        (kind,) = generator.choices(kinds, weights)
        yield Action(kind.name, generator.getrandbits(SEED_BITS))
