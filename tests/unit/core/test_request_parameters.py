"""Parameters that the server acts on: their types and values, in Triton's words."""

from __future__ import annotations

import pytest

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.request_parameters import check_request_parameters, class_count


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
