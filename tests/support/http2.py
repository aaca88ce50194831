"""An HTTP/2 client for calls that no gRPC library makes: a call can stop anywhere, and frames can be written by
hand."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import h2.config
import h2.connection
import h2.events

from support.waiting import PATIENCE_SECONDS, wait_until

MOST_BYTES_AT_ONCE = 16384
"""The largest HTTP/2 frame unless a server allows more."""


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS = 0, 1, 4
END_STREAM, END_HEADERS = 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    """A frame (RFC 9113, section 4.1). `length`: the length that the header claims."""
    size = len(payload) if length is None else length
    return struct.pack(">I", size)[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def head(path: str) -> bytes:
    """The header block of a call: literal fields without indexing (RFC 7541, section 6.2.2)."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "test",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    return b"".join(
        b"\x00" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()
        for name, value in fields.items()
    )


def prefixed(message: bytes) -> bytes:
    """A message as gRPC sends it: uncompressed, behind its length."""
    return struct.pack("!BI", 0, len(message)) + message


@dataclass
class Answer:
    """What has arrived for one call."""

    data: bytearray = field(default_factory=bytearray)
    status: int | None = None
    """The gRPC status; None = the call continues."""
    text: str = ""
    is_over: bool = False
    """Whether the server has ended or reset the stream, and reads no more of it."""


class Http2Connection:
    """One connection; a context manager."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self._connection.initiate_connection()
        self.answers: dict[int, Answer] = {}
        self.is_closed = False
        self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def begin(self, method: str, data: bytes = b"", ends: bool = False) -> int:
        """Begin a call of "/package.Service/Method" with these bytes of its messages; return the number of its
        stream."""
        stream = self._connection.get_next_available_stream_id()
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", method),
            (":authority", "127.0.0.1"),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
        ]
        self._connection.send_headers(stream, headers)
        self.answers[stream] = Answer()
        if data or ends:
            # Sent with the head, for the server's time for a message begins with that.
            self.send(stream, data, ends)
        else:
            self._flush()
        return stream

    def send(self, stream: int, data: bytes, ends: bool = False) -> None:
        """Send more bytes of a call as fast as the server reads them. The rest is not sent if the server ends the
        call."""
        view, answer = memoryview(data), self.answers[stream]
        while view and not answer.is_over:
            room = min(self._connection.local_flow_control_window(stream), MOST_BYTES_AT_ONCE)
            if not room:
                assert self.receive(PATIENCE_SECONDS), "the server takes no more bytes"
                continue
            self._connection.send_data(stream, view[:room].tobytes())
            view = view[room:]
            self._flush()
        if ends and not answer.is_over:
            self._connection.end_stream(stream)
            self._flush()

    def room(self, stream: int) -> int:
        """The bytes of a call that the server would take now."""
        return self._connection.local_flow_control_window(stream)

    def receive(self, seconds: float = 0.0) -> bool:
        """Read what the server sends next. Returns whether anything came within the time."""
        self._socket.settimeout(max(seconds, 0.001))
        try:
            data = self._socket.recv(1 << 16)
        except TimeoutError:
            return False
        except ConnectionError:
            data = b""
        finally:
            self._socket.settimeout(PATIENCE_SECONDS)
        self.is_closed = self.is_closed or not data
        for event in self._connection.receive_data(data) if data else ():
            self._note(event)
        if not self.is_closed:
            self._flush()
        return bool(data)

    def wait(self, *streams: int) -> list[Answer]:
        """Wait for the complete answers of some calls."""

        def are_complete() -> bool:
            if all(self.answers[stream].status is not None for stream in streams):
                return True
            assert not self.is_closed, "the server has closed the connection"
            self.receive(0.1)
            return False

        wait_until(are_complete, "the answers")
        return [self.answers[stream] for stream in streams]

    def _note(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.DataReceived):
            self.answers[event.stream_id].data += event.data
            self._connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
            headers = dict(event.headers)
            if "grpc-status" in headers:
                answer = self.answers[event.stream_id]
                answer.status, answer.text = int(headers["grpc-status"]), str(headers.get("grpc-message", ""))
        elif isinstance(event, h2.events.StreamEnded | h2.events.StreamReset):
            self.answers[event.stream_id].is_over = True
        elif isinstance(event, h2.events.ConnectionTerminated):
            self.is_closed = True

    def _flush(self) -> None:
        self._socket.sendall(self._connection.data_to_send())
