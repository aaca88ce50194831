from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from socket import SO_REUSEPORT, SOL_SOCKET, socket
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.waiting import PATIENCE_SECONDS

from rocserve.protocol import grpc_service_pb2 as pb
from rocserve_client import (
    Classification,
    Client,
    DeadlineExceeded,
    Duration,
    IndexEntry,
    Input,
    Internal,
    InvalidArgument,
    KeepAlive,
    NotFound,
    Output,
    ResourceExhausted,
    RocserveError,
    ServerMetadata,
    StatusCode,
    TensorMetadata,
    Tls,
    Unavailable,
    errors,
)
from rocserve_client.connection import Connection
from rocserve_client.messages import decode_infer_response, encode_infer_request
from rocserve_client.readiness import ReadinessWait

ONE = {"A": np.zeros(1, np.float32)}


@pytest.mark.parametrize("status", [status for status in StatusCode if status is not StatusCode.OK])
def test_every_status_becomes_an_exception(call: Any, loopback: Any, status: StatusCode) -> None:
    with pytest.raises(RocserveError) as caught:
        call(loopback.address, "infer", f"fails.{status.name}", ONE)
    assert caught.value.status is status
    assert caught.value.text == f"asked to fail with {status.name}"
    assert str(caught.value) == f"{status.name}: asked to fail with {status.name}"
    named = getattr(errors, status.name.title().replace("_", ""), RocserveError)
    assert type(caught.value) is named


def test_the_exceptions_that_callers_tell_apart(call: Any, loopback: Any) -> None:
    with pytest.raises(NotFound):
        call(loopback.address, "infer", "fails.NOT_FOUND", ONE)
    with pytest.raises(ResourceExhausted):
        call(loopback.address, "infer", "fails.RESOURCE_EXHAUSTED", ONE)


_CALLS: dict[str, tuple[Any, ...]] = {
    "ServerLive": (),
    "ServerReady": (),
    "ModelReady": ("echo",),
    "ServerMetadata": (),
    "ModelMetadata": ("echo",),
    "ModelConfig": ("echo",),
    "ModelStatistics": (),
    "RepositoryIndex": (),
    "RepositoryModelLoad": ("echo",),
    "RepositoryModelUnload": ("echo",),
    "ModelInfer": ("echo", ONE),
}
_NAMES = {
    "ModelStatistics": "statistics",
    "RepositoryModelLoad": "load_model",
    "RepositoryModelUnload": "unload_model",
    "ModelInfer": "infer",
}
"""The client's names that differ from the service's."""


@pytest.mark.parametrize("garbage", [b"\x0a\xff", b"\xff" * 20, b"<html></html>"])
@pytest.mark.parametrize("method", _CALLS)
def test_an_answer_that_is_no_message_is_the_servers_fault(
    call: Any, loopback: Any, method: str, garbage: bytes
) -> None:
    loopback.garbage = garbage
    name = _NAMES.get(method) or re.sub("(?<!^)([A-Z])", r"_\1", method).lower()
    with pytest.raises(Internal, match=f"^INTERNAL: expected a {method}Response from the server, got other bytes: "):
        call(loopback.address, name, *_CALLS[method])


def test_an_answer_whose_shape_no_memory_holds_is_the_servers_fault() -> None:
    response = pb.ModelInferResponse(raw_output_contents=[b"\0\0\0\0"])
    response.outputs.add(name="A", datatype="BYTES", shape=[1 << 45])
    with pytest.raises(Internal, match=r"output 'A' cannot be read as BYTES of shape \[35184372088832\]: expected"):
        decode_infer_response(response.SerializeToString())


@pytest.mark.parametrize("timeout", [1e10, float("inf")])
def test_a_timeout_may_be_longer_than_grpc_counts(call: Any, loopback: Any, timeout: float) -> None:
    assert call(loopback.address, "infer", "echo", ONE, timeout=timeout).model_version == "3"


def test_a_timeout_ends_the_call(call: Any, loopback: Any) -> None:
    with pytest.raises(DeadlineExceeded):
        call(loopback.address, "infer", "slow", ONE, timeout=0.2)


def test_no_server(call: Any) -> None:
    with pytest.raises(Unavailable):
        call("127.0.0.1:1", "server_live", timeout=PATIENCE_SECONDS)


def test_questions(call: Any, loopback: Any) -> None:
    assert call(loopback.address, "server_live") is True
    assert call(loopback.address, "server_ready") is True
    assert call(loopback.address, "model_ready", "echo") is True
    assert call(loopback.address, "model_ready", "other", "2") is False
    assert call(loopback.address, "server_metadata") == ServerMetadata("x", "1", ("a", "b"))
    assert call(loopback.address, "model_config", "echo").max_batch_size == 4


