"""Which requests are traced, and how the settings of models follow the global ones; the settings of --trace-config,
valid and invalid."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from support.observation import HeldSink

from rocserve.core.errors import ServeError
from rocserve.core.trace import SpanContext, Trace, TraceLevel
from rocserve.observability.tracing.trace_settings import TraceConfig, TraceOptions, TraceValues, trace_options
from rocserve.observability.tracing.tracing import Tracing, client_context, create_tracing

ON: TraceConfig = (("", "level", "TIMESTAMPS"), ("", "rate", "1"), ("triton", "file", "/nowhere"))
SPANS: TraceConfig = (("", "mode", "opentelemetry"), ("", "level", "TIMESTAMPS"))
LOG = logging.getLogger("rocserve.test.tracing")
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def tracing(*config: tuple[str, str, str]) -> Tracing:
    return Tracing(trace_options(config, {}), HeldSink())


def begin(tracing: Tracing, headers: Mapping[str, str] = MappingProxyType({}), model: str = "m") -> Trace | None:
    return tracing.begin(model, "1", "id", headers, 1)


def chosen(tracing: Tracing, count: int, model: str = "m") -> list[int]:
    return [index for index in range(1, count + 1) if begin(tracing, model=model) is not None]


def test_off_by_default() -> None:
    assert not tracing().is_on
    assert chosen(tracing(), 3) == []


def test_each_so_many_th_and_no_more_than_the_count() -> None:
    settings = tracing(*ON, ("", "rate", "3"), ("", "count", "2"))
    assert chosen(settings, 12) == [3, 6]
    assert settings.values_of("").count == 0
    settings.change("", {"count": 1})
    # Counting starts again.
    assert chosen(settings, 6) == [3]


def test_nothing_without_a_file() -> None:
    settings = tracing(*ON[:2])
    assert settings.values_of("").level is TraceLevel.TIMESTAMPS
    assert chosen(settings, 3) == []
    with pytest.raises(ServeError, match="Attempting to set invalid trace setting :trace file name is not given"):
        settings.change("", {"rate": 2})


def test_one_model_alone() -> None:
    settings = tracing(("triton", "file", "/nowhere"))
    switched: list[bool] = []
    settings.on_switched = lambda: switched.append(settings.is_on)
    settings.change("m", {"level": TraceLevel.TIMESTAMPS, "rate": 1})
    assert chosen(settings, 2, "other") == []
    assert chosen(settings, 2) == [1, 2]
    settings.change("m", {"level": None, "rate": None})
    assert switched == [True, False]


def test_a_change_for_all_that_one_model_cannot_follow_changes_nothing() -> None:
    sink = HeldSink()
    settings = Tracing(trace_options((("triton", "file", "/nowhere"),), {}), sink)
    settings.change("a", {"rate": 5})
    settings.change("m", {"level": TraceLevel.TIMESTAMPS})
    sink.retired.clear()
    with pytest.raises(ServeError, match="sample rate must be non-zero"):
        settings.change("", {"rate": 0, "count": 3})
    assert [settings.values_of(name).rate for name in ("", "a", "m")] == [1000, 5, 1000]
    assert {settings.values_of(name).count for name in ("", "a", "m")} == {-1}
    assert not sink.retired
    settings.change("", {"rate": 2})
    assert [settings.values_of(name).rate for name in ("", "a", "m")] == [2, 5, 2]
    assert len(sink.retired) == 3


def test_a_replaced_setting_is_retired() -> None:
    sink = HeldSink()
    settings = Tracing(trace_options(ON, {}), sink)
    trace = begin(settings)
    settings.change("", {"rate": 2})
    assert len(sink.retired) == 1
    assert trace is not None
    trace.end()
    assert sink.groups == [trace.group]
    settings.close()
    assert sink.is_closed
    assert len(sink.retired) == 2
    assert begin(settings) is None


def test_a_group_is_handed_on_once_all_of_it_has_ended() -> None:
    sink = HeldSink()
    settings = Tracing(trace_options(ON, {}), sink)
    root = begin(settings)
    assert root is not None
    child = root.child("member", "2", "id")
    child.keep_open()
    root.end()
    child.end()
    assert sink.groups == []
    child.end()
    assert sink.groups == [root.group]
    assert [(record.number, record.parent_id) for record in root.group.records] == [(1, 0), (2, 1)]
    # Traces that end late are not passed on a second time.
    root.child("member", "2", "id").end()
    assert len(sink.groups) == 1


def test_a_client_that_traces_is_followed_whatever_rate_and_count() -> None:
    settings = tracing(*SPANS, ("", "rate", "0"))
    assert begin(settings) is None
    record = begin(settings, {"traceparent": TRACEPARENT, "tracestate": "a=b"})
    assert record is not None
    context = re.fullmatch(
        r'\{"traceparent":"00-0af7651916cd43dd8448eb211c80319c-([0-9a-f]{16})-01","tracestate":"a=b"\}', record.context
    )
    assert context is not None
    assert record.span is not None
    assert int(context[1], 16) == record.span.span_id
    settings.change("", {"level": TraceLevel.OFF})
    assert begin(settings, {"traceparent": TRACEPARENT}) is None


def test_a_file_has_no_context() -> None:
    record = begin(tracing(*ON), {"traceparent": TRACEPARENT})
    assert record is not None
    assert record.context == ""


@pytest.mark.parametrize(
    "header",
    [
        "",
        "nonsense",
        TRACEPARENT + "-more",
        TRACEPARENT.upper(),
        "ff" + TRACEPARENT[2:],
        "00-00000000000000000000000000000000-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
    ],
)
def test_headers_that_are_none(header: str) -> None:
    assert client_context({"traceparent": header}) is None


def test_a_header_of_a_later_version() -> None:
    context = client_context({"traceparent": f"01{TRACEPARENT[2:]}-more"})
    assert context == SpanContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)


@pytest.mark.parametrize(
    ("place", "why"), [("gone/trace.json", "No such file or directory"), ("", "Is a directory"), ("trace.json", "")]
)
def test_a_trace_file_that_cannot_be_written_is_said_at_the_start(
    place: str, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / place
    create_tracing((("", "level", "TIMESTAMPS"), ("triton", "file", str(path))), "server", LOG, {}).close()
    message = f"traces will be lost: the trace file {path} cannot be written: {why}"
    assert caplog.messages == ([message] if why else [])
    assert path.exists() == (place == ""), "nothing is made by the look"


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
            ("triton", "file", "ignored"),
        ],
        {"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "5"},
    )
    assert options.mode == "opentelemetry"
    assert (options.url, dict(options.resource)) == (
        "http://collector/v1/traces",
        {"service.name": "vision=2", "zone": "a"},
    )
    assert tuple(options.batch.values()) == (10, 5000, 5)
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
        (("", "level", "all"), "invalid value for trace level option: all; expected OFF, TIMESTAMPS or TENSORS"),
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
        ("resource", "vision", {}, "opentelemetry,resource=vision: expected KEY=VALUE, such as service.name=vision"),
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


def test_what_is_said_of_spans_has_to_make_sense_in_the_other_mode_too() -> None:
    with pytest.raises(ValueError, match="bsp_schedule_delay=soon: expected a whole number"):
        trace_options([("opentelemetry", "bsp_schedule_delay", "soon")], {})
    # The environment's variables then do not mean this server's traces.
    assert trace_options([("opentelemetry", "url", "http://x")], {"OTEL_BSP_SCHEDULE_DELAY": "soon"}).shown == ()
