"""The thread on which outcomes arrive and the schedulers' timers fire.

Why a thread: answers must not wait behind the control plane's work on the asyncio loop (a scan of the repository, a
config being parsed), and a wake-up of this loop costs a fraction of an asyncio one. It runs short callbacks only.
"""

from __future__ import annotations

import enum
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

from rocserve.workers.timers import TimerDescriptor, TimerHandle, TimerQueue
from rocserve.workers.wire import MAXIMUM_DATAGRAM

__all__ = ["CompletionThread", "TimerHandle"]


class _Loan(enum.Enum):
    NONE = enum.auto()
    ASKED = enum.auto()
    GIVEN = enum.auto()


class CompletionThread:
    """One epoll loop over descriptors, timers and calls from other threads. What a callback raises is logged."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._epoll = select.epoll()
        self.receive_buffer = memoryview(bytearray(MAXIMUM_DATAGRAM))
        """What callbacks receive a message into: they are called one at a time, and keep nothing of it here."""
        self._readers: dict[int, Callable[[], None]] = {}
        self._soon: deque[Callable[[], None]] = deque()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._timer = TimerDescriptor()
        self._timers = TimerQueue(self._timer)
        self._rough_timer = TimerDescriptor()
        self._rough_timers = TimerQueue(self._rough_timer)
        self._stopping = False
        self.awaited: set[object] = set()
        """The channels whose workers have a batch in hand, and the conversations with open requests: what workers are
        due to say."""
        self.collecting = False
        """Several requests are coming at once, on the thread of the borrower."""
        self._collected: dict[Callable[[], None], None] = {}
        self._loan = _Loan.NONE
        self._loan_changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="completion", daemon=True)
        self.register(self._wakeup, self._run_soon)
        self.register(self._timer.descriptor, lambda: self._run_timers(self._timers))
        self.register(self._rough_timer.descriptor, lambda: self._run_timers(self._rough_timers))

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the calls that are due, and wait for it."""
        if self._thread.is_alive():
            self.call_soon(self._stop)
            self._thread.join()
        self._epoll.close()
        os.close(self._wakeup)
        self._timer.close()
        self._rough_timer.close()

    def register(self, descriptor: int, on_readable: Callable[[], None]) -> None:
        """Call `on_readable` whenever the descriptor has something to read (level-triggered). From any thread."""
        self._readers[descriptor] = on_readable
        self._epoll.register(descriptor, select.EPOLLIN)

    def unregister(self, descriptor: int) -> None:
        """From any thread; before the descriptor is closed. One last call may still be on its way."""
        if self._readers.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def call_at(self, when: float, callback: Callable[[], None]) -> TimerHandle:
        """Call back once at `when` (time.monotonic() seconds). From any thread."""
        return self._timers.add(when, callback)

    def call_about(self, when: float, callback: Callable[[], None]) -> TimerHandle:
        """As `call_at`, but some milliseconds may pass after `when`: such a timer hinders nobody from borrowing."""
        return self._rough_timers.add(when, callback)

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call back on the thread as soon as it gets there. From any thread."""
        self._soon.append(callback)
        os.eventfd_write(self._wakeup, 1)

    # Another thread may do the work of this one for a while, which saves both the way to each other

    def borrow(self, patience_seconds: float) -> bool:
        """Pause the thread, and leave its work to the caller's `wait` and `handle`; False if it is too busy to pause.

        Callbacks still run one at a time, only on the borrower's thread.
        """
        with self._loan_changed:
            self._loan = _Loan.ASKED
            os.eventfd_write(self._wakeup, 1)
            if self._loan_changed.wait_for(lambda: self._loan is _Loan.GIVEN, patience_seconds):
                return True
            self._loan = _Loan.NONE
            return False

    def give_back(self) -> None:
        """Let the thread go on."""
        with self._loan_changed:
            self._loan = _Loan.NONE
            self._loan_changed.notify_all()

    def has_timer_within(self, seconds: float) -> bool:
        """Whether one of `call_at` is due by then."""
        return self._timers.next_due <= time.monotonic() + seconds

    def wait(self, seconds: float) -> list[tuple[int, int]]:
        """What has something to read now, or within the time (in whole milliseconds)."""
        return self._epoll.poll(seconds)

    def handle(self, readable: list[tuple[int, int]]) -> None:
        """Call those who wait for what `wait` gave."""
        readers = self._readers
        for descriptor, _ in readable:
            on_readable = readers.get(descriptor)
            if on_readable is not None:
                try:
                    on_readable()
                except Exception:
                    self._log.exception("a callback of the completion thread failed")

    def begin_collecting(self) -> None:
        """The borrower is about to bring several requests at once: whoever forms batches of them may wait for all."""
        self.collecting = True

    def end_collecting(self) -> None:
        """Call those who waited."""
        self.collecting = False
        while self._collected:
            try:
                callback, _ = self._collected.popitem()
            except KeyError:
                return  # Another thread took the last one.
            self._call(callback)

    def when_collected(self, callback: Callable[[], None]) -> None:
        """Call back, once, when the requests that come now are all there. From any thread."""
        self._collected[callback] = None
        if not self.collecting:
            # It ended between the caller's look and now.
            self.end_collecting()

    def _run(self) -> None:
        while not self._stopping:
            self.handle(self._epoll.poll())
            if self._loan is _Loan.ASKED:
                self._lend()

    def _lend(self) -> None:
        with self._loan_changed:
            if self._loan is _Loan.ASKED:
                self._loan = _Loan.GIVEN
                self._loan_changed.notify_all()
                self._loan_changed.wait_for(lambda: self._loan is not _Loan.GIVEN)

    def _run_soon(self) -> None:
        try:
            os.eventfd_read(self._wakeup)
        except BlockingIOError:
            pass
        for _ in range(len(self._soon)):
            self._call(self._soon.popleft())

    def _run_timers(self, timers: TimerQueue) -> None:
        now = time.monotonic()
        while (callback := timers.pop_due(now)) is not None:
            self._call(callback)

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:
            self._log.exception("a callback of the completion thread failed")

    def _stop(self) -> None:
        self._stopping = True
