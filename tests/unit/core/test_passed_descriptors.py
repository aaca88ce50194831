"""Descriptors that are sent over a socket: what children inherit, and who waits."""

from __future__ import annotations

import os
import socket

import pytest

from rocserve.core.passed_descriptors import receive_with_descriptors, send_with_descriptors


def test_no_child_inherits_what_is_received() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reader, writer = os.pipe()
    with ours, theirs:
        send_with_descriptors(ours, b"pipe", (reader, writer))
        message, received = receive_with_descriptors(theirs, 10, 2)
    assert message == b"pipe"
    assert not any(os.get_inheritable(descriptor) for descriptor in received)
    os.write(received[1], b"x")
    assert os.read(reader, 1) == b"x"
    for descriptor in (reader, writer, *received):
        os.close(descriptor)


def test_neither_end_waits_without_blocking() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        with pytest.raises(BlockingIOError):
            receive_with_descriptors(ours, 10, 1, socket.MSG_DONTWAIT)
        with pytest.raises(BlockingIOError):
            while True:
                send_with_descriptors(ours, bytes(1000), (0,), socket.MSG_DONTWAIT)
