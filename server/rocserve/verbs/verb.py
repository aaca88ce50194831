"""Describes the verbs of the command, and turns their errors into one line and an exit status."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rocserve.core.errors import ServeError
from rocserve.verbs.printing import complain

ENDED_BY_USER = 130
"""The status that shells give to a command ended by SIGINT: 128 plus the signal's number."""


@dataclass(frozen=True, slots=True)
class Verb:
    """Describes one verb. Each verb's module defines a Verb as `VERB`."""

    description: str
    options: Any = None
    """An instance of the options' dataclass; its values are the defaults."""
    run: Callable[[Any], int | None] = lambda _: None
    """Takes the parsed options and returns the exit status; None = 0. Raises ServeError or FlagError."""
    subject: Callable[[Any], object] = lambda _: ""
    """Returns from the options the subject that error lines name."""
    actions: Mapping[str, Verb] = field(default_factory=dict)
    """Nested verbs by name, instead of `options` and `run`."""


def guarded(verb: str, subject: str, run: Callable[[], int | None]) -> int:
    """Call `run` and return its exit status; print an expected error as one line, which names any `subject`."""
    about = f"{subject}: " if subject else ""
    try:
        return run() or 0
    except ServeError as error:
        complain(f"rocserve {verb}: {about}{error.text}")
    except KeyboardInterrupt:
        complain(f"rocserve {verb}: ended by you")
        return ENDED_BY_USER
    except BrokenPipeError:
        # The reader of the output has closed the pipe. Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        complain(f"rocserve {verb}: {about}{error}")
    return 1


def tool_log() -> logging.Logger:
    """Return the tools' log, which writes warnings to standard error and drops the rest."""
    log = logging.getLogger("rocserve.verbs")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.propagate = False
    log.setLevel(logging.WARNING)
    return log
