from __future__ import annotations

import subprocess
import sys
import threading
import time
from socket import socket
from typing import Any

import numpy as np
import pytest

from rocserve_client import (
    Client,
    DeadlineExceeded,
    Duration,
    IndexEntry,
    InvalidArgument,
    KeepAlive,
    NotFound,
    ResourceExhausted,
    RocserveError,
    ServerMetadata,
    StatusCode,
    TensorMetadata,
    Unavailable,
    errors,
)

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


def test_a_timeout_ends_the_call(call: Any, loopback: Any) -> None:
    with pytest.raises(DeadlineExceeded):
        call(loopback.address, "infer", "slow", ONE, timeout=0.2)


def test_no_server(call: Any) -> None:
    with pytest.raises(Unavailable):
        call("127.0.0.1:1", "server_live", timeout=5)


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
    plain, given, unload, unload_all = loopback.requests
    assert (plain.model_name, len(plain.parameters)) == ("m", 0)
    assert given.parameters["config"].string_param == "{}"
    assert given.parameters["file:1/model.onnx"].bytes_param == b"bytes"
    assert (unload.model_name, len(unload.parameters)) == ("m", 0)
    assert unload_all.parameters["unload_dependents"].bool_param


def test_headers_of_the_client_and_of_the_call(call: Any, loopback: Any) -> None:
    connection = {"headers": {"Triton-Key": "client", "other": "kept"}}
    call(loopback.address, "server_live", connection=connection, headers={"triton-key": "call", "raw-bin": b"\0\xff"})
    (metadata,) = loopback.metadata
    assert metadata["other"] == "kept"
    assert metadata["raw-bin"] == b"\0\xff"
    assert metadata["triton-key"] == "call"


def test_wait_until_a_server_is_ready(call: Any, loopback: Any) -> None:
    call(loopback.address, "wait_until_ready", 5, "echo")
    loopback.ready = False
    threading.Timer(0.3, lambda: setattr(loopback, "ready", True)).start()
    call(loopback.address, "wait_until_ready", 5)
    assert loopback.ready


def test_wait_for_a_server_that_is_not_started_yet(call: Any) -> None:
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    code = (
        "import grpc, time, concurrent.futures as f;"
        "s = grpc.server(f.ThreadPoolExecutor(2));"
        f"time.sleep(0.5); s.add_insecure_port('{address}'); s.start(); time.sleep(30)"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        # It listens and knows no service: that is an answer, and a final one.
        with pytest.raises(RocserveError) as caught:
            call(address, "wait_until_ready", 20)
        assert caught.value.status is StatusCode.UNIMPLEMENTED
    finally:
        process.kill()
        process.wait()


def test_wait_tells_why_it_was_in_vain(call: Any, loopback: Any) -> None:
    with pytest.raises(DeadlineExceeded, match=r"model 'broken' .* version 2 is UNAVAILABLE: its file is empty"):
        call(loopback.address, "wait_until_ready", 0.2, "broken")
    with pytest.raises(DeadlineExceeded, match=r"the server is not ready after 0.2 s"):
        call("127.0.0.1:1", "wait_until_ready", 0.2)
    loopback.ready = False
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="broken version 2 is UNAVAILABLE"):
        call(loopback.address, "wait_until_ready", 0.3)
    assert 0.25 < time.monotonic() - started < 10


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
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(("scheme", "tls"), [("http", ""), ("grpc", ""), ("https", ", and Tls() as `tls`")])
def test_an_address_with_a_scheme_is_none(scheme: str, tls: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Client(f"{scheme}://host:8001/")
    assert caught.value.text == (
        f"'{scheme}://host:8001/' is no address of gRPC: leave out '{scheme}://' and give host:port of the server's"
        f" gRPC port (8001 by default), as in 'host:8001'{tls}"
    )
