"""Large or odd requests, each of which might delay other clients, and their models."""

from __future__ import annotations

import gzip
import http.client
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from benchmarks.load_generator import INFER_PATH

SERVER_FLAGS = (
    "--cache-config=local,size=2147483648",
    "--max-request-memory=17179869184",
    "--model-control-mode=explicit",
)
UNLOADED_MODELS = 5000
"""Models in the index."""
_Request = service_pb2.ModelInferRequest
_SERVICE = "/inference.GRPCInferenceService/"
_STREAM = f"{_SERVICE}ModelStreamInfer"
_MILLION = 1 << 20
_MIB = 1 << 20
_CHANNEL = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
_CALL_SECONDS = 300.0

_MODEL = """\
import numpy
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse({outputs}) for request in requests]
"""
_SAME = '[pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy())]'
_ONE = '[pb_utils.Tensor("OUTPUT0", numpy.zeros(1, numpy.uint8))]'
_MADE = '[pb_utils.Tensor("OUTPUT0", {array})]'


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    datatype: str
    outputs: str = _ONE
    """Its answer to a request, as Python text."""
    output_datatype: str = "UINT8"
    more: str = ""
    """The rest of its configuration."""

    def write(self, repository: Path) -> None:
        version = repository / self.name / "1"
        version.mkdir(parents=True)
        given, made = _config_type(self.datatype), _config_type(self.output_datatype)
        config = (
            f'backend: "python"\ninput {{ name: "INPUT0" data_type: TYPE_{given} dims: [ -1 ] }}\n'
            f'output {{ name: "OUTPUT0" data_type: TYPE_{made} dims: [ -1 ] }}\n'
            f"instance_group {{ kind: KIND_CPU }}\n{self.more}\n"
        )
        (version.parent / "config.pbtxt").write_text(config)
        (version / "model.py").write_text(_MODEL.format(outputs=self.outputs))


def _config_type(datatype: str) -> str:
    return "STRING" if datatype == "BYTES" else datatype


SMALL = Model("small", "UINT8")
_CACHED = "response_cache { enable: true }"
MODELS = (
    SMALL,
    Model("take_bytes", "UINT8"),
    Model("take_strings", "BYTES"),
    Model("take_ints", "INT32"),
    Model("take_floats", "FP32"),
    Model("same_bytes", "UINT8", _SAME),
    Model("same_strings", "BYTES", _SAME, "BYTES"),
    Model("cached", "UINT8", _SAME, more=_CACHED),
    Model("make_ints", "UINT8", _MADE.format(array="numpy.arange(1 << 22, dtype=numpy.int32)"), "INT32"),
    Model("make_floats", "UINT8", _MADE.format(array="numpy.arange(1 << 24, dtype=numpy.float32)"), "FP32"),
    Model("make_strings", "UINT8", _MADE.format(array='numpy.full(1 << 20, b"x", object)'), "BYTES"),
)
_CHAIN = """\
platform: "ensemble"
input { name: "INPUT0" data_type: TYPE_UINT8 dims: [ -1 ] }
output { name: "OUTPUT0" data_type: TYPE_UINT8 dims: [ -1 ] }
ensemble_scheduling {
  step {
    model_name: "same_bytes" model_version: -1
    input_map { key: "INPUT0" value: "INPUT0" } output_map { key: "OUTPUT0" value: "between" }
  }
  step {
    model_name: "same_bytes" model_version: -1
    input_map { key: "INPUT0" value: "between" } output_map { key: "OUTPUT0" value: "OUTPUT0" }
  }
}
"""


def write_models(repository: Path) -> list[str]:
    """Write the models that are loaded."""
    for model in MODELS:
        model.write(repository)
    (repository / "chain" / "1").mkdir(parents=True)
    (repository / "chain" / "config.pbtxt").write_text(_CHAIN)
    for number in range(UNLOADED_MODELS):
        (repository / f"unloaded_{number}" / "1").mkdir(parents=True)
    return [*(model.name for model in MODELS), "chain"]


@dataclass(frozen=True, slots=True)
class Addresses:
    grpc: str
    http: str


Send = Callable[[Addresses], None]
Make = Callable[[], Send]


@dataclass(frozen=True, slots=True)
class Case:
    """The requests, which are made before the others' delays are measured."""

    protocol: str
    title: str
    make: Make

    @property
    def name(self) -> str:
        return f"{self.protocol}: {self.title}"


