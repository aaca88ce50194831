"""The routes of the gRPC front end: which handler serves which method, and how its errors reach the client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from google.protobuf.message import DecodeError

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.serving import ServingTableHolder
from rocserve.frontends.grpc.codec import InferCodec
from rocserve.frontends.grpc.control import ControlHandlers
from rocserve.frontends.grpc.health import HealthHandlers
from rocserve.frontends.grpc.inference import InferenceHandlers
from rocserve.frontends.grpc.queries import QueryHandlers
from rocserve.frontends.grpc.transport import Route, StreamRoute, UnaryCall, UnaryRoute
from rocserve.protocol import grpc_service_pb2
from rocserve.repository.model_repository import ModelRepository

INFERENCE = "/inference.GRPCInferenceService/"
HEALTH = "/grpc.health.v1.Health/"


class GrpcService:
    """Everything behind the transport."""

    def __init__(
        self,
        tables: ServingTableHolder,
        repository: ModelRepository,
        server_id: str,
        loop: asyncio.AbstractEventLoop,
        log: logging.Logger,
    ) -> None:
        self._repository = repository
        self._loop = loop
        self._log = log
        self._exiting = False
        self._inference = InferenceHandlers(tables, InferCodec())
        self._queries = QueryHandlers(tables, repository, server_id, self.is_ready)
        self._control = ControlHandlers(repository)
        self._health = HealthHandlers(tables, self.is_ready)
        self._tasks: set[asyncio.Task[None]] = set()
        repository.subscribe(self._health.publish)

    def is_ready(self) -> bool:
        return not self._exiting and self._repository.is_ready()

    def begin_exit(self) -> None:
        """Not ready any more, refuse new inferences, end streams that wait for nothing. On the event loop."""
        self._exiting = True
        self._health.publish()
        self._health.end()
        self._inference.begin_exit()

    def routes(self) -> Mapping[str, Route]:
        """All methods of the two services; those that are not served yet answer UNIMPLEMENTED."""
        queries, control = self._queries, self._control
        routes: dict[str, Route] = {
            INFERENCE + method.name: UnaryRoute(_unserved(method.name))
            for method in grpc_service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
        }
        routes |= {
            INFERENCE + "ModelInfer": UnaryRoute(self._inference.model_infer),
            INFERENCE + "ModelStreamInfer": StreamRoute(self._inference.model_stream_infer),
            INFERENCE + "ServerLive": self._quick(queries.server_live),
            INFERENCE + "ServerReady": self._quick(queries.server_ready),
            INFERENCE + "ModelReady": self._quick(queries.model_ready),
            INFERENCE + "ServerMetadata": self._quick(queries.server_metadata),
            INFERENCE + "ModelMetadata": self._quick(queries.model_metadata),
            INFERENCE + "ModelConfig": self._quick(queries.model_config),
            INFERENCE + "ModelStatistics": self._quick(queries.model_statistics),
            INFERENCE + "RepositoryIndex": self._quick(queries.repository_index),
            INFERENCE + "RepositoryModelLoad": self._slow(control.load),
            INFERENCE + "RepositoryModelUnload": self._slow(control.unload),
            HEALTH + "Check": self._quick(self._health.check),
            HEALTH + "Watch": StreamRoute(self._health.watch),
        }
        return routes

    def _quick(self, answer: Callable[[bytes], bytes]) -> UnaryRoute:
        """A handler that answers in place, on the transport's thread."""

        def handle(call: UnaryCall) -> None:
            try:
                call.reply(answer(call.message))
            except Exception as error:
                self._fail(call, error)

        return UnaryRoute(handle)

    def _slow(self, answer: Callable[[bytes], Awaitable[bytes]]) -> UnaryRoute:
        """A handler that runs as a task of the event loop."""

        async def run(call: UnaryCall) -> None:
            try:
                call.reply(await answer(call.message))
            except Exception as error:
                self._fail(call, error)

        def begin(call: UnaryCall) -> None:
            task = self._loop.create_task(run(call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return UnaryRoute(lambda call: self._hand_over(begin, call))

    def _hand_over(self, begin: Callable[[UnaryCall], None], call: UnaryCall) -> None:
        self._loop.call_soon_threadsafe(begin, call)

    def _fail(self, call: UnaryCall, error: Exception) -> None:
        if isinstance(error, ServeError):
            call.fail(error.code, error.text)
        elif isinstance(error, DecodeError):
            call.fail(StatusCode.INVALID_ARGUMENT, f"{call.method}: the request is not a valid message: {error}")
        else:
            self._log.exception("%s failed", call.method, exc_info=error)
            call.fail(StatusCode.INTERNAL, f"{type(error).__name__}: {error}")


def _unserved(name: str) -> Callable[[UnaryCall], None]:
    def handle(call: UnaryCall) -> None:
        call.fail(StatusCode.UNIMPLEMENTED, f"{name} is not served by this version of rocserve")

    return handle
