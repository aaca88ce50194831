"""The order of loads, and the rate of retries."""

from __future__ import annotations

import asyncio
import errno
from unittest.mock import patch

from support.virtual_time import in_virtual_time
from support.waiting import PATIENCE_SECONDS

from rocserve.core.backoff import Backoff
from rocserve.core.errors import internal, invalid_argument, unavailable, unimplemented, unreadable
from rocserve.repository.load_slots import LoadSlots
from rocserve.repository.retries import Failure, Retries


async def test_a_change_goes_before_retries_that_waited_longer() -> None:
    slots = LoadSlots(1, 60.0)
    order: list[str] = []

    async def load(name: str, is_retry: bool) -> None:
        async with slots.acquire(False, is_retry):
            order.append(name)

    async with slots.acquire(False):
        assert slots.is_full
        waiting = [asyncio.create_task(load(f"retry {number}", True)) for number in range(3)]
        await asyncio.sleep(0)
        waiting.append(asyncio.create_task(load("change", False)))
        await asyncio.sleep(0)
    await asyncio.gather(*waiting)
    assert order == ["change", "retry 0", "retry 1", "retry 2"]
    assert not slots.is_full


async def test_a_slot_is_not_lost_with_a_load_that_is_called_off() -> None:
    slots = LoadSlots(1, 60.0)

    async def load() -> None:
        async with slots.acquire(False):
            pass

    async with slots.acquire(False):
        before, with_it = asyncio.create_task(load()), asyncio.create_task(load())
        await asyncio.sleep(0)
        before.cancel()
        await asyncio.sleep(0)
    # It has received the slot, but has not run yet.
    with_it.cancel()
    await asyncio.gather(before, with_it, return_exceptions=True)
    async with asyncio.timeout(PATIENCE_SECONDS), slots.acquire(False):
        pass


_DUE = Failure(internal("bad"), retry_at=0.0)


@in_virtual_time
async def test_retries_come_at_a_bounded_pace_in_their_order() -> None:
    retries = Retries(Backoff(1.0, 10.0), a_second=20.0, burst=2)
    came: list[int] = []
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    begun = loop.time()
    for number in range(6):
        retries.schedule(_DUE, lambda number=number: came.append(number))
    await asyncio.sleep(0.01)
    assert came == [0, 1]
    retries.schedule(_DUE, ended.set)
    await asyncio.wait_for(ended.wait(), PATIENCE_SECONDS)
    assert came == [0, 1, 2, 3, 4, 5]
    # Four beyond the burst, at 20 a second.
    assert loop.time() - begun >= 0.18


@in_virtual_time
async def test_a_retry_that_is_called_off_takes_nobodys_turn() -> None:
    retries = Retries(Backoff(1.0, 10.0), a_second=0.001, burst=1)
    came: list[str] = []
    first = retries.schedule(_DUE, lambda: came.append("first"))
    retries.schedule(_DUE, lambda: came.append("second"))
    assert first is not None
    first.cancel()
    await asyncio.sleep(0.01)
    assert came == ["second"]


def _pauses(retries: Retries, attempts: int, took_seconds: float = 0.0) -> float:
    """The pauses after this many failed tries."""
    with patch("time.monotonic", return_value=0.0):
        failure = retries.next_failure(internal("bad"), Failure(internal("bad"), attempts - 1), took_seconds)
    assert failure.retry_at is not None
    return failure.retry_at


def test_pauses_double_up_to_the_longest() -> None:
    retries = Retries(Backoff(1.0, 10.0))
    assert [_pauses(retries, attempts) for attempts in range(1, 7)] == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert _pauses(retries, 10_000) == 10.0


def test_what_took_long_is_not_tried_again_at_once() -> None:
    retries = Retries(Backoff(1.0, 10.0))
    assert [_pauses(retries, 1, took) for took in (0.1, 5.0, 3600.0)] == [1.0, 5.0, 3600.0]
    with patch("time.monotonic", return_value=0.0):
        failure = retries.next_failure(internal("bad"), None, 3600.0)
        assert failure.text == "bad (failed once, next try in 3600 s)"


def test_what_is_disabled_never_tries_again() -> None:
    retries = Retries(Backoff(1.0, 10.0))
    retries.enabled = False
    failure = retries.next_failure(internal("bad"))
    assert (failure.retry_at, failure.text, failure.is_due()) == (None, "bad", False)


def test_what_the_same_files_would_repeat_waits_until_they_change() -> None:
    retries = Retries(Backoff(1.0, 10.0))
    for error in (invalid_argument("bad"), unimplemented("bad"), internal("bad").lasting()):
        failure = retries.next_failure(error)
        assert (failure.retry_at, failure.is_due()) == (None, False)
        assert failure.text == "bad (failed once, not tried again until its files change)"
    for error in (internal("bad"), unavailable("bad"), invalid_argument("bad").passing()):
        assert retries.next_failure(error).retry_at is not None


def test_a_file_that_cannot_be_read_may_be_read_later_unless_it_is_not_there() -> None:
    absent, unwell = (unreadable("bad", OSError(number, "")) for number in (errno.ENOENT, errno.EIO))
    assert (absent.can_pass, unwell.can_pass, unwell.with_text("worse").can_pass) == (False, True, True)


def test_attempts_count_on() -> None:
    retries = Retries(Backoff(100.0, 1000.0))
    with patch("time.monotonic", return_value=0.0):
        first = retries.next_failure(internal("bad"))
        second = retries.next_failure(internal("bad"), first)
        assert first.text == "bad (failed once, next try in 100 s)"
        assert second.text == "bad (failed 2 times, next try in 200 s)"
    assert second.retry_at == 200.0
