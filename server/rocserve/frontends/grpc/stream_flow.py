"""How much of a stream is held in memory: messages not yet answered, answers not yet sent."""

from __future__ import annotations

from collections import deque

from rocserve.frontends.grpc.transport import TransportOptions


class StreamFlow:
    """The bounds of one stream. Not locked: its call guards it."""

    __slots__ = ("_backlog", "_backlog_bytes", "_options", "_unanswered")

    def __init__(self, options: TransportOptions) -> None:
        self._options = options
        self._unanswered = 0
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0

    def received(self) -> None:
        self._unanswered += 1

    def answered(self) -> None:
        self._unanswered = max(0, self._unanswered - 1)

    def may_read(self) -> bool:
        """Whether there is room for one more message."""
        return (
            self._unanswered < self._options.stream_unanswered_limit
            and self._backlog_bytes < self._options.stream_backlog_bytes
        )

    def queue(self, message: bytes) -> bool:
        """Queue an answer. False: it is too much, and all that was queued has been dropped."""
        self._backlog.append(message)
        self._backlog_bytes += len(message)
        if self._backlog_bytes < self._options.stream_backlog_limit_bytes:
            return True
        self.drop()
        return False

    def next(self) -> bytes | None:
        """The answer whose turn it is."""
        if not self._backlog:
            return None
        message = self._backlog.popleft()
        self._backlog_bytes -= len(message)
        return message

    def is_empty(self) -> bool:
        return not self._backlog

    def drop(self) -> None:
        self._backlog.clear()
        self._backlog_bytes = 0
