"""Traces of a real server's requests, configured by Triton's own clients over both front ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
import tritonclient.utils.shared_memory as shared_memory
from support.collector import Collector, attributes, events
from support.infer_inputs import infer_input
from support.models import add_constant, drop
from support.server import RocserveProcess
from support.trace_file import read_entries
from support.waiting import wait_until
from tritonclient.utils import InferenceServerException

ON = ("--trace-config=rate=1", "--trace-config=level=TIMESTAMPS")
CHAIN = """
platform: "ensemble"
max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: 2 }
output { name: "OUT" data_type: TYPE_FP32 dims: 2 }
ensemble_scheduling {
  step { model_name: "m" model_version: -1 input_map { key: "X" value: "IN" } output_map { key: "Y" value: "MID" } }
  step { model_name: "caller" model_version: -1 input_map { key: "X" value: "MID" }
         output_map { key: "Y" value: "OUT" } }
}
"""
CALLER_CONFIG = """
backend: "python"
max_batch_size: 4
input { name: "X" data_type: TYPE_FP32 dims: 2 }
output { name: "Y" data_type: TYPE_FP32 dims: 2 }
"""
CALLER = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        pb_utils.Logger.log_info(f"the context is {request.trace().get_context()}")
        call = pb_utils.InferenceRequest(
            model_name="m", requested_output_names=["Y"], inputs=request.inputs(), trace=request.trace()
        )
        untraced = pb_utils.InferenceRequest(model_name="m", requested_output_names=["Y"], inputs=request.inputs())
        untraced.exec()
        return pb_utils.InferenceResponse(call.exec().output_tensors())
"""
RUN = ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("models")
    drop(repository, "m", add_constant(1.0))
    drop(repository, "chain", None, CHAIN)
    drop(repository, "caller", CALLER, CALLER_CONFIG)
    return repository


def ask(client: Any, model: str = "m", name: str = "X", shape: tuple[int, ...] = (1, 2), **options: object) -> Any:
    module = triton if isinstance(client, triton.InferenceServerClient) else triton_http
    return client.infer(model, [infer_input(name, np.ones(shape, np.float32), module)], **options)


