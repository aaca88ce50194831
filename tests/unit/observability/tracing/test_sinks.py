"""Trace files: Triton's form, and which file is written when. Spans at a collector: their order, names, events,
attributes, and the client's own trace around them."""

from __future__ import annotations

import itertools
import json
import logging
import re
import socket
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from support.collector import Collector, attributes, events
from support.trace_file import read_entries
from support.waiting import PATIENCE_SECONDS, wait_until

from rocserve.core.datatypes import DataType
from rocserve.core.tensors import Tensor, encode_bytes_elements, tensor_from_numpy
from rocserve.core.trace import TraceGroup, TraceLevel
from rocserve.observability.tracing import span_sink
from rocserve.observability.tracing.json_sink import JsonSink, group_json
from rocserve.observability.tracing.trace_settings import trace_options
from rocserve.observability.tracing.tracing import Tracing, create_tracing

LOG = logging.getLogger("rocserve.test.tracing")


class Bench:
    """Tracing into a file of a folder."""

    def __init__(self, path: Path, level: str = "TIMESTAMPS", **settings: object) -> None:
        self.path = path
        levels = [("", "level", part) for part in level.split(",")]
        config = [*levels, ("", "rate", "1"), ("triton", "file", str(path))]
        config += [("triton" if name == "log-frequency" else "", name, str(value)) for name, value in settings.items()]
        self.tracing = Tracing(trace_options(config, {}), JsonSink(str(path), LOG))

    def trace(self, request_id: str, note: Callable[[Any], None] | None = None) -> None:
        record = self.tracing.begin("m", "3", request_id, {}, 10)
        if record is not None:
            if note is not None:
                note(record)
            record.note_front_end("GRPC_SEND_END", 99)
            record.note("REQUEST_END", 90)
            record.end()

    def ids(self, suffix: str = "") -> list[str]:
        """The requests of a file."""
        return [entry["request_id"] for entry in self.entries(suffix) if "request_id" in entry]

    def entries(self, suffix: str = "") -> list[dict[str, Any]]:
        return read_entries(Path(f"{self.path}{suffix}"))

    def files(self) -> list[str]:
        return sorted(path.name for path in self.path.parent.iterdir())


def test_the_form_of_a_trace(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "trace.json", "TIMESTAMPS,TENSORS")
    bench.trace(
        'a "b"',
        lambda record: (
            record.note_run(20, (30, 40, 50, 60)),
            record.note_tensors("TENSOR_QUEUE_INPUT", [tensor_from_numpy("X", np.array([[1.5, 2]], np.float32))]),
        ),
    )
    bench.tracing.close()
    *entries, tensor = bench.entries()
    assert entries == [
        {"id": 1, "model_name": "m", "model_version": 3, "request_id": 'a "b"'},
        {"id": 1, "timestamps": [{"name": "REQUEST_START", "ns": 10}]},
        {"id": 1, "timestamps": [{"name": "QUEUE_START", "ns": 20}]},
        {"id": 1, "timestamps": [{"name": "COMPUTE_START", "ns": 30}]},
        {"id": 1, "timestamps": [{"name": "COMPUTE_INPUT_END", "ns": 40}]},
        {"id": 1, "timestamps": [{"name": "COMPUTE_OUTPUT_START", "ns": 50}]},
        {"id": 1, "timestamps": [{"name": "COMPUTE_END", "ns": 60}]},
        {"id": 1, "timestamps": [{"name": "REQUEST_END", "ns": 90}]},
        {"id": 1, "timestamps": [{"name": "GRPC_SEND_END", "ns": 99}]},
    ]
    # In order of time, and this one is the newest.
    assert tensor == {
        "id": 1,
        "activity": "TENSOR_QUEUE_INPUT",
        "tensor": {"name": "X", "data": "1.5,2.0", "shape": "1,2", "dtype": "FP32"},
    }


