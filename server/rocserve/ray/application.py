"""The Ray Serve application: a deployment whose replicas each run a server and forward the bytes of calls to it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, Self

import aiohttp
import grpc
import starlette.requests
import starlette.responses
from ray import serve
from ray.serve.grpc_util import RayServegRPCContext, gRPCInputStream
from yarl import URL

from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.ray.autoscaling import QUEUED

_CHILD = """
import sys
from rocserve.cli import main
from rocserve.core.exit_with_parent import exit_with_parent
kept = exit_with_parent(int(sys.argv[1]))
sys.exit(main(sys.argv[2:]))
"""
_LOOPBACK = "127.0.0.1"


class ServerProcess:
    """A server that ends when its parent process ends, even if the parent is killed."""

    def __init__(
        self, process: asyncio.subprocess.Process, reserved: Sequence[socket.socket], parent_pipe_writer: int
    ) -> None:
        self.pid = process.pid
        self._process = process
        self._reserved = reserved
        self._parent_pipe_writer = parent_pipe_writer
        self.grpc, self.http, self._metrics = (f"{_LOOPBACK}:{held.getsockname()[1]}" for held in reserved)
        # Bodies are forwarded unchanged, compressed or not, and Serve limits the number of calls.
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None)
        )

    @classmethod
    async def start(cls, words: Sequence[str]) -> Self:
        """Start `rocserve serve` with these words and wait until it is ready. Raises RuntimeError if it ends."""
        # Reserves free ports: bound here without listening, so that only the server, with SO_REUSEPORT, gets them.
        reserved = [socket.socket() for _ in range(3)]
        for held in reserved:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind((_LOOPBACK, 0))
        reader, writer = os.pipe()
        where = [
            f"--{protocol}-{part}"
            for protocol, held in zip(("grpc", "http", "metrics"), reserved, strict=True)
            for part in (f"address={_LOOPBACK}", f"port={held.getsockname()[1]}")
        ]
        # A replica has one connection, for which one process is enough; the words that follow may override that.
        command = ["serve", "--front-ends=0", *words, *where, "--reuse-grpc-port", "--reuse-http-port"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _CHILD, str(reader), *command, pass_fds=(reader,), start_new_session=True
        )
        os.close(reader)
        server = cls(process, reserved, writer)
        while not await server._is_ready():
            if process.returncode is not None:
                await server.end()
                raise RuntimeError(
                    f"rocserve {' '.join(command)} ended with status {process.returncode} before it was ready;"
                    " the last lines in this replica's worker-*.err say why"
                )
            await asyncio.sleep(0.05)
        return server

    async def check(self) -> None:
        """Raises RuntimeError if the server has ended or is not ready."""
        if self._process.returncode is not None:
            raise RuntimeError(f"the server has ended with status {self._process.returncode}")
        if not await self._is_ready():
            raise RuntimeError("the server is not ready: /v2/repository/index says which model, and why")

    async def pending_requests(self) -> float:
        """Return how many requests wait for an instance, over all models."""
        async with self.session.get(f"http://{self._metrics}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return sum(
            float(line.rpartition(" ")[2]) for line in lines if line.startswith("nv_inference_pending_request_count{")
        )

    async def end(self) -> None:
        """Send SIGTERM and wait until the server has finished its work in flight, at most --exit-timeout-secs."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
            await self._process.wait()
        await self.session.close()
        os.close(self._parent_pipe_writer)
        for held in self._reserved:
            held.close()

    async def _is_ready(self) -> bool:
        try:
            async with self.session.get(f"http://{self.http}/v2/health/ready") as answer:
                return bool(answer.status == HTTPStatus.OK)
        except aiohttp.ClientConnectionError:
            return False


_SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
_STREAM = "ModelStreamInfer"
_HOP_HEADERS = frozenset(
    {
        *("connection", "content-length", "date", "host", "keep-alive", "server"),
        *("te", "trailer", "transfer-encoding", "upgrade"),
    }
)
"""HTTP headers that are not forwarded; each end makes its own."""
_FORWARDED_FOR = "x-forwarded-for"
"""Makes the server treat requests as remote, so that Serve's clients do not get local clients' privileges."""


def build(arguments: Mapping[str, Any]) -> serve.Application:
    """Build the application for Serve's `import_path`. Its `args` are the arguments of `application`."""
    return application(**arguments)


def application(words: list[str], models_per_replica: int = 0) -> serve.Application:
    """Return an application with one deployment, `Server`, whose options a configuration may set. `words` follow
    `rocserve serve`, without addresses and ports, which the replica chooses. `models_per_replica`: the most models that
    a replica loads by Serve's multiplexed model ids; 0 = no multiplexing: the words choose the models."""
    deployment = serve.deployment(
        name="Server",
        max_ongoing_requests=256,
        graceful_shutdown_timeout_s=45,  # More than the server's --exit-timeout-secs, which is 30.
    )
    return deployment(Replica).bind(words, models_per_replica)


def add_inference_service(servicer: object, server: grpc.aio.Server) -> None:
    """Register KServe's service with Serve's gRPC proxy, for `grpc_servicer_functions`. Messages remain bytes."""
    handlers = {
        name: grpc.stream_stream_rpc_method_handler(None)
        if name == _STREAM
        else grpc.unary_unary_rpc_method_handler(None)
        for name in _SERVICE.methods_by_name
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE.full_name, handlers),))


