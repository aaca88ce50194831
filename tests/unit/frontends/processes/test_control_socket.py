"""A front end's control socket between the two kinds of loop that use it."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from support.waiting import until

from rocserve.frontends.processes.control_socket import (
    NOBODYS,
    AsyncioWatch,
    Begin,
    ControlSocket,
    Finish,
    Listening,
    PlaneWatch,
    Reply,
)
from rocserve.plane.loop import PlaneLoop

MOST = 4 << 20


class Inbox:
    def __init__(self) -> None:
        self.messages: list[tuple[int, Any, bytes]] = []
        self.ends: list[str] = []

    def take(self, call: int, head: Any, body: bytes) -> None:
        self.messages.append((call, head, body))


@pytest.fixture
def plane() -> Iterator[PlaneLoop]:
    plane = PlaneLoop(logging.getLogger("rocserve.test"))
    plane.start()
    yield plane
    plane.stop()


def ends(plane: PlaneLoop) -> tuple[ControlSocket, Inbox, ControlSocket, Inbox]:
    """The server's, on asyncio, and the front end's."""
    ours, theirs = socket.socketpair()
    server, front = Inbox(), Inbox()
    return (
        ControlSocket(ours, AsyncioWatch(ours), MOST, server.take, server.ends.append),
        server,
        ControlSocket(theirs, PlaneWatch(theirs, plane), MOST, front.take, front.ends.append),
        front,
    )


async def test_heads_and_bodies_arrive_as_they_were_sent(plane: PlaneLoop) -> None:
    server_end, server, front_end, front = ends(plane)
    begin = Begin("/a/B", (("key", "v"), ("raw-bin", "\x00\xff")), "ipv4:127.0.0.1:1", 2.5)
    plane.call_soon(lambda: front_end.send(7, begin, b"body"))
    plane.call_soon(lambda: front_end.send(NOBODYS, Listening()))
    await until(lambda: len(server.messages) == 2)
    assert server.messages == [(7, begin, b"body"), (NOBODYS, Listening(), b"")]
    server_end.send(7, Reply((("t", "w"),)), b"answer")
    await until(lambda: front.messages)
    assert front.messages == [(7, Reply((("t", "w"),)), b"answer")]
    server_end.close()
    await until(lambda: front.ends)


async def test_a_small_message_does_not_wait_for_large_ones(plane: PlaneLoop) -> None:
    server_end, server, front_end, front = ends(plane)
    large = bytes(range(256)) * (MOST // 256)

    def send() -> None:
        front_end.send(1, Reply(()), large)
        front_end.send(2, Reply(()), large)
        front_end.send(1, Finish(3, "after it", ()))
        front_end.send(3, Reply(()), b"small")

    plane.call_soon(send)
    await until(lambda: len(server.messages) == 4)
    assert server.messages[0] == (3, Reply(()), b"small")
    assert sorted(call for call, _, body in server.messages if body == large) == [1, 2]
    assert [type(head) for call, head, _ in server.messages if call == 1] == [Reply, Finish]
    for each in (1, 2):
        server_end.send(each, Reply(()), large)
    await until(lambda: len(front.messages) == 2)
    assert all(body == large for _, _, body in front.messages)
    server_end.close()
    await until(lambda: front.ends)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"\x01\x00\x00\x00\xff\xff\xff\x7f\x01", "a piece of 2147483647 bytes"),
        (b"\x01\x00\x00\x00\x05\x00\x00\x00\x01\xee\x00\x00\x00\x00", "a message of kind 238"),
        (b"\x01\x00\x00\x00\x01\x00\x00\x00\x01\x00", "cannot be read"),
        (b"\x01\x00\x00\x00\x07\x00\x00\x00\x01\x03\x02\x00\x00\x00{}", "fields"),
        (b"", "closed"),
    ],
)
async def test_what_cannot_be_read_ends_it(sent: bytes, reason: str) -> None:
    ours, theirs = socket.socketpair()
    inbox = Inbox()
    ControlSocket(ours, AsyncioWatch(ours), MOST, inbox.take, inbox.ends.append)
    theirs.sendall(sent)
    if not sent:
        theirs.close()
    await until(lambda: inbox.ends)
    assert reason in inbox.ends[0]
    assert inbox.messages == []
    theirs.close()


async def test_a_message_larger_than_may_be_ends_it(plane: PlaneLoop) -> None:
    server_end, server, front_end, _ = ends(plane)
    plane.call_soon(lambda: front_end.send(1, Reply(()), bytes(MOST + (2 << 20))))
    await until(lambda: server.ends)
    assert "a message of more than" in server.ends[0]
    plane.call_soon(front_end.close)
    server_end.close()
