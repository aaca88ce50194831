"""Where the sequences of replaced versions go on: the old version has them until they end."""

from __future__ import annotations

import threading
from typing import Protocol

from rocserve.core.requests import InferRequest
from rocserve.core.sequences import SequenceId
from rocserve.core.serving import Responder


class SequenceHome(Protocol):
    """A version's scheduler."""

    def knows(self, sequence: SequenceId) -> bool: ...

    def adopt(self, request: InferRequest, responder: Responder) -> None:
        """Take a request that came to the version's successor.

        Raises:
            ServeError: as for any other.
            VersionEnding: its sequence has ended meanwhile.
        """


class SequenceHomes:
    """All versions of sequence models that there are. Callable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, list[SequenceHome]] = {}
        self._closing: dict[str, list[SequenceHome]] = {}

    def opened(self, model: str, home: SequenceHome) -> None:
        with self._lock:
            self._open.setdefault(model, []).append(home)

    def closing(self, model: str, home: SequenceHome) -> bool:
        """A version takes no new sequences any more; whether another of its model does, through which requests of its
        sequences still come."""
        with self._lock:
            _remove(self._open, model, home)
            if model not in self._open:
                return False
            self._closing.setdefault(model, []).append(home)
            return True

    def closed(self, model: str, home: SequenceHome) -> None:
        """All its sequences have ended."""
        with self._lock:
            _remove(self._closing, model, home)

    def find(self, model: str, sequence: SequenceId) -> SequenceHome | None:
        """The closing version that has a sequence."""
        with self._lock:
            closing = tuple(self._closing.get(model, ()))
        return next((home for home in closing if home.knows(sequence)), None)


def _remove(homes: dict[str, list[SequenceHome]], model: str, home: SequenceHome) -> None:
    left = [other for other in homes.get(model, ()) if other is not home]
    if left:
        homes[model] = left
    else:
        homes.pop(model, None)
