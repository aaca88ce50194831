"""Timeouts out of headers and settings."""

from __future__ import annotations

import pytest

from rocserve.core.errors import ServeError, StatusCode
from rocserve.frontends.http.inference import request_timeout


@pytest.mark.parametrize(
    ("timeout_seconds", "headers", "seconds"),
    [
        (0.0, {}, None),
        (5.0, {}, 5.0),
        (0.0, {"X-Request-Timeout-Ms": "1500"}, 1.5),
        (0.0, {"X-Envoy-Expected-Rq-Timeout-Ms": "15000"}, 15.0),
        (5.0, {"X-Request-Timeout-Ms": "9000", "X-Envoy-Expected-Rq-Timeout-Ms": "15000"}, 5.0),
        (5.0, {"X-Request-Timeout-Ms": "9000", "X-Envoy-Expected-Rq-Timeout-Ms": "3000"}, 3.0),
    ],
)
def test_the_shortest_counts(timeout_seconds: float, headers: dict[str, str], seconds: float | None) -> None:
    assert request_timeout({name.lower(): value for name, value in headers.items()}, timeout_seconds) == seconds


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "1s", "\u0661", "9" * 30])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ServeError, match="expected a whole number of milliseconds from 1 on, got") as refused:
        request_timeout({"x-request-timeout-ms": text}, 0.0)
    assert refused.value.code is StatusCode.INVALID_ARGUMENT