class TraceFile:
    """The requests of a trace file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def entries(self) -> list[dict[str, Any]]:
        return read_entries(self.path)

    def wait_for(self, request_id: str) -> list[dict[str, Any]]:
        """Wait for a client's request and the requests that it caused: the head of each, `stamps` by name,
        `tensors`."""
        wait_until(lambda: self._number(request_id), f"the trace of {request_id}")
        found: dict[int, dict[str, Any]] = {}
        for entry in self.entries:
            trace = found.setdefault(entry["id"], {"stamps": {}, "tensors": []})
            if "timestamps" in entry:
                trace["stamps"] |= {stamp["name"]: stamp["ns"] for stamp in entry["timestamps"]}
            elif "activity" in entry:
                trace["tensors"].append((entry["activity"], entry["tensor"]["name"], entry["tensor"]["data"]))
            else:
                trace |= entry
        family = [self._number(request_id)]
        family += [trace["id"] for trace in found.values() if trace.get("parent_id") in family]
        family += [trace["id"] for trace in found.values() if trace.get("parent_id") in family[1:]]
        return [found[number] for number in family]

    def _number(self, request_id: str) -> int:
        """0 if it is missing."""
        heads = [entry for entry in self.entries if "model_name" in entry and "parent_id" not in entry]
        return next((entry["id"] for entry in heads if entry.get("request_id") == request_id), 0)


@pytest.fixture
def file(tmp_path: Path) -> TraceFile:
    return TraceFile(tmp_path / "trace.json")


class TracingServer(NamedTuple):
    """A server that traces all of its requests."""

    process: RocserveProcess
    file: TraceFile


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TracingServer]:
    folder = tmp_path_factory.mktemp("traces")
    flags = ("--trace-config=level=TENSORS", f"--trace-config=triton,file={folder / 'trace.json'}")
    with RocserveProcess([models], *ON, *flags, "--allow-client-shm=true", log=folder / "server.log") as process:
        process.wait_until_ready()
        yield TracingServer(process, TraceFile(folder / "trace.json"))


def test_a_request_over_each_front_end(server: TracingServer) -> None:
    ask(server.process.client(), request_id="one")
    http = triton_http.InferenceServerClient(server.process.http_address)
    ask(http, request_id="two")
    http.close()
    (first,), (second,) = server.file.wait_for("one"), server.file.wait_for("two")
    assert (first["model_name"], first["model_version"], first["request_id"]) == ("m", 1, "one")
    assert list(first["stamps"]) == [
        "GRPC_WAITREAD_START",
        "GRPC_WAITREAD_END",
        "REQUEST_START",
        "QUEUE_START",
        *RUN,
        "REQUEST_END",
        "INFER_RESPONSE_COMPLETE",
        "GRPC_SEND_START",
        "GRPC_SEND_END",
    ]
    assert first["tensors"] == [
        ("TENSOR_QUEUE_INPUT", "X", "1.0,1.0"),
        ("TENSOR_BACKEND_OUTPUT", "Y", "2.0,2.0"),
    ]
    assert second["request_id"] == "two"
    assert list(second["stamps"])[:3] == ["HTTP_RECV_START", "HTTP_RECV_END", "REQUEST_START"]
    assert list(second["stamps"])[-2:] == ["HTTP_SEND_START", "HTTP_SEND_END"]
    for trace in (first, second):
        times = list(trace["stamps"].values())
        assert times == sorted(times)


def test_an_ensemble_and_what_its_members_call(server: TracingServer) -> None:
    ask(server.process.client(), "chain", "IN", request_id="e")
    chain, member, caller, called = server.file.wait_for("e")
    assert [trace["model_name"] for trace in (chain, member, caller, called)] == ["chain", "m", "caller", "m"]
    assert [member["parent_id"], caller["parent_id"], called["parent_id"]] == [chain["id"], chain["id"], caller["id"]]
    assert [trace.get("request_id") for trace in (chain, member, caller, called)] == ["e", "e", "e", None]
    assert [name for name in chain["stamps"] if not name.startswith("GRPC")] == [
        "REQUEST_START",
        "QUEUE_START",
        "REQUEST_END",
        "INFER_RESPONSE_COMPLETE",
    ]
    for trace in (member, caller, called):
        assert list(trace["stamps"]) == ["REQUEST_START", "QUEUE_START", *RUN, "REQUEST_END"]
    assert called["tensors"] == [
        ("TENSOR_QUEUE_INPUT", "X", "2.0,2.0"),
        ("TENSOR_BACKEND_OUTPUT", "Y", "3.0,3.0"),
    ]


def test_a_request_that_fails(server: TracingServer) -> None:
    with pytest.raises(InferenceServerException, match="is not found"):
        ask(server.process.client(), "nobody", request_id="not there")
    with pytest.raises(InferenceServerException, match="unexpected shape"):
        ask(server.process.client(), shape=(1, 3), request_id="bad")
    (trace,) = server.file.wait_for("bad")
    assert not any(entry.get("request_id") == "not there" for entry in server.file.entries)
    assert {"REQUEST_START", "REQUEST_END", "GRPC_SEND_END"} <= set(trace["stamps"])
    assert "COMPUTE_START" not in trace["stamps"]


def test_tensors_in_memory_of_the_client(server: TracingServer) -> None:
    client = server.process.client()
    name = f"rocserve-traces-{server.process.port}"
    region = shared_memory.create_shared_memory_region(name, f"/{name}", 16)
    try:
        shared_memory.set_shared_memory_region(region, [np.array([[3, 4]], np.float32)])
        client.register_system_shared_memory(name, f"/{name}", 16)
        entry = triton.InferInput("X", [1, 2], "FP32")
        entry.set_shared_memory(name, 8)
        wanted = triton.InferRequestedOutput("Y")
        wanted.set_shared_memory(name, 8, offset=8)
        client.infer("m", [entry], outputs=[wanted], request_id="shared")
        client.unregister_system_shared_memory(name)
    finally:
        shared_memory.destroy_shared_memory_region(region)
    (trace,) = server.file.wait_for("shared")
    assert trace["tensors"] == [
        ("TENSOR_QUEUE_INPUT", "X", "3.0,4.0"),
        ("TENSOR_BACKEND_OUTPUT", "Y", "4.0,5.0"),
    ]


def test_settings_are_changed_while_the_server_runs(serve: Any, models: Path, file: TraceFile) -> None:
    server = serve(models, flags=(f"--trace-config=triton,file={file.path}",))
    server.wait_until_ready()
    grpc = server.client()
    http = triton_http.InferenceServerClient(server.http_address)
    ask(grpc)
    assert http.get_trace_settings() == {
        "trace_level": ["OFF"],
        "trace_rate": "1000",
        "trace_count": "-1",
        "log_frequency": "0",
        "trace_file": str(file.path),
        "trace_mode": "triton",
    }
    http.update_trace_settings("m", {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": "1"})
    assert "trace_level" in grpc.update_trace_settings(settings={"log_frequency": "5"}, as_json=True)["settings"]
    ask(grpc, "caller", request_id="not asked for")
    ask(grpc, request_id="traced")
    ask(grpc, request_id="beyond the count")
    left = grpc.get_trace_settings("m", as_json=True)["settings"]
    assert (left["trace_count"]["value"], left["log_frequency"]["value"]) == (["0"], ["5"])
    assert len(TraceFile(Path(f"{file.path}.0")).wait_for("traced")) == 1
    grpc.update_trace_settings("m", {"trace_level": None, "trace_rate": None, "trace_count": None})
    assert http.get_trace_settings("m")["trace_level"] == ["OFF"]
    http.close()


def test_traces_are_there_when_the_server_has_ended(serve: Any, models: Path, file: TraceFile) -> None:
    server = serve(models, flags=(*ON, "--trace-count=10", f"--trace-file={file.path}"))
    server.wait_until_ready()
    ask(server.client(), request_id="last words")
    assert server.terminate() == 0
    assert len(file.wait_for("last words")) == 1


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


def test_spans_join_the_trace_of_the_client(serve: Any, models: Path, collector: Collector) -> None:
    server = serve(
        models,
        flags=(
            "--trace-config=mode=opentelemetry",
            "--trace-config=level=TIMESTAMPS",
            "--trace-config=rate=0",
            f"--trace-config=opentelemetry,url={collector.url}",
            "--trace-config=opentelemetry,bsp_schedule_delay=100",
        ),
    )
    server.wait_until_ready()
    trace_ids = ["0af7651916cd43dd8448eb211c80319c", "1af7651916cd43dd8448eb211c80319c"]
    headers = [{"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"} for trace_id in trace_ids]
    ask(server.client(), request_id="not traced")
    ask(server.client(), "caller", headers=headers[0], request_id="over gRPC")
    http = triton_http.InferenceServerClient(server.http_address)
    ask(http, headers=headers[1], request_id="over HTTP")
    http.close()
    collector.wait_for(8)
    over_grpc, over_http = (
        [span for span in collector.spans if span.trace_id.hex() == trace_id] for trace_id in trace_ids
    )
    assert sorted(span.name for span in over_grpc) == ["InferRequest", "caller", "compute", "compute", "m"]
    assert sorted(span.name for span in over_http) == ["InferRequest", "compute", "m"]
    root = next(span for span in over_http if span.name == "InferRequest")
    assert root.parent_span_id.hex() == "b7ad6b7169203331"
    assert events(root)[:2] == ["HTTP_RECV_START", "HTTP_RECV_END"]
    model = next(span for span in over_http if span.name == "m")
    assert attributes(model)["triton.request_id"] == "over HTTP"
    caller, called = (next(span for span in over_grpc if span.name == name) for name in ("caller", "m"))
    assert called.parent_span_id == caller.span_id
    context = f'{{"traceparent":"00-{trace_ids[0]}-{caller.span_id.hex()}-01"}}'
    # A model's own lines begin with the id of its request.
    line = f"caller:1: [request id: over gRPC] the context is {context}"
    wait_until(lambda: line in server.log_text, "the context in the model's hands")
