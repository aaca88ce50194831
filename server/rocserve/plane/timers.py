"""Timers in the order of their times, and the kernel's descriptor that becomes readable when one is due.

A timer descriptor (timerfd) keeps microseconds where epoll's own time-out has whole milliseconds. Python offers it from
3.13 on; here libc is called.
"""

from __future__ import annotations

import ctypes
import heapq
import os
from collections.abc import Callable

NEVER = float("inf")

_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1
_FEW = 64


class TimerDescriptor:
    """A timerfd on the monotonic clock."""

    def __init__(self) -> None:
        # PyDLL keeps the GIL: the calls take less time than giving it up would.
        libc = ctypes.PyDLL(None, use_errno=True)
        self._settime = libc.timerfd_settime
        self._settime.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        # struct itimerspec: interval and first expiry, seconds and nanoseconds each.
        self._setting = (ctypes.c_long * 4)()
        self._address = ctypes.addressof(self._setting)
        self._when = NEVER
        self.descriptor: int = libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.descriptor < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")

    def set(self, when: float) -> None:
        """Become readable at `when` (time.monotonic() seconds), or never. What was readable no longer is, unless the
        time is the same."""
        if when == self._when:
            return
        self._when = when
        nanoseconds = 0 if when == NEVER else max(int(when * 1e9), 1)
        self._setting[2], self._setting[3] = divmod(nanoseconds, 1_000_000_000)
        if self._settime(self.descriptor, _TFD_TIMER_ABSTIME, self._address, None) != 0:
            raise OSError(ctypes.get_errno(), f"timerfd_settime({when}) failed")

    def close(self) -> None:
        os.close(self.descriptor)


class TimerHandle:
    """A timer that was set."""

    __slots__ = ("_queue", "callback", "when")

    def __init__(self, queue: TimerQueue, when: float, callback: Callable[[], None]) -> None:
        self._queue = queue
        self.when = when
        self.callback: Callable[[], None] | None = callback

    def __lt__(self, other: TimerHandle) -> bool:
        return self.when < other.when

    def cancel(self) -> None:
        """Do not call back; without effect when it is too late."""
        if self.callback is not None:
            self.callback = None
            self._queue.cancelled += 1


class TimerQueue:
    """Timers by their times. For one thread; what others may do is to cancel."""

    def __init__(self) -> None:
        self._heap: list[TimerHandle] = []
        self.cancelled = 0
        """Of those in the heap: they stay until their time, unless they become the greater part of all."""
        self.next_due = NEVER
        """time.monotonic() seconds; NEVER when there is none. The loop looks at it in every turn."""

    def push(self, handle: TimerHandle) -> None:
        if self.cancelled > max(_FEW, len(self._heap) // 2):
            self._heap = [handle for handle in self._heap if handle.callback is not None]
            heapq.heapify(self._heap)
            self.cancelled = 0
        heapq.heappush(self._heap, handle)
        self.next_due = self._heap[0].when

    def pop_due(self, now: float) -> Callable[[], None] | None:
        """The callback of the earliest timer up to `now`."""
        heap = self._heap
        found: Callable[[], None] | None = None
        while found is None and heap and (heap[0].callback is None or heap[0].when <= now):
            handle = heapq.heappop(heap)
            found, handle.callback = handle.callback, None
            if found is None:
                self.cancelled -= 1
        self.next_due = heap[0].when if heap else NEVER
        return found
