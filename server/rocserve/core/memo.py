"""Memo remembers values, up to a limit."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

MOST_REMEMBERED = 1024
"""More entries than most servers see different heads, but so few that a hostile client cannot fill much memory."""


class Memo(dict[Key, Value]):
    """A dict that forgets its oldest entry when it is full. Look-ups run no Python code. Safe on any thread."""

    __slots__ = ("_most",)

    def __init__(self, most: int = MOST_REMEMBERED) -> None:
        super().__init__()
        self._most = most

    def keep(self, key: Key, value: Value) -> Value:
        while len(self) >= self._most:
            try:
                del self[next(iter(self))]
            except (KeyError, RuntimeError):
                continue  # Another thread has changed the dict.
        self[key] = value
        return value
