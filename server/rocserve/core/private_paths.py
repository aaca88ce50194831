"""Takes the server's own paths out of errors for clients; the log has them whole."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

from rocserve.core.errors import ServeError

_NO_PATH = r"\s'\"`,;:()\[\]{}<>|"
"""What ends a path in a text."""


class PrivatePaths:
    """Of a file in a folder that clients know, the path within that folder stays. Of any other whose path begins with a
    folder of this machine's root its name stays, behind dots."""

    def __init__(self, known: Iterable[Path] = ()) -> None:
        """`known`: the model repositories, and folders whose files clients may name."""
        folders = {str(form) for folder in known for form in (folder.absolute(), folder.resolve())} - {"/"}
        # Files that do not lie in a repository as a model's should are in <temporary>/rocserve-<what>-<any>/<model>.
        private = rf"{re.escape(tempfile.gettempdir())}/rocserve-[^/{_NO_PATH}]+"
        known_forms = "|".join([*map(re.escape, sorted(folders, key=len, reverse=True)), private])
        self._known = re.compile(rf"(?<![\w.-])(?:{known_forms})(?:/|(?![\w.-]))")
        roots = "|".join(map(re.escape, sorted((entry.name for entry in Path("/").iterdir()), key=len, reverse=True)))
        self._others = re.compile(rf"(?<![\w.-])/(?:{roots})/(?:[^/{_NO_PATH}]*/)*(?P<name>[^/{_NO_PATH}]*)")

    def hide(self, text: str) -> str:
        if "/" not in text:
            return text
        within = self._known.sub(lambda found: "" if found[0].endswith("/") else "the model repository", text)
        return self._others.sub(r".../\g<name>", within)

    def without(self, error: ServeError) -> ServeError:
        """The error as its client gets it."""
        text = self.hide(error.text)
        return error if text == error.text else ServeError(error.code, text)
