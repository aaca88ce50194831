"""Links and doorbells: order, room, hostile ends, and that no end sleeps while a message waits."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from random import Random

import pytest
from support.waiting import PATIENCE_SECONDS
from support.workers import open_descriptors

from rocserve.links import rings
from rocserve.links.rings import ENTRY_BYTES, SMALLEST_RING, LinkBroken, LinkEnd, create_file
from rocserve.plane import doorbell
from rocserve.plane.anonymous_file import map_file, open_for_reading
from rocserve.plane.doorbell import KEEPS_STORE_ORDER, Doorbell, SocketRinger, SocketSleeper, drain_rings

ENTRIES = SMALLEST_RING
FIRST_RINGS = (ENTRIES, 2 * ENTRIES)
SECOND_RINGS = (3 * ENTRIES,)
TOO_LONG_SECONDS = 600.0
"""Longer than a test may take."""


def entries(first: int, count: int) -> bytes:
    return b"".join(struct.pack("<4Q", number, 0, 0, ~number & (1 << 64) - 1) for number in range(first, first + count))


def numbers(taken: bytes) -> list[int]:
    words = memoryview(taken).cast("Q").tolist()
    assert all(last == ~first & (1 << 64) - 1 for first, last in zip(words[::4], words[3::4], strict=True))
    return words[::4]


class Pair:
    """The files of both ends, with the second end's words writable, as a hostile process has them."""

    def __init__(self) -> None:
        self.first, self.second = create_file("first", FIRST_RINGS), create_file("second", SECOND_RINGS)
        self.readers = [open_for_reading(self.first), open_for_reading(self.second)]
        self.hostile = memoryview(map_file(self.second, to_write=True)).cast("Q")

    def first_end(self) -> LinkEnd:
        return LinkEnd(self.first, FIRST_RINGS, self.readers[1], SECOND_RINGS)

    def second_end(self) -> LinkEnd:
        return LinkEnd(self.second, SECOND_RINGS, self.readers[0], FIRST_RINGS)

    def close(self) -> None:
        for descriptor in (self.first, self.second, *self.readers):
            os.close(descriptor)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


@pytest.fixture(name="doorbell")
def a_doorbell() -> Iterator[Doorbell]:
    doorbell = Doorbell("test")
    yield doorbell
    doorbell.close()


def test_what_is_posted_is_taken_in_order_on_each_ring(pair: Pair) -> None:
    random = Random(3)
    first, second = pair.first_end(), pair.second_end()
    rings = [(first.writers[0], second.readers[0]), (first.writers[1], second.readers[1])]
    rings.append((second.writers[0], first.readers[0]))
    posted, seen = [0] * 3, [[], [], []]  # type: ignore[var-annotated]
    for _ in range(4000):
        at = random.randrange(3)
        writer, reader = rings[at]
        count = random.randrange(1, 40)
        if writer.room >= count:
            writer.post(entries(posted[at], count))
            posted[at] += count
        if random.random() < 0.3:
            assert reader.has_mail() is (posted[at] > len(seen[at]))
            seen[at].extend(numbers(reader.take()))
    for at, (_, reader) in enumerate(rings):
        seen[at].extend(numbers(reader.take()))
        assert seen[at] == list(range(posted[at]))
        assert posted[at] > 10 * ENTRIES
        assert not reader.has_mail()
        assert reader.take() == b""


def test_a_place_that_was_reserved_is_there_when_it_is_needed(pair: Pair) -> None:
    writer, reader = pair.first_end().writers[0], pair.second_end().readers[0]
    assert writer.reserve() and writer.reserve()
    assert writer.room == ENTRIES - 2
    writer.post(entries(0, ENTRIES - 2))
    assert writer.room == 0 and not writer.reserve()
    writer.post_reserved(entries(ENTRIES - 2, 1))
    writer.give_up_reserved()
    assert writer.room == 1
    assert reader.take() == entries(0, ENTRIES - 1)
    assert writer.room == ENTRIES


