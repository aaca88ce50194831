"""A front end of gRPC: the transport and the handlers that the server would have itself, on a loop as the server's."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

from rocserve.frontends.grpc.codec import InferCodec
from rocserve.frontends.grpc.inference import InferenceHandlers
from rocserve.frontends.grpc.server import GrpcServer
from rocserve.frontends.grpc.transport import transport_options
from rocserve.frontends.processes.main import FrontEndTask, WayToServer
from rocserve.services.forwarded_headers import header_forwarding
from rocserve.services.restrictions import GRPC_HEADER_PREFIX, restrictions


def serve(task: FrontEndTask) -> None:
    """Until the server says so or is gone. Raises: EOFError, ConnectionError: the server is gone."""
    settings, log = task.settings, task.log
    transport: GrpcServer
    handlers: InferenceHandlers

    def stop(grace_seconds: float) -> None:
        # All has been sent by then, and what Python and gRPC would tidy up the system does.
        transport.stop_soon(grace_seconds, partial(os._exit, 0))

    def begin_exit() -> None:
        handlers.begin_exit()

    way = WayToServer(task, stop, begin_exit)
    plane = way.plane
    forwarded = header_forwarding(settings.grpc.header_forward_pattern)
    handlers = InferenceHandlers(way.inference, InferCodec(), task.memory, forwarded)
    restricted = restrictions(settings.grpc.restricted, log, GRPC_HEADER_PREFIX)
    routes = {**handlers.routes(restricted), **way.forwarding.routes()}
    options = transport_options(settings)
    transport = GrpcServer(replace(options, port=task.port, reuse_port=True), routes, log, plane, task.memory)
    try:
        transport.start()
    except (OSError, RuntimeError, ValueError) as error:
        way.tell_refusal(error)
        return
    way.tell_listening()
    plane.run()
