"""Until when a client waits for the answer to an inference request, as its headers and the server's settings say."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rocserve.core.errors import invalid_argument

OWN_HEADER = "X-Request-Timeout-Ms"
ENVOY_HEADER = "X-Envoy-Expected-Rq-Timeout-Ms"
"""Envoy tells those behind it so how long it waits for them."""
_HEADERS = tuple((name, name.lower()) for name in (OWN_HEADER, ENVOY_HEADER))
_MOST_DIGITS = 15
"""Of milliseconds: thirty thousand years."""


class RequestDeadlines:
    def __init__(self, timeout_seconds: float) -> None:
        """`timeout_seconds`: the longest that any request may take; 0 = as long as it takes."""
        self._timeout_seconds = timeout_seconds

    def of(self, headers: Mapping[str, str]) -> float | None:
        """Of a request whose head is there now: time.monotonic() seconds, None = there is none. The shortest counts.

        Raises:
            ServeError: INVALID_ARGUMENT, a header is no number.
        """
        seconds = [self._timeout_seconds] if self._timeout_seconds else []
        for name, key in _HEADERS:
            text = headers.get(key)
            if text is not None:
                seconds.append(_milliseconds(name, text) / 1000)
        return time.monotonic() + min(seconds) if seconds else None


def _milliseconds(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS and int(text)):
        raise invalid_argument(f"{name}: expected a whole number of milliseconds from 1 on, got '{text}'")
    return int(text)
