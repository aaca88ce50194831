"""The data plane's loop: descriptors, timers, calls, sources, sleep."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from random import Random

import pytest
from support.waiting import PATIENCE_SECONDS, wait_until

from rocserve.core.steps import Steps
from rocserve.observability import failures
from rocserve.plane import loop as loop_module
from rocserve.plane.loop import Alarm, PlaneLoop, TimerDescriptor, default_spin


def test_readable_descriptors_are_reported_on_the_thread(plane: PlaneLoop) -> None:
    reader, writer = os.pipe()
    got: list[tuple[bytes, str]] = []
    both = threading.Semaphore(0)

    def on_readable() -> None:
        got.append((os.read(reader, 1), threading.current_thread().name))
        both.release()

    plane.register(reader, on_readable)
    os.write(writer, b"ab")
    assert both.acquire(timeout=PATIENCE_SECONDS) and both.acquire(timeout=PATIENCE_SECONDS)
    assert got == [(b"a", "data-plane"), (b"b", "data-plane")]
    plane.unregister(reader)
    plane.unregister(reader)
    os.write(writer, b"c")
    called = threading.Event()
    plane.call_soon(called.set)
    assert called.wait(PATIENCE_SECONDS) and len(got) == 2
    os.close(reader)
    os.close(writer)


def test_timers_fire_in_the_order_of_their_times(plane: PlaneLoop) -> None:
    fired: list[tuple[int, float]] = []
    done = threading.Event()
    start = time.monotonic()

    def begin() -> None:
        for number in (3, 1, 4, 2, 0):
            plane.call_at(start + 0.02 * number, lambda number=number: fired.append((number, time.monotonic())))
        plane.call_at(start + 0.1, done.set)

    plane.call_soon(begin)
    assert done.wait(PATIENCE_SECONDS)
    assert [number for number, _ in fired] == [0, 1, 2, 3, 4]
    assert all(at >= start + 0.02 * number for number, at in fired)


def test_an_earlier_timer_does_not_wait_for_a_later(plane: PlaneLoop) -> None:
    done = threading.Event()
    plane.call_at(time.monotonic() + 600, lambda: None)
    time.sleep(0.05)
    plane.call_at(time.monotonic() + 0.001, done.set)
    assert done.wait(PATIENCE_SECONDS)


def test_timers_are_finer_than_a_millisecond(plane: PlaneLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """They end a sleep by a descriptor, because epoll's own timeout would be a whole millisecond late."""
    timer = TimerDescriptor()
    for microseconds in (1, 200, 1500):
        when = time.monotonic() + microseconds * 1e-6
        timer.set(when)
        assert timer._setting[2] * 1_000_000_000 + timer._setting[3] == int(when * 1e9)
        assert select.select([timer.descriptor], [], [], PATIENCE_SECONDS)[0]
        assert time.monotonic() >= when
    timer.close()
    set_to: list[float] = []
    set_timer = plane._timer.set

    def note(when: float) -> None:
        set_to.append(when)
        set_timer(when)

    monkeypatch.setattr(plane._timer, "set", note)
    when = time.monotonic() + 3600.0002
    plane.call_at(when, lambda: None)
    wait_until(lambda: when in set_to, "a sleep until exactly then")


def test_cancelled_timers_do_not_fire_and_are_forgotten(plane: PlaneLoop) -> None:
    fired = threading.Event()
    later = threading.Event()

    def cancel_all() -> None:
        for handle in [plane.call_at(time.monotonic() + 3600, fired.set) for _ in range(10_000)]:
            handle.cancel()
            handle.cancel()
        plane.call_at(time.monotonic() + 0.02, fired.set).cancel()
        plane.call_at(time.monotonic() + 0.05, later.set)

    plane.call_soon(cancel_all)
    assert later.wait(PATIENCE_SECONDS) and not fired.is_set()
    assert len(plane._timers._heap) < 100