class TakenMeanwhile:
    """The other end's words; that end takes all entries after each look at them."""

    def __init__(self, words: memoryview, reader: rings.RingReader) -> None:
        self._words, self._reader = words, reader

    def __getitem__(self, at: int) -> int:
        word: int = self._words[at]
        self._reader.take()
        return word


def test_what_is_taken_during_a_reservation_gives_no_place_twice(pair: Pair) -> None:
    writer, reader = pair.first_end().writers[0], pair.second_end().readers[0]
    writer.post(entries(0, ENTRIES))
    words = writer._other_words
    writer._other_words = TakenMeanwhile(words, reader)  # type: ignore[assignment]
    has_place = writer.reserve()
    writer._other_words = words
    assert writer.room == ENTRIES - has_place


def test_room_comes_back_when_the_other_end_has_taken(pair: Pair) -> None:
    writer, reader = pair.first_end().writers[0], pair.second_end().readers[0]
    assert writer.room == ENTRIES
    writer.post(entries(0, ENTRIES - 1))
    before = writer.posted
    writer.post(entries(0, 1))
    assert writer.room == 0
    assert not writer.is_taken(before) and writer.is_taken(0)
    assert len(reader.take()) == ENTRIES * ENTRY_BYTES
    assert writer.room == ENTRIES
    assert writer.is_taken(before) and writer.is_taken(writer.posted)


