"""A real gRPC server on loopback that answers with plain protobuf, and both clients behind one interface."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import pytest

from rocserve.core.tensors import bytes_elements
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.protocol import model_config_pb2
from rocserve_client import AsyncClient, Client


@dataclass
class LoopbackServer:
    """A server with models: echo returns its inputs, slow never answers, fails.<STATUS> fails with that status, classes
    returns class texts; in a stream times.<N> answers N times."""

    address: str = ""
    requests: list[Any] = field(default_factory=list)
    metadata: list[dict[str, str | bytes]] = field(default_factory=list)
    ready: bool = True
    garbage: bytes = b""
    """Replaces all answers."""

    def model_infer(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.requests.append(request)
        name, _, status = request.model_name.partition(".")
        if name == "fails":
            context.abort(grpc.StatusCode[status], f"asked to fail with {status}")
        if name == "slow":
            given_up = threading.Event()
            context.add_callback(given_up.set)
            given_up.wait()
        return echo(request)

    def model_stream_infer(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        for request in requests:
            self.requests.append(request)
            if request.model_name == "breaks":
                context.abort(grpc.StatusCode.UNAVAILABLE, "the stream is broken")
            answer = pb.ModelStreamInferResponse()
            if request.model_name.startswith("times."):
                yield from decoupled(request)
                continue
            if request.model_name == "fails":
                answer.error_message = "asked to fail"
                answer.infer_response.id = request.id
            else:
                answer.infer_response.CopyFrom(echo(request))
            yield answer

    def server_ready(self, _: Any, context: grpc.ServicerContext) -> Any:
        return pb.ServerReadyResponse(ready=self.ready)

    def model_ready(self, request: Any, context: grpc.ServicerContext) -> Any:
        return pb.ModelReadyResponse(ready=self.ready and request.name == "echo")

    def repository_index(self, request: Any, context: grpc.ServicerContext) -> Any:
        rows = [("echo", "1", "READY", ""), ("broken", "2", "UNAVAILABLE", "its file is empty"), ("never", "", "", "")]
        index = pb.RepositoryIndexResponse()
        for name, version, state, reason in rows:
            if state == "READY" or not request.ready:
                index.models.add(name=name, version=version, state=state, reason=reason)
        return index

    def model_config(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.requests.append(request)
        answer = pb.ModelConfigResponse()
        answer.config.name, answer.config.max_batch_size = "echo", 4
        return answer

    def keep(self, answer: Any) -> Callable[[Any, grpc.ServicerContext], Any]:
        def handle(request: Any, context: grpc.ServicerContext) -> Any:
            self.requests.append(request)
            return answer

        return handle


@dataclass
class VectorServer(LoopbackServer):
    """A server with models of text: `rows` takes four texts in a request, `single` and `behind_text` one, and `behind`
    is the encoder of the latter. A text's vector: its length, its first and its last byte. `shapes` takes no text."""

    texts: list[list[str]] = field(default_factory=list)
    """Of each request, in the order of their arrival."""
    under_way: int = 0
    most_under_way: int = 0
    gate: int = 0
    """Requests are answered once so many have arrived."""
    cancelled: int = 0
    _arrival: threading.Condition = field(default_factory=threading.Condition)

    def model_config(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.requests.append(request)
        name = request.name
        if name not in ("rows", "single", "behind", "behind_text", "shapes"):
            context.abort(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{name}' is not found")
        answer = pb.ModelConfigResponse()
        config = answer.config
        config.name, config.max_batch_size = name, 4 if name == "rows" else 0
        if name in ("behind", "shapes"):
            config.input.add(name="input_ids", data_type=model_config_pb2.TYPE_INT64, dims=[-1])
            config.output.add(name="OUT", data_type=model_config_pb2.TYPE_FP32, dims=[-1, 3])
        else:
            config.input.add(name="TEXT", data_type=model_config_pb2.TYPE_STRING, dims=[1])
            config.input.add(name="IDS", data_type=model_config_pb2.TYPE_INT64, dims=[-1], optional=True)
            config.output.add(name="EMBEDDING", data_type=model_config_pb2.TYPE_FP32, dims=[3])
        return answer

    def model_infer(self, request: Any, context: grpc.ServicerContext) -> Any:
        (text,), (raw,) = request.inputs, request.raw_input_contents
        assert (request.outputs[0].name, text.name, text.datatype) == ("EMBEDDING", "TEXT", "BYTES")
        elements = [bytes(element) for element in bytes_elements(raw, math.prod(text.shape), "TEXT")]
        assert list(text.shape) == ([len(elements), 1] if request.model_name == "rows" else [1])
        with self._arrival:
            self.requests.append(request)
            self.texts.append([element.decode() for element in elements])
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
            self._arrival.notify_all()
            self._arrival.wait_for(lambda: len(self.texts) >= self.gate)
        try:
            if b"fail" in elements:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "asked to fail")
            if b"wait" in elements:
                self._wait_for_end(context)
        finally:
            with self._arrival:
                self.under_way -= 1
        vectors = np.array([[len(element), element[0], element[-1]] for element in elements], np.float32)
        answer = pb.ModelInferResponse(model_name=request.model_name)
        if b"empty" in elements:
            vectors = vectors[:0]
        shape = vectors.shape if request.model_name == "rows" else (vectors.size,)
        answer.outputs.add(name="EMBEDDING", datatype="FP32", shape=shape)
        answer.raw_output_contents.append(vectors.tobytes())
        return answer

    def _wait_for_end(self, context: grpc.ServicerContext) -> None:
        ended = threading.Event()
        if context.add_callback(ended.set):
            ended.wait()
        with self._arrival:
            self.cancelled += 1


def decoupled(request: Any) -> Iterator[Any]:
    """As many responses as the model's name says, and an empty last one if the request asks for it."""
    for number in range(int(request.model_name.partition(".")[2])):
        answer = pb.ModelStreamInferResponse()
        response = answer.infer_response
        response.id = request.id
        response.outputs.add(name="N", datatype="INT32", shape=[1])
        response.raw_output_contents.append(number.to_bytes(4, "little"))
        yield answer
    if "triton_enable_empty_final_response" in request.parameters:
        last = pb.ModelStreamInferResponse()
        last.infer_response.id = request.id
        last.infer_response.parameters["triton_final_response"].bool_param = True
        yield last


def echo(request: Any) -> Any:
    answer = pb.ModelInferResponse(model_name=request.model_name, model_version="3", id=request.id)
    for name, parameter in request.parameters.items():
        answer.parameters[name].CopyFrom(parameter)
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        answer.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        answer.raw_output_contents.append(raw)
    return answer


def model_statistics() -> Any:
    answer = pb.ModelStatisticsResponse()
    row = answer.model_stats.add(name="echo", version="3", inference_count=8, execution_count=2, last_inference=5)
    row.inference_stats.success.count, row.inference_stats.success.ns = 4, 8_000
    row.inference_stats.queue.count, row.inference_stats.queue.ns = 4, 2_000
    row.batch_stats.add(batch_size=4).compute_infer.count = 2
    return answer


def model_metadata() -> Any:
    answer = pb.ModelMetadataResponse(name="echo", versions=["3"], platform="onnx_onnxv1")
    answer.inputs.add(name="IN", datatype="FP32", shape=[-1, 4])
    answer.outputs.add(name="OUT", datatype="BYTES", shape=[-1])
    answer.properties["engine"] = "migraphx"
    return answer


class _Handler(grpc.GenericRpcHandler):
    """The service of a LoopbackServer; records the metadata of every call."""

    def __init__(self, server: LoopbackServer) -> None:
        self._server = server
        self._unary: dict[str, Callable[[Any, grpc.ServicerContext], Any]] = {
            "ModelInfer": server.model_infer,
            "ServerReady": server.server_ready,
            "ModelReady": server.model_ready,
            "RepositoryIndex": server.repository_index,
            "ServerLive": server.keep(pb.ServerLiveResponse(live=True)),
            "ServerMetadata": server.keep(pb.ServerMetadataResponse(name="x", version="1", extensions=["a", "b"])),
            "ModelMetadata": server.keep(model_metadata()),
            "ModelConfig": server.model_config,
            "ModelStatistics": server.keep(model_statistics()),
            "RepositoryModelLoad": server.keep(pb.RepositoryModelLoadResponse()),
            "RepositoryModelUnload": server.keep(pb.RepositoryModelUnloadResponse()),
        }

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        service, _, method = details.method.rpartition("/")
        self._server.metadata.append(dict(details.invocation_metadata))
        if service != "/inference.GRPCInferenceService":
            return None
        if method == "ModelStreamInfer":
            return grpc.stream_stream_rpc_method_handler(
                self._server.model_stream_infer, pb.ModelInferRequest.FromString, self._serialize
            )
        request = getattr(pb, f"{method}Request")
        return grpc.unary_unary_rpc_method_handler(self._unary[method], request.FromString, self._serialize)

    def _serialize(self, message: Any) -> bytes:
        data: bytes = self._server.garbage or message.SerializeToString()
        return data


def start(server: LoopbackServer, credentials: grpc.ServerCredentials | None = None) -> grpc.Server:
    """Serve on a free port of loopback; the address goes into `server`."""
    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    grpc_server = grpc.server(ThreadPoolExecutor(16), handlers=[_Handler(server)], options=unlimited)
    if credentials is None:
        server.address = f"127.0.0.1:{grpc_server.add_insecure_port('127.0.0.1:0')}"
    else:
        server.address = f"localhost:{grpc_server.add_secure_port('localhost:0', credentials)}"
    grpc_server.start()
    return grpc_server


@pytest.fixture
def loopback() -> Iterator[LoopbackServer]:
    server = LoopbackServer()
    grpc_server = start(server)
    yield server
    grpc_server.stop(None).wait()


@pytest.fixture
def vectors() -> Iterator[VectorServer]:
    server = VectorServer()
    grpc_server = start(server)
    yield server
    grpc_server.stop(None).wait()


@pytest.fixture
def serve() -> Iterator[Callable[..., grpc.Server]]:
    """Starts further servers, which end with the test."""
    started: list[grpc.Server] = []

    def serving(server: LoopbackServer, credentials: grpc.ServerCredentials | None = None) -> grpc.Server:
        started.append(start(server, credentials))
        return started[-1]

    yield serving
    for grpc_server in started:
        grpc_server.stop(None).wait()


Caller = Callable[..., Any]


def call_blocking(address: str, method: str, *arguments: Any, connection: Any = None, **named: Any) -> Any:
    with Client(address, **(connection or {})) as client:
        return getattr(client, method)(*arguments, **named)


def call_asyncio(address: str, method: str, *arguments: Any, connection: Any = None, **named: Any) -> Any:
    async def run() -> Any:
        async with AsyncClient(address, **(connection or {})) as client:
            return await getattr(client, method)(*arguments, **named)

    return asyncio.run(run())


@pytest.fixture(params=[call_blocking, call_asyncio], ids=["blocking", "asyncio"])
def call(request: pytest.FixtureRequest) -> Caller:
    """call(address, method, *arguments, connection={...}, **named): one call of either client."""
    caller: Caller = request.param
    return caller
