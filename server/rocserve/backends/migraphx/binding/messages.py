"""What MIGraphX says beside its results."""

from __future__ import annotations

import collections
from collections.abc import Sequence

_AT_MOST = 1000
"""Lines kept until they are taken; the oldest go."""


class Messages:
    """The lines that MIGraphX wrote and nobody has taken yet. Safe on several threads."""

    def __init__(self) -> None:
        self._lines: collections.deque[str] = collections.deque(maxlen=_AT_MOST)

    def add(self, text: str) -> None:
        self._lines.extend(line for line in text.splitlines() if line.strip())

    def take(self) -> Sequence[str]:
        taken = []
        while self._lines:
            taken.append(self._lines.popleft())
        return taken
