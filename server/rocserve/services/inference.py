"""Takes the inference requests of all front ends, and records them in traces and the log if these are switched on."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

from rocserve.core.dispatch import Dispatcher, note_inputs
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.exchange import Exchange, Hook, HookOrder, Responder
from rocserve.core.memo import Memo
from rocserve.core.parameters import QUEUE_PARAMETERS, RESERVED_PREFIX, TIMING
from rocserve.core.printable import shortened
from rocserve.core.private_paths import PrivatePaths
from rocserve.core.request_prefix import request_prefix
from rocserve.core.requests import InferRequest, RequestHead
from rocserve.core.responses import Answer
from rocserve.core.sequences import SEQUENCE_PARAMETERS
from rocserve.core.serving import ServingTableHolder
from rocserve.core.steps import Steps
from rocserve.core.trace import Trace
from rocserve.observability.log_fields import about
from rocserve.observability.tracing.tracing import Tracing
from rocserve.plane.heap import SharedHeap
from rocserve.plane.loop import PlaneLoop
from rocserve.scheduling.served_version import ScheduledVersion
from rocserve.services.client_limits import ClientLimits
from rocserve.services.client_memory.attachment import ClientMemory

NOT_FOR_DECOUPLED: Mapping[str, str] = MappingProxyType(
    {
        "GRPC": "ModelInfer RPC doesn't support models with decoupled transaction policy",
        "HTTP": "HTTP end point doesn't support models with decoupled transaction policy",
    }
)
"""Protocol -> error text for a request that can have only one response."""


@dataclass(frozen=True, slots=True)
class RequestOrigin:
    """How a request came to the server."""

    protocol: str
    """"GRPC" or "HTTP"."""
    received_ns: tuple[int, int]
    """time.monotonic_ns() when the request's first and last bytes arrived; equal over gRPC."""
    headers: Mapping[str, str]
    """The request's headers, names in lower case. Of a repeated header one value is kept."""
    address: str
    """The client's address, or that of the last proxy."""


class ClientResponder(Responder, Protocol):
    takes_one: bool
    """The client can take only one response."""
    protocol: str
    """"GRPC" or "HTTP"."""

    def origin(self) -> RequestOrigin:
        """Return the request's source. Called only for observed or limited requests, when they arrive."""


class Inference(Protocol):
    """Takes the requests of a front end: the server's service, or the link to it from another process."""

    paths: PrivatePaths

    @property
    def plane(self) -> PlaneLoop:
        """The loop on whose thread `infer` must be called."""

    def infer(self, request: InferRequest, client: ClientResponder) -> None:
        """Schedule a request. Never blocks, and sends every error to the responder."""

    def refuse(self, error: ServeError, find_id: Callable[[], str]) -> None:
        """Log the error of a call that made no request. `find_id` reads its id if the log needs it."""


@dataclass(eq=False)
class InferenceService:
    """Takes requests on the data plane's thread, see Inference."""

    _dispatcher: Dispatcher
    _client_memory: ClientMemory
    _observer: RequestObserver
    paths: PrivatePaths
    """Removes the server's paths from errors."""
    plane: PlaneLoop
    _client_limits: ClientLimits | None = None

    @property
    def wants_origins(self) -> bool:
        """Return whether the service asks responders for the source of requests."""
        return self._observer.is_on or self._client_limits is not None

    def watch_wants(self, callback: Callable[[], object]) -> None:
        """Set the callback that is called, on any thread, when `wants_origins` may have changed."""
        self._observer.on_switched = callback

    def heap_for(self, head: RequestHead) -> SharedHeap | None:
        """Return the heap in which the workers would read a request of this head now; None if there is none."""
        try:
            version = self._dispatcher.tables.table.find(head.model_name, head.model_version)
        except ServeError:
            return None
        return version.inputs if isinstance(version, ScheduledVersion) else None

    def refuse(self, error: ServeError, find_id: Callable[[], str]) -> None:
        self._observer.note_refusal(error, find_id)

    def infer(self, request: InferRequest, client: ClientResponder) -> None:
        exchange = Exchange(client)
        is_observed = self._observer.is_on
        copying: Sequence[Steps[None]] = ()
        try:
            if is_observed:
                self._observer.begin(request, exchange, client.origin())
            if self._client_limits is not None:
                self._client_limits.admit(client.origin().address, exchange)
            if request.head.uses_shared_memory:
                copying = self._client_memory.attach(request, exchange)
        except ServeError as error:
            exchange.send(error)
            return
        if is_observed and request.trace is not None:
            # Now all inputs are present, including those in shared memory.
            note_inputs(request.trace, request, exchange)
        self._dispatcher.dispatch(request, exchange, copying)