# gRPC


def _request(
    model: str, datatype: str, shape: Sequence[int], raw: bytes | None = None
) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="INPUT0", datatype=datatype, shape=shape)
    if raw is not None:
        request.raw_input_contents.append(raw)
    return request


def _unary(message: bytes, method: str = INFER_PATH, compression: grpc.Compression | None = None) -> Send:
    def send(addresses: Addresses) -> None:
        with grpc.insecure_channel(addresses.grpc, _CHANNEL) as channel, suppress(grpc.RpcError):
            channel.unary_unary(method)(message, timeout=_CALL_SECONDS, compression=compression)

    return send


def _stream(message: bytes) -> Send:
    def send(addresses: Addresses) -> None:
        with grpc.insecure_channel(addresses.grpc, _CHANNEL) as channel:
            for _ in channel.stream_stream(_STREAM)(iter([message]), timeout=_CALL_SECONDS):
                pass

    return send


def _streamed() -> Send:
    return _stream(_request("same_bytes", "UINT8", [512 * _MIB], bytes(512 * _MIB)).SerializeToString())


def _raw(model: str, datatype: str, count: int, raw: Callable[[], bytes]) -> Make:
    return lambda: _unary(_request(model, datatype, [count], raw()).SerializeToString())


def _typed(model: str, datatype: str, field: str, element: Any, count: int) -> Make:
    def make() -> Send:
        request = _request(model, datatype, [count])
        getattr(request.inputs[0].contents, field).extend([element] * count)
        return _unary(request.SerializeToString())

    return make


def _odd(fill: Callable[[_Request], object]) -> Make:
    """A small request with something added."""

    def make() -> Send:
        request = _request("small", "UINT8", [1], b"x")
        fill(request)
        return _unary(request.SerializeToString())

    return make


def _parameters(request: _Request, count: int) -> None:
    for number in range(count):
        request.parameters[f"name{number}"].int64_param = number


def _classes() -> Send:
    request = _request("make_floats", "UINT8", [1], b"x")
    request.outputs.add(name="OUTPUT0").parameters["classification"].int64_param = 1 << 20
    return _unary(request.SerializeToString())


def _compressed_zeros() -> Send:
    message = _request("take_bytes", "UINT8", [512 * _MIB], bytes(512 * _MIB)).SerializeToString()
    return _unary(message, compression=grpc.Compression.Gzip)


def _shared() -> Send:
    size = 1024 * _MIB
    memory = shared_memory.SharedMemory(create=True, size=size)
    memory.buf[:] = bytes(size)
    register = service_pb2.SystemSharedMemoryRegisterRequest(name="region", key=f"/{memory.name}", byte_size=size)
    request = _request("same_bytes", "UINT8", [size])
    for given in (request.inputs[0], request.outputs.add(name="OUTPUT0")):
        given.parameters["shared_memory_region"].string_param = "region"
        given.parameters["shared_memory_byte_size"].int64_param = size
    unregister = service_pb2.SystemSharedMemoryUnregisterRequest(name="region")

    def send(addresses: Addresses) -> None:
        _unary(register.SerializeToString(), f"{_SERVICE}SystemSharedMemoryRegister")(addresses)
        _unary(request.SerializeToString())(addresses)
        _unary(unregister.SerializeToString(), f"{_SERVICE}SystemSharedMemoryUnregister")(addresses)
        memory.close()
        memory.unlink()

    return send


def _loading(size: int) -> Make:
    def make() -> Send:
        request = service_pb2.RepositoryModelLoadRequest(model_name="small")
        request.parameters["config"].string_param = json.dumps({"backend": "python", "x": "a" * size})
        return _unary(request.SerializeToString(), f"{_SERVICE}RepositoryModelLoad")

    return make


def _index() -> Send:
    return _unary(b"", f"{_SERVICE}RepositoryIndex")


# HTTP


def _post(path: str, body: bytes, headers: Mapping[str, str] | None = None, method: str = "POST") -> Send:
    def send(addresses: Addresses) -> None:
        connection = http.client.HTTPConnection(addresses.http, timeout=_CALL_SECONDS)
        try:
            connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            while response.read(_MIB):
                pass
        except OSError:
            pass  # The server may refuse a body without reading it.
        finally:
            connection.close()

    return send


