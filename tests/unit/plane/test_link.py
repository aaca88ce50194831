"""Links and doorbells: order, room, what a hostile end can do, and that no message is slept through."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Iterator
from multiprocessing import get_context
from random import Random

import pytest

from rocserve.plane.anonymous_file import map_to_write
from rocserve.plane.doorbell import Doorbell, DoorbellFiles, Ringer
from rocserve.plane.link import ENTRY_BYTES, LinkBroken, LinkEnd, LinkFiles

ENTRIES = 128


def entries(first: int, count: int) -> bytes:
    return b"".join(struct.pack("<4Q", number, 0, 0, ~number & (1 << 64) - 1) for number in range(first, first + count))


def numbers(taken: bytes) -> list[int]:
    words = memoryview(taken).cast("Q").tolist()
    assert all(last == ~first & (1 << 64) - 1 for first, last in zip(words[::4], words[3::4], strict=True))
    return words[::4]


@pytest.fixture
def files() -> tuple[LinkFiles, LinkFiles]:
    return LinkFiles.create_pair("test", ENTRIES)


@pytest.fixture
def ends(files: tuple[LinkFiles, LinkFiles]) -> tuple[LinkEnd, LinkEnd]:
    """Both in this process."""
    return LinkEnd(files[0], None), LinkEnd(files[1], None)


@pytest.fixture
def doorbell() -> Iterator[Doorbell]:
    doorbell = Doorbell(DoorbellFiles.create("test"))
    yield doorbell
    doorbell.close()


def test_what_is_posted_is_taken_in_order_both_ways(ends: tuple[LinkEnd, LinkEnd]) -> None:
    random = Random(3)
    posted = [0, 0]
    seen: tuple[list[int], list[int]] = ([], [])
    for _ in range(2000):
        at = random.randrange(2)
        count = random.randrange(1, 40)
        if ends[at].room >= count * ENTRY_BYTES:
            ends[at].post(entries(posted[at], count))
            posted[at] += count
        if random.random() < 0.3:
            assert ends[1 - at].has_mail() is (posted[at] > len(seen[at]))
            seen[at].extend(numbers(ends[1 - at].take()))
    for at in range(2):
        seen[at].extend(numbers(ends[1 - at].take()))
        assert seen[at] == list(range(posted[at]))
        assert posted[at] > 10 * ENTRIES
        assert not ends[1 - at].has_mail()
        assert ends[1 - at].take() == b""


def test_room_comes_back_when_the_other_end_has_taken(ends: tuple[LinkEnd, LinkEnd]) -> None:
    first, second = ends
    first.post(entries(0, ENTRIES))
    assert first.room == 0
    assert len(second.take()) == ENTRIES * ENTRY_BYTES
    assert first.room == ENTRIES * ENTRY_BYTES


@pytest.mark.parametrize("count", [0, 1, 64, 100, 129])
def test_rings_fill_pages(count: int) -> None:
    with pytest.raises(ValueError, match=f"expected a power of two of entries that fill pages, got {count}"):
        LinkFiles.create_pair("test", count)


@pytest.mark.parametrize("lie", [1, 31, ENTRY_BYTES * (ENTRIES + 1), (1 << 64) - ENTRY_BYTES, 1 << 63])
def test_an_end_that_lies_is_found_out(files: tuple[LinkFiles, LinkFiles], lie: int) -> None:
    """Of how much it posted and of how much it took."""
    hostile = memoryview(map_to_write(files[1].own)).cast("Q")
    honest = LinkEnd(files[0], None)
    hostile[0] = lie
    with pytest.raises(LinkBroken, match=f"says {lie} bytes where 0 were taken"):
        honest.take()
    hostile[8] = lie
    with pytest.raises(LinkBroken, match=f"has taken {lie} of 0 bytes"):
        honest.room  # noqa: B018
    files[1].close()


def test_an_end_cannot_take_back_what_it_posted(files: tuple[LinkFiles, LinkFiles]) -> None:
    hostile = memoryview(map_to_write(files[1].own)).cast("Q")
    honest = LinkEnd(files[0], None)
    hostile[0] = 3 * ENTRY_BYTES
    assert len(honest.take()) == 3 * ENTRY_BYTES
    hostile[0] = ENTRY_BYTES
    with pytest.raises(LinkBroken):
        honest.take()
    files[1].close()


def test_no_end_can_write_where_the_other_does(files: tuple[LinkFiles, LinkFiles]) -> None:
    for end in files:
        with pytest.raises(PermissionError):
            map_to_write(end.other)
        end.close()


def test_a_bell_is_rung_once_a_sleep(doorbell: Doorbell) -> None:
    ringer = Ringer(doorbell.files.for_ringing())

    def rung() -> int:
        try:
            return os.eventfd_read(doorbell.files.bell)
        except BlockingIOError:
            return 0

    ringer.ring()
    assert rung() == 0, "nobody sleeps"

    def has_mail() -> bool:
        for _ in range(5):
            ringer.ring()
        assert rung() == 1
        return True

    for _ in range(2):
        doorbell.sleep(10, has_mail)
    ringer.close()


def test_sleep_ends_by_time_by_a_ring_and_by_another_descriptor(doorbell: Doorbell) -> None:
    started = time.monotonic()
    doorbell.sleep(0.05, lambda: False)
    assert 0.04 < time.monotonic() - started < 5
    ringer = Ringer(doorbell.files.for_ringing())
    other = os.eventfd(0)
    doorbell.also_wake_for(other)
    for wake in (ringer.ring, lambda: os.eventfd_write(other, 1)):
        timer = threading.Timer(0.1, wake)
        timer.start()
        started = time.monotonic()
        doorbell.sleep(60, lambda: False)
        assert time.monotonic() - started < 30
        timer.join()
    ringer.close()
    os.close(other)


def _echo(link: LinkFiles, own_bell: DoorbellFiles, other_bell: DoorbellFiles) -> None:
    """The other process: gives back what comes until it is a number of all ones."""
    doorbell, end, random = Doorbell(own_bell), LinkEnd(link, Ringer(other_bell)), Random(1)
    while True:
        taken = end.take()
        if taken:
            end.post(taken)
            end.ring()
            if taken[-ENTRY_BYTES:-24] == b"\xff" * 8:
                return
        elif random.random() < 0.5:
            doorbell.sleep(60, end.has_mail)


def test_nothing_is_slept_through_between_processes(doorbell: Doorbell) -> None:
    """A ring that is missed would cost a minute."""
    mine, theirs = LinkFiles.create_pair("test", ENTRIES)
    their_bell = DoorbellFiles.create("theirs")
    process = get_context("fork").Process(target=_echo, args=(theirs, their_bell, doorbell.files.for_ringing()))
    process.start()
    end, random = LinkEnd(mine, Ringer(their_bell.for_ringing())), Random(2)
    posted, seen, under_way = 0, [], 0
    ends = time.monotonic() + 50
    while posted < 100_000:
        count = min(random.choice((1, 1, 2, 30)), ENTRIES - under_way, 100_000 - posted)
        if count:
            end.post(entries(posted, count))
            end.ring()
            posted, under_way = posted + count, under_way + count
        if random.random() < 0.5 or not count:
            doorbell.sleep(60, end.has_mail)
        came = numbers(end.take())
        under_way -= len(came)
        seen += came
        assert time.monotonic() < ends, f"stood after {len(seen)} of {posted}"
    end.post(struct.pack("<4Q", (1 << 64) - 1, 0, 0, 0))
    end.ring()
    while len(seen) < posted + 1:
        doorbell.sleep(60, end.has_mail)
        seen += numbers(end.take())
        assert time.monotonic() < ends, f"stood after {len(seen)} of {posted}"
    process.join(30)
    assert process.exitcode == 0
    assert seen[:-1] == list(range(posted))
    theirs.close()
    their_bell.close()
