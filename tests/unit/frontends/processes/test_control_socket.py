"""A front end's control socket between the two kinds of loop that use it."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Iterator

import pytest
from support.waiting import until

from rocserve.frontends.processes.control_socket import NOBODYS, ControlSocket, Head, Kind
from rocserve.plane.guest_loop import GuestLoop
from rocserve.plane.loop import PlaneLoop

MOST = 4 << 20


class Inbox:
    def __init__(self) -> None:
        self.messages: list[tuple[int, Head, bytes]] = []
        self.ends: list[str] = []

    def take(self, call: int, head: Head, body: bytes) -> None:
        self.messages.append((call, head, body))


@pytest.fixture
def guest() -> Iterator[GuestLoop]:
    """A front end's loop."""
    plane = PlaneLoop(logging.getLogger("rocserve.test"))
    plane.start()
    loop = GuestLoop(plane)
    yield loop
    plane.call_soon(loop.close)
    plane.stop()


async def ends(guest: GuestLoop) -> tuple[ControlSocket, Inbox, ControlSocket, Inbox]:
    """The server's, on asyncio, and the front end's."""
    ours, theirs = socket.socketpair()
    server, front = Inbox(), Inbox()
    made: list[ControlSocket] = []
    guest.call_soon_threadsafe(lambda: made.append(ControlSocket(guest, theirs, MOST, front.take, front.ends.append)))
    await until(lambda: made)
    return (
        ControlSocket(asyncio.get_running_loop(), ours, MOST, server.take, server.ends.append),
        server,
        made[0],
        front,
    )


async def test_heads_and_bodies_arrive_as_they_were_sent(guest: GuestLoop) -> None:
    server_end, server, front_end, front = await ends(guest)
    begin = Head(Kind.BEGIN, "/a/B", metadata=(("key", "v"), ("raw-bin", "\x00\xff")), peer="ipv4:127.0.0.1:1")
    guest.call_soon_threadsafe(lambda: front_end.send(7, begin, b"body"))
    guest.call_soon_threadsafe(lambda: front_end.send(NOBODYS, Head(Kind.LISTENING)))
    await until(lambda: len(server.messages) == 2)
    assert server.messages == [(7, begin, b"body"), (NOBODYS, Head(Kind.LISTENING), b"")]
    server_end.send(7, Head(Kind.REPLY), b"answer")
    await until(lambda: front.messages)
    assert front.messages == [(7, Head(Kind.REPLY), b"answer")]
    server_end.close()
    await until(lambda: front.ends)


async def test_a_small_message_does_not_wait_for_large_ones(guest: GuestLoop) -> None:
    server_end, server, front_end, front = await ends(guest)
    large = bytes(range(256)) * (MOST // 256)

    def send() -> None:
        front_end.send(1, Head(Kind.REPLY), large)
        front_end.send(2, Head(Kind.REPLY), large)
        front_end.send(1, Head(Kind.FINISH, "after it", 3))
        front_end.send(3, Head(Kind.REPLY), b"small")

    guest.call_soon_threadsafe(send)
    await until(lambda: len(server.messages) == 4)
    assert server.messages[0] == (3, Head(Kind.REPLY), b"small")
    assert sorted(call for call, _, body in server.messages if body == large) == [1, 2]
    assert [head.kind for call, head, _ in server.messages if call == 1] == [Kind.REPLY, Kind.FINISH]
    for each in (1, 2):
        server_end.send(each, Head(Kind.REPLY), large)
    await until(lambda: len(front.messages) == 2)
    assert all(body == large for _, _, body in front.messages)
    server_end.close()
    await until(lambda: front.ends)


def piece(head: bytes) -> bytes:
    """A message of a call's that is nothing but this head."""
    return struct.pack("<IIBI", 1, len(head) + 4, 1, len(head)) + head


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"\x01\x00\x00\x00\xff\xff\xff\x7f\x01", "a piece of 2147483647 bytes"),
        (piece(b'{"kind":"what","text":"","number":0,"seconds":0.0,"metadata":[],"peer":""}'), "what"),
        (b"\x01\x00\x00\x00\x01\x00\x00\x00\x01\x00", "cannot be read"),
        (piece(b"{}"), "fields"),
        (b"", "closed"),
    ],
)
async def test_what_cannot_be_read_ends_it(sent: bytes, reason: str) -> None:
    ours, theirs = socket.socketpair()
    inbox = Inbox()
    ControlSocket(asyncio.get_running_loop(), ours, MOST, inbox.take, inbox.ends.append)
    theirs.sendall(sent)
    if not sent:
        theirs.close()
    await until(lambda: inbox.ends)
    assert reason in inbox.ends[0]
    assert inbox.messages == []
    theirs.close()


async def test_a_message_larger_than_may_be_ends_it(guest: GuestLoop) -> None:
    server_end, server, front_end, _ = await ends(guest)
    guest.call_soon_threadsafe(lambda: front_end.send(1, Head(Kind.REPLY), bytes(MOST + (2 << 20))))
    await until(lambda: server.ends)
    assert "a message of more than" in server.ends[0]
    guest.call_soon_threadsafe(front_end.close)
    server_end.close()