def test_an_alarm_keeps_the_earliest_time_and_can_be_set_again(plane: PlaneLoop) -> None:
    fired: list[str] = []
    done = threading.Event()
    alarm = Alarm(plane)

    def again() -> None:
        fired.append("again" if not alarm.is_set else "still set")
        alarm.set(time.monotonic() + 0.01, done.set)

    def begin() -> None:
        now = time.monotonic()
        alarm.set(now + 3600, lambda: fired.append("replaced"))
        alarm.set(now + 0.02, again)
        alarm.set(now + 0.03, lambda: fired.append("later"))
        cancelled = Alarm(plane)
        cancelled.set(now + 0.01, lambda: fired.append("cancelled"))
        cancelled.cancel()

    plane.call_soon(begin)
    assert done.wait(PATIENCE_SECONDS)
    assert (fired, alarm.is_set) == (["again"], False)


def test_a_timer_may_cancel_another_that_is_due(plane: PlaneLoop) -> None:
    fired = threading.Event()
    done = threading.Event()
    handles = []

    def begin() -> None:
        when = time.monotonic() + 0.02
        second = plane.call_at(when + 1e-6, fired.set)
        handles.append(plane.call_at(when, second.cancel))
        plane.call_at(when + 0.02, done.set)

    plane.call_soon(begin)
    assert done.wait(PATIENCE_SECONDS) and not fired.is_set()
    handles[0].cancel()


def test_what_a_callback_raises_is_logged_and_the_thread_goes_on(
    plane: PlaneLoop, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "_SECONDS_BETWEEN_TRACEBACKS", 3600.0)

    def fail() -> None:
        raise RuntimeError("a callback's fault")

    done = threading.Event()

    def fail_otherwise() -> None:
        raise ValueError("a timer's fault")

    for _ in range(1000):
        plane.call_soon(fail)
    plane.call_at(time.monotonic(), fail_otherwise)
    plane.call_at(time.monotonic() + 0.02, done.set)
    assert done.wait(PATIENCE_SECONDS)
    assert caplog.text.count("RuntimeError: a callback's fault") == 1, "one a line of code in some time"
    assert caplog.text.count("ValueError: a timer's fault") == 1


def test_calls_from_many_threads(plane: PlaneLoop) -> None:
    count = 0
    done = threading.Semaphore(0)

    def add() -> None:
        nonlocal count
        count += 1
        if count == 8000:
            done.release()

    def call() -> None:
        for number in range(1000):
            if number % 2:
                plane.call_soon(add)
            else:
                plane.call_at(time.monotonic() + 0.001, add)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done.acquire(timeout=PATIENCE_SECONDS)


def test_the_end_of_a_turn_is_called_once_and_when_all_that_has_come_has_been_handled(plane: PlaneLoop) -> None:
    calls: list[str] = []
    done = threading.Event()

    def end() -> None:
        calls.append("end")

    def first() -> None:
        plane.at_end_of_turn(end)
        plane.at_end_of_turn(end)
        calls.append("first")
        # At the end of this turn, because the current calls are this one and the next.
        plane.call_soon(done.set)

    def both() -> None:
        # One turn runs what was there when it began: both calls.
        plane.call_soon(first)
        plane.call_soon(lambda: (plane.at_end_of_turn(end), calls.append("second")))

    plane.call_soon(both)
    assert done.wait(PATIENCE_SECONDS)
    assert calls == ["first", "second", "end"]


def test_the_end_of_a_turn_may_ask_for_the_next(plane: PlaneLoop) -> None:
    ends = 0
    done = threading.Event()

    def again() -> None:
        nonlocal ends
        ends += 1
        if ends < 100:
            plane.at_end_of_turn(again)
        else:
            done.set()

    plane.call_soon(lambda: plane.at_end_of_turn(again))
    assert done.wait(PATIENCE_SECONDS)


