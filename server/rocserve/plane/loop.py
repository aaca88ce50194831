"""The data plane's loop: one thread that handles messages, runs callbacks, and sleeps when there is no work.

A turn polls the sources (gRPC's completion queue, links), reads readable descriptors, runs callbacks from other threads
and due timers, then the callbacks for the end of the turn, and some steps of long work, so that a large request delays
others by no more than these steps. After some empty turns the loop sleeps in an epoll of its doorbell, all descriptors,
and the sources' descriptors.

Why a thread: requests must not wait behind the control plane's work on the asyncio loop, and a turn costs a fraction of
a turn there. Why one thread: two threads that hand the GIL to each other cost more than they gain.
"""

from __future__ import annotations

import ctypes
import heapq
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from rocserve.observability.failures import RequestFailures
from rocserve.plane.doorbell import Doorbell

NEVER = float("inf")


class TimerDescriptor:
    """A timerfd on the monotonic clock. epoll's timeout has only milliseconds, and Python no timerfd before 3.13."""

    def __init__(self) -> None:
        # PyDLL keeps the GIL: the calls take less time than releasing it would.
        libc = ctypes.PyDLL(None, use_errno=True)
        self._settime = libc.timerfd_settime
        self._settime.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        # struct itimerspec: interval and first expiry, each in seconds and nanoseconds.
        self._setting = (ctypes.c_long * 4)()
        self._address = ctypes.addressof(self._setting)
        self._when = NEVER
        self.descriptor: int = libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.descriptor < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")

    def set(self, when: float) -> None:
        """Become readable at `when` (time.monotonic() seconds; NEVER = not at all), and unreadable until then."""
        if when == self._when:
            return
        self._when = when
        nanoseconds = 0 if when == NEVER else max(int(when * 1e9), 1)
        self._setting[2], self._setting[3] = divmod(nanoseconds, 1_000_000_000)
        # 1 is TFD_TIMER_ABSTIME.
        if self._settime(self.descriptor, 1, self._address, None) != 0:
            raise OSError(ctypes.get_errno(), f"timerfd_settime({when}) failed")

    def close(self) -> None:
        os.close(self.descriptor)


class TimerHandle:
    __slots__ = ("_queue", "callback", "when")

    def __init__(self, queue: TimerQueue, when: float, callback: Callable[[], None]) -> None:
        self._queue = queue
        self.when = when
        self.callback: Callable[[], None] | None = callback

    def __lt__(self, other: TimerHandle) -> bool:
        return self.when < other.when

    def cancel(self) -> None:
        """Cancel the callback; without effect after it has run."""
        if self.callback is not None:
            self.callback = None
            self._queue.cancelled += 1


