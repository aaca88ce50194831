"""What has come of messages that are not whole, by what the kernel says of connections."""

from __future__ import annotations

import logging

import pytest

from rocserve.core.request_memory import RequestMemory
from rocserve.frontends.grpc.unfinished import ReceivedBytes, UnfinishedBytes, peer_of

A, B = "ipv4:127.0.0.1:1000", "ipv6:%5B::1%5D:1000"
LOG = logging.getLogger("test.unfinished")
MESSAGE = 1 << 20
CLOSE = 4096
"""What frames and the like may make of a difference."""


class Counted:
    """A check a second of what the connections have received."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.memory = RequestMemory(limit)
        self.now = 0.0
        self.bytes = {A: 0, B: 0}
        self.unfinished = UnfinishedBytes(self.memory, self._received, 0.0, LOG)

    def _received(self) -> ReceivedBytes:
        return {peer: {7: count} for text, count in self.bytes.items() if (peer := peer_of(text)) is not None}

    def check(self, **oldest: float) -> list[str]:
        self.now += 1
        return list(self.unfinished.check(self.now, 1.0, {{"a": A, "b": B}[name]: at for name, at in oldest.items()}))

    def has_come(self, nbytes: int) -> bool:
        return abs(self.memory.request_bytes - nbytes) <= CLOSE


def test_what_came_before_a_call_began_is_none_of_its_message() -> None:
    counted = Counted()
    counted.bytes[A] = 50 * MESSAGE
    counted.check()
    counted.check()
    counted.bytes[A] += MESSAGE
    counted.check(a=2.0)
    assert counted.memory.request_bytes == 0, "it has not waited for a whole check"
    counted.check(a=2.0)
    assert counted.has_come(MESSAGE)
    counted.check()
    assert counted.memory.request_bytes == 0


def test_messages_that_come_whole_beside_a_waiting_one_are_taken_off() -> None:
    counted = Counted()
    counted.check(a=0.0)
    counted.bytes[A] += MESSAGE // 2
    counted.check(a=0.0)
    for _ in range(100):
        counted.bytes[A] += MESSAGE
        counted.unfinished.came_whole(A, counted.now, MESSAGE)
        counted.check(a=0.0)
    assert 0 <= counted.memory.request_bytes <= MESSAGE // 2 + CLOSE
    counted.unfinished.came_whole(A, 0.0, MESSAGE // 2)
    assert counted.memory.request_bytes == 0, "its request counts in its place"


def test_what_ended_calls_had_sent_is_forgotten_once_all_have_ended_that_waited_beside_them() -> None:
    counted = Counted()
    counted.bytes[A] = 3 * MESSAGE
    counted.check(a=0.0)
    counted.check(a=0.0)
    assert counted.has_come(3 * MESSAGE)
    counted.bytes[A] += MESSAGE
    for at in (1.0, 1.0, 4.0, 4.0, 6.0, 6.0):
        counted.check(a=at)
    assert counted.memory.request_bytes <= CLOSE


def test_the_connection_that_holds_most_makes_room_for_the_others() -> None:
    counted = Counted(limit=4 * MESSAGE)
    counted.bytes = {A: 3 * MESSAGE, B: 2 * MESSAGE}
    counted.check(a=0.0, b=0.0)
    assert counted.check(a=0.0, b=0.0) == [A]
    assert counted.has_come(2 * MESSAGE)


def test_an_idle_connection_that_is_pinged_holds_nothing() -> None:
    counted = Counted()
    for _ in range(1000):
        counted.bytes[A] += 17
        counted.check(a=0.0)
    assert counted.memory.request_bytes == 0


def test_a_system_that_does_not_tell_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> ReceivedBytes:
        raise OSError("no sock_diag here")

    unfinished = UnfinishedBytes(RequestMemory(), refuse, 0.0, LOG)
    assert unfinished.is_due(1.0)
    assert unfinished.check(1.0, 0.5, {A: 0.0}) == {}
    assert not unfinished.is_due(2.0)
    assert [record.message for record in caplog.records].count(caplog.records[0].message) == 1
    assert "no sock_diag here" in caplog.text
