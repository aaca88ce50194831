"""Says what went wrong in a model's code, and on which line of it."""

from __future__ import annotations

import traceback
from pathlib import Path

from rocserve.core.errors import ServeError


def exception_text(error: BaseException) -> str:
    """As Python's last line of a traceback: the type and what it says."""
    if isinstance(error, ServeError):
        return error.text
    try:
        text = str(error).strip()
    except Exception:
        text = "<exception str() failed>"  # Python's words in a traceback.
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def fault_text(error: BaseException, model_folder: Path) -> str:
    """The exception's type and text and the last line of the model's own code that it came from."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({_relative(error.filename, model_folder)}, line {error.lineno})"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).is_relative_to(model_folder):
            place = f"{_relative(frame.filename, model_folder)}, line {frame.lineno}"
            return f"{exception_text(error)} ({place}, in {frame.name})"
    return exception_text(error)


def _relative(filename: str, model_folder: Path) -> str:
    path = Path(filename)
    return str(path.relative_to(model_folder)) if path.is_relative_to(model_folder) else filename