class Mailbox:
    """A source that another thread fills."""

    wake_descriptor: int | None = None
    longest_sleep_seconds = float("inf")
    idle_polls = 1

    def __init__(self) -> None:
        self.mail: deque[int] = deque()
        self.taken: list[int] = []
        self.done = threading.Event()
        self.polls = 0

    def poll(self) -> bool:
        self.polls += 1
        if not self.mail:
            return False
        number = self.mail.popleft()
        if number < 0:
            self.done.set()
            raise RuntimeError("a source's fault")
        self.taken.append(number)
        return True

    def has_mail(self) -> bool:
        return bool(self.mail)


def rests(box: Mailbox) -> bool:
    """Whether the loop has not looked into the box for a while."""
    polls = box.polls
    time.sleep(0.1)
    return box.polls == polls


def test_nothing_is_slept_through(plane: PlaneLoop) -> None:
    """With pauses about as long as falling asleep takes."""
    boxes = [Mailbox() for _ in range(3)]
    for box in boxes:
        plane.call_soon(partial(plane.add_source, box))
    random = Random(1)
    for number in range(6000):
        box = random.choice(boxes)
        box.mail.append(number)
        plane.wake()
        if number % 3 == 0:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while box.mail:
                assert time.monotonic() < deadline, "the loop sleeps over a full mailbox"
                time.sleep(0)
        for _ in range(random.randrange(200)):
            pass
    wait_until(lambda: not any(box.mail for box in boxes), "the end of the mail")
    taken = sorted(number for box in boxes for number in box.taken)
    assert taken == list(range(6000))


