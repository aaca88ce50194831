"""What the head of a .mxr says: MIGraphX's C API cannot be asked whether a program is compiled."""

from __future__ import annotations

from pathlib import Path

_HEAD = 1 << 20
"""Bytes. The file begins with its version and targets; the contexts of the targets come before the program."""
_KEY = b"\xa8contexts"
"""As msgpack writes the key (8 letters)."""
_EMPTY_ARRAY = 0x90


def is_compiled(path: Path) -> bool:
    """Whether the program has contexts, which compiling gives it. True where the file does not tell.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD)
    found = head.find(_KEY)
    after = found + len(_KEY)
    return found < 0 or after >= len(head) or head[after] != _EMPTY_ARRAY