def _infer(model: str, head: Mapping[str, Any], raw: bytes = b"", **headers: str) -> Send:
    text = json.dumps(head).encode()
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    if raw:
        sent["Inference-Header-Content-Length"] = str(len(text))
    return _post(f"/v2/models/{model}/infer", text + raw, sent)


def _binary(
    model: str, datatype: str, count: int, raw: Callable[[], bytes], output: bool = True, **headers: str
) -> Make:
    def make() -> Send:
        data = raw()
        given = {"name": "INPUT0", "datatype": datatype, "shape": [count]}
        head = {"inputs": [given | {"parameters": {"binary_data_size": len(data)}}]}
        return _infer(model, head | {"parameters": {"binary_data_output": output}}, data, **headers)

    return make


def _json(model: str, datatype: str, element: Any, count: int, **headers: str) -> Make:
    given = {"name": "INPUT0", "datatype": datatype, "shape": [count]}
    return lambda: _infer(model, {"inputs": [given | {"data": [element] * count}]}, **headers)


def _small_json(**members: Any) -> Make:
    given = {"name": "INPUT0", "datatype": "UINT8", "shape": [1], "data": [1]}
    return lambda: _infer("small", {"inputs": [given], **members})


def _packed(pack: Callable[[bytes], bytes], encoding: str) -> Make:
    def make() -> Send:
        count = 60 * _MIB
        head = {"inputs": [{"name": "INPUT0", "datatype": "UINT8", "shape": [count]}]}
        head["inputs"][0]["parameters"] = {"binary_data_size": count}
        text = json.dumps(head).encode()
        headers = {"Content-Encoding": encoding, "Inference-Header-Content-Length": str(len(text))}
        return _post("/v2/models/take_bytes/infer", pack(text + bytes(count)), headers)

    return make


