"""Text from files and engines, made fit for a log and a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Text that cannot move a terminal's cursor or fake a line of the log: files and engines say what they like."""
    return text if text.isprintable() else "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character == "\t" or character.isprintable():
        return character
    return character.encode("unicode_escape").decode("ascii")
