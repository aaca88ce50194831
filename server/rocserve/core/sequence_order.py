"""Keeps the order of a sequence while one of its requests needs several turns of the loop before it is scheduled."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from rocserve.core.requests import InferRequest
from rocserve.core.sequences import SequenceId

_Key = tuple[str, SequenceId]
"""Model name and sequence id."""


class SequenceOrder:
    """Delays requests behind earlier requests of their sequence. Used on one thread."""

    def __init__(self) -> None:
        self.held: dict[_Key | None, deque[Callable[[], None]]] = {}
        """Sequence with a held request -> functions that start those behind it. Callers first test if it is empty."""

    def wait_if_held(self, request: InferRequest, begin: Callable[[], None]) -> bool:
        """Return whether an earlier request of the sequence is held. If so, `begin` is called later, in order."""
        waiting = self.held.get(_key(request))
        if waiting is None:
            return False
        waiting.append(begin)
        return True

    def hold(self, request: InferRequest) -> None:
        """Delay later requests of the sequence until this request is released."""
        key = _key(request)
        if key is not None:
            self.held[key] = deque()

    def release(self, request: InferRequest) -> None:
        """Start the requests behind this one, which was scheduled or has failed."""
        key = _key(request)
        waiting = self.held.pop(key, None)
        while waiting:
            waiting.popleft()()
            if key in self.held:
                # That request is held too; the rest wait behind it.
                self.held[key] += waiting
                return


def _key(request: InferRequest) -> _Key | None:
    return None if request.sequence is None else (request.head.model_name, request.sequence.id)
