"""Where a request comes from, for whoever writes down what happened to it."""

from __future__ import annotations

import time
from collections.abc import Callable

from aiohttp import web

from rocserve.services.observation import RequestOrigin


class Arrival:
    """Begins with the head of a request, ends when all of it is there."""

    __slots__ = ("_request", "_start_ns")

    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        self._start_ns = time.monotonic_ns()

    def completed(self) -> Callable[[], RequestOrigin]:
        """To be called when the body is there; what it gives is made only for those who ask."""
        end_ns = time.monotonic_ns()
        return lambda: RequestOrigin(
            "HTTP",
            (self._start_ns, end_ns),
            {name.lower(): value for name, value in self._request.headers.items()},
            self._request.remote or "",
        )
