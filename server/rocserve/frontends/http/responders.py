"""Inference requests of HTTP: what they are served with, and who waits for their answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.model_config import ModelConfig
from rocserve.core.request_memory import RequestMemory
from rocserve.core.requests import InferRequest, InferResponse
from rocserve.core.serving import ServingTableHolder
from rocserve.frontends.http.body import BodyReader
from rocserve.frontends.http.large_bodies import LargeBodies
from rocserve.frontends.http.request import Request
from rocserve.scheduling.batch import send_copied
from rocserve.services.inference import Inference
from rocserve.services.methods import Method
from rocserve.services.observation import ClientResponder, RequestOrigin
from rocserve.settings import HttpSettings


class Models(Protocol):
    """The configurations of the models that are served."""

    def find(self, name: str, version: str) -> ModelConfig | None:
        """Of the version that a request names; None = ask.

        Raises:
            ServeError: there is none ready.
        """

    async def ask(self, name: str, version: str) -> ModelConfig:
        """The same, of the server; raises as `find` does."""


class ServedModels:
    """Those of this process."""

    def __init__(self, tables: ServingTableHolder) -> None:
        self._tables = tables

    def find(self, name: str, version: str) -> ModelConfig:
        """See Models."""
        return self._tables.table.find(name, version).config

    async def ask(self, name: str, version: str) -> ModelConfig:
        """See Models."""
        return self.find(name, version)


@dataclass(frozen=True, slots=True)
class HttpParts:
    """What HTTP asks, in the server's own process or beside it."""

    inference: Inference
    methods: Mapping[str, Method]
    models: Models
    memory: RequestMemory
    large: LargeBodies
    settings: HttpSettings
    bodies: BodyReader = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bodies", BodyReader(self.settings.max_input_size, self.memory))


OWN_HEADER = "X-Request-Timeout-Ms"
ENVOY_HEADER = "X-Envoy-Expected-Rq-Timeout-Ms"
"""Envoy sends it to servers behind it: how long it waits for them."""
_HEADERS = tuple((name, name.lower()) for name in (OWN_HEADER, ENVOY_HEADER))
_MOST_DIGITS = 15
"""Of milliseconds: thirty thousand years."""


def request_timeout(headers: Mapping[str, str], timeout_seconds: float) -> float | None:
    """How many seconds the client of a request waits from its beginning on, as its headers and the server's settings
    say; None = there is no end. The shortest counts.

    Args:
        timeout_seconds: the longest that any request may take; 0 = as long as it takes.

    Raises:
        ServeError: INVALID_ARGUMENT, a header is no number.
    """
    seconds = [timeout_seconds] if timeout_seconds else []
    for name, key in _HEADERS:
        text = headers.get(key)
        if text is not None:
            if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS and int(text)):
                raise invalid_argument(f"{name}: expected a whole number of milliseconds from 1 on, got '{text}'")
            seconds.append(int(text) / 1000)
    return min(seconds, default=None)


class HttpResponder(ClientResponder):
    """A request of HTTP from its head on: where it comes from, whether its client is still there, and (a Holder) what
    memory its body takes. All is called on the plane's thread."""

    held_bytes = 0
    is_refused = False
    """Whether it failed before it was scheduled."""
    _is_scheduled = False
    _is_gone = False
    _callbacks: Sequence[Callable[[], None]] = ()

    def __init__(self, request: Request, parts: HttpParts, timeout: float | None) -> None:
        """`timeout`: seconds from the request's beginning on, after which the client is answered so, whatever becomes
        of the request."""
        self.request = request
        self._parts = parts
        self._deadline = None if timeout is None else request.began_at + timeout

    def hand_over(self, request: InferRequest) -> None:
        """Have the request, whose body is there now, scheduled. An error that is raised is its only answer."""
        request.deadline = self._deadline
        self._parts.inference.infer(request, self)
        self._is_scheduled = True

    def release(self) -> None:
        """The request's body is needed no more. The callbacks know the request, which knows this: such a ring would
        keep the client's data until the next collection."""
        self._callbacks = ()
        self._parts.memory.release(self)

    def origin(self) -> RequestOrigin:
        request = self.request
        received_ns = int(request.began_at * 1e9), time.monotonic_ns()
        return RequestOrigin("HTTP", received_ns, request.head.headers, request.remote)

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        self._callbacks = [*self._callbacks, callback]
        if self._is_gone:
            self._on_gone()

    def cancel(self) -> None:
        """Nobody waits for the answer any more. Who says so may be in the middle of it."""
        self._is_gone = True
        self._parts.inference.plane.call_soon(self._on_gone)

    def _copy(self, response: InferResponse, final: bool) -> None:
        """A large response, for clients may read slowly; it will be sent once more."""
        self._parts.inference.plane.work_off(send_copied(response, final, self))

    def _on_gone(self) -> None:
        callbacks, self._callbacks = self._callbacks, ()
        for callback in callbacks:
            callback()

    def _note_failure(self, error: ServeError) -> None:
        if error.is_refusal or not self._is_scheduled:
            self.is_refused = True
