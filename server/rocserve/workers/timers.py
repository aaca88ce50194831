"""Timers in the order of their times, on a descriptor of the kernel's that becomes readable when the next is due.

A timer descriptor (timerfd) keeps microseconds where epoll's own time-out has whole milliseconds, and a timer that is
set from another thread needs no wake-up of the thread that waits. Python offers it from 3.13 on; here libc is called.
"""

from __future__ import annotations

import ctypes
import heapq
import os
import threading
from collections.abc import Callable

_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1
_NEVER = float("inf")
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
        self.descriptor: int = libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.descriptor < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")

    def set(self, when: float) -> None:
        """Become readable at `when` (time.monotonic() seconds); infinity = never. What was readable no longer is."""
        nanoseconds = 0 if when == _NEVER else max(int(when * 1e9), 1)
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
        """Do not call back. From any thread; without effect when it is too late."""
        if self.callback is not None:
            self.callback = None
            self._queue.count_cancelled()


class TimerQueue:
    """Timers set from any thread, taken by one."""

    def __init__(self, descriptor: TimerDescriptor) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._heap: list[TimerHandle] = []
        self._armed = _NEVER
        self._cancelled = 0

    @property
    def next_due(self) -> float:
        """time.monotonic() seconds; infinity when there is none."""
        return self._armed

    def add(self, when: float, callback: Callable[[], None]) -> TimerHandle:
        handle = TimerHandle(self, when, callback)
        with self._lock:
            heapq.heappush(self._heap, handle)
            if when < self._armed:
                self._arm(when)
        return handle

    def pop_due(self, now: float) -> Callable[[], None] | None:
        """The callback of the earliest timer up to `now`; when there is none, the descriptor is set for the next."""
        with self._lock:
            heap = self._heap
            while heap and (heap[0].callback is None or heap[0].when <= now):
                handle = heapq.heappop(heap)
                callback, handle.callback = handle.callback, None
                if callback is not None:
                    return callback
                self._cancelled -= 1
            self._arm(heap[0].when if heap else _NEVER)
        return None

    def count_cancelled(self) -> None:
        """Cancelled timers stay until their time, unless they become the greater part of all."""
        with self._lock:
            self._cancelled += 1
            if self._cancelled > max(_FEW, len(self._heap) // 2):
                self._heap = [handle for handle in self._heap if handle.callback is not None]
                heapq.heapify(self._heap)
                self._cancelled = 0

    def _arm(self, when: float) -> None:
        self._armed = when
        self._descriptor.set(when)
