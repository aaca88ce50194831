"""Unix sockets: who may connect, who has them, and whom the server takes the client for."""

from __future__ import annotations

import asyncio
import http.client
import logging
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from rocserve.frontends.grpc.relay import UserRelay, user_of
from rocserve.frontends.grpc.server import GrpcServer
from rocserve.frontends.grpc.transport import UnaryCall, UnaryRoute, address_of
from rocserve.frontends.http.listener import HttpListener
from rocserve.frontends.http.request import Request, Response
from rocserve.frontends.listen_address import ListenAddress
from rocserve.frontends.unix_sockets import listen
from rocserve.plane.guest_loop import GuestLoop
from rocserve.plane.loop import PlaneLoop
from rocserve.services.access import Peer
from rocserve.settings import GrpcSettings
from rocserve.settings.server import admin_addresses
from rocserve.settings.unix_place import UnixPlace, unix_place

LOG = logging.getLogger("test")
ME = f"uid:{os.getuid()}"
UNARY = "/test.Service/Unary"


@pytest.fixture
def place() -> Iterator[UnixPlace]:
    # The kernel accepts only short paths.
    with tempfile.TemporaryDirectory() as folder:
        yield UnixPlace(f"{folder}/s.sock")


def left(place: UnixPlace) -> list[str]:
    return sorted(one.name for one in Path(place.path).parent.iterdir())


# Addresses


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", None),
        ("unix:/run/a.sock", UnixPlace("/run/a.sock")),
        ("unix:///run/a.sock", UnixPlace("/run/a.sock")),
        ("unix:/a,mode=0660,owner=me:us", UnixPlace("/a", 0o660, "me", "us")),
        ("unix:/a,owner=:us,mode=666", UnixPlace("/a", 0o666, "", "us")),
    ],
)
def test_addresses_say_path_mode_and_owner(address: str, expected: UnixPlace | None) -> None:
    assert unix_place(address) == expected


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("unix:a.sock", "expected unix:/FOLDER/NAME"),
        ("unix:/run/", "expected unix:/FOLDER/NAME"),
        ("unix-abstract:a", "anybody on the machine"),
        ("unix:/a,mode=9", "got 'mode=9'"),
        ("unix:/a,user=me", "got 'user=me'"),
        ("unix:/a,owner=a:b:c", "got 'owner=a:b:c'"),
        (f"unix:/{'a' * 107}", "at most 107 bytes"),
        (f"unix:/{'a' * 95}/b", "in a folder of at most 93"),
    ],
)
def test_wrong_addresses_are_refused(address: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        unix_place(address)


@pytest.mark.parametrize(
    ("listed", "address", "forwarded", "expected"),
    [
        ("local", "uid:7", False, True),
        ("local", "unix", False, True),
        ("local", "uid:7", True, False),
        ("uid:7", "uid:7", False, True),
        ("uid:7", "uid:7", True, False),
        ("uid:7", "uid:77", False, False),
        ("uid:7", "unix", False, False),
        ("uid:7", "127.0.0.1", False, False),
        ("10.0.0.0/8", "uid:7", False, False),
        ("any", "uid:7", True, True),
        ("none", "uid:7", False, False),
    ],
)
def test_admin_rights_by_user(listed: str, address: str, forwarded: bool, expected: bool) -> None:
    assert Peer(address, forwarded).is_among(admin_addresses(listed)) is expected


def test_clients_cannot_choose_to_be_a_user() -> None:
    assert user_of("unix-abstract:rocserve.00.1.uid:7") == "uid:7"
    assert address_of("unix-abstract:rocserve.00.1.uid:7") == "uid:7"
    assert address_of("unix:/tmp/rocserve.uid:7") == "unix"
    assert address_of("unix-abstract:mine.uid:7") == "unix"


# Places


def test_a_socket_has_its_mode_and_leaves_nothing_behind(place: UnixPlace) -> None:
    listening, published = listen(UnixPlace(place.path, 0o660, str(os.getuid()), str(os.getgid())), 1)
    with listening:
        assert stat.S_IMODE(Path(place.path).stat().st_mode) == 0o660
        assert left(place) == ["s.sock"]
    published.withdraw()
    published.withdraw()
    assert left(place) == []


def test_the_socket_of_a_dead_server_is_replaced(place: UnixPlace) -> None:
    listen(place, 1)[0].close()
    with listen(place, 1)[0], socket.socket(socket.AF_UNIX) as client:
        client.connect(place.path)


def test_the_socket_of_a_living_server_stays(place: UnixPlace) -> None:
    with listen(place, 0)[0] as living, socket.socket(socket.AF_UNIX) as client:
        client.connect(place.path)  # It accepts nobody, and nobody else may wait.
        with pytest.raises(OSError, match="Address already in use"):
            listen(place, 1)
        assert living.accept()[0].getsockname() and left(place) == ["s.sock"]


def test_a_file_that_is_no_socket_stays(place: UnixPlace) -> None:
    Path(place.path).write_text("mine")
    where = ListenAddress("HTTP", "http", f"unix:{place.path}", 8000)
    with pytest.raises(OSError, match="a file exists there that is not a socket") as raised:
        listen(place, 1)
    assert str(place.path) in str(where.refusal(raised.value))
    assert "name another with --http-address" in str(where.refusal(raised.value))
    assert Path(place.path).read_text() == "mine"


def test_a_server_that_ends_leaves_the_socket_of_its_successor(place: UnixPlace) -> None:
    first, published = listen(place, 1)
    first.close()
    with listen(place, 1)[0]:
        published.withdraw()
        assert left(place) == ["s.sock"]


def test_an_unknown_owner_is_named(place: UnixPlace) -> None:
    with pytest.raises(OSError, match="there is no group 'nobody-has-this'"):
        listen(UnixPlace(place.path, group="nobody-has-this"), 1)
    assert left(place) == []


# Servers


def grpc_server(plane: PlaneLoop, place: UnixPlace, seen: list[str], behind_relay: bool = False) -> GrpcServer:
    def echo(call: UnaryCall) -> None:
        seen.append(address_of(call.peer))
        call.reply(bytes(call.message))

    settings = GrpcSettings(address=f"unix:{place.path}")
    return GrpcServer(settings, {UNARY: UnaryRoute(echo)}, LOG, plane, behind_relay=behind_relay)


def ask(place: UnixPlace, message: bytes = b"x") -> Any:
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1))
    with grpc.insecure_channel(str(place), options) as channel:
        return channel.unary_unary(UNARY)(message, timeout=60)