_LONGEST_TEXT = 1000
"""Characters of what the log quotes of a request besides its names."""


class RequestObserver:
    """Records requests in traces and the log, if these are switched on. Any thread may switch them."""

    def __init__(self, tracing: Tracing, tables: ServingTableHolder, log: logging.Logger) -> None:
        self.is_on = False
        """The only check that is made for every request."""
        self.on_switched: Callable[[], object] | None = None
        self._tracing = tracing
        self._tables = tables
        self._log = log
        tracing.on_switched = self.switch
        self.switch()

    def switch(self) -> None:
        """Adjust to a change of the tracing settings or the log's level."""
        self.is_on = self._tracing.is_on or self._log.isEnabledFor(logging.DEBUG)
        if self.on_switched is not None:
            self.on_switched()

    def begin(self, request: InferRequest, exchange: Exchange, origin: RequestOrigin) -> None:
        """Record a request's arrival, and later its end."""
        head, now_ns = request.head, time.monotonic_ns()
        if self._log.isEnabledFor(logging.DEBUG):
            exchange.add(LogHook(request, now_ns, self._log, origin.address))
        if not self._tracing.is_on:
            return
        try:
            version = self._tables.table.find(head.model_name, head.model_version)
        except ServeError:
            # As in Triton, a request to an unknown model is neither traced nor counted.
            return
        trace = self._tracing.begin(version.name, str(version.version), request.id, origin.headers, now_ns)
        if trace is None:
            return
        part = "HTTP_RECV" if origin.protocol == "HTTP" else "GRPC_WAITREAD"
        for name, ns in zip((f"{part}_START", f"{part}_END"), origin.received_ns, strict=True):
            trace.note_front_end(name, ns)
        request.trace = trace
        exchange.add(_TraceHook(trace, origin.protocol))

    def note_refusal(self, error: ServeError, find_id: Callable[[], str]) -> None:
        if self._log.isEnabledFor(logging.DEBUG):
            request_id = shortened(find_id())
            fields = about(request_id=request_id, code=error.code.name)
            text = "%sinference is refused: %s: %s"
            reason = shortened(error.text, _LONGEST_TEXT)
            self._log.debug(text, request_prefix([request_id]), error.code.name, reason, extra=fields)


class _TraceHook(Hook):
    """Records when a client's request is answered, and ends its trace."""

    __slots__ = ("_is_complete", "_protocol", "_trace")

    order = HookOrder.TRACE

    def __init__(self, trace: Trace, protocol: str) -> None:
        self._trace = trace
        self._protocol = protocol
        self._is_complete = False

    def on_answer(self, exchange: Exchange, answer: Answer, final: bool) -> Answer:
        trace = self._trace
        if final:
            trace.note("REQUEST_END", time.monotonic_ns())
        if not self._is_complete:
            self._is_complete = True
            trace.note_front_end("INFER_RESPONSE_COMPLETE", time.monotonic_ns())
        trace.note_front_end(f"{self._protocol}_SEND_START", time.monotonic_ns())
        return answer

    def on_sent(self, final: bool) -> None:
        self._trace.note_front_end(f"{self._protocol}_SEND_END", time.monotonic_ns())
        if final:
            self._trace.end()


