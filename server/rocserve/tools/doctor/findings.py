"""What a look at one thing has found."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class State(enum.Enum):
    FACT = "fact"
    """Neither good nor bad."""
    WORKS = "works"
    ABSENT = "absent"
    """Not installed: no fault, only something that cannot be had."""
    BROKEN = "broken"
    """Installed, and does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    section: str
    name: str
    state: State
    text: str
    advice: str = ""
    """What to do; "" = nothing."""
