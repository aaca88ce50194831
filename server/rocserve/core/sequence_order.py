"""The order of a sequence while one of its requests takes several turns until it can go on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from rocserve.core.requests import InferRequest
from rocserve.core.sequences import SequenceId

_Key = tuple[str, SequenceId]
"""The model's name, the sequence's id."""


class SequenceOrder:
    """Has requests wait for those before them of their sequence. On one thread."""

    def __init__(self) -> None:
        self.held: dict[_Key | None, deque[Callable[[], None]]] = {}
        """By sequences of which a request is held, what begins those that have come behind it. Empty as a rule, which
        is asked first: every request comes by."""

    def waits(self, request: InferRequest, begin: Callable[[], None]) -> bool:
        """Whether one before it of its sequence is held: `begin` is called when its turn has come."""
        waiting = self.held.get(_key(request))
        if waiting is None:
            return False
        waiting.append(begin)
        return True

    def hold(self, request: InferRequest) -> None:
        """Those that come behind it wait until it is released."""
        key = _key(request)
        if key is not None:
            self.held[key] = deque()

    def release(self, request: InferRequest) -> None:
        """It has gone on, or failed: those behind it begin."""
        key = _key(request)
        waiting = self.held.pop(key, None)
        while waiting:
            waiting.popleft()()
            if key in self.held:
                # That one is held as well.
                self.held[key] += waiting
                return


def _key(request: InferRequest) -> _Key | None:
    return None if request.sequence is None else (request.head.model_name, request.sequence.id)
