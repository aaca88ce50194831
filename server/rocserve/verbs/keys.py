"""Reads single keys from a terminal, without waiting for the end of a line."""

from __future__ import annotations

import codecs
import os
import re
import select
import termios
import tty
from typing import Self

UP, DOWN, LEFT, PAGE_UP, PAGE_DOWN = "up", "down", "left", "page up", "page down"
HOME, END, ENTER, ESCAPE, BACKSPACE = "home", "end", "enter", "escape", "backspace"

_NAMES = {
    "\x1b[A": UP, "\x1bOA": UP, "\x1b[B": DOWN, "\x1bOB": DOWN, "\x1b[D": LEFT, "\x1bOD": LEFT,
    "\x1b[5~": PAGE_UP, "\x1b[6~": PAGE_DOWN,
    "\x1b[H": HOME, "\x1bOH": HOME, "\x1b[1~": HOME, "\x1b[F": END, "\x1bOF": END, "\x1b[4~": END,
    "\r": ENTER, "\n": ENTER, "\x1b": ESCAPE, "\x7f": BACKSPACE, "\b": BACKSPACE,
}  # fmt: skip
"""What terminals send for keys without a character."""
_REST_SECONDS = 0.05
"""How long the rest of a key's bytes may take. After that, the byte is the key Escape itself."""
_MOST_BYTES = 1024


def key_names(text: str) -> list[str]:
    """Split what a terminal sent into keys: names for those above, the character for others. Unknown ones are left
    out."""
    keys = re.findall(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1bO.|.", text, re.DOTALL)
    found = (_NAMES.get(key, key) for key in keys)
    return [key for key in found if key in _NAMES.values() or key.isprintable()]


class Keys:
    """A terminal whose keys are read one by one. A context manager; afterwards the terminal is as before."""

    def __init__(self, terminal: int, woken: int) -> None:
        """`terminal`: file descriptor. `woken`: one whose readability ends a wait; its bytes are thrown away."""
        self._terminal = terminal
        self._woken = woken
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __enter__(self) -> Self:
        self._before = termios.tcgetattr(self._terminal)
        tty.setcbreak(self._terminal)
        return self

    def __exit__(self, *_: object) -> None:
        termios.tcsetattr(self._terminal, termios.TCSAFLUSH, self._before)

    def read(self, timeout: float) -> list[str]:
        """Return the keys pressed within `timeout` seconds, as soon as the first is; maybe none. Raises EOFError if the
        terminal has gone."""
        ready, _, _ = select.select([self._terminal, self._woken], [], [], timeout)
        if self._woken in ready:
            os.read(self._woken, _MOST_BYTES)
        if self._terminal not in ready:
            return []
        data = self._receive()
        # A slow connection may deliver the bytes of one key one after another.
        while re.search(rb"\x1b(\[[0-9;?]*|O)?\Z", data) and select.select([self._terminal], [], [], _REST_SECONDS)[0]:
            data += self._receive()
        return key_names(self._decoder.decode(data))

    def _receive(self) -> bytes:
        data = os.read(self._terminal, _MOST_BYTES)
        if not data:
            raise EOFError("the terminal has gone")
        return data
