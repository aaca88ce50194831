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
    """`subject.what`: a campaign may be restricted to a subject."""
    run: Callable[[Stage, random.Random], None]
    """Runs the action, restores the stage, and raises an AssertionError if the server did not do its part."""
    weight: int = 4
    """How often the kind is drawn, relative to the others."""
    is_alone: bool = False
    """Whether no other action may run meanwhile, because others cannot expect the server's end."""


@dataclass(frozen=True, slots=True)
class Action:
    """An action of one kind with its own seed: it does the same in each repetition."""

    kind: str
    seed: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.seed:x}"

    @classmethod
    def parse(cls, text: str) -> Action:
        kind, _, seed = text.strip().partition(":")
        return cls(kind, int(seed, 16))


def drawn(seed: int, kinds: Sequence[Kind]) -> Iterator[Action]:
    """Endless actions, the same for the same seed and kinds."""
    generator = random.Random(seed)
    weights = [kind.weight for kind in kinds]
    while True:
        (kind,) = generator.choices(kinds, weights)
        yield Action(kind.name, generator.getrandbits(SEED_BITS))
