"""Memo remembers what has been worked out, within a bound."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

MOST_REMEMBERED = 1024
"""Entries: more than most servers meet of different heads, few enough that a hostile client fills little memory."""


class Memo(dict[Key, Value]):
    """Forgets all when it is full: frequent keys are soon there again. Looked up as a dict, without a call."""

    def __init__(self, most: int = MOST_REMEMBERED) -> None:
        super().__init__()
        self._most = most

    def keep(self, key: Key, value: Value) -> Value:
        """Remember a value; that value."""
        if len(self) >= self._most:
            self.clear()
        self[key] = value
        return value
