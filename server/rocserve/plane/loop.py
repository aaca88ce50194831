"""Loop runs the data plane: one thread that takes what has come, calls back, and sleeps when nothing comes.

A turn polls the sources (gRPC's completion queue, links), reads the descriptors that have something, runs what other
threads have handed over and the timers that are due, then callbacks that wait for the turn's end, and some steps of
what takes long: a large request delays others by no more than these. After some turns without anything it sleeps, in an
epoll that holds its doorbell, all descriptors, and those that the sources name.

Why a thread: requests and answers must not wait behind the control plane's work on the asyncio loop, and a turn costs a
fraction of one there. Why one: two that hand the interpreter's lock to each other cost more than they bring.
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

_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1
_FEW = 64


class TimerDescriptor:
    """A timerfd on the monotonic clock: it keeps microseconds where epoll's own time-out has whole milliseconds. Python
    offers it from 3.13 on; here libc is called."""

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


Callback = Callable[[], None]

_CPUS_TO_SPARE = 4
"""On two a loop that looks 60 times takes more from workers and clients than it gains."""


def default_spin(cpus: int) -> int:
    """Turns without anything before the loop sleeps, by the CPUs that it may use: falling asleep and being woken takes
    longer than many a worker's answer, but a CPU that looks must not be one that a worker needs."""
    if cpus == 1:
        return 0
    return 22 if cpus < _CPUS_TO_SPARE else 100


def default_looks(cpus: int) -> int:
    """That a worker looks for its next batch before it sleeps, likewise: some 50 us."""
    return 0 if cpus < _CPUS_TO_SPARE else 500


_STEPS_SECONDS = 0.001
"""After which no further step of one long piece of work is taken in a turn: 4 MiB are copied by then, and a turn
between steps would take as long as a step."""
_SHORTEST_SLEEP_SECONDS = 0.001
"""For the sake of a source whose descriptor does not show all: see `_sleep`."""
_TURNS_BETWEEN_READS = 4
"""While there is much to do elsewhere: some milliseconds, which HTTP's connections wait. What workers have to say lies
in their links: their sockets only wake the loop, and show when they have ended."""


class Source(Protocol):
    """What the loop polls. All is called on the loop's thread."""

    wake_descriptor: int | None
    """Readable when there may be something; the loop does not sleep on while it is."""

    @property
    def longest_sleep_seconds(self) -> float:
        """After which it wants to be polled, whatever the descriptor says, and sooner while there is traffic; infinity
        = it need not."""

    @property
    def looks(self) -> int:
        """Polls in a row that found nothing, after which there is nothing."""

    def poll(self) -> bool:
        """Handle what has come, some at a time; whether there was anything."""

    def has_mail(self) -> bool:
        """A last look before the loop sleeps: whether something may be there."""


