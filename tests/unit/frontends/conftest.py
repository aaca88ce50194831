"""Real servers on loopback for the transport's tests."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import grpc
import pytest
from support.workers import on_plane

from rocserve.core.request_memory import RequestMemory
from rocserve.frontends.grpc.open_calls import OpenCall
from rocserve.frontends.grpc.server import GrpcServer
from rocserve.frontends.grpc.transport import Routes, TransportLimits
from rocserve.plane.loop import PlaneLoop
from rocserve.settings import GrpcSettings

LOG = logging.getLogger("test.grpc")
CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
)


@dataclass
class Served:
    """A running transport and the client channels connected to it."""

    transport: GrpcServer
    port: int
    channels: list[grpc.Channel] = field(default_factory=list)

    def channel(self, *options: tuple[str, int]) -> grpc.Channel:
        channel = grpc.insecure_channel(f"127.0.0.1:{self.port}", (*CHANNEL_OPTIONS, *options))
        self.channels.append(channel)
        return channel

    def unary(self, method: str = "/test.Service/Unary") -> Any:
        return self.channel().unary_unary(method)

    def stream(self, method: str = "/test.Service/Stream") -> Any:
        return self.channel().stream_stream(method)

    def do(self, *calls: Callable[[], object]) -> None:
        """Run a call on the transport's thread."""
        on_plane(self.transport.plane, lambda: [call() for call in calls])

    def calls_alive(self) -> int:
        """Call objects of the transport that still exist, in flight or not."""
        return sum(isinstance(thing, OpenCall) for thing in gc.get_objects())


Serve = Callable[..., Served]


@pytest.fixture
def serve(plane: PlaneLoop) -> Iterator[Serve]:
    """`serve(routes, **options)` starts a transport on a free port of 127.0.0.1; all are stopped at the end."""
    running: list[Served] = []

    def start(routes: Routes, memory: RequestMemory | None = None, **options: Any) -> Served:
        names = {entry.name for entry in fields(TransportLimits)} & options.keys()
        limits = TransportLimits(**{name: options.pop(name) for name in names})
        settings = GrpcSettings(**{"address": "127.0.0.1", "port": 0, **options})
        transport = GrpcServer(settings, routes, LOG, plane, memory, limits)
        served = Served(transport, transport.start())
        running.append(served)
        return served

    yield start
    for served in running:
        for channel in served.channels:
            channel.close()
        served.transport.stop(0)