def test_model_metadata(call: Any, loopback: Any) -> None:
    metadata = call(loopback.address, "model_metadata", "echo", "3")
    assert (loopback.requests[0].name, loopback.requests[0].version) == ("echo", "3")
    assert (metadata.name, metadata.versions, metadata.platform) == ("echo", ("3",), "onnx_onnxv1")
    assert metadata.inputs == (TensorMetadata("IN", "FP32", (-1, 4)),)
    assert metadata.outputs == (TensorMetadata("OUT", "BYTES", (-1,)),)
    assert metadata.properties == {"engine": "migraphx"}


def test_statistics(call: Any, loopback: Any) -> None:
    (statistics,) = call(loopback.address, "statistics", "echo")
    assert loopback.requests[0].name == "echo"
    assert (statistics.name, statistics.version, statistics.last_inference_ms) == ("echo", "3", 5)
    assert (statistics.inference_count, statistics.execution_count) == (8, 2)
    assert statistics.success == Duration(4, 8_000)
    assert statistics.success.mean_us == 2.0
    assert statistics.fail.mean_us == 0.0
    assert statistics.queue == Duration(4, 2_000)
    assert statistics.batches[0].batch_size == 4
    assert statistics.batches[0].compute_infer.count == 2


def test_repository_index(call: Any, loopback: Any) -> None:
    ready = IndexEntry("echo", "1", "READY", "")
    assert call(loopback.address, "repository_index", ready=True) == (ready,)
    index = call(loopback.address, "repository_index")
    assert index == (
        ready,
        IndexEntry("broken", "2", "UNAVAILABLE", "its file is empty"),
        IndexEntry("never", "", "", ""),
    )


def test_load_and_unload(call: Any, loopback: Any) -> None:
    call(loopback.address, "load_model", "m")
    call(loopback.address, "load_model", "m", config="{}", files={"1/model.onnx": b"bytes"})
    call(loopback.address, "unload_model", "m")
    call(loopback.address, "unload_model", "m", unload_dependents=True)
    call(loopback.address, "load_model", "m", version="2")
    call(loopback.address, "unload_model", "m", version="2")
    call(loopback.address, "unload_model", "m", version=0)
    plain, given, unload, unload_all, *of_one = loopback.requests
    assert (plain.model_name, len(plain.parameters)) == ("m", 0)
    assert given.parameters["config"].string_param == "{}"
    assert given.parameters["file:1/model.onnx"].bytes_param == b"bytes"
    assert (unload.model_name, len(unload.parameters)) == ("m", 0)
    assert unload_all.parameters["unload_dependents"].bool_param
    assert [request.parameters["version"].string_param for request in of_one] == ["2", "2", "0"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("key", "secret\n"),
        ("key", "s\u00e9cret"),
        ("a key", "v"),
        ("", "v"),
        (":path", "v"),
        ("raw-bin", "v"),
        ("key", 1),
    ],
)
def test_headers_that_grpc_does_not_take(call: Any, loopback: Any, name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"header '{name}': expected ") as caught:
        call(loopback.address, "server_live", headers={name: value})
    assert "cret" not in caught.value.text
    with pytest.raises(InvalidArgument), Client(loopback.address, headers={name: value}) as client:
        client.stream()


def test_a_header_is_sent_once_whatever_the_case_of_its_name() -> None:
    connection = Connection("localhost:8001", headers={"X-Key": "client", "a": "kept"})
    assert connection.metadata({"x-key": "call"}) == (("x-key", "call"), ("a", "kept"))


def test_headers_of_the_client_and_of_the_call(call: Any, loopback: Any) -> None:
    connection = {"headers": {"Triton-Key": "client", "other": "kept"}}
    call(loopback.address, "server_live", connection=connection, headers={"triton-key": "call", "raw-bin": b"\0\xff"})
    (metadata,) = loopback.metadata
    assert metadata["other"] == "kept"
    assert metadata["raw-bin"] == b"\0\xff"
    assert metadata["triton-key"] == "call"


def test_wait_until_a_server_is_ready(call: Any, loopback: Any) -> None:
    call(loopback.address, "wait_until_ready", PATIENCE_SECONDS, "echo")
    loopback.ready = False
    threading.Timer(0.3, lambda: setattr(loopback, "ready", True)).start()
    call(loopback.address, "wait_until_ready", PATIENCE_SECONDS)
    assert loopback.ready


