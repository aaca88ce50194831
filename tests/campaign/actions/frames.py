"""HTTP/2 frames byte by byte: what no client library sends to the gRPC port."""

from __future__ import annotations

import random
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

from campaign import models
from campaign.action import Kind
from campaign.requests import connected, infer_message
from campaign.stage import Stage

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS, ACK = 0x1, 0x4, 0x1
METHOD = b"/inference.GRPCInferenceService/ModelInfer"
MOST_STREAMS = 100
"""Streams that are opened together on one connection; gRPC's own limit is higher."""
HELD_SECONDS = 15.0
"""Seconds for which a call stays unfinished: longer than a health answer may take."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _literal(name: bytes, value: bytes) -> bytes:
    """A header in HPACK, neither indexed nor Huffman-coded; for lengths below 127."""
    return bytes([0, len(name)]) + name + bytes([len(value)]) + value


def head(path: bytes = METHOD) -> bytes:
    pairs = (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path),
        (b":authority", b"campaign"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
    )
    return b"".join(_literal(name, value) for name, value in pairs)


def message(model: str = models.FUZZED) -> bytes:
    """gRPC's prefix of five bytes, and the message."""
    body = infer_message(model).SerializeToString()
    return b"\0" + struct.pack(">I", len(body)) + body


def opening(*settings: tuple[int, int]) -> bytes:
    return PREFACE + frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *setting) for setting in settings))


def send(opened: socket.socket, data: bytes) -> bool:
    """Send bytes; return whether the server still reads."""
    try:
        opened.sendall(data)
    except (ConnectionError, TimeoutError):
        return False
    return True


def drain(opened: socket.socket, seconds: float) -> bytes:
    """Return what arrives within that time."""
    received = bytearray()
    end = time.monotonic() + seconds
    with suppress(ConnectionError, TimeoutError):
        while (left := end - time.monotonic()) > 0:
            opened.settimeout(left)
            if not (part := opened.recv(65536)):
                break
            received += part
    return bytes(received)


def streams_of(first: int = 1) -> list[int]:
    return list(range(first, first + 2 * MOST_STREAMS, 2))


def headers_without_data(stage: Stage, random: random.Random) -> None:
    """Begin calls whose messages never come, on one connection or on several."""
    with ExitStack() as connections:
        for _ in range(random.randint(1, 3)):
            opened = connections.enter_context(connected(stage.poll.port))
            heads = (frame(HEADERS, END_HEADERS, stream, head()) for stream in streams_of())
            send(opened, opening() + b"".join(heads))
        time.sleep(HELD_SECONDS)


def half_messages(stage: Stage, random: random.Random) -> None:
    """Send the beginning of one message on each of many connections."""
    half = message()[: random.randint(1, 30)]
    with ExitStack() as connections:
        for _ in range(random.randint(80, 130)):
            opened = connections.enter_context(connected(stage.poll.port))
            send(opened, opening() + frame(HEADERS, END_HEADERS, 1, head()) + frame(DATA, 0, 1, half))
        time.sleep(HELD_SECONDS)


def resets(stage: Stage, random: random.Random) -> None:
    """Open streams and reset them immediately, with a whole request or none."""
    whole = random.random() < 0.5
    with connected(stage.poll.port) as opened:
        if not send(opened, opening()):
            return
        for round_number in range(random.randint(5, 40)):
            parts = []
            for stream in streams_of(1 + 2 * MOST_STREAMS * round_number):
                parts.append(frame(HEADERS, END_HEADERS, stream, head()))
                if whole:
                    parts.append(frame(DATA, END_STREAM, stream, message()))
                parts.append(frame(RST_STREAM, 0, stream, struct.pack(">I", 8)))
            if not send(opened, b"".join(parts)):
                return
        drain(opened, 0.5)


