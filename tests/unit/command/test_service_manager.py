"""What a server tells systemd, over a real socket."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Iterator

import pytest

from rocserve.service_manager import ServiceManager

LOG = logging.getLogger("test")
START = "EXTEND_TIMEOUT_USEC=60000000"


class Manager:
    """The end that systemd has."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.socket.bind(f"\0{address[1:]}" if address.startswith("@") else address)

    def messages(self) -> list[str]:
        found: list[str] = []
        try:
            while True:
                found.append(self.socket.recv(4096).decode())
        except BlockingIOError:
            return found


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest) -> Iterator[Manager]:
    with tempfile.TemporaryDirectory() as folder:
        address = f"{folder}/notify" if request.param == "path" else f"@rocserve-test-{secrets.token_hex(8)}"
        made = Manager(address)
        yield made
        made.socket.close()


async def test_a_life(manager: Manager) -> None:
    environment = {"NOTIFY_SOCKET": manager.address, "OTHER": "stays"}
    server = ServiceManager(environment, LOG)
    assert environment == {"OTHER": "stays"}
    server.begin(lambda alive: alive())
    await asyncio.sleep(0)
    assert manager.messages() == [START]
    server.ready("1 model served")
    assert manager.messages() == ["READY=1", "STATUS=1 model served"]
    server.show("1 model served")
    assert manager.messages() == []
    server.show("2 models served\nREADY=0")
    assert manager.messages() == ["STATUS=2 models served READY=0"]
    server.stopping(45.5)
    assert manager.messages() == ["STOPPING=1\nEXTEND_TIMEOUT_USEC=45500000\nSTATUS=finishing the work in flight"]
    server.show("0 models served")
    assert manager.messages() == [], "a status after this would say that the server goes on"
    server.close()


async def test_a_manager_that_cannot_be_reached_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = ServiceManager({"NOTIFY_SOCKET": f"{folder}/notify"}, LOG)
        server.ready("1 model served")
        server.show("2 models served")
        assert len(caplog.records) == 1
        assert f"cannot send READY=1 to the service manager at NOTIFY_SOCKET={folder}/notify" in caplog.text
        manager = Manager(f"{folder}/notify")
        server.show("\udc80")
        assert manager.messages() == ["STATUS=?"]
        manager.socket.close()
        server.show("3 models served")
        server.stopping(1.0)
        assert len(caplog.records) == 2
        server.close()


async def test_signs_of_life_are_what_the_plane_gives(manager: Manager) -> None:
    asked: list[Callable[[], None]] = []
    environment = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "3000000000", "WATCHDOG_PID": str(os.getpid())}
    server = ServiceManager(environment, LOG)
    server.begin(asked.append)
    await asyncio.sleep(0)
    assert manager.messages() == [START]
    assert len(asked) == 1  # The next is asked for a third of the limit later.
    await asyncio.to_thread(asked[0])
    await asyncio.sleep(0)
    assert manager.messages() == ["WATCHDOG=1"]
    server.close()


@pytest.mark.parametrize("variables", [{}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "9000000", "WATCHDOG_PID": "1"}])
async def test_no_signs_of_life_unless_they_are_for_this_process(manager: Manager, variables: dict[str, str]) -> None:
    asked: list[Callable[[], None]] = []
    server = ServiceManager({"NOTIFY_SOCKET": manager.address, **variables}, LOG)
    server.begin(asked.append)
    await asyncio.sleep(0)
    assert not asked
    server.close()


@pytest.mark.parametrize("address", ["", "vsock:2:1", "/nowhere/notify"])
async def test_without_a_manager_nothing_happens(address: str, caplog: pytest.LogCaptureFixture) -> None:
    server = ServiceManager({"NOTIFY_SOCKET": address} if address else {}, LOG)
    server.begin(lambda alive: alive())
    await asyncio.sleep(0)
    server.ready("1 model served")
    server.stopping(1.0)
    server.close()
    assert ("expected a path, or @ and a name" in caplog.text) is (address == "vsock:2:1")
    assert server.listens is (address == "/nowhere/notify")