def test_a_source_that_raises_stops_no_other_and_one_that_was_removed_is_left_alone(
    plane: PlaneLoop, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Mailbox(), Mailbox()
    for box in (bad, good):
        plane.call_soon(partial(plane.add_source, box))
    bad.mail.append(-1)
    good.mail.append(7)
    plane.wake()
    assert bad.done.wait(PATIENCE_SECONDS)
    removed = threading.Event()
    plane.call_soon(lambda: (plane.remove_source(bad), removed.set()))
    assert removed.wait(PATIENCE_SECONDS)
    polls = bad.polls
    good.mail.append(8)
    plane.wake()
    wait_until(lambda: good.taken == [7, 8])
    assert bad.polls == polls
    assert "a source's fault" in caplog.text


def test_a_sources_descriptor_wakes_and_so_does_its_longest_sleep(plane: PlaneLoop) -> None:
    reader, writer = os.pipe()

    class Pipe(Mailbox):
        wake_descriptor = reader

        def poll(self) -> bool:
            self.polls += 1
            if select.select([reader], [], [], 0)[0]:
                self.taken.append(os.read(reader, 1)[0])
                self.done.set()
                return True
            return False

    pipe = Pipe()
    plane.call_soon(partial(plane.add_source, pipe))
    wait_until(partial(rests, pipe), "its sleep")
    os.write(writer, b"a")
    assert pipe.done.wait(PATIENCE_SECONDS)
    plane.call_soon(lambda: setattr(pipe, "longest_sleep_seconds", 0.01))
    polls = pipe.polls
    wait_until(lambda: pipe.polls > polls + 10, "its looks after short sleeps")
    removed = threading.Event()
    plane.call_soon(lambda: (plane.remove_source(pipe), removed.set()))
    assert removed.wait(PATIENCE_SECONDS)
    os.close(reader)
    os.close(writer)


def test_what_a_source_does_not_tell_of_is_found_soon_after_something_came(plane: PlaneLoop) -> None:
    """gRPC's core has threads whose events wake nobody: clients waited for the longest sleep."""
    box = Mailbox()
    box.longest_sleep_seconds = 60
    plane.call_soon(partial(plane.add_source, box))
    for number in range(20):
        box.mail.append(2 * number)
        plane.wake()
        time.sleep(0.005)
        box.mail.append(2 * number + 1)
        wait_until(lambda: not box.mail)
    assert box.taken == list(range(40))


def test_it_looks_as_often_as_a_source_asks_before_it_sleeps(plane: PlaneLoop) -> None:
    box = Mailbox()
    box.idle_polls = 500
    plane.call_soon(partial(plane.add_source, box))
    wait_until(lambda: box.polls >= 500)
    wait_until(partial(rests, box), "its sleep")


def test_with_cpus_to_spare_it_looks_before_it_sleeps() -> None:
    assert default_spin(1) == 0
    assert 0 < default_spin(2) < default_spin(4) == default_spin(64)


def test_spin_is_how_often_it_looks() -> None:
    loop, box = PlaneLoop(logging.getLogger("test"), spin=300), Mailbox()
    loop.start()
    try:
        loop.call_soon(partial(loop.add_source, box))
        wait_until(lambda: box.polls >= 300)
        wait_until(partial(rests, box), "its sleep")
    finally:
        loop.stop()


def test_long_work_leaves_others_their_turns(plane: PlaneLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "_STEPS_SECONDS", 0.0)
    taken: list[str] = []
    done = threading.Event()

    def work(name: str) -> Iterator[None]:
        for _ in range(3):
            taken.append(name)
            yield
        if name == "b":
            done.set()

    def broken() -> Iterator[None]:
        yield
        raise ValueError("broken")

    def begin() -> None:
        plane.work_off(work("a"))
        plane.work_off(broken())
        plane.work_off(work("b"))
        plane.call_soon(lambda: taken.append("call"))

    plane.call_soon(begin)
    assert done.wait(PATIENCE_SECONDS)
    # The first steps immediately, then one a turn; calls run in each turn.
    assert taken == ["a", "b", "a", "call", "b", "a", "b"]


def test_long_work_that_is_left_when_the_loop_stops_holds_nothing() -> None:
    plane = PlaneLoop(logging.getLogger("test"))
    plane.start()
    ended = threading.Event()

    def endless() -> Steps[None]:
        try:
            while True:
                time.sleep(0.002)
                yield
        finally:
            ended.set()

    plane.work_off_later(endless())
    plane.stop()
    assert ended.is_set()


def test_quick_steps_are_taken_at_once(plane: PlaneLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "_STEPS_SECONDS", 60.0)
    left: list[int] = []
    done = threading.Event()

    def begin() -> None:
        steps = iter([None] * 3)
        plane.work_off(steps)
        left.append(len(list(steps)))
        done.set()

    plane.call_soon(begin)
    assert done.wait(PATIENCE_SECONDS)
    assert left == [0]


def test_what_a_sleep_did_not_bring_is_not_looked_for() -> None:
    """Nor what a timer did not ask for."""
    loop, box = PlaneLoop(logging.getLogger("test"), spin=10_000), Mailbox()
    box.longest_sleep_seconds = 0.01
    timers = 0

    def tick() -> None:
        nonlocal timers
        timers += 1
        loop.call_at(time.monotonic() + 0.01, tick)

    loop.start()
    try:
        loop.call_soon(lambda: (loop.add_source(box), tick()))
        wait_until(lambda: timers >= 50)
        assert box.polls < 20_000

        def polls_on() -> bool:
            box.mail.append(1)
            loop.wake()
            return box.polls >= 20_000

        wait_until(polls_on, "polls that go on after something has come")
    finally:
        loop.stop()


def test_work_is_counted_and_sleep_is_not(plane: PlaneLoop) -> None:
    begun = time.monotonic()
    done = threading.Event()

    def work() -> None:
        end = time.monotonic() + 0.05
        while time.monotonic() < end:
            pass
        plane.at_end_of_turn(done.set)

    assert plane.worked_seconds == 0.0
    plane.call_soon(work)
    assert done.wait(PATIENCE_SECONDS)
    wait_until(lambda: plane.worked_seconds >= 0.05, "the work in the count")
    time.sleep(0.05)
    assert plane.worked_seconds <= time.monotonic() - begun - 0.05
