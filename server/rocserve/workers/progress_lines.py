"""Makes the lines about the current work of a version's workers."""

from __future__ import annotations

import re
from collections.abc import Sequence


def phase_of(text: str) -> str:
    """Return a report of progress without its numbers."""
    # Times, percentages and sizes.
    return re.sub(r"[0-9][0-9.:]* ?(?:%|(?:ms|s|min|h|[KMGT]?i?B)\b)", "", text)


def progress_line(texts: Sequence[str]) -> str:
    """Return one line for all workers, in their order; workers that report the same text share a part of the line."""
    by_text: dict[str, list[int]] = {}
    for number, text in enumerate(texts, 1):
        if text:
            by_text.setdefault(text, []).append(number)
    if len(texts) == 1:
        return texts[0]
    parts = [
        f"worker{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))} of {len(texts)}: {text}"
        for text, numbers in by_text.items()
    ]
    # Bounds the line that says what all workers are doing.
    most_parts = 2
    more = f"; {len(parts) - most_parts} more" if len(parts) > most_parts else ""
    return "; ".join(parts[:most_parts]) + more


def silence_line(seconds: Sequence[float], instance_count: int) -> str:
    """Return how many of the instances have not answered for how long; "" = all answer."""
    if not seconds:
        return ""
    have = "has" if len(seconds) == 1 else "have"
    return f"{len(seconds)} of {instance_count} instances {have} not answered for {max(seconds):.0f} s"
