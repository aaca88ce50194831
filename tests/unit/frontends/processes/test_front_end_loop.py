"""The loop of a front end of HTTP: asyncio's turns with a link's mail in them, and sleep over none of it."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from random import Random

import pytest

from rocserve.frontends.processes.front_end_loop import FrontEndLoop
from rocserve.plane.doorbell import SocketRinger, drain_rings, sleep_word


class Mailbox:
    """A source that another thread fills."""

    wake_descriptor: int | None = None
    longest_sleep_seconds = float("inf")
    looks = 1

    def __init__(self) -> None:
        self.mail: deque[int] = deque()
        self.taken: list[int] = []

    def poll(self) -> bool:
        if not self.mail:
            return False
        number = self.mail.popleft()
        if number < 0:
            raise RuntimeError("a source's fault")
        self.taken.append(number)
        return True

    def has_mail(self) -> bool:
        return bool(self.mail)


@pytest.fixture
def loop() -> Iterator[FrontEndLoop]:
    """Runs on a thread of its own."""
    made = FrontEndLoop(logging.getLogger("rocserve.test.front_end_loop"))
    thread = threading.Thread(target=made.run_forever)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join()
    made.close()


def test_nothing_is_slept_through(loop: FrontEndLoop, caplog: pytest.LogCaptureFixture) -> None:
    """With pauses about as long as falling asleep takes, and a fault now and then."""
    box = Mailbox()
    here, there = socket.socketpair()
    there.setblocking(False)
    ringer = SocketRinger(sleep_word(loop.sleeps), here)
    loop.call_soon_threadsafe(loop.add_source, box)
    loop.call_soon_threadsafe(loop.register, there.fileno(), lambda: drain_rings(there))
    random = Random(1)
    deadline = time.monotonic() + 60
    for number in range(6000):
        box.mail.append(-1 if number % 1000 == 999 else number)
        ringer.ring()
        if number % 3 == 0:
            while box.mail:
                assert time.monotonic() < deadline, "the loop sleeps over a full mailbox"
                time.sleep(0)
        for _ in range(random.randrange(200)):
            pass
    while box.mail:
        assert time.monotonic() < deadline, "the loop sleeps over a full mailbox"
        time.sleep(0.001)
    done = threading.Event()
    loop.call_soon_threadsafe(lambda: (loop.unregister(there.fileno()), done.set()))
    assert done.wait(5)
    assert box.taken == [number for number in range(6000) if number % 1000 != 999]
    assert "a source's fault" in caplog.text
    here.close()
    there.close()


def test_an_end_of_turn_comes_once_and_long_work_in_steps(loop: FrontEndLoop) -> None:
    told: list[str] = []

    def end() -> None:
        told.append("end")

    def work(name: str) -> Iterator[None]:
        for _ in range(2):
            told.append(name)
            yield

    async def turn() -> None:
        for _ in range(2):
            loop.at_end_of_turn(end)
        told.append("turn")
        await asyncio.sleep(0)
        loop.work_off(work("a"))
        loop.work_off(work("b"))
        await asyncio.sleep(0.01)

    asyncio.run_coroutine_threadsafe(turn(), loop).result(5)
    assert told == ["turn", "end", "a", "b", "a", "b"]
