"""Parameters that the server acts on: their types and values, in Triton's words. The ids of the requests that a model
is at, at the head of the lines that it writes. Names of sequences."""

from __future__ import annotations

import asyncio

import pytest

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.request_parameters import check_request_parameters, class_count
from rocserve.core.request_prefix import begin_requests, current_prefix, end_requests
from rocserve.core.sequences import sequence_id


def test_other_parameters_may_be_anything():
    check_request_parameters({"colour": "red", "priority": 3, "timeout": 0, "triton_enable_empty_final_response": True})


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"priority": -1}, "invalid value for 'priority', expected value >= 0."),
        ({"priority": "1"}, "invalid value type for 'priority' parameter, expected int64_param or uint64_param."),
        ({"priority": True}, "invalid value type for 'priority' parameter, expected int64_param or uint64_param."),
        ({"timeout": 1.5}, "invalid value type for 'timeout' parameter, expected int64_param."),
        ({"timeout": -1}, "invalid value for 'timeout', expected value >= 0."),
        (
            {"triton_enable_empty_final_response": 1},
            "invalid value type for 'triton_enable_empty_final_response' parameter, expected bool_param.",
        ),
        (
            {"triton_x": 1},
            "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys starting"
            " with 'triton_' are allowed: triton_enable_empty_final_response",
        ),
    ],
)
def test_wrong_parameters_are_refused(parameters: dict[str, bool | int | float | str], text: str):
    with pytest.raises(ServeError) as caught:
        check_request_parameters(parameters)
    assert (caught.value.code, caught.value.text) == (StatusCode.INVALID_ARGUMENT, text)


@pytest.mark.parametrize("value", [True, "2", 2.0])
def test_a_count_of_classes_is_an_integer(value: bool | float | str):
    with pytest.raises(ServeError, match="invalid value type for 'classification' parameter, expected int64_param"):
        class_count({"classification": value})


@pytest.mark.parametrize("value", [0, -3])
def test_a_count_of_classes_is_positive(value: int):
    with pytest.raises(ServeError, match="invalid value for 'classification' parameter, expected >= 0"):
        class_count({"classification": value})


def test_without_a_count_there_are_no_classes():
    assert class_count({}) == 0
    assert class_count({"classification": 5}) == 5


def test_one_batch_after_the_other() -> None:
    assert current_prefix() == ""
    outer = begin_requests(("a", ""))
    assert current_prefix() == "[request id: a, <id_unknown>] "
    inner = begin_requests(("", ""))
    assert current_prefix() == ""
    end_requests(inner)
    assert current_prefix() == "[request id: a, <id_unknown>] "
    end_requests(outer)
    assert current_prefix() == ""


async def test_a_coroutine_keeps_its_own() -> None:
    async def prefix() -> str:
        await asyncio.sleep(0)
        return current_prefix()

    tasks = []
    for request_id in "ab":
        token = begin_requests((request_id,))
        tasks.append(asyncio.ensure_future(prefix()))
        end_requests(token)
    assert await asyncio.gather(*tasks) == ["[request id: a] ", "[request id: b] "]


def test_names_are_at_most_128_bytes_long() -> None:
    assert sequence_id("s" * 128) == "s" * 128
    with pytest.raises(ServeError) as caught:
        sequence_id("s" * 129)
    assert caught.value.code is StatusCode.UNIMPLEMENTED
    assert caught.value.text == "string correlation ID cannot be longer than 128 characters"


def test_numbers_below_zero_are_those_of_the_same_bits() -> None:
    assert sequence_id(-1) == 2**64 - 1
