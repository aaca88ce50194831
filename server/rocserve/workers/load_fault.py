"""Describes to the server why a load failed, with the traceback that a model's author needs."""

from __future__ import annotations

import traceback
from itertools import dropwhile
from pathlib import Path

from rocserve.core.errors import ServeError, StatusCode, unreadable
from rocserve.core.load_check import LoadCheckFailed
from rocserve.core.printable import without_colours
from rocserve.links.entries import LONGEST_TEXT
from rocserve.workers.messages import Load, LoadFailed
from rocserve.workers.worker_end import error_text


def load_failed(error: BaseException, load: Load) -> LoadFailed:
    if (
        isinstance(error, OSError)
        and isinstance(error.filename, str)
        and Path(error.filename).is_relative_to(load.model_folder)
    ):
        # A file that vanishes during the load is not a fault of the engine's code.
        error = unreadable(f"{error.filename} cannot be read: {error.strerror}", error)
    if not isinstance(error, ServeError):
        trace = _trace(error) or "".join(traceback.format_exception(error))
        code, text, can_pass = StatusCode.INTERNAL, error_text(error), False
    else:
        trace = "" if error.__cause__ is None else _trace(error.__cause__)
        code, text, can_pass = error.code, error.text, error.can_pass
    text, trace = without_colours(text), without_colours(trace)
    check = error.kind if isinstance(error, LoadCheckFailed) else ""
    return LoadFailed(int(code), text[:LONGEST_TEXT], can_pass, check, trace[-LONGEST_TEXT:])


def _trace(error: BaseException) -> str:
    """Return the traceback without the server's own frames at its beginning; "" = it has only those."""
    parts: list[str] = []
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        frames = [*dropwhile(_is_own, traceback.extract_tb(link.__traceback__))]
        if frames or isinstance(link, SyntaxError):
            head = ["Traceback (most recent call last):\n"] if frames else []
            lines = [*head, *traceback.format_list(frames), *traceback.format_exception_only(link)]
            parts.insert(0, "".join(lines))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return "The exception above led to this one:\n".join(parts)


def _is_own(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith((f"{Path(__file__).parents[1]}/", "<frozen importlib"))
