"""Text from files and engines, made fit for a log and a terminal."""

from __future__ import annotations

import os


def printable(text: str) -> str:
    """Text that cannot move a terminal's cursor or fake a line of the log: files and engines say what they like."""
    return text if text.isprintable() else "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character == "\t" or character.isprintable():
        return character
    return character.encode("unicode_escape").decode("ascii")


def printable_name(name: str) -> str:
    """A file's name, with what cannot be printed escaped; bytes that are no UTF-8 as \\xe9."""
    return printable(os.fsencode(name).decode("utf-8", "backslashreplace"))


def encodable(text: str) -> str:
    """Text that UTF-8 can say: file names may bring bytes that it cannot, and JSON lone surrogates."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
