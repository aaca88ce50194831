"""The settings of traces and of the log: read, changed, refused. Each exchange restores what it changed."""

from __future__ import annotations

from typing import Any

import pytest
from support.parity.exchange import Call, Exchange
from support.parity.pair import Pair
from tritonclient.grpc import service_pb2 as pb


def trace(model: str = "", **settings: str | list[str] | None) -> Call:
    """Set trace settings; None clears one."""
    request = pb.TraceSettingRequest(model_name=model)
    for name, value in settings.items():
        values = [] if value is None else [value] if isinstance(value, str) else value
        request.settings[name].value.extend(values)
    return Call("TraceSetting", request)


def log(**settings: Any) -> Call:
    request = pb.LogSettingsRequest()
    for name, value in settings.items():
        setting = request.settings[name]
        if isinstance(value, bool):
            setting.bool_param = value
        elif isinstance(value, int):
            setting.uint32_param = value
        elif isinstance(value, str):
            setting.string_param = value
    return Call("LogSettings", request)


TRACE_BACK = trace(trace_level=None, trace_rate=None, trace_count=None, log_frequency=None, trace_file=None)
TRACES = [
    Exchange("trace: read", [trace()]),
    Exchange("trace: read of a model", [trace("add_sub")]),
    Exchange("trace: read of an unknown model", [trace("missing")]),
    *(
        Exchange(f"trace: {name} = {value!r}", [trace(**{name: value}), trace(), TRACE_BACK])
        for name, value in (
            ("trace_level", "TIMESTAMPS"),
            ("trace_level", ["TIMESTAMPS", "TENSORS"]),
            ("trace_level", "OFF"),
            ("trace_level", ["OFF", "TIMESTAMPS"]),
            ("trace_level", "MIN"),
            ("trace_level", "timestamps"),
            ("trace_level", "nothing"),
            ("trace_level", None),
            ("trace_rate", "7"),
            ("trace_rate", "0"),
            ("trace_rate", "-1"),
            ("trace_rate", "often"),
            ("trace_rate", "99999999999999999999999"),
            ("trace_rate", ["1", "2"]),
            ("trace_count", "5"),
            ("trace_count", "-1"),
            ("trace_count", "-2"),
            ("trace_count", "many"),
            ("log_frequency", "10"),
            ("log_frequency", "-1"),
            ("log_frequency", "x"),
            ("trace_file", "elsewhere.json"),
            ("trace_mode", "triton"),
            ("colour", "red"),
        )
    ),
    Exchange(
        "trace: of a model",
        [
            trace("add_sub", trace_rate="3"),
            trace("add_sub"),
            trace(),
            trace("add_sub", trace_rate=None),
            trace("add_sub"),
        ],
    ),
    Exchange(
        "trace: a model follows the others until it is set",
        [
            trace(trace_rate="9"),
            trace("chain"),
            trace("chain", trace_rate="4"),
            trace(trace_rate="8"),
            trace("chain"),
            trace("chain", trace_rate=None),
            trace("chain"),
            TRACE_BACK,
        ],
    ),
    Exchange("trace: of an unknown model", [trace("missing", trace_rate="3")]),
]
LOGS = [
    Exchange("log: read", [log()]),
    *(
        Exchange(f"log: {name} = {value!r}", [log(**{name: value}), log(), log(**back)])
        for name, value, back in (
            ("log_info", False, {"log_info": True}),
            ("log_warning", False, {"log_warning": True}),
            ("log_error", False, {"log_error": True}),
            ("log_verbose_level", 1, {"log_verbose_level": 0}),
            ("log_format", "ISO8601", {"log_format": "default"}),
            ("log_format", "default", {}),
            ("log_format", "json", {}),
            ("log_format", 1, {}),
            ("log_info", 1, {}),
            ("log_info", "true", {}),
            ("log_verbose_level", "1", {}),
            ("log_verbose_level", True, {}),
            ("log_file", 1, {}),
            ("log_file", "/tmp/rocserve-parity.log", {}),
            ("log_info", None, {}),
            ("colour", "red", {}),
        )
    ),
]


@pytest.mark.parametrize("exchange", [*TRACES, *LOGS], ids=lambda exchange: exchange.name)
def test_settings(pair: Pair, exchange: Exchange) -> None:
    pair.compare(exchange)
