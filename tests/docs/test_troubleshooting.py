"""Checks that the messages on the page for troubleshooting are those of the sources, apart from names and numbers: most
pairs of words must be found. A message that was written anew fails; one changed word may not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache

import pytest
from support.migraphx import CHECKOUT

PAGE = CHECKOUT / "docs/guides/troubleshooting.md"
WINDOW = 2
"""Words in a row that are looked for."""
MOST = 0.5
"""The share of a message's words that must be found; the rest are names and numbers."""
OTHERS = ("Received HTTP/0.9", "SyntaxError", "ModuleNotFoundError")
"""How messages of other programs begin."""


def _messages() -> list[str]:
    """What the first column of the tables quotes, if it is a sentence."""
    cells = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    quoted = [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]
    return [text for text in quoted if text.count(" ") >= 4 and not text.startswith(("rocserve ", *OTHERS))]


@cache
def _sources() -> str:
    """All constant parts of strings in the sources."""

    def parts() -> Iterator[str]:
        for folder in ("server/rocserve", "clients/rocserve_client"):
            for file in (CHECKOUT / folder).rglob("*.py"):
                for node in ast.walk(ast.parse(file.read_text())):
                    if isinstance(node, ast.Constant) and isinstance(node.value, str):
                        yield " ".join(node.value.split())

    return "\n".join(parts())


def _known(words: Sequence[str]) -> float:
    """The share of the words that the sources have in the same company."""
    known: set[int] = set()
    for first in range(len(words) - WINDOW + 1):
        if " ".join(words[first : first + WINDOW]) in _sources():
            known.update(range(first, first + WINDOW))
    return len(known) / len(words)


@pytest.mark.parametrize("message", _messages())
def test_a_quoted_message_is_one_of_the_sources(message: str) -> None:
    pieces = [piece.split() for piece in message.split("...")]
    for words in pieces:
        if len(words) > WINDOW:
            assert _known(words) >= MOST, f"the sources do not have: {' '.join(words)}"
