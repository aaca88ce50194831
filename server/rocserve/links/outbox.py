"""Posts entries to a ring, later if it is full."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from rocserve.plane.loop import Alarm, PlaneLoop


class Outbox:
    """Posts entries in their order, at the end of the current turn. On the plane's thread."""

    def __init__(
        self,
        plane: PlaneLoop,
        room: Callable[[], int],
        post: Callable[[bytes], None],
        ring: Callable[[], None],
        on_full: Callable[[int, float], None] = lambda waiting, seconds: None,
    ) -> None:
        """`room`: how many entries can be posted now. `post`: posts them. `ring`: wakes the other end. `on_full`: takes
        how many entries wait for room, and for how many seconds the other end has taken none."""
        self.plane = plane
        self._room = room
        self._post = post
        self.ring = ring
        self._on_full = on_full
        self._queue: deque[bytes] = deque()
        self._retry = Alarm(plane)
        self._stuck_since = 0.0
        self.is_open = True

    def post(self, entry: bytes) -> None:
        """Post an entry after all entries posted before."""
        if not self.is_open:
            return
        if not self._queue:
            self.plane.at_end_of_turn(self.flush)
        self._queue.append(entry)

    def flush(self) -> None:
        if self.post_waiting():
            self.ring()

    def post_waiting(self) -> int:
        """Post the entries that fit the ring, and the rest later. Returns how many entries were posted."""
        queue = self._queue
        count = min(len(queue), self._room())
        if count:
            if count == len(queue):
                mail = b"".join(queue)
                queue.clear()
            else:
                mail = b"".join([queue.popleft() for _ in range(count)])
            self._post(mail)
        if queue and self.is_open:
            now = time.monotonic()
            if count or not self._stuck_since:
                self._stuck_since = now
            # Seconds: the other end may sleep until it is rung, and then takes all entries together.
            self._retry.set(now + 0.001, self.flush)
            self._on_full(len(queue), now - self._stuck_since)
        else:
            self._stuck_since = 0.0
        return count

    def drop(self) -> None:
        """Post nothing more, because the other end is gone."""
        self.is_open = False
        self._queue.clear()
        self._retry.cancel()
