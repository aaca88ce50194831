"""A front end of gRPC: the transport and the handlers that the server would have itself, on a loop as the server's."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

from rocserve.frontends.grpc.inference import InferenceHandlers
from rocserve.frontends.grpc.server import GrpcServer
from rocserve.frontends.grpc.transport import TransportLimits, transport_settings
from rocserve.frontends.processes.main import WayToServer
from rocserve.services.access import GRPC_HEADER_PREFIX, restrictions
from rocserve.services.forwarded_headers import header_forwarding
from rocserve.settings import ServerSettings


class GrpcFrontEnd:
    """Implements main.Listener."""

    def __init__(self, settings: ServerSettings, port: int, way: WayToServer) -> None:
        forwarded = header_forwarding(settings.grpc.header_forward_pattern)
        self._handlers = InferenceHandlers(way.inference, way.memory, forwarded)
        restricted = restrictions(settings.grpc.restricted, way.log, GRPC_HEADER_PREFIX)
        routes = {**self._handlers.routes(restricted), **way.forwarding.routes()}
        own = replace(transport_settings(settings), port=port, reuse_port=True)
        self._transport = GrpcServer(own, routes, way.log, way.plane, way.memory, TransportLimits.of(settings))

    async def start(self) -> None:
        self._transport.start()

    def begin_exit(self) -> None:
        self._handlers.begin_exit()

    def stop(self, grace_seconds: float) -> None:
        # All has been sent by then, and what Python and gRPC would tidy up the system does.
        self._transport.stop_soon(grace_seconds, partial(os._exit, 0))