def test_a_step_tells_its_ensemble(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "trace.json")
    bench.trace("", lambda record: record.child("member", "1", "").end())
    bench.tracing.close()
    heads = [entry for entry in bench.entries() if "model_name" in entry]
    assert heads == [
        {"id": 1, "model_name": "m", "model_version": 3},
        {"id": 2, "model_name": "member", "model_version": 1, "parent_id": 1},
    ]


@pytest.mark.parametrize(
    ("tensor", "data", "shape"),
    [
        (tensor_from_numpy("T", np.array([True, False])), "1,0", "2"),
        (tensor_from_numpy("T", np.array([[-1], [65]], np.int8)), "-1,65", "2,1"),
        (tensor_from_numpy("T", np.array([0.1], np.float32)), "0.1", "1"),
        (tensor_from_numpy("T", np.array([0.5], np.float16)), "0.5", "1"),
        (Tensor("T", DataType.BF16, (1,), np.array([0x3FC0], np.uint16).tobytes()), "1.5", "1"),
        (
            Tensor("T", DataType.BYTES, (3,), encode_bytes_elements(["a,b", 'say "x"', b"\xff"])),
            '"a,b","say ""x""","\\xff"',
            "3",
        ),
        (Tensor("T", DataType.INT32, (4,), b"\1\0\0\0"), "", "4"),
        (tensor_from_numpy("T", np.zeros((0, 4), np.int32)), "", "0,4"),
    ],
    ids=lambda value: value.datatype.value if isinstance(value, Tensor) else "",
)
def test_tensors(tmp_path: Path, tensor: Tensor, data: str, shape: str) -> None:
    bench = Bench(tmp_path / "trace.json", "TENSORS")
    record = bench.tracing.begin("m", "1", "", {}, 1)
    assert record is not None
    record.note_tensors("TENSOR_BACKEND_OUTPUT", [tensor])
    _, entry = json.loads(f"[{group_json(record.group)}]")
    expected = {"name": "T", "data": data, "shape": shape, "dtype": tensor.datatype.value}
    assert entry == {"id": 1, "activity": "TENSOR_BACKEND_OUTPUT", "tensor": expected}


