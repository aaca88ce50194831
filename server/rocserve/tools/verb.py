"""A verb of the command: its options, what runs it, and how what goes wrong becomes one line and an exit status."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rocserve.core.errors import ServeError
from rocserve.tools.printing import complain

ENDED_BY_USER = 130
"""As shells have it: 128 and SIGINT's number."""


class UsageError(Exception):
    """The options contradict each other; ends the command as a wrong option does."""


@dataclass(frozen=True, slots=True)
class Verb:
    """Each verb's module has one as `VERB`."""

    description: str
    options: Any = None
    """The dataclass of its options, with its defaults."""
    run: Callable[[Any], int | None] = lambda _: None
    """Takes the options as they were given; returns the exit status, None for 0. Raises: ServeError, UsageError."""
    subject: Callable[[Any], object] = lambda _: ""
    """Of the options: what its errors are about."""
    actions: Mapping[str, tuple[str, Verb]] = field(default_factory=dict)
    """In place of options and run: its own verbs, each with its help."""


def guarded(verb: str, subject: str, run: Callable[[], int | None]) -> int:
    """`run`'s exit status, whatever happens in it. `subject`: what errors are about; "" = nothing to name."""
    about = f"{subject}: " if subject else ""
    try:
        return run() or 0
    except ServeError as error:
        complain(f"rocserve {verb}: {about}{error.text}")
    except KeyboardInterrupt:
        complain(f"rocserve {verb}: ended by you")
        return ENDED_BY_USER
    except BrokenPipeError:
        # The reader of our output has ended; Python would complain once more when it closes the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        complain(f"rocserve {verb}: {about}{error}")
    return 1


def tool_log() -> logging.Logger:
    """Warnings of the parts that tools use go to standard error; the rest nowhere."""
    log = logging.getLogger("rocserve.tools")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.propagate = False
    log.setLevel(logging.WARNING)
    return log
