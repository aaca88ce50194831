"""Where the sequences of replaced versions go on: the old version has them until they end."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from rocserve.core.requests import InferRequest
from rocserve.core.sequences import SequenceId
from rocserve.core.serving import Responder


class SequenceHome(Protocol):
    """A version's scheduler."""

    @property
    def version(self) -> int: ...
    def knows(self, sequence: SequenceId) -> bool: ...

    def adopt(self, request: InferRequest, responder: Responder) -> None:
        """Take a request that came to the version's successor.

        Raises:
            ServeError: as for any other.
            VersionEnding: its sequence has ended meanwhile.
        """


class SequenceHomes:
    """The versions of one model with sequences. Callable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: tuple[SequenceHome, ...] = ()
        self._closing: tuple[SequenceHome, ...] = ()

    def opened(self, home: SequenceHome) -> None:
        with self._lock:
            self._open = (*self._open, home)

    def closing(self, home: SequenceHome) -> bool:
        """A version takes no new sequences any more; whether another one does, through which requests of its sequences
        still come."""
        with self._lock:
            self._open = _without(self._open, home)
            if not self._open:
                return False
            self._closing = (*self._closing, home)
            return True

    def closed(self, home: SequenceHome) -> None:
        """All its sequences have ended."""
        with self._lock:
            self._closing = _without(self._closing, home)

    def find(self, sequence: SequenceId, version: str, but: SequenceHome) -> SequenceHome | None:
        """Another version that has a sequence: one that has been replaced, or is about to be.

        Args:
            version: as the request names it, "" where it does not; only that one will do.
            but: the version that asks.
        """
        others = (home for home in (*self._closing, *self._open) if home is not but)
        fitting = (home for home in others if not version or int(version) == home.version)
        return next((home for home in fitting if home.knows(sequence)), None)


class AllSequenceHomes:
    """Those of all models, for as long as anybody has them."""

    def __init__(self) -> None:
        self._homes: weakref.WeakValueDictionary[str, SequenceHomes] = weakref.WeakValueDictionary()

    def of(self, model: str) -> SequenceHomes:
        """Those of the versions of a model. `model`: names it in all repositories."""
        homes = self._homes.get(model)
        if homes is None:
            homes = self._homes[model] = SequenceHomes()
        return homes


def _without(homes: tuple[SequenceHome, ...], home: SequenceHome) -> tuple[SequenceHome, ...]:
    return tuple(other for other in homes if other is not home)