def test_grpc_over_a_unix_socket(plane: PlaneLoop, place: UnixPlace) -> None:
    seen: list[str] = []
    server = grpc_server(plane, place, seen)
    server.start()
    assert ask(place) == b"x"
    second = grpc_server(plane, place, seen)
    with pytest.raises(OSError, match=r"cannot serve gRPC at unix:.*Address already in use; name another"):
        second.start()
    assert ask(place) == b"x"
    server.stop(1.0)
    assert seen == ["unix", "unix"]
    assert left(place) == []


def test_the_relay_says_the_user(plane: PlaneLoop, guest: GuestLoop, place: UnixPlace) -> None:
    seen: list[str] = []
    server = grpc_server(plane, place, seen, behind_relay=True)
    server.start()
    assert left(place) == []

    async def start() -> UserRelay:
        return UserRelay(place, server.relay_path, LOG)

    async def run() -> None:
        relay = await guest.run(start())
        large = os.urandom(3 << 20)
        answers = await asyncio.gather(*(asyncio.to_thread(ask, place, large) for _ in range(4)))
        assert answers == [large] * 4
        plane.call_soon(relay.stop_listening)
        await asyncio.to_thread(server.stop, 1.0)
        await guest.run(relay.close())

    asyncio.run(run())
    assert seen == [ME] * 4
    assert left(place) == []


async def test_the_log_names_a_relay_without_a_core_and_its_client_is_closed(
    guest: GuestLoop, place: UnixPlace, caplog: pytest.LogCaptureFixture
) -> None:
    async def start() -> UserRelay:
        return UserRelay(place, f"{place.path}.core", LOG)

    relay = await guest.run(start())
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(place.path)
        assert await asyncio.to_thread(client.recv, 1) == b""

    async def stop() -> None:
        relay.stop_listening()
        await relay.close()

    await guest.run(stop())
    assert "cannot relay a connection of the Unix socket: [Errno 2] No such file or directory" in caplog.text
    assert left(place) == []


class Connection(http.client.HTTPConnection):
    def __init__(self, place: UnixPlace) -> None:
        super().__init__("localhost", timeout=60)
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(place.path)


async def test_http_over_a_unix_socket(place: UnixPlace) -> None:
    def handle(request: Request) -> None:
        request.respond(Response(200, request.remote.encode(), "text/plain"))

    listener = HttpListener(handle, LOG)
    await listener.start(ListenAddress("HTTP", "http", f"unix:{place.path}", 8000))

    def get() -> bytes:
        connection = Connection(place)
        connection.request("GET", "/")
        body = connection.getresponse().read()
        connection.close()
        return body

    assert await asyncio.to_thread(get) == ME.encode()
    with pytest.raises(OSError, match=r"cannot serve HTTP at unix:.*Address already in use"):
        await HttpListener(handle, LOG).start(ListenAddress("HTTP", "http", f"unix:{place.path}", 8000))
    await listener.stop(1.0)
    assert left(place) == []