def test_rings_fill_pages() -> None:
    before = open_descriptors()
    for wrong in ((0,), (1,), (ENTRIES // 2,), (ENTRIES + 1,), (ENTRIES, -ENTRIES), (ENTRIES,) * 5):
        with pytest.raises(ValueError, match="expected at most 4 rings of whole pages of entries, got"):
            create_file("test", wrong)
    assert open_descriptors() <= before


def test_rings_have_to_be_in_the_file(pair: Pair) -> None:
    """The file that a process receives may not have the expected layout."""
    with pytest.raises(ValueError, match=f"rings of {4 * ENTRIES} entries in a file of"):
        LinkEnd(pair.first, FIRST_RINGS, pair.readers[1], (4 * ENTRIES,))


@pytest.mark.parametrize("lie", [1, 31, ENTRY_BYTES * (3 * ENTRIES + 1), (1 << 64) - ENTRY_BYTES, 1 << 63])
def test_an_end_that_lies_is_found_out(pair: Pair, lie: int) -> None:
    """An end that lies about how much it posted or took."""
    honest = pair.first_end()
    reader, writer = honest.readers[0], honest.writers[1]
    pair.hostile[reader.posted_at] = lie
    with pytest.raises(LinkBroken, match=f"reports {lie} bytes posted, but 0 were taken"):
        reader.take()
    pair.hostile[writer._taken_at] = lie
    with pytest.raises(LinkBroken, match=f"reports {lie} of 0 bytes taken"):
        writer.room  # noqa: B018


def test_an_end_cannot_take_back_what_it_posted(pair: Pair) -> None:
    reader = pair.first_end().readers[0]
    pair.hostile[reader.posted_at] = 3 * ENTRY_BYTES
    assert len(reader.take()) == 3 * ENTRY_BYTES
    pair.hostile[reader.posted_at] = ENTRY_BYTES
    with pytest.raises(LinkBroken):
        reader.take()


def test_no_word_is_anothers(pair: Pair) -> None:
    """The words of rings each way, their counts, and two threads' sleeps share nothing."""
    first, second = pair.first_end(), pair.second_end()
    at = [writer._posted_at for writer in first.writers] + [reader._taken_at for reader in first.readers]
    assert len(set(at)) == 3
    for number in (0, 1):
        first.own_sleep_word(number)[0] = 7 + number
        assert second.other_sleep_word(number)[0] == 7 + number
        assert second.own_sleep_word(number)[0] == 0
    assert not any(reader.has_mail() for reader in second.readers)
    assert all(writer.room for writer in second.writers)


def test_no_end_can_write_where_the_other_does(pair: Pair) -> None:
    for descriptor in pair.readers:
        with pytest.raises(PermissionError):
            map_file(descriptor, to_write=True)
    with pytest.raises(TypeError):
        pair.first_end().other_sleep_word()[0] = 1


def check_one_ring_a_sleep(
    ring: Callable[[], None], take_rings: Callable[[], int], sleep: Callable[[float, Callable[[], bool]], object]
) -> None:
    def rings() -> int:
        try:
            return take_rings()
        except BlockingIOError:
            return 0

    def has_mail() -> bool:
        for _ in range(5):
            ring()
        assert rings() == 1
        return True

    ring()
    assert rings() == 0, "nobody sleeps"
    for _ in range(2):
        assert sleep(10, has_mail) is not False


def test_a_bell_is_rung_once_a_sleep(doorbell: Doorbell) -> None:
    check_one_ring_a_sleep(doorbell.ring, lambda: os.eventfd_read(doorbell._bell), doorbell.sleep)


def test_a_socket_is_rung_once_a_sleep(pair: Pair) -> None:
    here, peer = socket.socketpair()
    ringer = SocketRinger(pair.first_end().other_sleep_word(1), here)
    sleeper = SocketSleeper(pair.second_end().own_sleep_word(1), peer, drain_rings)
    check_one_ring_a_sleep(ringer.ring, lambda: len(peer.recv(100, socket.MSG_DONTWAIT)), sleeper.sleep)
    here.close()
    peer.close()


@contextmanager
def ringing(ring: Callable[[], None]) -> Iterator[None]:
    """Another thread rings again and again: the first rings may come before the sleep, and then they do nothing."""
    is_over = threading.Event()

    def ring_on() -> None:
        while not is_over.wait(0.02):
            ring()

    thread = threading.Thread(target=ring_on)
    thread.start()
    yield
    is_over.set()
    thread.join()


def test_sleep_on_a_socket_ends_by_time_by_a_ring_and_by_the_end_of_the_other(pair: Pair) -> None:
    here, peer = socket.socketpair()
    ringer = SocketRinger(pair.first_end().other_sleep_word(), here)
    sleeper = SocketSleeper(pair.second_end().own_sleep_word(), peer, drain_rings)
    started = time.monotonic()
    assert sleeper.sleep(0.05, lambda: False)
    assert time.monotonic() - started > 0.04
    with ringing(ringer.ring):
        assert sleeper.sleep(TOO_LONG_SECONDS, lambda: False)
    timer = threading.Timer(0.1, here.close)
    timer.start()
    assert sleeper.sleep(TOO_LONG_SECONDS, lambda: False)
    timer.join()
    # Messages posted before the end can still be taken.
    assert sleeper.sleep(TOO_LONG_SECONDS, lambda: True)
    assert not sleeper.sleep(TOO_LONG_SECONDS, lambda: False)
    peer.close()


def test_rings_that_nobody_takes_stop_nobody(pair: Pair) -> None:
    here, peer = socket.socketpair()
    ringer = SocketRinger(pair.first_end().other_sleep_word(), here)
    word = pair.second_end().own_sleep_word()
    for asleep in range(1, 200_001, 2):
        word[0] = asleep
        ringer.ring()
    peer.close()
    word[0] += 2
    ringer.ring()  # Nor does its end.
    assert not drain_rings(here)
    here.close()


def test_a_late_ring_for_taken_mail_does_not_stand_for_the_next(pair: Pair) -> None:
    here, peer = socket.socketpair()
    ringer = SocketRinger(pair.first_end().other_sleep_word(), here)

    def drain(connection: socket.socket) -> bool:
        ringer.ring()  # The mail has been taken already.
        return drain_rings(connection)

    sleeper = SocketSleeper(pair.second_end().own_sleep_word(), peer, drain)

    def rung_late() -> bool:
        """Mail comes just after this look."""
        ringer.ring()
        return False

    for _ in range(3):
        assert sleeper.sleep(0.0, rung_late)
        assert sleeper._is_rung
    here.close(), peer.close()


def test_sleep_ends_by_time_by_a_ring_and_by_another_descriptor(doorbell: Doorbell) -> None:
    started = time.monotonic()
    doorbell.sleep(0.05, lambda: False)
    assert time.monotonic() - started > 0.04
    with ringing(doorbell.ring):
        doorbell.sleep(TOO_LONG_SECONDS, lambda: False)
    other = os.eventfd(0)
    doorbell.also_wake_for(other)
    timer = threading.Timer(0.1, os.eventfd_write, (other, 1))
    timer.start()
    doorbell.sleep(TOO_LONG_SECONDS, lambda: False)
    timer.join()
    os.close(other)


def _echo(pair: Pair, connection: socket.socket) -> None:
    """The other process: echoes what comes on the first ring, until a number of all ones."""
    end, random = pair.second_end(), Random(1)
    ringer, sleeper = (
        SocketRinger(end.other_sleep_word(), connection),
        SocketSleeper(end.own_sleep_word(), connection, drain_rings),
    )
    reader, writer = end.readers[0], end.writers[0]
    while True:
        taken = reader.take()
        if taken:
            writer.post(taken)
            ringer.ring()
            if taken[-ENTRY_BYTES:-24] == b"\xff" * 8:
                return
        elif random.random() < 0.5:
            assert sleeper.sleep(TOO_LONG_SECONDS, reader.has_mail)


@pytest.mark.parametrize("keeps_store_order", [KEEPS_STORE_ORDER, False], ids=["this machine", "with fences"])
def test_nothing_is_slept_through_between_processes(
    pair: Pair, keeps_store_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a missed ring both would sleep. Tested with this machine's memory order, and as Arm needs it."""
    for module in (rings, doorbell):
        monkeypatch.setattr(module, "KEEPS_STORE_ORDER", keeps_store_order)
    here, peer = socket.socketpair()
    process = get_context("fork").Process(target=_echo, args=(pair, peer), daemon=True)
    process.start()
    end, random = pair.first_end(), Random(2)
    ringer, sleeper = SocketRinger(end.other_sleep_word(), here), SocketSleeper(end.own_sleep_word(), here, drain_rings)
    writer, reader = end.writers[0], end.readers[0]
    posted, seen, under_way = 0, [], 0

    def sleep() -> None:
        begun = time.monotonic()
        sleeper.sleep(PATIENCE_SECONDS, reader.has_mail)
        assert time.monotonic() < begun + PATIENCE_SECONDS, f"stood after {len(seen)} of {posted}"

    while posted < 100_000:
        count = min(random.choice((1, 1, 2, 30)), ENTRIES - under_way, 100_000 - posted)
        if count:
            assert writer.room >= count
            writer.post(entries(posted, count))
            ringer.ring()
            posted, under_way = posted + count, under_way + count
        if random.random() < 0.5 or not count:
            sleep()
        came = numbers(reader.take())
        under_way -= len(came)
        seen += came
    while len(seen) < posted:
        sleep()
        seen += numbers(reader.take())
    writer.post(struct.pack("<4Q", (1 << 64) - 1, 0, 0, 0))
    ringer.ring()
    process.join(PATIENCE_SECONDS)
    assert process.exitcode == 0
    assert numbers(reader.take()) == [(1 << 64) - 1]
    assert seen == list(range(posted))
    here.close()
    peer.close()


def test_no_ring_of_another_thread_is_slept_through(doorbell: Doorbell) -> None:
    random, left = Random(2), deque[int]()

    def leave() -> None:
        for number in range(20_000):
            left.append(number)
            doorbell.ring()

    thread = threading.Thread(target=leave)
    thread.start()
    seen: list[int] = []
    while len(seen) < 20_000:
        if random.random() < 0.5:
            doorbell.sleep(TOO_LONG_SECONDS, lambda: bool(left))
        while left:
            seen.append(left.popleft())
    thread.join()
    assert seen == list(range(20_000))