def test_a_large_tensor_is_written_piece_by_piece() -> None:
    count = 1 << 18
    tensor = Tensor("x", DataType.UINT8, (count,), bytes([7, 8]) * (count // 2))
    group = TraceGroup(TraceLevel.TENSORS, itertools.count(1), lambda _: None)
    group.begin("m", "1", "", 0, 0).note_tensors("TENSOR_QUEUE_INPUT", [tensor])
    tracemalloc.start()
    written = json.loads(f"[{group_json(group)}]")[1]["tensor"]["data"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert written == ",".join(["7", "8"] * (count // 2))
    assert peak < 8 << 20, "the text, its form in JSON, and what is read of that"


def test_one_array_however_many_pieces(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "trace.json")
    for request_id in "abc":
        bench.trace(request_id)
        wait_until(lambda wanted=request_id: wanted in bench.ids(), "the trace in the file")
    assert bench.ids() == ["a", "b", "c"]
    bench.tracing.close()
    assert bench.ids() == ["a", "b", "c"]
    assert bench.files() == ["trace.json"]


def test_a_file_for_each_so_many(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "trace.json", **{"log-frequency": 2})
    for request_id in "abcde":
        bench.trace(request_id)
    bench.tracing.close()
    assert [bench.ids(f".{index}") for index in range(3)] == [["a", "b"], ["c", "d"], ["e"]]
    assert bench.files() == ["trace.json.0", "trace.json.1", "trace.json.2"]


def test_a_count_that_is_reached_gives_a_file_of_its_own(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "trace.json", count=2)
    for request_id in "abcd":
        bench.trace(request_id)
    wait_until(lambda: bench.ids(".0") == ["a", "b"], "the traces in the file")
    bench.tracing.change("", {"count": 5})
    bench.trace("e")
    bench.tracing.close()
    assert bench.ids() == ["e"]
    assert bench.files() == ["trace.json", "trace.json.0"]


def test_what_ends_after_its_setting_is_written_all_the_same(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "trace.json", count=2)
    bench.trace("early", lambda _: bench.tracing.change("", {"count": 7}))
    bench.tracing.close()
    assert bench.ids() == ["early"]


def test_a_path_that_leads_nowhere_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(tmp_path / "gone" / "trace.json")
    for request_id in "abc":
        bench.trace(request_id)
        wait_until(lambda: caplog.messages, "the word in the log")
    bench.tracing.close()
    path = tmp_path / "gone" / "trace.json"
    assert caplog.messages == [f"failed creating trace file {path}: No such file or directory; traces are lost"]


def test_a_disk_that_is_full_leaves_a_whole_array(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = Bench(Path("/dev/full"))
    full.trace("a")
    full.tracing.close()
    assert caplog.messages == ["failed creating trace file /dev/full: No space left on device; traces are lost"]


TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setattr(span_sink, "_CLOSE_SECONDS", PATIENCE_SECONDS)
    with Collector() as running:
        yield running


@pytest.fixture
def unused_port() -> Iterator[int]:
    """Nobody listens there, and no other process can."""
    with socket.socket() as kept:
        kept.bind(("127.0.0.1", 0))
        yield int(kept.getsockname()[1])


def tracing(collector: Collector, *config: tuple[str, str, str], environment: dict[str, str] | None = None) -> Tracing:
    return create_tracing(
        (
            ("", "mode", "opentelemetry"),
            ("", "level", "TIMESTAMPS"),
            ("", "rate", "1"),
            ("opentelemetry", "url", collector.url),
            *config,
        ),
        "my server",
        LOG,
        environment or {},
    )


def trace(traces: Tracing, headers: Mapping[str, str] = MappingProxyType({})) -> None:
    record = traces.begin("m", "1", "", headers, 1)
    assert record is not None
    record.end()


def test_an_ensemble_of_a_client_that_traces(collector: Collector) -> None:
    traces = tracing(collector, ("opentelemetry", "resource", "zone=a"))
    root = traces.begin("ensemble", "2", "id", {"traceparent": TRACEPARENT, "tracestate": "vendor=1"}, 100)
    assert root is not None
    root.note_front_end("HTTP_RECV_START", 90)
    step = root.group.begin("member", "1", "id", root.number, 200)
    step.note_run(210, (220, 230, 240, 250))
    step.note("REQUEST_END", 260)
    step.end()
    root.note("QUEUE_START", 110)
    root.note("REQUEST_END", 300)
    root.note_front_end("HTTP_SEND_END", 310)
    root.end()
    traces.close()
    request, ensemble, member, compute = sorted(collector.spans, key=lambda span: span.start_time_unix_nano)
    assert [span.name for span in (request, ensemble, member, compute)] == [
        "InferRequest",
        "ensemble",
        "member",
        "compute",
    ]
    assert {span.trace_id.hex() for span in collector.spans} == {"0af7651916cd43dd8448eb211c80319c"}
    assert request.parent_span_id.hex() == "b7ad6b7169203331"
    assert request.trace_state == ensemble.trace_state == "vendor=1"
    assert [ensemble.parent_span_id, member.parent_span_id, compute.parent_span_id] == [
        request.span_id,
        ensemble.span_id,
        member.span_id,
    ]
    assert events(request) == ["HTTP_RECV_START", "HTTP_SEND_END"]
    assert events(ensemble) == ["REQUEST_START", "QUEUE_START", "REQUEST_END"]
    assert events(member) == ["REQUEST_START", "QUEUE_START", "REQUEST_END"]
    assert events(compute) == ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]
    assert attributes(member) == {
        "triton.model_name": "member",
        "triton.model_version": 1,
        "triton.trace_id": 2,
        "triton.trace_parent_id": 1,
        "triton.request_id": "id",
    }
    assert request.end_time_unix_nano - request.start_time_unix_nano == 220
    assert compute.end_time_unix_nano - compute.start_time_unix_nano == 30
    assert (collector.resource["service.name"], collector.resource["zone"]) == ("my server", "a")


def test_a_request_without_a_client_that_traces(collector: Collector) -> None:
    traces = tracing(collector, ("opentelemetry", "resource", "service.name=vision"))
    contexts = []
    for _ in range(2):
        record = traces.begin("m", "1", "", {}, 1)
        assert record is not None
        contexts.append(record.context)
        record.end()
    traces.close()
    assert [span.name for span in collector.spans] == ["InferRequest", "m"] * 2
    assert len({span.trace_id for span in collector.spans}) == 2
    assert len({span.span_id for span in collector.spans}) == 4
    told = [f"00-{span.trace_id.hex()}-{span.span_id.hex()}-01" for span in collector.spans if span.name == "m"]
    assert [json.loads(context) for context in contexts] == [{"traceparent": text} for text in told]
    assert not any(span.parent_span_id for span in collector.spans if span.name == "InferRequest")
    assert collector.resource["service.name"] == "vision"


def test_the_environment_names_the_service(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=from the environment")
    traces = tracing(collector)
    trace(traces)
    traces.close()
    assert collector.resource["service.name"] == "from the environment"


def test_batches_are_as_large_as_asked_for(collector: Collector) -> None:
    traces = tracing(
        collector, ("opentelemetry", "bsp_max_export_batch_size", "4"), ("opentelemetry", "bsp_schedule_delay", "50")
    )
    for _ in range(6):
        trace(traces)
    collector.wait_for(12)
    traces.close()
    assert max(collector.batches) <= 4
    assert sum(collector.batches) == 12


def test_the_extra_that_is_not_installed(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.delitem(sys.modules, "rocserve.observability.tracing.span_sink", raising=False)
    with pytest.raises(
        ValueError,
        match=r"^--trace-config=mode=opentelemetry needs OpenTelemetry's SDK and its OTLP/HTTP exporter, which are not"
        r" installed \(.*\); run: pip install .+$",
    ):
        tracing(collector)


def test_tensors_have_no_place_in_spans(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    traces = tracing(collector, ("", "level", "TENSORS"))
    record = traces.begin("m", "1", "", {}, 1)
    assert record is not None
    assert not record.wants_tensors
    traces.close()
    assert "Tensor level tracing is not supported by the mode: opentelemetry" in caplog.messages


def test_a_clients_state_that_makes_no_sense_is_no_fault_of_the_collector(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    traces = tracing(collector)
    trace(traces, {"traceparent": TRACEPARENT, "tracestate": "no state"})
    traces.close()
    assert [span.trace_state for span in collector.spans] == ["", ""]
    assert [record.getMessage() for record in caplog.records if record.name == LOG.name] == []


def test_a_collector_that_is_not_there_is_said_once_in_the_log(
    unused_port: int,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The exporter tries again until the end, however long the machine takes to get there.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
    url = f"http://127.0.0.1:{unused_port}/v1/traces"
    traces = create_tracing(
        (
            ("", "mode", "opentelemetry"),
            ("", "level", "TIMESTAMPS"),
            ("", "rate", "1"),
            ("opentelemetry", "url", url),
            ("opentelemetry", "bsp_schedule_delay", "20"),
        ),
        "my server",
        LOG,
        {},
    )
    trace(traces)

    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == LOG.name]

    wait_until(warnings, "the word in the log")
    # A second message of the exporter is not passed on.
    logging.getLogger("opentelemetry.exporter").warning("once more")
    traces.close()
    assert [re.sub(": .*", "", text) for text in warnings()] == ["spans cannot be sent", "spans are lost"]
    assert "Connection refused" in warnings()[0]
    # Other threads of this process may write there too.
    written = capfd.readouterr().err
    assert not any(text in written for text in ("once more", "Connection refused", "Traceback"))
