"""TraceSetting: accepted values and their forms, and Triton's words for the others."""

from __future__ import annotations

import pytest
from support.observation import HeldSink

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.serving import ServedModel, ServingTable, ServingTableHolder
from rocserve.observability.tracing.trace_settings import trace_options
from rocserve.observability.tracing.tracing import Tracing
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.services.control import trace_setting

CONFIG = (("", "level", "TIMESTAMPS"), ("", "rate", "100"), ("triton", "file", "/tmp/trace.json"))
AT_START = {
    "trace_level": ["TIMESTAMPS"],
    "trace_rate": ["100"],
    "trace_count": ["-1"],
    "log_frequency": ["0"],
    "trace_file": ["/tmp/trace.json"],
    "trace_mode": ["triton"],
}


class Control:
    """The service, with plain values."""

    def __init__(self, *config: tuple[str, str, str]) -> None:
        tables = ServingTableHolder()
        tables.table = ServingTable({"m": ServedModel("m", {1: object()}, object())})  # type: ignore[dict-item, arg-type]
        self._parts = Tracing(trace_options(config, {}), HeldSink()), tables

    def ask(self, model: str = "", **settings: list[str]) -> dict[str, list[str]]:
        request = pb.TraceSettingRequest(model_name=model)
        for name, values in settings.items():
            request.settings[name].value.extend(values)
        answer = trace_setting(*self._parts, request)
        return {name: list(value.value) for name, value in answer.settings.items()}


@pytest.fixture
def control() -> Control:
    return Control(*CONFIG)


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ({"trace_level": ["TENSORS", "TIMESTAMPS"]}, {"trace_level": ["TIMESTAMPS", "TENSORS"]}),
        ({"trace_level": ["OFF"], "trace_rate": ["0"]}, {"trace_level": ["OFF"], "trace_rate": ["0"]}),
        ({"trace_level": ["timestamps"]}, {}),
        ({"trace_level": []}, {}),
        ({"trace_rate": ["12abc"]}, {"trace_rate": ["12"]}),
        ({"trace_rate": [" +7"]}, {"trace_rate": ["7"]}),
        ({"log_frequency": ["-3"]}, {"log_frequency": ["4294967293"]}),
        ({"trace_mode": ["opentelemetry"]}, {}),
        ({"nothing": ["1", "2"]}, {}),
    ],
)
def test_what_is_taken(control: Control, settings: dict[str, list[str]], changed: dict[str, list[str]]) -> None:
    assert control.ask(**settings) == AT_START | changed
    assert control.ask("m") == AT_START | changed


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"trace_level": ["TIMESTAMPS", "OFF"]}, "Expect only one trace level 'OFF' is specified"),
        ({"trace_rate": ["0"]}, "Attempting to set invalid trace setting :sample rate must be non-zero"),
        ({"trace_rate": [""]}, "Unable to parse 'trace_rate', got: "),
        (
            {"trace_rate": ["4294967295"]},
            "Unable to parse 'trace_rate', value is out of range [ 0, 4294967295 ], got: 4294967295",
        ),
        (
            {"trace_count": ["99999999999"]},
            "Unable to parse 'trace_count', value is out of range [ -1, 2147483647 ], got: 99999999999",
        ),
        (
            {"log_frequency": ["99999999999"]},
            "Unable to parse 'log_frequency', value is out of range [ 0, 4294967295 ], got: 99999999999",
        ),
        (
            {"trace_rate": ["9" * 5000]},
            f"Unable to parse 'trace_rate', value is out of range [ 0, 4294967295 ], got: {'9' * 5000}",
        ),
    ],
)
def test_what_is_refused(control: Control, settings: dict[str, list[str]], text: str) -> None:
    with pytest.raises(ServeError) as raised:
        control.ask(**settings)
    assert (raised.value.code, raised.value.text) == (StatusCode.INVALID_ARGUMENT, text)
    assert control.ask() == AT_START


def test_a_model_of_its_own_and_back(control: Control) -> None:
    assert control.ask("m", trace_rate=["3"]) == AT_START | {"trace_rate": ["3"]}
    assert control.ask() == AT_START
    assert control.ask(log_frequency=["11"]) == AT_START | {"log_frequency": ["11"]}
    assert control.ask("m") == AT_START | {"trace_rate": ["3"], "log_frequency": ["11"]}
    assert control.ask("m", trace_rate=[]) == AT_START | {"log_frequency": ["11"]}
    assert control.ask(log_frequency=[]) == AT_START


def test_the_mode_of_spans_tells_its_settings() -> None:
    control = Control(("", "mode", "opentelemetry"), ("opentelemetry", "resource", "a=b"))
    assert control.ask(trace_rate=["7"]) == {
        "trace_level": ["OFF"],
        "trace_rate": ["7"],
        "trace_count": ["-1"],
        "trace_mode": ["opentelemetry"],
        "resource": ["a=b"],
        "bsp_max_queue_size": ["2048"],
        "bsp_schedule_delay": ["5000"],
        "bsp_max_export_batch_size": ["512"],
    }