def control_frames(stage: Stage, random: random.Random) -> None:
    """Flood the server with SETTINGS, PING, PRIORITY, WINDOW_UPDATE, or empty DATA and CONTINUATION frames."""
    unit = random.choice(
        (
            frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 65535)),
            frame(PING, 0, 0, bytes(8)),
            frame(PRIORITY, 0, 1, bytes(5)),
            frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1)),
            frame(HEADERS, END_HEADERS, 1, head()) + frame(DATA, 0, 1) * 50,
            frame(HEADERS, 0, 1, head()) + frame(CONTINUATION, 0, 1, _literal(b"x", b"y" * 100)) * 50,
        )
    )
    with connected(stage.poll.port) as opened:
        send(opened, opening())
        for _ in range(random.randint(20, 200)):
            if not send(opened, unit * 50):
                return
        drain(opened, 0.5)


def windows(stage: Stage, random: random.Random) -> None:
    """Forbid answers by flow-control windows: of zero, of one byte, beyond the maximum, shrunk below zero."""
    size = random.choice((0, 1, 2**31 - 1))
    with connected(stage.poll.port) as opened:
        requests = [
            frame(HEADERS, END_HEADERS, stream, head()) + frame(DATA, END_STREAM, stream, message())
            for stream in streams_of()
        ]
        send(opened, opening((4, size)) + b"".join(requests))
        update = random.choice((0, 1, 2**31 - 1))
        send(opened, frame(WINDOW_UPDATE, 0, random.choice((0, 1, 99)), struct.pack(">I", update)) * 3)
        send(opened, frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 0)))
        drain(opened, random.uniform(0.2, HELD_SECONDS))


def nonsense(stage: Stage, random: random.Random) -> None:
    """Send frames with random types, flags, streams and lengths, some of them cut, and bytes that are not HTTP/2."""
    for _ in range(20):
        with connected(stage.poll.port) as opened:
            parts = [opening()] if random.random() < 0.8 else [random.randbytes(random.randint(1, 60))]
            for _ in range(random.randint(1, 20)):
                payload = random.choice((b"", head(), message(), random.randbytes(random.randint(1, 40))))
                stream = random.choice((0, 1, 2, 3, 5, 2**31 - 1))
                parts.append(frame(random.randrange(12), random.randrange(256), stream, payload))
            data = b"".join(parts)
            send(opened, data[: random.choice((len(data), random.randint(1, len(data))))])
            stage.canaries.search("frames", drain(opened, 0.1))


def upgraded_heads(stage: Stage, random: random.Random) -> None:
    """Send whole calls with odd headers: other paths, very long ones, forbidden names."""
    odd: Sequence[Callable[[], bytes]] = (
        lambda: head(b"/" + b"x" * 100),
        lambda: head(b""),
        lambda: head() + _literal(b"grpc-timeout", random.choice((b"0n", b"-1S", b"99999999H", b"x"))),
        lambda: head() + _literal(b"grpc-encoding", random.choice((b"gzip", b"identity", b"none"))),
        lambda: head() + b"".join(_literal(b"x-%d" % number, b"y" * 100) for number in range(200)),
        lambda: head() + _literal(b":path", b"/twice"),
        lambda: head() + _literal(b"content-length", b"5"),
        lambda: head() + b"\xff\xff\xff\xff\xff",
    )
    for _ in range(20):
        with connected(stage.poll.port) as opened:
            block = random.choice(odd)()[:16_000]
            call = frame(HEADERS, END_HEADERS, 1, block) + frame(DATA, END_STREAM, 1, message())
            send(opened, opening() + call)
            drain(opened, 0.1)


KINDS = (
    Kind("frames.headers-without-data", headers_without_data, 2),
    Kind("frames.half-messages", half_messages, 2),
    Kind("frames.resets", resets, 3),
    Kind("frames.control", control_frames, 3),
    Kind("frames.windows", windows, 3),
    Kind("frames.nonsense", nonsense, 3),
    Kind("frames.heads", upgraded_heads, 3),
)
