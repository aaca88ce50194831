"""asyncio on the data plane's thread."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest
from support.waiting import PATIENCE_SECONDS

from rocserve.core.steps import Steps
from rocserve.plane.guest_loop import GuestLoop, worked_off
from rocserve.plane.loop import PlaneLoop


async def test_sockets_timers_threads_and_tasks_are_served_on_the_planes_thread(
    plane: PlaneLoop, guest: GuestLoop
) -> None:
    mine, other = socket.socketpair()
    mine.setblocking(False)

    async def work() -> tuple[bytes, int, int]:
        loop = asyncio.get_running_loop()
        assert loop is guest
        read = loop.create_task(loop.sock_recv(mine, 10))
        await asyncio.sleep(0.01)
        elsewhere = await asyncio.to_thread(lambda: (other.send(b"hello"), threading.get_ident())[1])
        return await read, threading.get_ident(), elsewhere

    data, thread, elsewhere = await guest.run(work())
    assert (data, thread) == (b"hello", plane.thread)
    assert elsewhere not in (plane.thread, threading.get_ident())
    mine.close()
    other.close()


async def test_a_descriptor_has_one_reader(guest: GuestLoop) -> None:
    mine, other = socket.socketpair()
    mine.setblocking(False)
    taken: list[str] = []

    async def work() -> list[bool]:
        loop = asyncio.get_running_loop()
        loop.add_reader(mine.fileno(), taken.append, "first")
        loop.add_reader(mine.fileno(), lambda: taken.append(mine.recv(1).decode()))
        for byte in (b"a", b"b"):
            other.send(byte)
            while not taken or taken[-1] != byte.decode():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        removed = [loop.remove_reader(mine.fileno()) for _ in range(2)]
        other.send(b"c")
        await asyncio.sleep(0.05)
        return removed

    assert await guest.run(work()) == [True, False]
    assert taken == ["a", "b"]
    mine.close()
    other.close()


async def test_what_is_raised_goes_to_the_other_loop(guest: GuestLoop) -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise KeyError("what")

    with pytest.raises(KeyError):
        await guest.run(fail())


async def test_who_is_cancelled_takes_the_work_along(guest: GuestLoop) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    waiting = asyncio.ensure_future(guest.run(work()))
    assert await asyncio.to_thread(begun.wait, PATIENCE_SECONDS)
    waiting.cancel()
    assert await asyncio.to_thread(cancelled.wait, PATIENCE_SECONDS)


async def test_timers_come_in_their_order_whenever_they_were_set(guest: GuestLoop) -> None:
    async def work() -> list[str]:
        loop, came, ended = asyncio.get_running_loop(), [], asyncio.Event()
        start = loop.time()

        def third() -> None:
            came.append("third")
            # Set last, and due long before another.
            loop.call_later(0.01, ended.set)

        far = loop.call_at(start + 3600, came.append, "far")
        loop.call_at(start + 0.06, third)
        loop.call_at(start + 0.02, came.append, "first")
        loop.call_at(start + 0.04, came.append, "second")
        loop.call_at(start + 0.01, came.append, "never").cancel()
        await ended.wait()
        far.cancel()
        return came

    assert await guest.run(work()) == ["first", "second", "third"]


def test_callbacks_of_the_plane_may_set_what_its_tasks_wait_for(plane: PlaneLoop, guest: GuestLoop) -> None:
    came: list[object] = []
    done = threading.Event()

    async def wait(answer: asyncio.Future[str]) -> None:
        came.append(await answer)
        done.set()

    def begin() -> None:
        answer: asyncio.Future[str] = guest.create_future()
        came.append(guest.create_task(wait(answer)))
        plane.call_at(time.monotonic() + 0.02, lambda: answer.set_result("an answer"))

    plane.call_soon(begin)
    assert done.wait(PATIENCE_SECONDS)
    assert came[1:] == ["an answer"]


def test_what_is_left_at_the_end_is_cancelled(plane: PlaneLoop) -> None:
    guest = GuestLoop(plane)
    begun, cancelled, closed = threading.Event(), threading.Event(), threading.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    asyncio.run_coroutine_threadsafe(work(), guest)
    assert begun.wait(PATIENCE_SECONDS)
    plane.call_soon(lambda: (guest.close(), closed.set()))
    assert closed.wait(PATIENCE_SECONDS)
    assert cancelled.is_set()
    assert guest.is_closed()


async def test_others_have_their_turn_between_steps(plane: PlaneLoop, guest: GuestLoop) -> None:
    turns: list[int] = []
    taken: list[int] = []

    def steps() -> Steps[str]:
        for _ in range(20):
            taken.append(len(turns))
            time.sleep(0.002)
            yield
        return "done"

    async def count_turns() -> None:
        while True:
            turns.append(len(taken))
            await asyncio.sleep(0)

    async def work() -> str:
        counting = asyncio.get_running_loop().create_task(count_turns())
        result = await worked_off(plane, steps())
        counting.cancel()
        return result

    assert await guest.run(work()) == "done"
    assert len(taken) == 20
    assert len(set(taken)) > 10, "tasks go on between one step and the next"


async def test_what_steps_raise_is_raised(plane: PlaneLoop, guest: GuestLoop) -> None:
    def steps(count: int) -> Steps[None]:
        for _ in range(count):
            time.sleep(0.002)
            yield
        raise ValueError(f"after {count}")

    for count in (0, 3):
        with pytest.raises(ValueError, match=f"after {count}"):
            await guest.run(worked_off(plane, steps(count)))


async def test_nobody_waits_for_further_steps(plane: PlaneLoop, guest: GuestLoop) -> None:
    begun, ended = asyncio.Event(), threading.Event()

    def steps() -> Steps[None]:
        try:
            while True:
                time.sleep(0.002)
                begun.set()
                yield
        finally:
            ended.set()

    async def work() -> None:
        working = asyncio.get_running_loop().create_task(worked_off(plane, steps()))
        await begun.wait()
        working.cancel()

    await guest.run(work())
    assert await asyncio.to_thread(ended.wait, PATIENCE_SECONDS)