class LogHook(Hook):
    """Logs the beginning and end of a request, but no tensor data."""

    __slots__ = ("_fields", "_log", "_model", "_prefix", "_requested", "_sent", "_shown_prefix", "_started_ns")

    order = HookOrder.LOG

    def __init__(self, request: InferRequest, started_ns: int, log: logging.Logger, client: str) -> None:
        """`client`: its address."""
        head = request.head
        self._model = f"model '{shortened(head.model_name)}'"
        version = shortened(head.model_version)
        self._requested = f"{self._model} version {version}" if version else self._model
        self._prefix = request_prefix([request.id])
        """Triton's prefix; many error texts already begin with it."""
        self._shown_prefix = request_prefix([shortened(request.id)])
        self._fields: dict[str, Any] = {
            "model": head.model_name,
            "version": head.model_version,
            "request_id": request.id,
            "client": client,
        }
        self._started_ns = started_ns
        self._log = log
        self._sent = 0
        inputs = ", ".join(f"{entry.name} {entry.datatype} {list(entry.shape)}" for entry in head.inputs)
        self._log_line("%s begins: %s", self._requested, shortened(inputs, _LONGEST_TEXT))

    def on_answer(self, exchange: Exchange, answer: Answer, final: bool) -> Answer:
        milliseconds = (time.monotonic_ns() - self._started_ns) / 1e6
        self._fields |= {"duration_ms": milliseconds, "code": "OK"}
        if isinstance(answer, ServeError):
            end, text = "ends" if final else "goes on", answer.text.removeprefix(self._prefix)
            self._fields["code"] = answer.code.name
            text = shortened(text, _LONGEST_TEXT)
            self._log_line("%s %s: %s after %.3f ms: %s", self._requested, end, answer.code.name, milliseconds, text)
        elif answer is None:
            self._fields["responses"] = self._sent
            self._log_line("%s ends: OK, %d responses in %.3f ms", self._model, self._sent, milliseconds)
        else:
            self._sent += 1
            if final:
                self._fields["version"] = version = answer.head.model_version
                self._log_line("%s version %s ends: OK after %.3f ms", self._model, version, milliseconds)
        return answer

    def _log_line(self, text: str, *values: object) -> None:
        self._log.debug(
            f"%sinference of {text}", self._shown_prefix, *values, stacklevel=2, extra=about(**self._fields)
        )


_Pairs = tuple[tuple[str, str], ...]


class HeaderForwarding:
    """Adds headers to the parameters of requests. Safe on any thread."""

    def __init__(self, pattern: str) -> None:
        """Forward headers whose names `pattern` matches anywhere, in small or capital letters. Raises re.error if it is
        not a regular expression."""
        # The front ends give the names in lower case.
        self._pattern = re.compile(pattern, re.IGNORECASE)
        # Plans are remembered by the head's identity, so equal requests must keep one head. The dict's operations are
        # atomic; two threads may each make a new head.
        self._heads = Memo[tuple[RequestHead, _Pairs], RequestHead]()

    def forward(self, head: RequestHead, headers: Iterable[tuple[str, str | bytes]]) -> RequestHead:
        """Return the head with headers as parameters, which replace parameters of the same name. Raises ServeError
        (INVALID_ARGUMENT) if a header's name is reserved."""
        search = self._pattern.search
        pairs = tuple(
            (name, value if isinstance(value, str) else value.decode(errors="replace"))
            for name, value in headers
            if search(name)
        )
        if not pairs:
            return head
        forwarded = self._heads.get((head, pairs))
        if forwarded is None:
            reserved = SEQUENCE_PARAMETERS | QUEUE_PARAMETERS | {TIMING, "headers", "binary_data_output"}
            for name, _ in pairs:
                if name in reserved or name.startswith(RESERVED_PREFIX):
                    raise invalid_argument(f"Header '{name}' is reserved for Triton usage and cannot be forwarded.")
            parameters = {**head.parameters, **dict(pairs)}
            forwarded = replace(head, parameters=parameters)
            if forwarded.is_small:
                self._heads.keep((head, pairs), forwarded)
        return forwarded


def header_forwarding(pattern: str) -> HeaderForwarding | None:
    """Return the forwarding for a pattern; None if the pattern is empty."""
    return HeaderForwarding(pattern) if pattern else None
