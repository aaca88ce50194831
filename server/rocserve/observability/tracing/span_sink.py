"""Finished traces as OpenTelemetry's spans, sent over OTLP/HTTP. Needs the extra `tracing`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from operator import attrgetter
from types import MappingProxyType

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanKind,
    TraceFlags,
    TraceState,
    set_span_in_context,
)
from opentelemetry.trace import SpanContext as SdkContext

from rocserve.core.trace import (
    COMPUTE_END,
    COMPUTE_INPUT_END,
    COMPUTE_OUTPUT_START,
    COMPUTE_START,
    Moment,
    Trace,
    TraceGroup,
    random_id,
)
from rocserve.observability.failures import Allowance
from rocserve.observability.tracing.json_sink import WriterThread
from rocserve.observability.tracing.tracing import SpanOptions, TraceSetting

_TRACER = "rocserve"
_COMPUTE = (COMPUTE_START, COMPUTE_INPUT_END, COMPUTE_OUTPUT_START, COMPUTE_END)
_CLOSE_SECONDS = 2.0
"""How long the end waits for a collector to take the spans that are left."""
_EXPORTER_LOG = "opentelemetry"
_OF_SPANS = "opentelemetry.trace"
"""What this one says is about what clients have sent, and nothing is lost."""
_SECONDS_BETWEEN_WARNINGS = 60.0


class SpanSink:
    """Implements rocserve.observability.tracing.tracing.TraceSink.

    A request is a span InferRequest, with what the front end did as events; within it a span for each model that it
    came to, within that one for the time in the engine.
    """

    def __init__(self, options: SpanOptions, service_name: str, log: logging.Logger) -> None:
        """`service_name`: what the spans' resource is called where neither the options nor the environment say so."""
        self._log = log
        self._ids = _GivenIds()
        provider = TracerProvider(ALWAYS_ON, _resource(options, service_name), id_generator=self._ids)
        self._exporter: SpanExporter = OTLPSpanExporter(endpoint=options.url)
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=options.batch["bsp_max_queue_size"],
            schedule_delay_millis=options.batch["bsp_schedule_delay"],
            max_export_batch_size=options.batch["bsp_max_export_batch_size"],
        )
        provider.add_span_processor(self._processor)
        self._exporter_warnings = _ExporterWarnings(log)
        logging.getLogger(_EXPORTER_LOG).addHandler(self._exporter_warnings)
        self._provider = provider
        self._tracer = provider.get_tracer(_TRACER)
        # Making spans takes some time as well; sending them has a thread of the processor's.
        self._writer: WriterThread[TraceGroup] = WriterThread(self._handle, log)

    def take(self, setting: TraceSetting, group: TraceGroup) -> None:
        self._writer.put(group, group.nbytes)

    def retire(self, setting: TraceSetting) -> None:
        """Nothing waits for a setting's end."""

    def close(self) -> None:
        self._writer.close()

        # The exporter tries again and again on this thread, whatever time it was given: another one calls it off.
        def call_off() -> None:
            self._log.warning("spans are lost: the collector has not taken them within %g s of the end", _CLOSE_SECONDS)
            self._exporter_warnings.is_silent = True
            self._exporter.shutdown()

        calling_off = threading.Timer(_CLOSE_SECONDS, call_off)
        calling_off.daemon = True
        calling_off.start()
        self._processor.force_flush()
        self._provider.shutdown()
        calling_off.cancel()
        logging.getLogger(_EXPORTER_LOG).removeHandler(self._exporter_warnings)

    # On the writer's thread

    def _handle(self, groups: list[TraceGroup]) -> None:
        for group in groups:
            moments = [moment for record in group.records for moment in record.moments] + group.front_end
            if not moments:
                continue
            parent, above = group.parent, None
            if parent is not None:
                state = TraceState.from_header([parent.state]) if parent.state else None
                above = SdkContext(parent.trace_id, parent.span_id, True, TraceFlags(TraceFlags.SAMPLED), state)
            root = self._begin(group, "InferRequest", above, group.span_id, moments)
            by_number: dict[int, Span] = {}
            for record in group.records:
                outer = by_number.get(record.parent_id, root)
                by_number[record.number] = self._send_record(group, record, outer)
            _end(root, group, moments, group.front_end)

    def _send_record(self, group: TraceGroup, record: Trace, outer: Span) -> Span:
        if not record.moments:
            return outer
        attributes: dict[str, str | int] = {
            "triton.model_name": record.model_name,
            "triton.model_version": int(record.model_version),
            "triton.trace_id": record.number,
            "triton.trace_parent_id": record.parent_id,
        }
        if record.request_id:
            attributes["triton.request_id"] = record.request_id
        span = self._begin(
            group, record.model_name, outer.get_span_context(), record.span_id, record.moments, attributes
        )
        computing = [moment for moment in record.moments if moment.activity in _COMPUTE]
        if computing:
            _end(self._begin(group, "compute", span.get_span_context(), 0, computing), group, computing, computing)
        _end(span, group, record.moments, [moment for moment in record.moments if moment.activity not in _COMPUTE])
        return span

    def _begin(
        self,
        group: TraceGroup,
        name: str,
        above: SdkContext | None,
        span_id: int,
        moments: list[Moment],
        attributes: Mapping[str, str | int] = MappingProxyType({}),
    ) -> Span:
        self._ids.give(group.trace_id, span_id)
        context = set_span_in_context(NonRecordingSpan(above)) if above is not None else None
        first = min(moment.ns for moment in moments)
        return self._tracer.start_span(
            name, context, SpanKind.SERVER, attributes, start_time=group.wall_offset_ns + first
        )


def _end(span: Span, group: TraceGroup, moments: list[Moment], events: list[Moment]) -> None:
    """`moments`: within the span, of which some are its own events."""
    for moment in sorted(events, key=attrgetter("ns")):
        span.add_event(moment.activity, timestamp=group.wall_offset_ns + moment.ns)
    span.end(group.wall_offset_ns + max(moment.ns for moment in moments))


def _resource(options: SpanOptions, service_name: str) -> Resource:
    found = Resource.create(dict(options.resource))
    if SERVICE_NAME in options.resource or not str(found.attributes[SERVICE_NAME]).startswith("unknown_service"):
        return found
    return found.merge(Resource({SERVICE_NAME: service_name}))


class _ExporterWarnings(logging.Handler):
    """Brings the exporter's warnings into the server's log, one a minute: the exporter repeats itself while a
    collector is away."""

    def __init__(self, log: logging.Logger) -> None:
        super().__init__(logging.WARNING)
        self._log = log
        self._allowance = Allowance(1, 1 / _SECONDS_BETWEEN_WARNINGS)
        self.is_silent = False

    def emit(self, record: logging.LogRecord) -> None:
        if not (self.is_silent or record.name.startswith(_OF_SPANS)) and self._allowance.take():
            self._log.warning("spans cannot be sent: %s", record.getMessage())


class _GivenIds(IdGenerator):
    """The numbers that the next span takes: they are known before it is made, for models may hand them on."""

    def __init__(self) -> None:
        self._trace_id = 0
        self._span_id = 0

    def give(self, trace_id: int, span_id: int) -> None:
        """`span_id`: 0 = any."""
        self._trace_id, self._span_id = trace_id, span_id

    def generate_trace_id(self) -> int:
        return self._trace_id

    def generate_span_id(self) -> int:
        return self._span_id or random_id(64)
