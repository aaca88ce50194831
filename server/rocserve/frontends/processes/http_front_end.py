"""A front end of HTTP: the listener and the service that the server would have itself, on asyncio as a guest of
the loop that all front ends have."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from rocserve.config.plain import to_plain
from rocserve.core.errors import ServeError
from rocserve.core.model_config import ModelConfig
from rocserve.frontends.grpc.guards import full_name
from rocserve.frontends.grpc.transport import Metadata
from rocserve.frontends.http.large_bodies import LargeBodies
from rocserve.frontends.http.listener import HttpListener
from rocserve.frontends.http.serving import HttpParts, start_http
from rocserve.frontends.listen_address import ListenAddress
from rocserve.frontends.processes.edition import EditionReader
from rocserve.frontends.processes.forwarding import Forwarding
from rocserve.frontends.processes.main import FrontEndTask, WayToServer
from rocserve.plane.guest_loop import GuestLoop
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.protocol import page_pb2
from rocserve.services.method import Method, SlowMethod

_LARGE_BODY_PROCESSES = 1
"""There are other front ends, which have as many."""
_REMEMBERED_MODELS = 1024
"""Ways to name versions: a version's number may have any number of zeros before it."""


def serve(task: FrontEndTask) -> None:
    """Until the server says so or is gone. Raises: EOFError, ConnectionError: the server is gone."""
    listener: HttpListener
    tasks: list[asyncio.Task[None]] = []

    def stop(grace_seconds: float) -> None:
        tasks.append(loop.create_task(_end(listener, grace_seconds)))

    def close_after_answers() -> None:
        listener.close_after_answers()

    async def listen() -> None:
        nonlocal listener
        try:
            listener, _ = await start_http(task.settings, where, parts, task.log)
        except (OSError, ValueError) as error:
            way.tell_refusal(error)
            os._exit(0)
        way.tell_listening()

    way = WayToServer(task, stop, close_after_answers)
    loop = GuestLoop(way.plane)
    methods = remote_methods(way.forwarding, loop)
    models = RemoteModels(EditionReader(task.edition), methods["ModelConfig"])
    parts = HttpParts(way.inference, methods, models, task.memory, LargeBodies(_LARGE_BODY_PROCESSES))
    where = ListenAddress("HTTP", "http", task.settings.http.address, task.port, reuse_port=True)
    tasks.append(loop.create_task(listen()))
    way.plane.run()


async def _end(listener: HttpListener, grace_seconds: float) -> None:
    await listener.stop(grace_seconds)
    os._exit(0)


class _MethodCall:
    """Implements transport.UnaryCall for whoever waits for a method's answer. Who may call it has been decided."""

    metadata: Metadata = ()
    peer = ""
    held_bytes = 0
    deadline: float | None = None

    def __init__(self, method: str, message: bytes, answer: asyncio.Future[bytes]) -> None:
        self.method = method
        self.message = message
        self._answer = answer

    def reply(self, message: bytes, trailing_metadata: Metadata = ()) -> None:
        if not self._answer.done():
            self._answer.set_result(message)

    def reply_error(self, error: ServeError, trailing_metadata: Metadata = ()) -> None:
        if not self._answer.done():
            self._answer.set_exception(error)

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        """It goes on when the client does not wait for it."""


def remote_methods(forwarding: Forwarding, loop: asyncio.AbstractEventLoop) -> Mapping[str, Method]:
    """As methods.methods; the server answers them."""

    def method(name: str, response: type[Message]) -> Method:
        async def ask(request: Message) -> Message:
            answer: asyncio.Future[bytes] = loop.create_future()
            forwarding.forward(_MethodCall(full_name(name), request.SerializeToString(), answer))
            return response.FromString(await answer)

        return SlowMethod(GetMessageClass(described[name].input_type), ask)

    inference = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    described = {**inference, **page_pb2.DESCRIPTOR.services_by_name["Page"].methods_by_name}
    return {name: method(name, GetMessageClass(each.output_type)) for name, each in described.items()}


class RemoteModels:
    """Implements models.Models: the server is asked once for each version that requests name, and again when its
    serving table has changed."""

    def __init__(self, edition: EditionReader, model_config: Method) -> None:
        assert isinstance(model_config, SlowMethod)
        self._edition = edition
        self._model_config = model_config.answer
        self._known_edition = 0
        self._known: dict[tuple[str, str], asyncio.Task[ModelConfig]] = {}
        """Those of the known edition, and those that are being asked for."""

    def find(self, name: str, version: str) -> ModelConfig | None:
        """See Models."""
        if self._edition.value != self._known_edition:
            self._known_edition = self._edition.value
            self._known.clear()
        asked = self._known.get((name, version))
        return asked.result() if asked is not None and asked.done() else None

    async def ask(self, name: str, version: str) -> ModelConfig:
        """See Models. After `find`."""
        key = name, version
        asked = self._known.get(key)
        if asked is None:
            if len(self._known) >= _REMEMBERED_MODELS:
                self._known.clear()
            asked = self._known[key] = asyncio.create_task(self._ask(name, version))
            asked.add_done_callback(lambda done: self._forget_failure(key, done))
        return await asyncio.shield(asked)

    def _forget_failure(self, key: tuple[str, str], asked: asyncio.Task[ModelConfig]) -> None:
        """There may be an answer the next time."""
        if (asked.cancelled() or asked.exception() is not None) and self._known.get(key) is asked:
            del self._known[key]

    async def _ask(self, name: str, version: str) -> ModelConfig:
        response = await self._model_config(pb.ModelConfigRequest(name=name, version=version))
        assert isinstance(response, pb.ModelConfigResponse)
        return to_plain(response.config, response.config.backend, {})