def _generate(size: int, stream: bool = False) -> Make:
    path = "/v2/models/same_strings/generate" + ("_stream" if stream else "")
    return lambda: _post(path, json.dumps({"INPUT0": ["abc"] * (size // 7)}).encode())


def _zeros(nbytes: int) -> Callable[[], bytes]:
    return lambda: bytes(nbytes)


_MANY_STRINGS = 4 * _MILLION
CASES: tuple[Case, ...] = (
    Case("-", "nothing", lambda: lambda addresses: None),
    Case("gRPC", "1 GiB in", _raw("take_bytes", "UINT8", 1024 * _MIB, _zeros(1024 * _MIB))),
    Case("gRPC", "256 MiB in", _raw("take_bytes", "UINT8", 256 * _MIB, _zeros(256 * _MIB))),
    Case("gRPC", "256 MiB in and out", _raw("same_bytes", "UINT8", 256 * _MIB, _zeros(256 * _MIB))),
    Case("gRPC", "1 GiB in and out", _raw("same_bytes", "UINT8", 1024 * _MIB, _zeros(1024 * _MIB))),
    Case("gRPC", "512 MiB through a stream", _streamed),
    Case("gRPC", "512 MiB of zeros as gzip", _compressed_zeros),
    Case("gRPC", "4 M empty strings", _raw("take_strings", "BYTES", _MANY_STRINGS, _zeros(4 * _MANY_STRINGS))),
    Case("gRPC", "64 M empty strings", _raw("take_strings", "BYTES", 64 * _MILLION, _zeros(256 * _MIB))),
    Case("gRPC", "64 M strings, one too few", _raw("take_strings", "BYTES", 64 * _MILLION, _zeros(256 * _MIB - 4))),
    Case("gRPC", "4 M strings in and out", _raw("same_strings", "BYTES", _MANY_STRINGS, _zeros(4 * _MANY_STRINGS))),
    Case("gRPC", "4 M bytes_contents", _typed("take_strings", "BYTES", "bytes_contents", b"abc", _MANY_STRINGS)),
    Case("gRPC", "16 M int_contents", _typed("take_ints", "INT32", "int_contents", 5, 16 * _MILLION)),
    Case("gRPC", "64 M fp32_contents", _typed("take_floats", "FP32", "fp32_contents", 5.0, 64 * _MILLION)),
    Case("gRPC", "1 M inputs", _odd(lambda request: [request.inputs.add() for _ in range(_MILLION)])),
    Case("gRPC", "1 M outputs", _odd(lambda request: [request.outputs.add() for _ in range(_MILLION)])),
    Case("gRPC", "16 M dimensions", _odd(lambda request: request.inputs[0].shape.extend([1] * (16 * _MILLION)))),
    Case("gRPC", "1 M parameters", _odd(lambda request: _parameters(request, _MILLION))),
    Case("gRPC", "1 M raw contents", _odd(lambda request: request.raw_input_contents.extend([b""] * _MILLION))),
    Case("gRPC", "id of 256 MiB", _odd(lambda request: setattr(request, "id", "a" * (256 * _MIB)))),
    Case("gRPC", "1 M classes of 16 M", _classes),
    Case("gRPC", "256 MiB, cached", _raw("cached", "UINT8", 256 * _MIB, _zeros(256 * _MIB))),
    Case("gRPC", "256 MiB through an ensemble", _raw("chain", "UINT8", 256 * _MIB, _zeros(256 * _MIB))),
    Case("gRPC", "1 GiB in shared memory, both ways", _shared),
    Case("gRPC", f"index of {UNLOADED_MODELS} models", _index),
    Case("gRPC", "load with 64 MiB of configuration", _loading(64 * _MIB)),
    Case("HTTP", "1 GiB in", _binary("take_bytes", "UINT8", 1024 * _MIB, _zeros(1024 * _MIB))),
    Case("HTTP", "256 MiB in and out", _binary("same_bytes", "UINT8", 256 * _MIB, _zeros(256 * _MIB))),
    Case("HTTP", "1 GiB in and out", _binary("same_bytes", "UINT8", 1024 * _MIB, _zeros(1024 * _MIB))),
    Case(
        "HTTP",
        "256 MiB in, gzip out",
        _binary("same_bytes", "UINT8", 256 * _MIB, _zeros(256 * _MIB), Accept_Encoding="gzip"),
    ),
    Case("HTTP", "60 MiB of gzip", _packed(gzip.compress, "gzip")),
    Case("HTTP", "60 MiB of deflate", _packed(zlib.compress, "deflate")),
    Case("HTTP", "4 M empty strings", _binary("take_strings", "BYTES", _MANY_STRINGS, _zeros(4 * _MANY_STRINGS))),
    Case("HTTP", "4 M strings in and out", _binary("same_strings", "BYTES", _MANY_STRINGS, _zeros(4 * _MANY_STRINGS))),
    Case("HTTP", "1 M strings out as JSON", _binary("make_strings", "UINT8", 1, _zeros(1), output=False)),
    Case("HTTP", "4 M numbers out as JSON", _binary("make_ints", "UINT8", 1, _zeros(1), output=False)),
    Case("HTTP", "48 MB of numbers as JSON", _json("take_ints", "INT32", 5, 16 * _MILLION)),
    Case("HTTP", "28 MB of strings as JSON", _json("same_strings", "BYTES", "abc", 4 * _MILLION)),
    Case("HTTP", "250 KB of numbers as JSON", _json("take_ints", "INT32", 5, 80_000)),
    Case("HTTP", "id of 60 MB", _small_json(id="a" * (60 * _MIB))),
    Case("HTTP", "1 M parameters", _small_json(parameters={f"n{number}": 1 for number in range(_MILLION)})),
    Case("HTTP", "1 M outputs", _small_json(outputs=[{"name": "OUTPUT0"}] * _MILLION)),
    Case("HTTP", "generate, 28 MB", _generate(28 * _MIB)),
    Case("HTTP", "generate_stream, 28 MB", _generate(28 * _MIB, stream=True)),
    Case(
        "HTTP",
        "512 MiB without JSON",
        lambda: _post("/v2/models/take_bytes/infer", bytes(60 * _MIB), {"Inference-Header-Content-Length": "0"}),
    ),
    Case("HTTP", f"index of {UNLOADED_MODELS} models", lambda: _post("/v2/repository/index", b"")),
    Case(
        "HTTP",
        "load with 60 MiB of configuration",
        lambda: _post(
            "/v2/repository/models/small/load",
            json.dumps({"parameters": {"config": json.dumps({"backend": "python", "x": "a" * (60 * _MIB)})}}).encode(),
        ),
    ),
)
