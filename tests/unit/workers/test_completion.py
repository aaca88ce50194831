"""The completion thread: descriptors, timers, calls."""

from __future__ import annotations

import os
import threading
import time

import pytest

from rocserve.workers.completion import CompletionThread


def test_readable_descriptors_are_told_on_the_thread(completion: CompletionThread) -> None:
    reader, writer = os.pipe()
    got: list[tuple[bytes, str]] = []
    both = threading.Semaphore(0)

    def on_readable() -> None:
        got.append((os.read(reader, 1), threading.current_thread().name))
        both.release()

    completion.register(reader, on_readable)
    os.write(writer, b"ab")
    assert both.acquire(timeout=5) and both.acquire(timeout=5)
    assert got == [(b"a", "completion"), (b"b", "completion")]
    completion.unregister(reader)
    completion.unregister(reader)
    os.write(writer, b"c")
    called = threading.Event()
    completion.call_soon(called.set)
    assert called.wait(5) and len(got) == 2
    os.close(reader)
    os.close(writer)


def test_timers_fire_in_the_order_of_their_times(completion: CompletionThread) -> None:
    fired: list[tuple[int, float]] = []
    done = threading.Event()
    start = time.monotonic()
    for number in (3, 1, 4, 2, 0):
        completion.call_at(start + 0.02 * number, lambda number=number: fired.append((number, time.monotonic())))
    completion.call_at(start + 0.1, done.set)
    assert done.wait(5)
    assert [number for number, _ in fired] == [0, 1, 2, 3, 4]
    assert all(at >= start + 0.02 * number for number, at in fired)


def test_a_rough_timer_fires_and_hinders_nobody_from_borrowing(completion: CompletionThread) -> None:
    due = time.monotonic() + 0.02
    fired: list[float] = []
    done = threading.Event()
    completion.call_about(due, lambda: (fired.append(time.monotonic()), done.set()))
    assert not completion.has_timer_within(10)
    completion.call_at(due + 600, lambda: None)
    assert completion.has_timer_within(1000)
    assert done.wait(5)
    assert fired[0] >= due


def test_an_earlier_timer_does_not_wait_for_a_later(completion: CompletionThread) -> None:
    done = threading.Event()
    completion.call_at(time.monotonic() + 600, lambda: None)
    time.sleep(0.05)
    completion.call_at(time.monotonic() + 0.001, done.set)
    assert done.wait(5)


def test_timers_are_finer_than_a_millisecond(completion: CompletionThread) -> None:
    lateness: list[float] = []
    for _ in range(50):
        done = threading.Event()
        when = time.monotonic() + 0.0002

        def fire(when: float = when, done: threading.Event = done) -> None:
            lateness.append(time.monotonic() - when)
            done.set()

        completion.call_at(when, fire)
        assert done.wait(5)
    assert min(lateness) >= 0
    assert sorted(lateness)[10] < 0.0008  # epoll's own time-out would be a whole millisecond late.


def test_cancelled_timers_do_not_fire_and_are_forgotten(completion: CompletionThread) -> None:
    fired = threading.Event()
    handles = [completion.call_at(time.monotonic() + 3600, fired.set) for _ in range(10_000)]
    for handle in handles:
        handle.cancel()
        handle.cancel()
    assert len(completion._timers._heap) < 100
    soon = completion.call_at(time.monotonic() + 0.02, fired.set)
    soon.cancel()
    later = threading.Event()
    completion.call_at(time.monotonic() + 0.05, later.set)
    assert later.wait(5) and not fired.is_set()


def test_a_timer_may_cancel_another_that_is_due(completion: CompletionThread) -> None:
    fired = threading.Event()
    done = threading.Event()
    when = time.monotonic() + 0.02
    second = completion.call_at(when + 1e-6, fired.set)
    first = completion.call_at(when, second.cancel)
    completion.call_at(when + 0.02, done.set)
    assert done.wait(5) and not fired.is_set()
    first.cancel()


def test_what_a_callback_raises_is_logged_and_the_thread_goes_on(
    completion: CompletionThread, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("a callback's fault")

    done = threading.Event()
    completion.call_soon(fail)
    completion.call_at(time.monotonic(), fail)
    completion.call_at(time.monotonic() + 0.02, done.set)
    assert done.wait(5)
    assert caplog.text.count("RuntimeError: a callback's fault") == 2


def test_calls_from_many_threads(completion: CompletionThread) -> None:
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
                completion.call_soon(add)
            else:
                completion.call_at(time.monotonic() + 0.001, add)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done.acquire(timeout=10)


def test_another_thread_may_do_its_work_for_a_while(completion: CompletionThread) -> None:
    reader, writer = os.pipe()
    threads: list[threading.Thread] = []
    arrived = threading.Semaphore(0)

    def on_readable() -> None:
        os.read(reader, 1)
        threads.append(threading.current_thread())
        arrived.release()

    completion.register(reader, on_readable)
    assert completion.borrow(5.0)
    os.write(writer, b"x")
    completion.handle(completion.wait(5.0))
    assert threads == [threading.current_thread()]
    completion.give_back()
    assert arrived.acquire(timeout=5)
    os.write(writer, b"x")
    assert arrived.acquire(timeout=5)
    assert threads[1] is not threading.current_thread()
    completion.unregister(reader)
    os.close(reader)
    os.close(writer)


def test_a_thread_that_is_busy_is_not_borrowed(completion: CompletionThread) -> None:
    release, begun = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        release.wait(10)

    completion.call_soon(hold)
    assert begun.wait(5)
    assert not completion.borrow(0.02)
    release.set()
    done = threading.Event()
    completion.call_soon(done.set)
    assert done.wait(5), "the thread did not go on by itself"
    assert completion.borrow(5.0)
    completion.give_back()
