"""Spans at a collector: their order, names, events, attributes, and the client's own trace around them."""

from __future__ import annotations

import logging
import re
import socket
import sys
from collections.abc import Iterator

import pytest
from support.collector import Collector, attributes, events
from support.waiting import wait_until

from rocserve.observability.tracing.tracing import Tracing, create_tracing

LOG = logging.getLogger("rocserve.test.tracing")
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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


def test_an_ensemble_of_a_client_that_traces(collector: Collector) -> None:
    traces = tracing(collector, ("opentelemetry", "resource", "zone=a"))
    group = traces.begin("ensemble", {"traceparent": TRACEPARENT, "tracestate": "vendor=1"})
    assert group is not None
    root = group.begin("ensemble", "2", "id", 0, 100)
    root.note_front_end("HTTP_RECV_START", 90)
    step = group.begin("member", "1", "id", root.number, 200)
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
    for _ in range(2):
        group = traces.begin("m", {})
        assert group is not None
        record = group.begin("m", "1", "", 0, 1)
        assert f"{group.trace_id:032x}-{record.span_id:016x}-01" in record.context
        record.end()
    traces.close()
    assert [span.name for span in collector.spans] == ["m", "InferRequest"] * 2
    assert len({span.trace_id for span in collector.spans}) == 2
    assert len({span.span_id for span in collector.spans}) == 4
    assert not any(span.parent_span_id for span in collector.spans if span.name == "InferRequest")
    assert collector.resource["service.name"] == "vision"


def test_the_environment_names_the_service(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=from the environment")
    traces = tracing(collector)
    group = traces.begin("m", {})
    assert group is not None
    group.begin("m", "1", "", 0, 1).end()
    traces.close()
    assert collector.resource["service.name"] == "from the environment"


def test_batches_are_as_large_as_asked_for(collector: Collector) -> None:
    traces = tracing(
        collector, ("opentelemetry", "bsp_max_export_batch_size", "4"), ("opentelemetry", "bsp_schedule_delay", "50")
    )
    for _ in range(6):
        group = traces.begin("m", {})
        assert group is not None
        group.begin("m", "1", "", 0, 1).end()
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
        r" installed \(.*\); install them with `pip install 'rocserve\[tracing\]'`$",
    ):
        tracing(collector)


def test_tensors_have_no_place_in_spans(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    traces = tracing(collector, ("", "level", "TENSORS"))
    group = traces.begin("m", {})
    assert group is not None
    assert not group.begin("m", "1", "", 0, 1).wants_tensors
    traces.close()
    assert "Tensor level tracing is not supported by the mode: opentelemetry" in caplog.messages


def test_a_collector_that_is_not_there_is_said_once_in_the_log(
    unused_port: int, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
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
    group = traces.begin("m", {})
    assert group is not None
    group.begin("m", "1", "", 0, 1).end()

    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == LOG.name]

    wait_until(warnings, "the word in the log")
    # A second one of the exporter's is not passed on.
    logging.getLogger("opentelemetry.exporter").warning("once more")
    traces.close()
    assert [re.sub(": .*", "", text) for text in warnings()] == ["spans cannot be sent", "spans are lost"]
    assert "Connection refused" in warnings()[0]
    assert capfd.readouterr().err == ""
