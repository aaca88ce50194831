"""The REST protocol: KServe's with Triton's extensions, over plain HTTP/1.1."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from typing import Any

import pytest
from support.parity.exchange import Exchange, HttpCall, Step
from support.parity.models import parity_models
from support.parity.pair import Pair
from support.parity.repository import HttpIndex

_EVERY_MODEL = [model.name for model in parity_models()]
MODEL = "/v2/models/add_sub"
ROW = [1, 2, 3, 4]


def get(path: str, **headers: str) -> HttpCall:
    return HttpCall("GET", path, headers=headers)


def post(path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> HttpCall:
    """Post a body: bytes unchanged, other values as JSON."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    return HttpCall("POST", path, data, headers or {})


def one(name: str, *calls: Step) -> Exchange:
    return Exchange(f"HTTP: {name}", calls)


def tensor(name: str = "INPUT0", data: Any = ROW, **more: Any) -> dict[str, Any]:
    """A tensor's JSON; None leaves an entry out."""
    entries = {"name": name, "shape": [1, 4], "datatype": "INT32", "data": data, **more}
    return {key: value for key, value in entries.items() if value is not None}


def body(*inputs: Any, **more: Any) -> dict[str, Any]:
    return {"inputs": list(inputs), **more}


BOTH = (tensor("INPUT0"), tensor("INPUT1"))


def binary(head: Any, *data: bytes, length: int | str | None = None) -> HttpCall:
    text = json.dumps(head).encode()
    shown = len(text) if length is None else length
    return post(f"{MODEL}/infer", text + b"".join(data), {"Inference-Header-Content-Length": str(shown)})


def in_binary(name: str = "INPUT0", size: Any = 16) -> dict[str, Any]:
    return tensor(name, None, parameters={"binary_data_size": size})


PACKED = b"".join(value.to_bytes(4, "little") for value in ROW)


def infer(name: str, *inputs: Any, model: str = "add_sub", **more: Any) -> Exchange:
    return one(name, post(f"/v2/models/{model}/infer", body(*inputs, **more)))