def test_wait_for_a_server_that_is_not_started_yet(call: Any) -> None:
    with socket() as kept:
        # It keeps the port from other processes until the server, which shares it, listens.
        kept.setsockopt(SOL_SOCKET, SO_REUSEPORT, 1)
        kept.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{kept.getsockname()[1]}"
        code = (
            "import grpc, time, concurrent.futures as f;"
            "s = grpc.server(f.ThreadPoolExecutor(2), options=[('grpc.so_reuseport', 1)]);"
            f"time.sleep(0.5); s.add_insecure_port('{address}'); s.start(); time.sleep(600)"
        )
        process = subprocess.Popen([sys.executable, "-c", code])
        try:
            # The server listens without any service: that is a final answer.
            with pytest.raises(RocserveError) as caught:
                call(address, "wait_until_ready", PATIENCE_SECONDS)
            assert caught.value.status is StatusCode.UNIMPLEMENTED
        finally:
            process.kill()
            process.wait()


def test_wait_tells_why_it_was_in_vain(call: Any, loopback: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    note_unready = ReadinessWait.note_unready

    def be_told_and_end(wait: ReadinessWait, index: Sequence[IndexEntry]) -> None:
        note_unready(wait, index)
        wait._end = time.monotonic()

    monkeypatch.setattr(ReadinessWait, "note_unready", be_told_and_end)
    with pytest.raises(DeadlineExceeded, match=r"model 'broken' .* version 2 is UNAVAILABLE: its file is empty"):
        call(loopback.address, "wait_until_ready", 60, "broken")
    with pytest.raises(DeadlineExceeded, match=r"model 'borken' .*: there is no such model in the repository"):
        call(loopback.address, "wait_until_ready", 60, "borken")
    with pytest.raises(DeadlineExceeded, match=r"model 'never' is not ready after 60 s: never is not loaded$"):
        call(loopback.address, "wait_until_ready", 60, "never")
    loopback.ready = False
    with pytest.raises(DeadlineExceeded, match=r"after 60 s: broken version 2 is UNAVAILABLE: its file is empty$"):
        call(loopback.address, "wait_until_ready", 60)


def test_wait_ends_with_its_time(call: Any) -> None:
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"the server is not ready after 0.2 s"):
        call("127.0.0.1:1", "wait_until_ready", 0.2)
    assert time.monotonic() - started >= 0.2


def test_a_probe_that_the_end_of_the_wait_cuts_short_hides_no_answer() -> None:
    index = [IndexEntry("m", "1", "LOADING", "compiling")]
    wait = ReadinessWait(0.0, None)
    wait.note_unready(index)
    wait.note_failure(DeadlineExceeded("Deadline Exceeded"))
    with pytest.raises(DeadlineExceeded, match=r"after 0 s: m version 1 is LOADING: compiling$"):
        wait.check_time()
    without_answer = ReadinessWait(0.0, None)
    without_answer.note_failure(DeadlineExceeded("Deadline Exceeded"))
    with pytest.raises(DeadlineExceeded, match=r"after 0 s: Deadline Exceeded$"):
        without_answer.check_time()


def test_probes_become_rarer_while_a_wait_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.0, 4.0, 60.0, 99.9])
    monkeypatch.setattr("rocserve_client.readiness.time", SimpleNamespace(monotonic=lambda: next(times)))
    wait = ReadinessWait(100.0, None)
    pauses = [wait.pause for _ in range(4)]
    assert pauses == pytest.approx([0.05, 0.2, 0.5, 0.1]), "the last one ends with the wait"


def test_keepalive_and_further_channel_options(call: Any, loopback: Any) -> None:
    connection = {"keepalive": KeepAlive(10_000), "channel_options": (("grpc.max_receive_message_length", 100),)}
    assert call(loopback.address, "server_live", connection=connection)
    with pytest.raises(ResourceExhausted):
        call(loopback.address, "infer", "echo", {"A": np.zeros(1000, np.float32)}, connection=connection)


