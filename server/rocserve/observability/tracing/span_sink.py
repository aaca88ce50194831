"""Sends finished traces as OpenTelemetry spans over OTLP/HTTP. Needs the extra `tracing`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from operator import attrgetter
from types import MappingProxyType

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanLimits, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.util import BoundedList
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext as SdkContext
from opentelemetry.trace import SpanKind, TraceFlags, TraceState

from rocserve.core.trace import Moment, SpanContext, Trace, TraceGroup
from rocserve.observability.failures import Allowance
from rocserve.observability.tracing.json_sink import WriterThread
from rocserve.observability.tracing.trace_settings import TraceOptions, TraceSetting

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_COMPUTE = ("COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END")
_CLOSE_SECONDS = 2.0
"""Limit for the collector to take the remaining spans at the end."""


class SpanSink:
    """Sends traces as spans (a TraceSink). A request is a span InferRequest, with the front end's activities as events.
    It contains a span per model, which contains a span for the engine."""

    def __init__(self, options: TraceOptions, service_name: str, log: logging.Logger) -> None:
        """`service_name`: the default for the resource's service.name, which the options or the environment may set."""
        self._log = log
        self._resource = _resource(options, service_name)
        self._most_events = SpanLimits().max_events
        self._exporter: SpanExporter = OTLPSpanExporter(endpoint=options.url)
        self._processor: SpanProcessor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=options.batch["bsp_max_queue_size"],
            schedule_delay_millis=options.batch["bsp_schedule_delay"],
            max_export_batch_size=options.batch["bsp_max_export_batch_size"],
        )
        self._exporter_warnings = _ExporterWarnings(log)
        logging.getLogger("opentelemetry").addHandler(self._exporter_warnings)
        # A separate thread, because creating spans takes time too. The processor sends them on a third thread.
        self._writer: WriterThread[TraceGroup] = WriterThread(self._handle, log)

    def take(self, setting: TraceSetting, group: TraceGroup) -> None:
        self._writer.put(group, group.nbytes)

    def retire(self, setting: TraceSetting) -> None:
        """Do nothing: no trace waits for a setting's end."""

    def close(self) -> None:
        self._writer.close()

        # The exporter retries on this thread beyond its time limit, so a timer's thread stops it.
        def call_off() -> None:
            self._log.warning("spans are lost: the collector did not take them within %g s of the end", _CLOSE_SECONDS)
            self._exporter_warnings.is_silent = True
            self._exporter.shutdown()

        calling_off = threading.Timer(_CLOSE_SECONDS, call_off)
        calling_off.daemon = True
        calling_off.start()
        self._processor.force_flush()
        self._processor.shutdown()
        calling_off.cancel()
        logging.getLogger("opentelemetry").removeHandler(self._exporter_warnings)

    # The methods below run on the writer's thread.

    def _handle(self, groups: list[TraceGroup]) -> None:
        for group in groups:
            moments = [moment for record in group.records for moment in record.moments] + group.front_end
            if not moments or group.span is None:
                continue
            parent, above = group.parent, None
            if parent is not None:
                state = TraceState.from_header([parent.state]) if parent.state else None
                above = SdkContext(parent.trace_id, parent.span_id, True, _SAMPLED, state)
            root = self._send(group, "InferRequest", above, group.span, moments, group.front_end)
            by_number: dict[int, SdkContext] = {0: root}
            for record in group.records:
                by_number[record.number] = self._send_record(group, record, by_number[record.parent_id])

    def _send_record(self, group: TraceGroup, record: Trace, above: SdkContext) -> SdkContext:
        if not record.moments or record.span is None:
            return above
        attributes: dict[str, str | int] = {
            "triton.model_name": record.model_name,
            "triton.model_version": int(record.model_version),
            "triton.trace_id": record.number,
            "triton.trace_parent_id": record.parent_id,
        }
        if record.request_id:
            attributes["triton.request_id"] = record.request_id
        computing = [moment for moment in record.moments if moment.activity in _COMPUTE]
        others = [moment for moment in record.moments if moment.activity not in _COMPUTE]
        context = self._send(group, record.model_name, above, record.span, record.moments, others, attributes)
        if computing:
            self._send(group, "compute", context, record.span.inner(), computing, computing)
        return context

    def _send(
        self,
        group: TraceGroup,
        name: str,
        above: SdkContext | None,
        span: SpanContext,
        moments: list[Moment],
        events: list[Moment],
        attributes: Mapping[str, str | int] = MappingProxyType({}),
    ) -> SdkContext:
        """Send a span below the span `above`. It lasts from the first to the last of `moments`, and shows `events`."""
        state = None if above is None else above.trace_state
        context = SdkContext(span.trace_id, span.span_id, False, _SAMPLED, state)
        offset_ns = group.wall_offset_ns
        shown = [Event(one.activity, timestamp=offset_ns + one.ns) for one in sorted(events, key=attrgetter("ns"))]
        self._processor.on_end(
            ReadableSpan(
                name,
                context,
                above,
                self._resource,
                attributes,
                BoundedList.from_seq(self._most_events, shown),
                kind=SpanKind.SERVER,
                start_time=offset_ns + min(moment.ns for moment in moments),
                end_time=offset_ns + max(moment.ns for moment in moments),
                instrumentation_scope=InstrumentationScope("rocserve"),
            )
        )
        return context


def _resource(options: TraceOptions, service_name: str) -> Resource:
    found = Resource.create(dict(options.resource))
    if SERVICE_NAME in options.resource or not str(found.attributes[SERVICE_NAME]).startswith("unknown_service"):
        return found
    return found.merge(Resource({SERVICE_NAME: service_name}))


class _ExporterWarnings(logging.Handler):
    """Logs at most one of the exporter's warnings per minute: without a collector, the exporter repeats them."""

    def __init__(self, log: logging.Logger) -> None:
        super().__init__(logging.WARNING)
        self._log = log
        self._allowance = Allowance(1, 1 / 60)
        self.is_silent = False

    def emit(self, record: logging.LogRecord) -> None:
        # The SDK's logger of this name warns of clients' data, for example a bad tracestate; no span is lost then.
        if not (self.is_silent or record.name.startswith("opentelemetry.trace")) and self._allowance.take():
            self._log.warning("spans cannot be sent: %s", record.getMessage())