QUESTIONS = [
    one("live", get("/v2/health/live")),
    one("server metadata", get("/v2")),
    one("server metadata with a slash", get("/v2/")),
    one("model ready", get(f"{MODEL}/ready")),
    one("version ready", get(f"{MODEL}/versions/1/ready")),
    one("unknown model ready", get("/v2/models/missing/ready")),
    one("unknown version ready", get(f"{MODEL}/versions/9/ready")),
    one("version that is not a number ready", get(f"{MODEL}/versions/x/ready")),
    one("model metadata", get(MODEL)),
    one("version metadata", get("/v2/models/versions/versions/3")),
    one("unknown model metadata", get("/v2/models/missing")),
    one("unknown version metadata", get(f"{MODEL}/versions/9")),
    one("model config of an unknown model", get("/v2/models/missing/config")),
    one("statistics of an idle model", get("/v2/models/idle/stats")),
    one("statistics of a version", get("/v2/models/idle/versions/1/stats")),
    one("statistics of an unknown model", get("/v2/models/missing/stats")),
    one("statistics of an unknown version", get("/v2/models/idle/versions/2/stats")),
    *(
        one(f"{method} {path}", HttpCall(method, path))
        for method, path in (
            ("GET", "/"),
            ("GET", "/v1"),
            ("GET", "/v2/nothing"),
            ("GET", "/v2/health"),
            ("GET", "/v2/health/well"),
            ("GET", "/v2/models"),
            ("GET", "/v2/models/"),
            ("GET", f"{MODEL}/nothing"),
            ("GET", f"{MODEL}/versions"),
            ("GET", f"{MODEL}/versions/1/nothing"),
            ("GET", f"{MODEL}/infer"),
            ("POST", "/v2/health/live"),
            ("POST", "/v2"),
            ("POST", MODEL),
            ("POST", f"{MODEL}/ready"),
            ("POST", f"{MODEL}/config"),
            ("PUT", f"{MODEL}/infer"),
            ("DELETE", MODEL),
            ("GET", "/v2/repository/index"),
            ("GET", "/v2/repository/models/add_sub/load"),
            ("POST", "/v2/repository/models/add_sub/reload"),
            ("POST", "/v2/systemsharedmemory/status"),
        )
    ),
]
ANSWERED = [
    infer("two rows of JSON", tensor("INPUT0", ROW * 2, shape=[2, 4]), tensor("INPUT1", ROW * 2, shape=[2, 4])),
    infer("nested data", tensor("INPUT0", [ROW]), tensor("INPUT1", [ROW])),
    infer("an id", *BOTH, id="request 1"),
    infer("no outputs", *BOTH, outputs=[]),
    infer("one output", *BOTH, outputs=[{"name": "OUTPUT1"}]),
    infer("outputs turned", *BOTH, outputs=[{"name": "OUTPUT1"}, {"name": "OUTPUT0"}]),
    infer("binary output", *BOTH, outputs=[{"name": "OUTPUT0", "parameters": {"binary_data": True}}]),
    infer(
        "binary output and one of JSON",
        *BOTH,
        outputs=[{"name": "OUTPUT0", "parameters": {"binary_data": True}}, {"name": "OUTPUT1"}],
    ),
    infer("all outputs binary", *BOTH, parameters={"binary_data_output": True}),
    infer(
        "all outputs binary but one",
        *BOTH,
        parameters={"binary_data_output": True},
        outputs=[{"name": "OUTPUT0", "parameters": {"binary_data": False}}, {"name": "OUTPUT1"}],
    ),
    infer("classes", *BOTH, outputs=[{"name": "OUTPUT0", "parameters": {"classification": 2}}]),
    infer(
        "classes in binary",
        *BOTH,
        outputs=[{"name": "OUTPUT0", "parameters": {"classification": 2, "binary_data": True}}],
    ),
    infer("unknown entries", *BOTH, colour="red"),
    infer(
        "parameters",
        tensor("IN", [1.5], shape=[1], datatype="FP32"),
        model="seen",
        id="x",
        parameters={"a": "b", "c": 1, "d": True},
    ),
    infer(
        "sequence",
        tensor("IN", [1.5], shape=[1], datatype="FP32"),
        model="seen",
        parameters={"sequence_id": 5, "sequence_start": True},
    ),
    infer(
        "sequence of text",
        tensor("IN", [1.5], shape=[1], datatype="FP32"),
        model="seen",
        parameters={"sequence_id": "s", "sequence_end": True},
    ),
    one("version", post("/v2/models/versions/versions/1/infer", body(tensor("IN", [1], shape=[1], datatype="FP32")))),
    *(
        infer(
            f"{datatype} as JSON",
            tensor(f"INPUT_{datatype}", data, shape=[len(data)], datatype=datatype),
            model="types_whole",
        )
        for datatype, data in (
            ("BOOL", [True, False]),
            ("UINT8", [0, 255]),
            ("UINT16", [0, 65535]),
            ("UINT32", [0, 2**32 - 1]),
            ("UINT64", [0, 2**64 - 1]),
            ("INT8", [-128, 127]),
            ("INT16", [-32768, 32767]),
            ("INT32", [-(2**31), 2**31 - 1]),
            ("INT64", [-(2**63), 2**63 - 1]),
            ("FP32", [0.5, -1.25, 1e10]),
            ("FP64", [0.1, -1e300]),
            ("BYTES", ["one", "", "grün"]),
        )
    ),
    one("binary inputs", binary(body(in_binary("INPUT0"), in_binary("INPUT1")), PACKED, PACKED)),
    one("a binary input and one of JSON", binary(body(in_binary("INPUT0"), tensor("INPUT1")), PACKED)),
    one(
        "binary both ways",
        binary(body(in_binary("INPUT0"), in_binary("INPUT1"), parameters={"binary_data_output": True}), PACKED, PACKED),
    ),
    one(
        "gzip",
        post(f"{MODEL}/infer", gzip.compress(json.dumps(body(*BOTH)).encode(), mtime=0), {"Content-Encoding": "gzip"}),
    ),
    one(
        "deflate",
        post(f"{MODEL}/infer", zlib.compress(json.dumps(body(*BOTH)).encode()), {"Content-Encoding": "deflate"}),
    ),
    one("gzip back", post(f"{MODEL}/infer", body(*BOTH), {"Accept-Encoding": "gzip"})),
    one("deflate back", post(f"{MODEL}/infer", body(*BOTH), {"Accept-Encoding": "deflate"})),
    one("raw bytes of one input", post("/v2/models/raw/infer", PACKED, {"Inference-Header-Content-Length": "0"})),
]
REFUSED = [
    infer("unknown model", *BOTH, model="missing"),
    one("unknown version", post(f"{MODEL}/versions/9/infer", body(*BOTH))),
    one("version that is not a number", post(f"{MODEL}/versions/x/infer", body(*BOTH))),
    one("no body", post(f"{MODEL}/infer")),
    one("no JSON", post(f"{MODEL}/infer", b"{")),
    one("JSON that is a list", post(f"{MODEL}/infer", [])),
    one("no inputs in JSON", post(f"{MODEL}/infer", {})),
    one("inputs that are not a list", post(f"{MODEL}/infer", {"inputs": 3})),
    infer("an input that is not an object", 3),
    infer("an input without a name", tensor(None), tensor("INPUT1")),
    infer("an input without a shape", tensor(shape=None), tensor("INPUT1")),
    infer("an input without a datatype", tensor(datatype=None), tensor("INPUT1")),
    infer("an input without data", tensor(data=None), tensor("INPUT1")),
    infer("a name that is a number", tensor(3), tensor("INPUT1")),
    infer("a shape of texts", tensor(shape=["1", "4"]), tensor("INPUT1")),
    infer("a shape below zero", tensor(shape=[-1, 4]), tensor("INPUT1")),
    infer("a shape that is a number", tensor(shape=4), tensor("INPUT1")),
    infer("an unknown datatype in JSON", tensor(datatype="INT33"), tensor("INPUT1")),
    infer("the wrong datatype in JSON", tensor("INPUT0"), tensor("INPUT1", datatype="FP32")),
    infer("too little data", tensor("INPUT0"), tensor("INPUT1", [1, 2])),
    infer("too much data", tensor("INPUT0"), tensor("INPUT1", [1, 2, 3, 4, 5])),
    infer("data of texts", tensor("INPUT0"), tensor("INPUT1", ["1", "2", "3", "4"])),
    infer("data of fractions", tensor("INPUT0"), tensor("INPUT1", [1.5, 2, 3, 4])),
    infer("data that is a number", tensor("INPUT0"), tensor("INPUT1", 3)),
    infer("data beyond the datatype", tensor("INPUT0"), tensor("INPUT1", [2**40, 0, 0, 0])),
    infer("FP16 as JSON", tensor("INPUT_FP16", [1.0], shape=[1], datatype="FP16"), model="types_whole"),
    infer("BF16 as JSON", tensor("INPUT_BF16", [1.0], shape=[1], datatype="BF16"), model="types_whole"),
    infer("BYTES of numbers", tensor("INPUT_BYTES", [1], shape=[1], datatype="BYTES"), model="types_whole"),
    infer("a missing input", tensor("INPUT0")),
    infer("an unknown input", tensor("INPUT0"), tensor("NOPE")),
    infer("an input twice", tensor("INPUT0"), tensor("INPUT0")),
    infer("an unknown output", *BOTH, outputs=[{"name": "NOPE"}]),
    infer("an output without a name", *BOTH, outputs=[{}]),
    infer("outputs that are not a list", *BOTH, outputs="OUTPUT0"),
    infer("classes below zero", *BOTH, outputs=[{"name": "OUTPUT0", "parameters": {"classification": -1}}]),
    infer("no classes", *BOTH, outputs=[{"name": "OUTPUT0", "parameters": {"classification": 0}}]),
    infer("classes of text", *BOTH, outputs=[{"name": "OUTPUT0", "parameters": {"classification": "2"}}]),
    infer("a batch too big", tensor(data=ROW * 9, shape=[9, 4]), tensor("INPUT1", ROW * 9, shape=[9, 4])),
    infer("a reserved parameter", *BOTH, parameters={"triton_x": 1}),
    infer("priority of text", *BOTH, parameters={"priority": "high"}),
    infer("time-out of text", *BOTH, parameters={"timeout": "soon"}),
    infer("a parameter that is a list", *BOTH, parameters={"list": [1]}),
    infer("parameters that are a list", *BOTH, parameters=[1]),
    infer("an id that is a number", *BOTH, id=7),
    infer("a decoupled model by HTTP", tensor("IN", [1], shape=[1]), model="repeat"),
    infer("a model that fails by HTTP", tensor("MODE", ["error"], shape=[1], datatype="BYTES"), model="faults"),
    infer(
        "a model that does not find by HTTP", tensor("MODE", ["not_found"], shape=[1], datatype="BYTES"), model="faults"
    ),
    infer(
        "a model that is not available by HTTP",
        tensor("MODE", ["unavailable"], shape=[1], datatype="BYTES"),
        model="faults",
    ),
    one("too little binary data", binary(body(in_binary("INPUT0"), in_binary("INPUT1")), PACKED, PACKED[:8])),
    one("too much binary data", binary(body(in_binary("INPUT0"), in_binary("INPUT1")), PACKED, PACKED, b"more")),
    one("no binary data", binary(body(in_binary("INPUT0"), in_binary("INPUT1")))),
    one(
        "binary data of another size",
        binary(body(in_binary("INPUT0", 16), in_binary("INPUT1", 20)), PACKED, PACKED, PACKED[:4]),
    ),
    one(
        "binary data and data",
        binary(body(tensor("INPUT0", ROW, parameters={"binary_data_size": 16}), tensor("INPUT1")), PACKED),
    ),
    one("size of text", binary(body(in_binary("INPUT0", "16"), tensor("INPUT1")), PACKED)),
    one("size below zero", binary(body(in_binary("INPUT0", -16), tensor("INPUT1")), PACKED)),
    one("header length that is not a number", binary(body(*BOTH), length="x")),
    one("header length below zero", binary(body(*BOTH), length=-5)),
    one("header length too long", binary(body(*BOTH), length=10_000)),
    one("header length too short", binary(body(*BOTH), length=10)),
    one("gzip that is none", post(f"{MODEL}/infer", b"nothing", {"Content-Encoding": "gzip"})),
    one("unknown encoding", post(f"{MODEL}/infer", body(*BOTH), {"Content-Encoding": "br"})),
]
CONTROL = [
    one("index", HttpIndex(_EVERY_MODEL), post("/v2/repository/index", b"{")),
    one("load of a missing model by HTTP", post("/v2/repository/models/http_missing/load")),
    one("load with no JSON", post("/v2/repository/models/add_sub/load", b"{")),
    one(
        "load with an unknown parameter by HTTP",
        post("/v2/repository/models/add_sub/load", {"parameters": {"colour": "red"}}),
    ),
    one(
        "load with a configuration of no JSON",
        post("/v2/repository/models/http_missing/load", {"parameters": {"config": "{"}}),
    ),
    one(
        "load with a file that is not base64",
        post("/v2/repository/models/http_missing/load", {"parameters": {"config": "{}", "file:1/model.py": "!"}}),
    ),
    one("unload of a missing model by HTTP", post("/v2/repository/models/http_missing/unload")),
    one(
        "unload with dependents of text",
        post("/v2/repository/models/http_missing/unload", {"parameters": {"unload_dependents": "x"}}),
    ),
    one("status of regions", get("/v2/systemsharedmemory/status"), get("/v2/systemsharedmemory/region/r/status")),
    one(
        "register a region that is not there",
        post("/v2/systemsharedmemory/region/r/register", {"key": "/rocserve_none", "offset": 0, "byte_size": 8}),
    ),
    one("register a region without a key", post("/v2/systemsharedmemory/region/r/register", {"byte_size": 8})),
    one(
        "register a region without a size", post("/v2/systemsharedmemory/region/r/register", {"key": "/rocserve_none"})
    ),
    one(
        "unregister by HTTP",
        post("/v2/systemsharedmemory/unregister"),
        post("/v2/systemsharedmemory/region/r/unregister"),
    ),
    one("CUDA regions", get("/v2/cudasharedmemory/status"), post("/v2/cudasharedmemory/unregister")),
    one(
        "trace settings",
        get("/v2/trace/setting"),
        get(f"{MODEL}/trace/setting"),
        get("/v2/models/missing/trace/setting"),
    ),
    one(
        "wrong trace setting",
        post("/v2/trace/setting", {"colour": "red"}),
        post("/v2/trace/setting", {"trace_rate": "often"}),
    ),
    one("log settings", get("/v2/logging"), post("/v2/logging", {}), post("/v2/logging", {"colour": "red"})),
    one("wrong log settings", post("/v2/logging", {"log_info": "yes"}), post("/v2/logging", b"{")),
]
GENERATE = "/v2/models/repeat_text"
GENERATED = [
    one("generate", post(f"{GENERATE}/generate", {"TEXT": "hello", "COUNT": 1})),
    one("generate by version", post(f"{GENERATE}/versions/1/generate", {"TEXT": "hello", "COUNT": 1})),
    one("generate a list", post(f"{GENERATE}/generate", {"TEXT": ["hello"], "COUNT": [1]})),
    one("generate with an id", post(f"{GENERATE}/generate", {"id": "x", "TEXT": "hello", "COUNT": 1})),
    one(
        "generate with parameters",
        post(f"{GENERATE}/generate", {"TEXT": "hello", "COUNT": 1, "parameters": {"a": "b"}}),
    ),
    one("generate with unknown entries", post(f"{GENERATE}/generate", {"TEXT": "hello", "COUNT": 1, "colour": "red"})),
    one("generate too much", post(f"{GENERATE}/generate", {"TEXT": "hello", "COUNT": 2})),
    one("generate nothing", post(f"{GENERATE}/generate", {"TEXT": "hello", "COUNT": 0})),
    one("generate an error", post(f"{GENERATE}/generate", {"TEXT": "error", "COUNT": 1})),
    one("generate without an input", post(f"{GENERATE}/generate", {"TEXT": "hello"})),
    one("generate of the wrong type", post(f"{GENERATE}/generate", {"TEXT": "hello", "COUNT": "many"})),
    one("generate from no JSON", post(f"{GENERATE}/generate", b"{")),
    one("generate from nothing", post(f"{GENERATE}/generate")),
    one("generate by an unknown model", post("/v2/models/missing/generate", {"TEXT": "hello"})),
    one("generate a stream", post(f"{GENERATE}/generate_stream", {"TEXT": "hello", "COUNT": 3})),
    one("generate a stream of one", post(f"{GENERATE}/generate_stream", {"TEXT": "hello", "COUNT": 1})),
    one("generate a stream of nothing", post(f"{GENERATE}/generate_stream", {"TEXT": "hello", "COUNT": 0})),
    one("generate a stream with an error", post(f"{GENERATE}/generate_stream", {"TEXT": "error", "COUNT": 2})),
    one("generate a stream without an input", post(f"{GENERATE}/generate_stream", {"TEXT": "hello"})),
    one("generate a stream by an unknown model", post("/v2/models/missing/generate_stream", {"TEXT": "hello"})),
]


@pytest.mark.parametrize(
    "exchange", [*QUESTIONS, *ANSWERED, *REFUSED, *CONTROL, *GENERATED], ids=lambda exchange: exchange.name
)
def test_http(pair: Pair, exchange: Exchange) -> None:
    pair.compare(exchange)
