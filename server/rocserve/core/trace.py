"""Traces of requests, and of the requests that they caused, while they run. Used on the data plane's thread."""

from __future__ import annotations

import enum
import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Literal

from rocserve.core.tensors import Tensor

Activity = Literal[
    "REQUEST_START",
    "QUEUE_START",
    "COMPUTE_START",
    "COMPUTE_INPUT_END",
    "COMPUTE_OUTPUT_START",
    "COMPUTE_END",
    "REQUEST_END",
]
"""Triton's names of a request's activities."""


class TraceLevel(enum.IntFlag):
    OFF = 0
    TIMESTAMPS = 1
    TENSORS = 2

    @classmethod
    def of(cls, parts: Iterable[TraceLevel]) -> TraceLevel:
        return reduce(or_, parts, cls.OFF)


@dataclass(frozen=True, slots=True)
class SpanContext:
    """A span's identity among the spans of other processes (W3C Trace Context)."""

    trace_id: int
    """128 bits."""
    span_id: int
    """64 bits."""
    state: str = ""
    """The header `tracestate`, forwarded unchanged."""

    def inner(self) -> SpanContext:
        """Return a new span of the same trace."""
        return replace(self, span_id=random_id(64))


@dataclass(frozen=True, slots=True)
class Moment:
    """An activity in a request's life, and when it happened."""

    activity: str
    ns: int
    """time.monotonic_ns()"""
    tensor: Tensor | None = None


class TraceGroup:
    """A client's request and the requests that it caused. `on_done` gets the group after the end of its last trace."""

    def __init__(
        self,
        level: TraceLevel,
        numbers: Iterator[int],
        on_done: Callable[[TraceGroup], None],
        parent: SpanContext | None = None,
        makes_spans: bool = False,
    ) -> None:
        """`numbers`: numbers for all traces. `parent`: the client's span. `makes_spans`: traces also have spans."""
        self.level = level
        self.parent = parent
        self.span: SpanContext | None = None
        """The span around the whole request; None = traces have no spans."""
        if makes_spans:
            self.span = SpanContext(random_id(128), random_id(64)) if parent is None else parent.inner()
        self.wall_offset_ns = time.time_ns() - time.monotonic_ns()
        """Add this to a monotonic time to get the time of the wall clock."""
        self.records: list[Trace] = []
        """The client's own request first."""
        self.front_end: list[Moment] = []
        """Activities of the front end, which belong to the client's request only."""
        self._numbers = numbers
        self.on_done: Callable[[TraceGroup], None] | None = on_done
        """None = already called."""
        self.open_ends = 0
        """How many calls of `end` are still expected."""

    @property
    def nbytes(self) -> int:
        """Return the approximate memory of the traces."""
        return sum(record.nbytes for record in self.records)

    def begin(self, model_name: str, model_version: str, request_id: str, parent_id: int, now_ns: int) -> Trace:
        self.open_ends += 1
        record = Trace(self, next(self._numbers), model_name, model_version, request_id, parent_id)
        self.records.append(record)
        record.note("REQUEST_START", now_ns)
        return record


class Trace:
    """The trace of one request. Only requests chosen for tracing have one."""

    def __init__(
        self, group: TraceGroup, number: int, model_name: str, model_version: str, request_id: str, parent_id: int
    ) -> None:
        self.number = number
        self.model_name = model_name
        self.model_version = model_version
        self.request_id = request_id
        self.parent_id = parent_id
        """Number of the trace of the request that caused this one; 0 = a client sent it."""
        self.span = None if group.span is None else group.span.inner()
        self.moments: list[Moment] = []
        self.nbytes = 2000
        self.group = group
        self._notes_times = bool(group.level & TraceLevel.TIMESTAMPS)
        self.wants_tensors = bool(group.level & TraceLevel.TENSORS) and group.span is None
        """Whether `note_tensors` has an effect."""

    @property
    def context(self) -> str:
        """Return the W3C trace context that a model may pass on, as JSON; "" if there is none."""
        span = self.span
        if span is None:
            return ""
        context = {"traceparent": f"00-{span.trace_id:032x}-{span.span_id:016x}-01"}
        if span.state:
            context["tracestate"] = span.state
        return json.dumps(context, separators=(",", ":"))

    def note(self, activity: Activity, ns: int) -> None:
        """Record an activity. `ns`: its time.monotonic_ns()."""
        if self._notes_times:
            self.moments.append(Moment(activity, ns))

    def note_run(self, queue_start: int, times: tuple[int, int, int, int]) -> None:
        """Record an execution. `times`: of its start, the engine's start, the engine's end and its own end."""
        begin, input_end, output_start, end = times
        self.note("QUEUE_START", queue_start)
        self.note("COMPUTE_START", begin)
        self.note("COMPUTE_INPUT_END", input_end)
        self.note("COMPUTE_OUTPUT_START", output_start)
        self.note("COMPUTE_END", end)

    def note_tensors(
        self, activity: Literal["TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_OUTPUT"], tensors: Sequence[Tensor]
    ) -> None:
        """Record copies of tensors."""
        if not self.wants_tensors:
            return
        now_ns = time.monotonic_ns()
        for tensor in tensors:
            self.nbytes += len(tensor.data)
            self.moments.append(Moment(activity, now_ns, tensor.copied()))

    def note_front_end(self, activity: str, ns: int) -> None:
        if self._notes_times:
            self.group.front_end.append(Moment(activity, ns))

    def child(self, model_name: str, model_version: str, request_id: str) -> Trace:
        """Begin the trace of a request that this one causes, a step of an ensemble or a call by a model."""
        return self.group.begin(model_name, model_version, request_id, self.number, time.monotonic_ns())

    def keep_open(self) -> None:
        """Expect one more call of `end`: another part of the server may still record activities."""
        self.group.open_ends += 1

    def end(self) -> None:
        """End one part's records. After the last expected `end` of the whole group, `on_done` gets the group."""
        group = self.group
        group.open_ends -= 1
        if not group.open_ends and group.on_done is not None:
            on_done, group.on_done = group.on_done, None
            on_done(group)


def random_id(bits: int) -> int:
    return secrets.randbits(bits) or 1
