"""Opens links. The server creates everything that both ends share, and passes the other end its part through a socket,
which then serves as a doorbell."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING

from rocserve.core.passed_descriptors import receive_with_descriptors, send_with_descriptors
from rocserve.links import rings
from rocserve.links.rings import LinkEnd
from rocserve.plane import anonymous_file, heap
from rocserve.plane.doorbell import SocketRinger, sleep_word
from rocserve.plane.heap import Heap, HeapReader

if TYPE_CHECKING:
    # At run time this would import asyncio into workers.
    from rocserve.plane.loop import PlaneLoop

HEAP_BYTES = 1 << 32
"""Bytes for each size class of slots, in every heap of a link. gRPC messages take at most half."""

Rings = Sequence[int]
"""Entries of each ring."""
FRONT_RINGS: Rings = (4096, 1024)
"""Of both ends."""
MESSAGES, FRONT_RETURNS = range(2)
SERVER_RINGS: Rings = (128, 1024, 1024)
"""To a worker. WORK is short, because few batches are in flight at a time."""
WORK, BACK, RETURNS = range(3)
WORKER_RINGS: Rings = (1024,)

POLL_SECONDS = Struct("<d")
"""The message with a worker's part of a link: how long the worker may poll for a batch before it sleeps. If the model
sees each request separately, the socket for the reader of BACK comes too."""
FRONT_MESSAGE = b"F"
"""The message with a front end's part, and with each descriptor that is passed later."""

_DESCRIPTORS = 5


def offer(
    connection: socket.socket,
    message: bytes,
    name: str,
    own_heap: Heap,
    plane: PlaneLoop,
    sends: Rings,
    takes: Rings,
    more: Sequence[int] = (),
) -> tuple[LinkEnd, HeapReader]:
    """Make a link, and send the other end its part with a message and `more` descriptors. Returns this end, and the
    reader of the other end's heap. Raises OSError, and leaves nothing open then."""
    reading = anonymous_file.open_for_reading
    with ExitStack() as passed:

        def closing(descriptor: int) -> int:
            passed.callback(os.close, descriptor)
            return descriptor

        own, others = closing(rings.create_file(name, sends)), closing(rings.create_file(name, takes))
        others_heap = closing(heap.create_file(name, HEAP_BYTES))
        files = [
            others,
            closing(reading(own)),
            others_heap,
            closing(own_heap.open_for_reading()),
            closing(reading(plane.doorbell.sleeps)),
            *more,
        ]
        send_with_descriptors(connection, message, files)
        end = LinkEnd(own, sends, closing(reading(others)), takes)
        return end, HeapReader(reading(others_heap), later=plane.work_off_later)


@dataclass(frozen=True, slots=True)
class Accepted:
    """This process's end of a link, and what came with it."""

    message: bytes
    end: LinkEnd
    heap: Heap
    """The heap of this end."""
    servers_heap: int
    """Descriptor of the server's heap, to read."""
    ring: Callable[[], None]
    """Wakes the server."""
    more: Sequence[int]
    """Descriptors."""


def accept(connection: socket.socket, nbytes: int, sends: Rings, takes: Rings, most_more: int = 0) -> Accepted:
    """Wait for this end's part of a link, in a message of `nbytes`, with up to so many further descriptors. Raises
    EOFError if the server is gone, ValueError for any other message."""
    message, descriptors = receive_with_descriptors(connection, nbytes, _DESCRIPTORS + most_more)
    if not message:
        raise EOFError("the server closed the connection")
    if len(message) != nbytes or len(descriptors) < _DESCRIPTORS:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ValueError(f"expected one end of a link, got {message!r} and {len(descriptors)} descriptors")
    own, servers, own_heap, servers_heap, sleeps, *more = descriptors
    end = LinkEnd(own, sends, servers, takes)
    ring = SocketRinger(sleep_word(sleeps), connection).ring
    for descriptor in (own, servers, sleeps):
        os.close(descriptor)
    return Accepted(message, end, Heap.of_file(own_heap), servers_heap, ring, more)