@dataclass(frozen=True, slots=True)
class Answer:
    """The bytes of a message, in the form that Serve requires."""

    content: bytes

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's name
        return self.content


class Replica:
    """A server with the methods that Serve calls. Serve finds a method of KServe's service by the method's name."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it.
        self, words: list[str], models_per_replica: int
    ) -> None:
        self._ending = AsyncExitStack()
        explicit = ["--model-control-mode=explicit"] if models_per_replica else []
        self._server = await ServerProcess.start([*words, *explicit])
        self._ending.push_async_callback(self._server.end)
        any_length = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self._channel = await self._ending.enter_async_context(grpc.aio.insecure_channel(self._server.grpc, any_length))
        self._load = _model_loader(self._channel, models_per_replica) if models_per_replica else None

    async def check_health(self) -> None:
        await self._server.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return {QUEUED: await self._server.pending_requests()}

    async def __del__(self) -> None:
        """Stop the server. Serve calls this after the last call, or if the server did not start."""
        await self._ending.aclose()

    async def __call__(self, request: starlette.requests.Request) -> starlette.responses.Response:
        """Forward an HTTP request and its response; an event stream is forwarded as it comes."""
        try:
            await self._load_requested_model()
        except grpc.aio.AioRpcError as error:
            return starlette.responses.JSONResponse({"error": error.details()}, HTTPStatus.BAD_REQUEST)
        path = request.scope["raw_path"].decode("latin-1").removeprefix(request.scope["root_path"])
        answer = await self._server.session.request(
            request.method,
            URL(f"http://{self._server.http}{path}?{request.url.query}", encoded=True),
            headers=[
                *((name, value) for name, value in request.headers.items() if name not in _HOP_HEADERS),
                (_FORWARDED_FOR, request.client.host if request.client else ""),
            ],
            data=await request.body(),
            allow_redirects=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        )
        headers = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_HEADERS}
        if answer.content_type == "text/event-stream":

            async def pieces() -> AsyncIterator[bytes]:
                async with answer:
                    async for piece in answer.content.iter_any():
                        yield piece

            return starlette.responses.StreamingResponse(pieces(), answer.status, headers)
        async with answer:
            return starlette.responses.Response(await answer.read(), answer.status, headers)

    async def unary(self, name: str, message: bytes, context: RayServegRPCContext) -> Answer:
        try:
            await self._load_requested_model()
            return Answer(await self._channel.unary_unary(_path(name))(message, metadata=_metadata(context)))
        except grpc.aio.AioRpcError as error:
            # Not raised, because Serve would log its traceback twice, and clients' requests may fail often.
            _set_status(error, context)
            return Answer(b"")

    async def ModelStreamInfer(  # noqa: N802 - the service's name
        self, messages: gRPCInputStream[bytes], grpc_context: RayServegRPCContext
    ) -> AsyncIterator[Answer]:
        """Forward a gRPC stream, message by message in both directions."""
        try:
            await self._load_requested_model()
            async for message in self._channel.stream_stream(_path(_STREAM))(
                messages, metadata=_metadata(grpc_context)
            ):
                yield Answer(message)
        except grpc.aio.AioRpcError as error:
            _set_status(error, grpc_context)
            raise  # Serve does not send a stream's status without an exception.

    async def _load_requested_model(self) -> None:
        """Load the model of Serve's multiplexed model id, if the call has one."""
        if self._load is not None and (name := serve.get_multiplexed_model_id()):
            await self._load(name)


def _unary(name: str) -> Callable[[Replica, bytes, RayServegRPCContext], Awaitable[Answer]]:
    async def method(self: Replica, message: bytes, grpc_context: RayServegRPCContext) -> Answer:
        return await self.unary(name, message, grpc_context)

    return method


for _name in set(_SERVICE.methods_by_name) - {_STREAM}:
    setattr(Replica, _name, _unary(_name))


def _model_loader(channel: grpc.aio.Channel, most: int) -> Callable[[str], Awaitable[object]]:
    """Return a function that loads a model, and unloads the least recently used one if there are too many."""
    load, unload = (channel.unary_unary(_path(f"RepositoryModel{what}")) for what in ("Load", "Unload"))

    async def loaded(name: str) -> SimpleNamespace:
        await load(pb.RepositoryModelLoadRequest(model_name=name).SerializeToString())

        async def end() -> None:
            await unload(pb.RepositoryModelUnloadRequest(model_name=name).SerializeToString())

        # Serve calls __del__. As a class's method it would also be called by the garbage collector.
        return SimpleNamespace(__del__=end)

    multiplexed: Callable[[str], Awaitable[object]] = serve.multiplexed(max_num_models_per_replica=most)(loaded)
    return multiplexed


def _path(name: str) -> str:
    return f"/{_SERVICE.full_name}/{name}"


def _metadata(context: RayServegRPCContext) -> list[tuple[str, str]]:
    return [*context.invocation_metadata(), (_FORWARDED_FOR, context.peer())]


def _set_status(error: grpc.aio.AioRpcError, context: RayServegRPCContext) -> None:
    """Set the server's status code and text for Serve's response."""
    context.set_code(error.code())
    context.set_details(error.details())
