"""How a child ended, in words."""

from __future__ import annotations

import signal
from collections.abc import Sequence

_MESSAGE_LINES = 4
"""So many of what it wrote last go into an error; all are in the log."""
_LONGEST_MESSAGE = 600


def describe_end(status: int, last_lines: Sequence[str], peak_bytes: int, who: str) -> str:
    """For a child that ended without a word; goes on after "while compiling: ".

    `status`: the exit status; below 0, less the signal's number. `who`: what a signal ended.
    """
    message = last_words(last_lines)
    if status == -signal.SIGKILL:
        held = f" (it had {peak_bytes / 2**20:.0f} MiB)" if peak_bytes else ""
        end = f"it was killed by signal 9 (SIGKILL) from outside{held}"
        return f"{end}: {message}" if message else end
    if status < 0:
        end = f"{who} ended by signal {-status} ({_signal_name(-status)})"
    else:
        end = f"the process ended with exit status {status}"
    return f"{end}: {message}" if message else f"{end} without a word"


def last_words(lines: Sequence[str]) -> str:
    """What was written last, in one line."""
    message = "; ".join(line.strip() for line in lines[-_MESSAGE_LINES:])
    return message if len(message) <= _LONGEST_MESSAGE else "..." + message[-_LONGEST_MESSAGE:]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
