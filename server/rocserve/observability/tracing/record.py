"""What is written down of a request and of those that it led to, while they run."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rocserve.core.tensors import Tensor
from rocserve.core.trace import (
    COMPUTE_END,
    COMPUTE_INPUT_END,
    COMPUTE_OUTPUT_START,
    COMPUTE_START,
    QUEUE_START,
    REQUEST_START,
)
from rocserve.observability.tracing.options import TraceLevel


@dataclass(frozen=True, slots=True)
class SpanContext:
    """Where a span stands among those of other processes (W3C Trace Context)."""

    trace_id: int
    """128 bits."""
    span_id: int
    """64 bits."""
    state: str = ""
    """The header `tracestate`, which goes on as it came."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened, or a tensor that passed."""

    activity: str
    ns: int
    """time.monotonic_ns()"""
    tensor: Tensor | None = None


class TraceGroup:
    """A request of a client and those that came of it, all on the data plane's thread. It is handed on when all have
    ended."""

    def __init__(
        self,
        level: TraceLevel,
        numbers: Iterator[int],
        on_done: Callable[[TraceGroup], None],
        parent: SpanContext | None = None,
        makes_spans: bool = False,
    ) -> None:
        """
        Args:
            numbers: gives each trace of the server its number.
            parent: the client's own span, which this one belongs to.
            makes_spans: each trace has a number in the world beside that in this server.
        """
        self.level = level
        self.parent = parent
        self.makes_spans = makes_spans
        self.trace_id = parent.trace_id if parent is not None else random_id(128) if makes_spans else 0
        self.span_id = random_id(64) if makes_spans else 0
        """Of the span around all of the request."""
        self.wall_offset_ns = time.time_ns() - time.monotonic_ns()
        """What makes of a time of the monotonic clock one of the calendar."""
        self.records: list[TraceRecord] = []
        """The client's own request first."""
        self.front_end: list[Moment] = []
        """What the front end did; other models know nothing of it."""
        self._numbers = numbers
        self._on_done = on_done
        self._open = 0
        self._done = False

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        return sum(record.nbytes for record in self.records)

    def begin(self, model_name: str, model_version: str, request_id: str, parent_id: int, now_ns: int) -> TraceRecord:
        self._open += 1
        record = TraceRecord(self, next(self._numbers), model_name, model_version, request_id, parent_id)
        self.records.append(record)
        record.note(REQUEST_START, now_ns)
        return record

    def keep_open(self) -> None:
        self._open += 1

    def end_one(self) -> None:
        self._open -= 1
        if not self._open and not self._done:
            self._done = True
            self._on_done(self)


class TraceRecord:
    """One request's trace. Implements core.trace.Trace."""

    def __init__(
        self, group: TraceGroup, number: int, model_name: str, model_version: str, request_id: str, parent_id: int
    ) -> None:
        self.number = number
        self.model_name = model_name
        self.model_version = model_version
        self.request_id = request_id
        self.parent_id = parent_id
        """The number of the request that made this one; 0 = a client did."""
        self.span_id = random_id(64) if group.makes_spans else 0
        self.moments: list[Moment] = []
        self.nbytes = 2000
        self._group = group
        self._notes_times = bool(group.level & TraceLevel.TIMESTAMPS)
        self.wants_tensors = bool(group.level & TraceLevel.TENSORS) and not group.makes_spans

    @property
    def context(self) -> str:
        """See core.trace.Trace."""
        group = self._group
        if not group.makes_spans:
            return ""
        context = {"traceparent": f"00-{group.trace_id:032x}-{self.span_id:016x}-01"}
        if group.parent is not None and group.parent.state:
            context["tracestate"] = group.parent.state
        return json.dumps(context, separators=(",", ":"))

    def note(self, activity: str, ns: int) -> None:
        """See core.trace.Trace."""
        if self._notes_times:
            self.moments.append(Moment(activity, ns))

    def note_run(self, queue_start: int, times: tuple[int, int, int, int]) -> None:
        """See core.trace.Trace."""
        names = (QUEUE_START, COMPUTE_START, COMPUTE_INPUT_END, COMPUTE_OUTPUT_START, COMPUTE_END)
        for name, ns in zip(names, (queue_start, *times), strict=True):
            self.note(name, ns)

    def note_tensors(self, activity: str, tensors: Sequence[Tensor]) -> None:
        """See core.trace.Trace."""
        if not self.wants_tensors:
            return
        now_ns = time.monotonic_ns()
        for tensor in tensors:
            self.nbytes += len(tensor.data)
            self.moments.append(Moment(activity, now_ns, tensor.copied()))

    def note_front_end(self, activity: str, ns: int) -> None:
        """What the front end did for this request."""
        if self._notes_times:
            self._group.front_end.append(Moment(activity, ns))

    def child(self, model_name: str, model_version: str, request_id: str) -> TraceRecord:
        """See core.trace.Trace."""
        return self._group.begin(model_name, model_version, request_id, self.number, time.monotonic_ns())

    def keep_open(self) -> None:
        """See core.trace.Trace."""
        self._group.keep_open()

    def end(self) -> None:
        """See core.trace.Trace."""
        self._group.end_one()


def client_context(headers: Mapping[str, str]) -> SpanContext | None:
    """The client's span as the headers `traceparent` and `tracestate` tell it; None = none that is valid.

    `headers`: names in lower case.
    """
    parts = headers.get("traceparent", "").strip().split("-")
    if len(parts) < 4 or [len(part) for part in parts[:4]] != [2, 32, 16, 2] or parts[0] == "ff":
        return None
    if parts[0] == "00" and len(parts) != 4:
        return None
    if not all(set(part) <= set("0123456789abcdef") for part in parts[:4]):
        return None
    trace_id, span_id = int(parts[1], 16), int(parts[2], 16)
    if not trace_id or not span_id:
        return None
    return SpanContext(trace_id, span_id, headers.get("tracestate", "").strip())


def random_id(bits: int) -> int:
    return secrets.randbits(bits) or 1