class TimerQueue:
    """Timers sorted by time. Used on one thread; other threads may cancel timers."""

    def __init__(self) -> None:
        self._heap: list[TimerHandle] = []
        self.cancelled = 0
        """Number of cancelled timers in the heap. They stay until their time, or until they are most of the heap."""
        self.next_due = NEVER
        """time.monotonic() seconds or NEVER. An attribute, because the loop reads it in every turn."""

    def push(self, handle: TimerHandle) -> None:
        if self.cancelled > max(64, len(self._heap) // 2):
            self._heap = [handle for handle in self._heap if handle.callback is not None]
            heapq.heapify(self._heap)
            self.cancelled = 0
        heapq.heappush(self._heap, handle)
        self.next_due = self._heap[0].when

    def pop_due(self, now: float) -> Callable[[], None] | None:
        """Remove the earliest timer that is due by `now` and return its callback; None if none is due."""
        heap = self._heap
        found: Callable[[], None] | None = None
        while found is None and heap and (heap[0].callback is None or heap[0].when <= now):
            handle = heapq.heappop(heap)
            found, handle.callback = handle.callback, None
            if found is None:
                self.cancelled -= 1
        self.next_due = heap[0].when if heap else NEVER
        return found


Callback = Callable[[], None]

_CPUS_TO_SPARE = 4
"""With fewer CPUs, polling as often as 60 times takes more from workers and clients than it gains."""


def default_spin(cpus: int) -> int:
    """Return after how many empty turns a loop sleeps. Sleeping and waking takes longer than many workers' answers, but
    polling must not occupy a CPU that a worker needs."""
    if cpus == 1:
        return 0
    return 22 if cpus < _CPUS_TO_SPARE else 100


def default_poll_seconds(cpus: int) -> float:
    """Return how long a worker polls for its next batch before it sleeps, if the one before came within that time. A
    client that sends one request after another takes 0.1 to 0.4 ms; to wake the worker takes some 40 us of them."""
    return 0.0 if cpus < _CPUS_TO_SPARE else 0.0005


_STEPS_SECONDS = 0.001
"""Limit of long work per turn: 4 MiB are copied by then. A turn after every step would take as long as the step."""


class Source(Protocol):
    """An object that the loop polls. All calls come on the loop's thread."""

    wake_descriptor: int | None
    """Readable when there may be work; the loop does not go on sleeping while it is readable."""

    @property
    def longest_sleep_seconds(self) -> float:
        """Return the seconds after which the source needs a poll without its descriptor; NEVER = not at all."""

    @property
    def idle_polls(self) -> int:
        """Return how many polls in a row must find no work before the loop may sleep."""

    def poll(self) -> bool:
        """Handle some of the work. Returns whether there was any."""

    def has_mail(self) -> bool:
        """Return whether there may be work. Called just before the loop sleeps."""


class PlaneLoop:
    """The data plane's thread. It logs the error of a callback and goes on."""

    def __init__(self, log: logging.Logger, spin: int = 0) -> None:
        """`spin`: empty turns before the loop sleeps."""
        self.doorbell = Doorbell("rocserve:doorbell")
        """Processes that write into a link of this process ring it."""
        self._failures = RequestFailures(log)
        self._spin = spin
        self._sources: tuple[Source, ...] = ()
        self._readers: dict[int, Callback] = {}
        self._readers_epoll = select.epoll()
        self._soon: deque[Callback] = deque()
        self._ends: dict[Callback, None] = {}
        self._long: deque[Iterator[None]] = deque()
        self._timers = TimerQueue()
        self._timer = TimerDescriptor()
        self.doorbell.also_wake_for(self._readers_epoll.fileno())
        self.doorbell.also_wake_for(self._timer.descriptor)
        self._stopping = False
        self._last_came_at = 0.0
        self.worked_seconds = 0.0
        """The time in which the loop had work, without sleeps and without turns that found none."""
        self.thread: int | None = None
        """The thread's threading.get_ident(), as soon as it runs."""
        self._thread = threading.Thread(target=self.run, name="data-plane", daemon=True)

    # The next methods are safe on any thread.

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the callbacks that are due, and wait for it. Not on the thread itself."""
        if self._thread.is_alive():
            self.call_soon(self._stop)
            self._thread.join()
        # Unfinished long work holds memory, and releasing it would add steps to this loop.
        self._long.clear()
        self._readers_epoll.close()
        self._timer.close()
        self.doorbell.close()

    def call_soon(self, callback: Callback) -> None:
        """Run a callback on the thread, in this turn or the next."""
        self._soon.append(callback)
        self.doorbell.ring()

    def wake(self) -> None:
        self.doorbell.ring()

    def register(self, descriptor: int, on_readable: Callback) -> None:
        """Call `on_readable` whenever the descriptor is readable (level-triggered)."""
        self._readers[descriptor] = on_readable
        self._readers_epoll.register(descriptor, select.EPOLLIN)

    def unregister(self, descriptor: int) -> None:
        """Stop watching a descriptor, before it is closed. One last callback may still run."""
        if self._readers.pop(descriptor, None) is not None:
            self._readers_epoll.unregister(descriptor)

    def call_at(self, when: float, callback: Callback) -> TimerHandle:
        """Run a callback once at `when` (time.monotonic() seconds)."""
        handle = TimerHandle(self._timers, when, callback)
        if threading.get_ident() == self.thread:
            self._timers.push(handle)
        else:
            self.call_soon(lambda: self._timers.push(handle))
        return handle

    # The next methods must be called on the thread.

    def at_end_of_turn(self, callback: Callback) -> None:
        """Run a callback at the end of this turn, once for equal callbacks."""
        self._ends[callback] = None

    def work_off(self, steps: Iterator[None]) -> None:
        """Run steps of some milliseconds: some now, then some per turn, alternating with other long work."""
        until = time.monotonic() + _STEPS_SECONDS
        try:
            next(steps)
            while time.monotonic() < until:
                next(steps)
        except StopIteration:
            return
        except Exception as error:
            self._report(error)
            return
        self._long.append(steps)

    def work_off_later(self, steps: Iterator[None]) -> None:
        """Run long work as `work_off` does. Safe on any thread."""
        self.call_soon(lambda: self.work_off(steps))

    def add_source(self, source: Source) -> None:
        self._sources = (*self._sources, source)
        if source.wake_descriptor is not None:
            self.doorbell.also_wake_for(source.wake_descriptor)

    def remove_source(self, source: Source) -> None:
        """Stop polling a source, before its descriptor is closed."""
        self._sources = tuple(other for other in self._sources if other is not source)
        if source.wake_descriptor is not None:
            self.doorbell.no_longer_wake_for(source.wake_descriptor)

    def run(self) -> None:
        """Run the loop. A process without other work calls it on its main thread instead of `start`."""
        self.thread = threading.get_ident()
        empty_turns = turns = 0
        idle_polls = self._spin
        readers, read_epoll = self._readers, self._readers_epoll.poll
        soon, ends, long, timers = self._soon, self._ends, self._long, self._timers
        monotonic = time.monotonic
        before, has_worked = monotonic(), False
        # One flat loop, because at low load it turns about ten times per request.
        while not self._stopping:
            busy = False
            for source in self._sources:
                try:
                    if source.poll():
                        busy = True
                except Exception as error:
                    self._report(error)
            turns += 1
            # Under load HTTP connections wait for some milliseconds. Workers' messages come through links and do not
            # wait: their sockets only wake the loop, and show when a worker has ended.
            if (empty_turns or not turns % 4) and readers and (readable := read_epoll(0)):
                self._read(readable)
                busy = True
            if soon:
                for _ in range(len(soon)):
                    self._call(soon.popleft())
                busy = True
            now = monotonic()
            # From the middle of a turn to the middle of the next.
            if busy or has_worked:
                self.worked_seconds += now - before
                has_worked = False
            before = now
            if timers.next_due <= now:
                # Timers do not make a turn busy: a timer with more work asks for a callback at the turn's end.
                has_worked = True
                while (callback := timers.pop_due(now)) is not None:
                    self._call(callback)
            if ends:
                self._run_ends()
                busy = has_worked = True
            if long:
                self.work_off(long.popleft())
                busy = has_worked = True
            if busy:
                empty_turns, idle_polls = 0, self._spin
                self._last_came_at = now
                continue
            empty_turns += 1
            if empty_turns <= idle_polls:
                continue
            if idle_polls == self._spin:
                idle_polls = self._idle_polls(idle_polls)
            if empty_turns > idle_polls:
                self._sleep()
                # The loop has just slept: if nothing woke it, it need not poll as often again.
                empty_turns, idle_polls = 1, self._idle_polls(0)
                before = monotonic()

    def _read(self, readable: list[tuple[int, int]]) -> None:
        for descriptor, _ in readable:
            on_readable = self._readers.get(descriptor)
            if on_readable is not None:
                self._call(on_readable)

    def _run_ends(self) -> None:
        # Not in `run`, because its local variables would keep the callbacks alive until the next turn with ends.
        ends = list(self._ends)
        self._ends.clear()
        for callback in ends:
            try:
                callback()
            except Exception as error:
                self._report(error)

    def _idle_polls(self, least: int) -> int:
        """Return how many empty turns must come before the loop sleeps."""
        for source in self._sources:
            if source.idle_polls > least:
                least = source.idle_polls - 1
        return least

    def _has_mail(self) -> bool:
        """Return whether there is work that the loop must not sleep over."""
        if self._soon:
            return True
        # Not any(), because this runs before each sleep.
        for source in self._sources:  # noqa: SIM110
            if source.has_mail():
                return True
        return False

    def _sleep(self) -> None:
        now = time.monotonic()
        seconds = NEVER
        for source in self._sources:
            seconds = min(seconds, source.longest_sleep_seconds)
        if seconds != NEVER:
            # Sleep no longer than the quiet time so far: work that a source does not show waits at most twice as long.
            seconds = min(seconds, max(now - self._last_came_at, 0.001))
        due = self._timers.next_due
        self._timer.set(due if due < now + seconds else NEVER)
        if self.doorbell.sleep(None if seconds == NEVER else seconds, self._has_mail):
            self._last_came_at = time.monotonic()

    def _call(self, callback: Callback) -> None:
        try:
            callback()
        except Exception as error:
            self._report(error)

    def _report(self, error: Exception) -> None:
        self._failures.report("a callback of the data plane failed", error)

    def _stop(self) -> None:
        self._stopping = True


class Alarm:
    """Fires at the earliest of its times. It refers to its callback only while it is set."""

    def __init__(self, plane: PlaneLoop) -> None:
        self._plane = plane
        self._timer: tuple[float, TimerHandle] | None = None

    @property
    def is_set(self) -> bool:
        return self._timer is not None

    def set(self, when: float, callback: Callable[[], None]) -> None:
        """`when`: time.monotonic() seconds; a later time than the set one is ignored. The callback may set it again."""
        if self._timer is not None:
            if self._timer[0] <= when:
                return
            self._timer[1].cancel()

        def fire() -> None:
            self._timer = None
            callback()

        self._timer = (when, self._plane.call_at(when, fire))

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer[1].cancel()
            self._timer = None
