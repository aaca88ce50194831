"""Asks the server for the parts of HTTP besides inference: methods, and configurations of models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from rocserve.config.plain import to_plain
from rocserve.core.errors import ServeError
from rocserve.core.memo import Memo
from rocserve.core.model_config import ModelConfig
from rocserve.core.request_memory import RequestMemory
from rocserve.frontends.grpc.transport import full_name
from rocserve.frontends.http.body import LargeBodies
from rocserve.frontends.http.inference import HttpParts
from rocserve.frontends.processes.forwarding import Forwarding
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.protocol import page_pb2
from rocserve.services.inference import Inference
from rocserve.services.methods import Method
from rocserve.settings import HttpSettings


def remote_parts(
    inference: Inference,
    forwarding: Forwarding,
    loop: asyncio.AbstractEventLoop,
    memory: RequestMemory,
    edition: memoryview,
    settings: HttpSettings,
) -> HttpParts:
    """Return the parts of HTTP's requests. `edition` has a number (u64) that changes with each serving table, before
    the server answers a load: while it stays the same, the server's earlier answers about its models are true."""
    methods = remote_methods(forwarding, loop)
    models = RemoteModels(edition, methods["ModelConfig"])
    # Fewer than in a server without front end processes, because every front end has one.
    large = LargeBodies(1)
    return HttpParts(inference, methods, models.find, memory, large, settings, models.ask)


def remote_methods(forwarding: Forwarding, loop: asyncio.AbstractEventLoop) -> Mapping[str, Method]:
    """Return methods that the server answers. The caller checks clients' access. Calls outlive their client."""

    def method(name: str, response: type[Message]) -> Method:
        async def ask(request: bytes) -> Message:
            answer: asyncio.Future[bytes] = loop.create_future()

            def end(give: Callable[[Any], None], what: bytes | ServeError) -> None:
                if not answer.done():
                    give(what)

            take, fail = partial(end, answer.set_result), partial(end, answer.set_exception)
            forwarding.begin(full_name(name), request, take, fail, is_checked=True)
            return response.FromString(await answer)

        async def ask_written(request: Message) -> Message:
            return await ask(request.SerializeToString())

        return Method(GetMessageClass(described[name].input_type), ask_written, is_slow=True, answer_serialised=ask)

    inference = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    described = {**inference, **page_pb2.DESCRIPTOR.services_by_name["Page"].methods_by_name}
    return {name: method(name, GetMessageClass(one.output_type)) for name, one in described.items()}


class RemoteModels:
    """Asks the server for each requested version's configuration, and again when the serving table has changed."""

    def __init__(self, edition: memoryview, model_config: Method) -> None:
        self._edition = edition
        self._model_config = model_config.answer
        self._known_edition = 0
        self._known = Memo[tuple[str, str], asyncio.Task[ModelConfig]]()
        """Configurations of the known edition, and requests for them that are in flight. Bounded, because a version's
        number may have any number of leading zeros."""

    def find(self, name: str, version: str) -> ModelConfig | None:
        if self._edition[0] != self._known_edition:
            self._known_edition = self._edition[0]
            self._known.clear()
        asked = self._known.get((name, version))
        return asked.result() if asked is not None and asked.done() else None

    async def ask(self, name: str, version: str) -> ModelConfig:
        """Ask the server. Only for a version that `find` has not found."""
        key = name, version
        asked = self._known.get(key)
        if asked is None:
            asked = self._known.keep(key, asyncio.create_task(self._ask(name, version)))

            def forget_failure(done: asyncio.Task[ModelConfig]) -> None:
                # The next request may get an answer.
                if (done.cancelled() or done.exception() is not None) and self._known.get(key) is done:
                    del self._known[key]

            asked.add_done_callback(forget_failure)
        return await asyncio.shield(asked)

    async def _ask(self, name: str, version: str) -> ModelConfig:
        response = await self._model_config(pb.ModelConfigRequest(name=name, version=version))
        return to_plain(response.config, response.config.backend, {})