class PlaneLoop:
    """The data plane's thread. What a callback raises is logged, and stops nothing else."""

    def __init__(self, log: logging.Logger, spin: int = 0) -> None:
        """`spin`: turns without anything before it sleeps, after one that had something."""
        self.doorbell = Doorbell("rocserve:doorbell")
        """Those who write into a link of this process ring it."""
        self.sleeps = self.doorbell.sleeps
        """The file of the word that says whether it sleeps (doorbell.py)."""
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
        self.thread: int | None = None
        """The thread's identity (threading.get_ident), once it has begun."""
        self._thread = threading.Thread(target=self.run, name="data-plane", daemon=True)

    # From any thread

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the calls that are due, and wait for it. Not from the thread itself."""
        if self._thread.is_alive():
            self.call_soon(self._stop)
            self._thread.join()
        # What is left of long work holds memory whose end this loop would have to work off.
        self._long.clear()
        self._readers_epoll.close()
        self._timer.close()
        self.doorbell.close()

    def call_soon(self, callback: Callback) -> None:
        """Call back on the thread, in this turn or the next."""
        self._soon.append(callback)
        self.doorbell.ring()

    def wake(self) -> None:
        """A source has something."""
        self.doorbell.ring()

    def register(self, descriptor: int, on_readable: Callback) -> None:
        """Call `on_readable` whenever the descriptor has something to read (level-triggered)."""
        self._readers[descriptor] = on_readable
        self._readers_epoll.register(descriptor, select.EPOLLIN)

    def unregister(self, descriptor: int) -> None:
        """Before the descriptor is closed. One last call may still be on its way."""
        if self._readers.pop(descriptor, None) is not None:
            self._readers_epoll.unregister(descriptor)

    def call_at(self, when: float, callback: Callback) -> TimerHandle:
        """Call back once at `when` (time.monotonic() seconds)."""
        handle = TimerHandle(self._timers, when, callback)
        if threading.get_ident() == self.thread:
            self._timers.push(handle)
        else:
            self.call_soon(lambda: self._timers.push(handle))
        return handle

    # On the thread

    def at_end_of_turn(self, callback: Callback) -> None:
        """Call back, once for equal callbacks, when what has come by now has been handled."""
        self._ends[callback] = None

    def work_off(self, steps: Iterator[None]) -> None:
        """Take some steps a turn, in turns with other work of the kind; each is to take some milliseconds at most. On
        the thread, where the first are taken at once."""
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
        """As `work_off`. From any thread."""
        self.call_soon(lambda: self.work_off(steps))

    def add_source(self, source: Source) -> None:
        self._sources = (*self._sources, source)
        if source.wake_descriptor is not None:
            self.doorbell.also_wake_for(source.wake_descriptor)

    def remove_source(self, source: Source) -> None:
        """Before its descriptor is closed."""
        self._sources = tuple(other for other in self._sources if other is not source)
        if source.wake_descriptor is not None:
            self.doorbell.no_longer_wake_for(source.wake_descriptor)

    def run(self) -> None:
        """The thread's work; a process that does nothing else has its main thread do it, without `start`."""
        self.thread = threading.get_ident()
        empty_turns = turns = 0
        looks = self._spin
        readers, read_epoll = self._readers, self._readers_epoll.poll
        soon, ends, long, timers = self._soon, self._ends, self._long, self._timers
        monotonic = time.monotonic
        # One flat loop: while requests come one by one it turns some ten times for each.
        while not self._stopping:
            busy = False
            for source in self._sources:
                try:
                    if source.poll():
                        busy = True
                except Exception as error:
                    self._report(error)
            turns += 1
            if (empty_turns or not turns % _TURNS_BETWEEN_READS) and readers and (readable := read_epoll(0)):
                self._read(readable)
                busy = True
            if soon:
                for _ in range(len(soon)):
                    self._call(soon.popleft())
                busy = True
            now = monotonic()
            if timers.next_due <= now:
                # One after which there is more to come asks for a call at the turn's end.
                while (callback := timers.pop_due(now)) is not None:
                    self._call(callback)
            if ends:
                self._run_ends()
                busy = True
            if long:
                self.work_off(long.popleft())
                busy = True
            if busy:
                empty_turns, looks = 0, self._spin
                self._last_came_at = now
                continue
            empty_turns += 1
            if empty_turns <= looks:
                continue
            if looks == self._spin:
                looks = self._looks(looks)
            if empty_turns > looks:
                self._sleep()
                # What did not come while it slept need not be looked for.
                empty_turns, looks = 1, self._looks(0)

    def _read(self, readable: list[tuple[int, int]]) -> None:
        for descriptor, _ in readable:
            on_readable = self._readers.get(descriptor)
            if on_readable is not None:
                self._call(on_readable)

    def _run_ends(self) -> None:
        # Not in `run`, whose variables would keep what was called until the next turn with ends.
        ends = list(self._ends)
        self._ends.clear()
        for callback in ends:
            try:
                callback()
            except Exception as error:
                self._report(error)

    def _looks(self, least: int) -> int:
        """Turns without anything before the one after which there is nothing."""
        for source in self._sources:
            if source.looks > least:
                least = source.looks - 1
        return least

    def _has_mail(self) -> bool:
        """What must not be slept over."""
        if self._soon:
            return True
        # Written out: it runs before each sleep.
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
            # For no longer than it has been quiet: what a source does not show waits at most twice as long.
            seconds = min(seconds, max(now - self._last_came_at, _SHORTEST_SLEEP_SECONDS))
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
