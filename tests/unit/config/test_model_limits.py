"""The limits that a model's parameters set: read by their names, and refused in words."""

from __future__ import annotations

import re

import pytest

from rocserve.config.model_limits import time_limits, worker_bounds
from rocserve.core.errors import ServeError, StatusCode
from rocserve.settings import TimeLimits


def test_parameters_go_before_the_flags_and_leave_the_others() -> None:
    parameters = {"request_timeout_secs": "2.5", "load_timeout_secs": "0", "worker_tasks": "40", "other": "x"}
    assert time_limits(parameters, TimeLimits()) == TimeLimits(request_seconds=2.5, load_seconds=0.0)
    assert worker_bounds(parameters) == {"tasks": 40}


@pytest.mark.parametrize("text", ["", "soon", "-1", "nan", "inf"])
def test_what_is_no_time_is_refused(text: str) -> None:
    expected = f"parameter 'hang_timeout_secs': expected a number of seconds, 0 for no limit, got '{text}'"
    with pytest.raises(ServeError, match=re.escape(expected)) as refused:
        time_limits({"hang_timeout_secs": text}, TimeLimits())
    assert refused.value.code is StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("text", ["", "much", "-1", "1.5", "1" * 19, "\u0663"])
def test_what_is_no_number_is_refused(text: str) -> None:
    expected = f"parameter 'worker_memory_bytes': expected a whole number, 0 for no bound, got '{text}'"
    with pytest.raises(ServeError, match=re.escape(expected)) as refused:
        worker_bounds({"worker_memory_bytes": text})
    assert refused.value.code is StatusCode.INVALID_ARGUMENT
