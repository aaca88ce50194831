"""Traces of requests and of those that they led to, while they run; all on the data plane's thread."""

from __future__ import annotations

import enum
import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

from rocserve.core.tensors import Tensor

# Triton's names.
REQUEST_START = "REQUEST_START"
QUEUE_START = "QUEUE_START"
COMPUTE_START = "COMPUTE_START"
COMPUTE_INPUT_END = "COMPUTE_INPUT_END"
COMPUTE_OUTPUT_START = "COMPUTE_OUTPUT_START"
COMPUTE_END = "COMPUTE_END"
REQUEST_END = "REQUEST_END"
TENSOR_QUEUE_INPUT = "TENSOR_QUEUE_INPUT"
TENSOR_BACKEND_OUTPUT = "TENSOR_BACKEND_OUTPUT"


class TraceLevel(enum.IntFlag):
    """What is written down of a request."""

    OFF = 0
    TIMESTAMPS = 1
    TENSORS = 2

    @classmethod
    def of(cls, parts: Iterable[TraceLevel]) -> TraceLevel:
        """All of them together."""
        return reduce(or_, parts, cls.OFF)


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
        """`numbers`: gives each trace of the server its number. `parent`: the client's own span, which this one belongs
        to. `makes_spans`: each trace has a number in the world beside that in this server."""
        self.level = level
        self.parent = parent
        self.makes_spans = makes_spans
        self.trace_id = parent.trace_id if parent is not None else random_id(128) if makes_spans else 0
        self.span_id = random_id(64) if makes_spans else 0
        """Of the span around all of the request."""
        self.wall_offset_ns = time.time_ns() - time.monotonic_ns()
        """What makes of a time of the monotonic clock one of the calendar."""
        self.records: list[Trace] = []
        """The client's own request first."""
        self.front_end: list[Moment] = []
        """What the front end did; other models know nothing of it."""
        self._numbers = numbers
        self.on_done: Callable[[TraceGroup], None] | None = on_done
        """None: it has been called."""
        self.open_ends = 0
        """How many calls of `end` are to come."""

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        return sum(record.nbytes for record in self.records)

    def begin(self, model_name: str, model_version: str, request_id: str, parent_id: int, now_ns: int) -> Trace:
        self.open_ends += 1
        record = Trace(self, next(self._numbers), model_name, model_version, request_id, parent_id)
        self.records.append(record)
        record.note(REQUEST_START, now_ns)
        return record


class Trace:
    """One request's trace; only requests that were chosen for tracing have one."""

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
        """Whether `note_tensors` has an effect."""

    @property
    def context(self) -> str:
        """The W3C trace context that a model may hand on, in JSON; empty: there is none."""
        group = self._group
        if not group.makes_spans:
            return ""
        context = {"traceparent": f"00-{group.trace_id:032x}-{self.span_id:016x}-01"}
        if group.parent is not None and group.parent.state:
            context["tracestate"] = group.parent.state
        return json.dumps(context, separators=(",", ":"))

    def note(self, activity: str, ns: int) -> None:
        """Something happened, e.g. QUEUE_START. `activity`: Triton's name for it. `ns`: time.monotonic_ns() when it
        did."""
        if self._notes_times:
            self.moments.append(Moment(activity, ns))

    def note_run(self, queue_start: int, times: tuple[int, int, int, int]) -> None:
        """The request has been run. `queue_start`: when it came into the queue. `times`: when its execution began, the
        engine began, the engine ended, the outputs were there."""
        names = (QUEUE_START, COMPUTE_START, COMPUTE_INPUT_END, COMPUTE_OUTPUT_START, COMPUTE_END)
        for name, ns in zip(names, (queue_start, *times), strict=True):
            self.note(name, ns)

    def note_tensors(self, activity: str, tensors: Sequence[Tensor]) -> None:
        """Tensors passed by; their data are copied."""
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

    def child(self, model_name: str, model_version: str, request_id: str) -> Trace:
        """The trace of a request that this one makes, a step of an ensemble or a call by a model; it begins now."""
        return self._group.begin(model_name, model_version, request_id, self.number, time.monotonic_ns())

    def keep_open(self) -> None:
        """One more `end` is to come: somebody beside the one who answers has something to note, perhaps later."""
        self._group.open_ends += 1

    def end(self) -> None:
        """Nothing follows from the caller. After the last call, of this trace and its relatives, it is written."""
        group = self._group
        group.open_ends -= 1
        if not group.open_ends and group.on_done is not None:
            on_done, group.on_done = group.on_done, None
            on_done(group)


def random_id(bits: int) -> int:
    return secrets.randbits(bits) or 1
