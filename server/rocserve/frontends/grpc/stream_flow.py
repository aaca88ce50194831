"""How much of a stream is held in memory: messages not yet answered, answers not yet sent."""

from __future__ import annotations

from collections import deque

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.request_memory import RequestMemory
from rocserve.frontends.grpc.transport import CLIENT_DOES_NOT_READ, TransportLimits


class StreamFlow:
    """The bounds of one stream, whose answers count against the server's memory until they have been sent. Not locked:
    its call guards it."""

    __slots__ = ("_backlog", "_backlog_bytes", "_limits", "_memory", "_sending_bytes", "_unanswered", "held_bytes")

    def __init__(self, limits: TransportLimits, memory: RequestMemory) -> None:
        self._limits = limits
        self._memory = memory
        self.held_bytes = 0
        self._unanswered = 0
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._sending_bytes = 0

    def received(self) -> None:
        self._unanswered += 1

    def answered(self) -> None:
        self._unanswered = max(0, self._unanswered - 1)

    @property
    def is_idle(self) -> bool:
        """All that has come has been answered."""
        return not self._unanswered

    def may_read(self) -> bool:
        """Whether there is room for one more message."""
        return (
            self._unanswered < self._limits.stream_unanswered_limit
            and self._backlog_bytes < self._limits.stream_backlog_bytes
        )

    def queue(self, message: bytes) -> None:
        """Queue an answer.

        Raises:
            ServeError: RESOURCE_EXHAUSTED, it is too much, and all that was queued has been dropped.
        """
        try:
            self._memory.admit_answer(self, len(message))
            if self._backlog_bytes + len(message) >= self._limits.stream_backlog_limit_bytes:
                raise ServeError(StatusCode.RESOURCE_EXHAUSTED, CLIENT_DOES_NOT_READ)
        except ServeError:
            self.drop()
            raise
        self._backlog.append(message)
        self._backlog_bytes += len(message)

    def begin(self, message: bytes) -> None:
        """An answer is to be sent without being queued.

        Raises:
            ServeError: RESOURCE_EXHAUSTED, there is no memory for it.
        """
        self._memory.admit_answer(self, len(message))
        self._sending_bytes = len(message)

    def sent(self) -> None:
        """What was begun, or what `next` gave, is on its way: no memory holds it any more."""
        self._memory.release_answer(self, self._sending_bytes)
        self._sending_bytes = 0

    def next(self) -> bytes | None:
        """The answer whose turn it is."""
        if not self._backlog:
            return None
        message = self._backlog.popleft()
        self._sending_bytes = len(message)
        self._backlog_bytes -= self._sending_bytes
        return message

    def is_empty(self) -> bool:
        return not self._backlog

    def drop(self) -> None:
        """Nothing more is sent."""
        self._backlog.clear()
        self._backlog_bytes = 0
        self._memory.release_answer(self)
