"""Memo caches computed values, up to a limit."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

MOST_REMEMBERED = 1024
"""More entries than most servers see different heads, but so few that a hostile client cannot fill much memory."""


class Memo(dict[Key, Value]):
    """A dict that forgets all entries when it is full: frequent keys come back soon. Look-ups run no Python code."""

    def __init__(self, most: int = MOST_REMEMBERED) -> None:
        super().__init__()
        self._most = most

    def keep(self, key: Key, value: Value) -> Value:
        if len(self) >= self._most:
            self.clear()
        self[key] = value
        return value
