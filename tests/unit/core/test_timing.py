"""The times of requests, as parameters and as the header `Server-Timing`."""

from __future__ import annotations

import json

import pytest

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.load_check import LoadCheckReport
from rocserve.core.parameters import check_request_parameters
from rocserve.core.requests import RequestHead
from rocserve.core.timing import MOST_STEPS, RequestTiming, server_timing

MS = 1_000_000


def timed(name: str, instance: str = "m_0_0") -> RequestTiming:
    timing = RequestTiming(name, 0, version=3, load_check=LoadCheckReport(("rows are independent",)), ended_ns=9 * MS)
    timing.note_start(1 * MS, 3 * MS, instance, 4)
    timing.note_run((3 * MS, 4 * MS, 6 * MS, 7 * MS))
    return timing


def test_the_header_has_milliseconds_and_texts() -> None:
    header = server_timing(timed("m").parameters())["Server-Timing"]
    assert header == (
        "total;dur=9.000, queue;dur=2.000, compute_input;dur=1.000, compute_infer;dur=2.000, compute_output;dur=1.000,"
        ' batch_size;desc="4", version;desc="3", instance;desc="m_0_0", load_check;desc="rows are independent"'
    )


def test_the_header_names_the_steps_of_an_ensemble() -> None:
    whole = RequestTiming("e", 0, version=1, is_ensemble=True, ended_ns=20 * MS)
    whole.steps += [timed("first"), timed("second")]
    metrics = server_timing(whole.parameters())["Server-Timing"].split(", ")
    assert metrics[:3] == ["total;dur=20.000", "queue;dur=4.000", "compute_input;dur=2.000"]
    assert 'step0_total;dur=9.000;desc="first"' in metrics
    assert 'step1_total;dur=9.000;desc="second"' in metrics
    assert "step1_compute_infer;dur=2.000" in metrics


def test_a_header_is_short_whatever_it_tells() -> None:
    """Proxies refuse long ones; the parameters tell all."""
    whole = RequestTiming("e", 0, is_ensemble=True, load_check=LoadCheckReport(("x" * 5000,)))
    whole.steps += [timed('"' * 255) for _ in range(MOST_STEPS)]
    header = server_timing(whole.parameters())["Server-Timing"]
    assert "step0_total;" in header
    assert len(header) <= 2048
    assert header.endswith("compute_output;dur=1.000")


def test_a_header_is_ascii_and_its_texts_are_quoted() -> None:
    header = server_timing(timed("m", 'ein "Gerät" \\\r\nX: y').parameters())["Server-Timing"]
    assert r'instance;desc="ein \"Ger?t\" \\??X: y"' in header
    assert header.isascii() and header.isprintable()


def test_a_response_without_times_has_no_header() -> None:
    assert server_timing({}) == server_timing({"timing_mine": 1}) == {}


@pytest.mark.parametrize(
    "own",
    [
        {"timing_total_ns": "x"},
        {"timing_total_ns": 1, "timing_steps": "[1]"},
        {"timing_total_ns": 1, "timing_steps": "{"},
    ],
)
def test_parameters_of_a_model_with_these_names_are_no_header(own: dict[str, int | str]) -> None:
    assert server_timing(own) == {}


def test_an_endless_ensemble_keeps_its_last_steps() -> None:
    whole = RequestTiming("e", 0, is_ensemble=True)
    for number in range(MOST_STEPS + 5):
        whole.begin_step(str(number))
    steps = json.loads(str(whole.parameters()["timing_steps"]))
    assert [steps[0]["model"], steps[-1]["model"], len(steps)] == ["5", str(MOST_STEPS + 4), MOST_STEPS]


def test_only_true_asks_for_times() -> None:
    asked = [RequestHead("m", "", (), (), {"timing": value}).wants_timing for value in (True, False, 1, "true")]
    assert asked == [True, False, False, False]
    for value in (1, "true", 1.0):
        with pytest.raises(ServeError) as refused:
            check_request_parameters({"timing": value})
        assert refused.value.code is StatusCode.INVALID_ARGUMENT
        assert refused.value.text == "invalid value type for 'timing' parameter, expected bool_param."
    check_request_parameters({"timing": False})


def test_the_timing_has_no_entries_for_unknown_values() -> None:
    told = RequestTiming("m", 0, version=1, ended_ns=5).parameters()
    assert told == {"timing_version": "1", "timing_total_ns": 5, "timing_load_check": "not checked"}
