"""Finds the flag that a misspelt one probably means."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher


def meant_flag(word: str, flags: Sequence[str]) -> str:
    """Return the flag of `flags` that `word` spells wrongly; "" = uncertain. A flag that begins with the word is
    meant if it is the only one. Else all words between hyphens must be alike: two flags that differ in a whole word
    have different meanings, however few letters that word has."""
    begun = {flag for flag in flags if flag.startswith(word)}
    if len(begun) == 1:
        return begun.pop()
    spelt = word.replace("_", "-")
    best = max(flags, key=lambda flag: _likeness(spelt, flag), default="")
    # "secs" and "seconds" have 0.73, "cpu" and "gpu" 0.67.
    return best if best and _likeness(spelt, best) >= 0.7 else ""


def _likeness(spelt: str, flag: str) -> float:
    """Return the similarity of the least similar words; 0 if their numbers differ."""
    if spelt.replace("-", "") == flag.replace("-", ""):
        return 1.0
    words, ours = spelt.split("-"), flag.split("-")
    if len(words) != len(ours):
        return 0.0
    return min(
        1.0 if word == own else SequenceMatcher(None, word, own).ratio() for word, own in zip(words, ours, strict=True)
    )