@pytest.mark.parametrize("order", ["rocserve_client, tritonclient.grpc", "tritonclient.grpc, rocserve_client"])
def test_lives_beside_tritonclient_in_one_process(order: str) -> None:
    code = (
        f"import {order}; import tritonclient.grpc.aio;"
        "from rocserve.protocol import grpc_service_pb2 as ours; from tritonclient.grpc import service_pb2 as theirs;"
        "assert ours.ModelInferRequest is not theirs.ModelInferRequest;"
        "a = ours.ModelInferRequest(model_name='m'); b = theirs.ModelInferRequest(model_name='m');"
        "assert a.SerializeToString() == b.SerializeToString()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("scheme", "tls"), [("http", ""), ("grpc", ""), ("https", ", and Tls() as `tls`")])
def test_an_address_with_a_scheme_is_none(scheme: str, tls: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Client(f"{scheme}://host:8001/")
    assert caught.value.text == (
        f"'{scheme}://host:8001/' is not a gRPC address: remove '{scheme}://' and give host:port of the server's"
        f" gRPC port (8001 by default), as in 'host:8001'{tls}"
    )


ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "BOOL": np.array([True, False, True]),
    "UINT8": np.array([0, 255], np.uint8),
    "UINT16": np.array([0, 65_535], np.uint16),
    "UINT32": np.array([2**32 - 1], np.uint32),
    "UINT64": np.array([2**64 - 1], np.uint64),
    "INT8": np.array([-128, 127], np.int8),
    "INT16": np.array([-32_768], np.int16),
    "INT32": np.arange(12, dtype=np.int32).reshape(3, 4),
    "INT64": np.array([-(2**63)], np.int64),
    "FP16": np.array([[1.5, -np.inf]], np.float16),
    "BF16": np.array([[1.5, -3.0]], ml_dtypes.bfloat16),
    "FP32": np.array([np.pi], np.float32),
    "FP64": np.array([np.pi]),
    "BYTES": np.array([[b"", b"a\0"], [b"\xff\xd8", "é".encode()]], dtype=object),
}


@pytest.mark.parametrize("datatype", ARRAYS)
def test_every_datatype_comes_back_as_it_went(call: Any, loopback: Any, datatype: str) -> None:
    array = ARRAYS[datatype]
    result = call(loopback.address, "infer", "echo", {"A": array})
    assert loopback.requests[0].inputs[0].datatype == datatype
    assert not loopback.requests[0].inputs[0].HasField("contents")
    assert result["A"].dtype == array.dtype
    np.testing.assert_array_equal(result["A"], array)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (), (1, 1, 1)])
@pytest.mark.parametrize("dtype", [np.float32, object])
def test_shapes_without_or_with_one_element(call: Any, loopback: Any, shape: tuple[int, ...], dtype: Any) -> None:
    array = np.full(shape, b"x" if dtype is object else 1.0, dtype=dtype)
    result = call(loopback.address, "infer", "echo", {"A": array})
    assert result["A"].shape == shape
    np.testing.assert_array_equal(result["A"], array)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.int32).reshape(3, 4).T,
        np.arange(12, dtype=np.int32)[::-2],
        np.arange(12, dtype=">i4"),
        np.asfortranarray(np.ones((4, 5), np.float64)),
        np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3).T,
    ],
    ids=["transposed", "strided", "big-endian", "fortran", "bfloat16-transposed"],
)
def test_memory_order_does_not_show(call: Any, loopback: Any, array: np.ndarray[Any, Any]) -> None:
    np.testing.assert_array_equal(call(loopback.address, "infer", "echo", {"A": array})["A"], array)


def test_text_arrays_are_sent_as_utf8(call: Any, loopback: Any) -> None:
    result = call(loopback.address, "infer", "echo", {"A": np.array(["é", "b"]), "B": np.array([b"c"])})
    assert result["A"].tolist() == ["é".encode(), b"b"]
    assert result["B"].tolist() == [b"c"]


def test_bfloat16_as_bits(call: Any, loopback: Any) -> None:
    bits = np.array([0x3FC0], np.uint16)
    result = call(loopback.address, "infer", "echo", {"A": Input(bits, datatype="BF16", parameters={"k": True})})
    assert loopback.requests[0].inputs[0].datatype == "BF16"
    assert loopback.requests[0].inputs[0].parameters["k"].bool_param
    assert result["A"].astype(np.float32).tolist() == [1.5]


def test_all_that_a_request_says_arrives(call: Any, loopback: Any) -> None:
    parameters = {"flag": True, "count": -1, "big": 2**64 - 1, "share": 0.5, "text": "t", "timeout": 1000}
    result = call(
        loopback.address,
        "infer",
        "echo",
        {"A": np.zeros(1, np.float32), "B": np.zeros(1, np.float32)},
        ["A", Output("B", classification=3)],
        version="3",
        request_id="r1",
        priority=2,
        parameters=parameters,
        headers={"X-Key": "secret"},
    )
    request = loopback.requests[0]
    assert (request.model_name, request.model_version, request.id) == ("echo", "3", "r1")
    assert [output.name for output in request.outputs] == ["A", "B"]
    assert "classification" not in request.outputs[0].parameters
    assert request.outputs[1].parameters["classification"].int64_param == 3
    assert request.parameters["priority"].uint64_param == 2
    assert request.parameters["timeout"].int64_param == 1000
    assert loopback.metadata[0]["x-key"] == "secret"
    assert (result.model_name, result.model_version, result.request_id) == ("echo", "3", "r1")
    assert result.parameters == {**parameters, "priority": 2}
    assert set(result.outputs) == {"A", "B"}


