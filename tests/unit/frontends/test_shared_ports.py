"""Ports that several processes share, and which of them gets new connections."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from rocserve.frontends import shared_ports
from rocserve.frontends.listen_address import ListenAddress
from rocserve.frontends.shared_ports import SharedPorts, has_connections, kernel_has_filters, listens, sockets_of

CONNECTIONS = 48
"""So many that each of three sockets gets one, except once in a hundred million times."""


class Listeners:
    """Sockets of one port, in place of those of several processes."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.shared = SharedPorts([ListenAddress("HTTP", "http", "127.0.0.1", 0)])
        stack.callback(self.shared.close)
        assert self.shared.reserve() == []
        self.port = self.shared.ports["HTTP"]
        self.sockets = [self.listen()]

    def listen(self) -> socket.socket:
        listening = self._stack.enter_context(socket.socket())
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind(("127.0.0.1", self.port))
        listening.listen(CONNECTIONS)
        listening.setblocking(False)
        return listening

    def connections(self) -> list[int]:
        """The number of connections that each of the sockets gets."""
        for _ in range(CONNECTIONS):
            socket.create_connection(("127.0.0.1", self.port)).close()
        return [self._accept_all(one) for one in self.sockets]

    def _accept_all(self, listening: socket.socket) -> int:
        count = 0
        while True:
            try:
                listening.accept()[0].close()
            except BlockingIOError:
                return count
            count += 1


@pytest.fixture
def listeners() -> Iterator[Listeners]:
    with ExitStack() as stack:
        yield Listeners(stack)


def test_only_those_that_shall_get_connections(listeners: Listeners) -> None:
    shared = listeners.shared
    shared.give_to_this_process()
    listeners.sockets += [listeners.listen(), listeners.listen()]
    assert listeners.connections() == [CONNECTIONS, 0, 0]
    shared.give_to_all()
    assert all(listeners.connections())
    shared.give_to_others(2)
    own, *others = listeners.connections()
    assert own == 0 and all(others)
    shared.give_to_this_process()
    assert listeners.connections() == [CONNECTIONS, 0, 0]


def test_a_kernel_without_filters_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel_has_filters()
    monkeypatch.setattr(shared_ports, "set_filter", lambda *_: None)
    assert not kernel_has_filters()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOPROTOOPT, "")

    monkeypatch.setattr(shared_ports, "set_filter", refuse)
    assert not kernel_has_filters()


def test_one_that_ends_is_replaced_by_the_next(listeners: Listeners) -> None:
    listeners.sockets += [listeners.listen(), listeners.listen()]
    listeners.shared.give_to_others(2)
    listeners.sockets.pop(1).close()
    # The numbers are those of two sockets, of which one is left; for the other number the kernel chooses any.
    assert sum(listeners.connections()) == CONNECTIONS
    listeners.sockets.append(listeners.listen())
    own, *others = listeners.connections()
    assert own == 0 and all(others)


def test_all_ports_that_others_have_are_reported(listeners: Listeners) -> None:
    addresses = [ListenAddress(name, name.lower(), "127.0.0.1", listeners.port) for name in ("HTTP", "gRPC")]
    shared = SharedPorts(addresses)
    refusals = shared.reserve()
    shared.close()
    assert [one.errno for one in refusals if isinstance(one, OSError)] == [errno.EADDRINUSE] * 2
    assert "cannot serve gRPC at 127.0.0.1" in str(refusals[1])


def test_connections_are_distinguished_from_listening_sockets(listeners: Listeners) -> None:
    # The reservation is bound, and neither listens nor has a client.
    assert sorted(listens(found) for _, found in sockets_of(listeners.port)) == [False, True]
    assert not has_connections(listeners.port)
    with socket.create_connection(("127.0.0.1", listeners.port)):
        accepted, _ = listeners.sockets[0].accept()
        with accepted:
            assert has_connections(listeners.port)
    assert not has_connections(listeners.port)
