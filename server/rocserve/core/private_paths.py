"""Removes the server's file paths from errors for clients; the log keeps them."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from rocserve.core.errors import ServeError

_NO_PATH = r"\s'\"`,;:()\[\]{}<>|"
"""Characters that end a path in a text."""


class PrivatePaths:
    """Hides paths in error texts. A file in a folder that clients know keeps its path within it. Any other path that
    starts with an entry of this machine's root directory becomes "..." and the file's name."""

    def __init__(self, known: Iterable[Path] = ()) -> None:
        """`known`: the model repositories, and folders with files that clients may name."""
        self._folders = {str(form) for folder in known for form in (folder.absolute(), folder.resolve())} - {"/"}

    # The expressions are compiled at the first error, because several objects of the server's start have this one.

    @cached_property
    def _known(self) -> re.Pattern[str]:
        # Model files that had to be copied or generated are in <temporary>/rocserve-<purpose>-<random>/<model>.
        private = rf"{re.escape(tempfile.gettempdir())}/rocserve-[^/{_NO_PATH}]+"
        forms = "|".join([*map(re.escape, sorted(self._folders, key=len, reverse=True)), private])
        return re.compile(rf"(?<![\w.-])(?:{forms})(?:/|(?![\w.-]))")

    @cached_property
    def _others(self) -> re.Pattern[str]:
        roots = "|".join(map(re.escape, sorted((entry.name for entry in Path("/").iterdir()), key=len, reverse=True)))
        return re.compile(rf"(?<![\w.-])/(?:{roots})/(?:[^/{_NO_PATH}]*/)*(?P<name>[^/{_NO_PATH}]*)")

    def hide(self, text: str) -> str:
        if "/" not in text:
            return text
        within = self._known.sub(lambda found: "" if found[0].endswith("/") else "the model repository", text)
        return self._others.sub(r".../\g<name>", within)

    def without(self, error: ServeError) -> ServeError:
        text = self.hide(error.text)
        return error if text == error.text else error.with_text(text)