def test_classes_are_parsed(call: Any, loopback: Any) -> None:
    texts = np.array([[b"0.900000:3:three", b"0.1:1"], [b"1:0:a:b", b"-2.5e-3:7:"]], dtype=object)
    result = call(loopback.address, "infer", "echo", {"P": texts, "Q": texts[0], "R": np.zeros(2, np.float32)})
    first = (Classification(0.9, 3, "three"), Classification(0.1, 1, ""))
    assert result.classes("P") == (first, (Classification(1.0, 0, "a:b"), Classification(-0.0025, 7, "")))
    assert result.classes("Q") == (first,)
    with pytest.raises(ValueError, match="'R' holds no classes"):
        result.classes("R")


@pytest.mark.parametrize(("shape", "rows"), [((0,), ((),)), ((2, 0), ((), ())), ((0, 3), ())])
def test_an_output_without_values_has_no_classes(
    call: Any, loopback: Any, shape: tuple[int, ...], rows: tuple[tuple[()], ...]
) -> None:
    inputs = {"P": np.zeros(shape, object), "R": np.zeros(shape, np.float32)}
    result = call(loopback.address, "infer", "echo", inputs)
    assert result.classes("P") == rows
    with pytest.raises(ValueError, match="'R' holds no classes"):
        result.classes("R")


def test_an_unknown_output_names_those_there_are(call: Any, loopback: Any) -> None:
    result = call(loopback.address, "infer", "echo", {"A": np.zeros(1, np.float32)})
    with pytest.raises(KeyError, match=r"no output 'B'.*\['A'\]"):
        result["B"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1, 2], "is a list, expected a numpy array"),
        (np.array([1 + 2j]), "complex128 has no KServe datatype"),
        (Input(np.zeros(1, np.float32), datatype="INT32"), "INT32 is made from int32, got float32"),
        (Input(np.zeros(1, np.float32), datatype="FLOAT"), "'FLOAT' is not a valid DataType"),
        (np.array([b"", 5], dtype=object), "expected to be bytes or str"),
    ],
)
def test_inputs_that_cannot_be_sent(value: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text) as caught:
        encode_infer_request("m", {"A": value}, None, {})
    assert caught.value.text.startswith("input 'A'")


def test_a_parameter_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="parameter 'p' is of type list"):
        encode_infer_request("m", {}, None, {"parameters": {"p": [1]}})  # type: ignore[dict-item]


def test_large_messages_pass(call: Any, loopback: Any) -> None:
    array = np.arange(3 << 20, dtype=np.int32)
    np.testing.assert_array_equal(call(loopback.address, "infer", "echo", {"A": array})["A"], array)


def test_outputs_are_views_on_the_message() -> None:
    array = np.arange(1000, dtype=np.int32)
    response = pb.ModelInferResponse(raw_output_contents=[array.tobytes()])
    response.outputs.add(name="A", datatype="INT32", shape=[1000])
    message = response.SerializeToString()
    output = decode_infer_response(message)["A"]
    assert np.shares_memory(output, np.frombuffer(message, np.uint8))
    assert not output.flags.writeable


@pytest.mark.parametrize("half", ["private_key", "certificate_chain"])
def test_half_of_a_certificate_is_none(half: str) -> None:
    with pytest.raises(InvalidArgument, match="private_key and certificate_chain go together"):
        Tls(**{half: Path("client.pem")})


@pytest.mark.parametrize(
    "options", [{"priority": -1}, {"priority": 1 << 70}, {"request_id": "\ud800"}, {"parameters": {"key": "\ud800"}}]
)
def test_values_that_have_no_form_on_the_wire(options: Any) -> None:
    with pytest.raises(InvalidArgument, match="a value of the request has no form on the wire: "):
        encode_infer_request("m", {"X": np.zeros(1, np.float32)}, None, options)
    with pytest.raises(InvalidArgument, match="out of range"):
        encode_infer_request("m", {"X": np.zeros(1, np.float32)}, [Output("Y", classification=1 << 70)], {})
