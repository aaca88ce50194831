"""Runs the verbs: finds the model, and turns what goes wrong into one line and an exit status."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

from rich.console import Console

from rocserve.backends.registry import discover_backends
from rocserve.core.errors import ServeError
from rocserve.tools.model_choice import ModelOptions, ToolModel, find_model
from rocserve.tools.printing import complain, console_on

ENDED_BY_USER = 130
"""As shells have it: 128 and SIGINT's number."""

Tool = Callable[[ToolModel, Console, logging.Logger], int | None]
"""Returns the exit status, None for 0; may raise ServeError."""


def run_on_model(options: ModelOptions, tool: Tool) -> int | None:
    """The tool's exit status. Raises: ServeError."""
    return tool(find_model(options, discover_backends()), console_on(), tool_log())


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
        # Whoever read our output has seen enough; Python would complain once more when it closes it.
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
