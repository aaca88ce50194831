"""--trace-config: what its settings come to, and what is refused."""

from __future__ import annotations

import re

import pytest

from rocserve.core.trace import TraceLevel
from rocserve.observability.tracing.tracing import TraceOptions, TraceValues, trace_options


def test_nothing_asked_for() -> None:
    assert trace_options((), {}) == TraceOptions(values=TraceValues(TraceLevel.OFF, 1000, -1, 0))


def test_the_settings_of_all_modes_and_of_triton() -> None:
    options = trace_options(
        [
            ("", "level", "timestamps"),
            ("", "level", "TENSORS"),
            ("", "rate", "3"),
            ("", "count", "-1"),
            ("TRITON", "file", "/tmp/trace.json"),
            ("triton", "log-frequency", "50"),
            ("", "rate", "4"),
        ],
        {},
    )
    assert options.values == TraceValues(TraceLevel.TIMESTAMPS | TraceLevel.TENSORS, 4, -1, 50)
    assert (options.mode, options.file, options.shown) == ("triton", "/tmp/trace.json", ())


def test_off_counts_whatever_stands_beside_it() -> None:
    assert trace_options([("", "level", "OFF"), ("", "level", "TENSORS")], {}).values.level is TraceLevel.OFF


def test_the_settings_of_spans() -> None:
    options = trace_options(
        [
            ("", "mode", "OpenTelemetry"),
            ("opentelemetry", "url", "http://collector/v1/traces"),
            ("opentelemetry", "resource", "service.name=vision=2"),
            ("opentelemetry", "resource", "zone=a"),
            ("opentelemetry", "bsp_max_queue_size", "10"),
            ("triton", "file", "passed over"),
        ],
        {"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "5"},
    )
    spans = options.spans
    assert options.mode == "opentelemetry"
    assert (spans.url, dict(spans.resource)) == (
        "http://collector/v1/traces",
        {"service.name": "vision=2", "zone": "a"},
    )
    assert (spans.max_queue_size, spans.schedule_delay_ms, spans.max_export_batch_size) == (10, 5000, 5)
    assert options.shown == (
        ("url", "http://collector/v1/traces"),
        ("resource", "service.name=vision=2"),
        ("resource", "zone=a"),
        ("bsp_max_queue_size", "10"),
        ("bsp_schedule_delay", "5000"),
        ("bsp_max_export_batch_size", "5"),
    )


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        (("", "levle", "OFF"), "unknown setting 'levle', expected one of mode, level, rate, count"),
        (("triton", "fil", "x"), "unknown setting of the mode 'triton' 'fil', expected one of file, log-frequency"),
        (
            ("jaeger", "url", "x"),
            'invalid value for trace mode option: jaeger. Available options are "triton" and "opentelemetry"',
        ),
        (
            ("", "mode", "zipkin"),
            'invalid value for trace mode option: zipkin. Available options are "triton" and "opentelemetry"',
        ),
        (
            ("", "level", "all"),
            "invalid value for trace level option: all; expected OFF, TIMESTAMPS or TENSORS",
        ),
        (("", "rate", "-1"), "rate=-1: expected a whole number from 0 to 4294967295"),
        (("", "count", "-2"), "count=-2: expected a whole number from -1 to 2147483647"),
        (
            ("triton", "log-frequency", "often"),
            "triton,log-frequency=often: expected a whole number from 0 to 4294967295",
        ),
        (("triton", "file", ""), "the setting 'file' has no value; expected [MODE,]SETTING=VALUE"),
    ],
)
def test_what_is_refused(setting: tuple[str, str, str], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        trace_options([setting], {})


@pytest.mark.parametrize(
    ("name", "value", "environment", "text"),
    [
        (
            "resource",
            "vision",
            {},
            "opentelemetry,resource=vision: expected KEY=VALUE, such as service.name=vision",
        ),
        (
            "url",
            "collector:4318",
            {},
            "opentelemetry,url=collector:4318: expected http://HOST:PORT/PATH, such as http://localhost:4318/v1/traces",
        ),
        (
            "bsp_schedule_delay",
            "soon",
            {},
            "opentelemetry,bsp_schedule_delay=soon: expected a whole number from 1 to 4294967295",
        ),
        (
            "url",
            "http://x",
            {"OTEL_BSP_SCHEDULE_DELAY": "soon"},
            "$OTEL_BSP_SCHEDULE_DELAY=soon: expected a whole number from 1 to 4294967295",
        ),
        (
            "bsp_max_queue_size",
            "100",
            {},
            "opentelemetry: bsp_max_export_batch_size is 512, but must be at most bsp_max_queue_size, 100",
        ),
    ],
)
def test_what_is_refused_of_spans(name: str, value: str, environment: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        trace_options([("", "mode", "opentelemetry"), ("opentelemetry", name, value)], environment)
