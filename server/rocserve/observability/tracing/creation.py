"""Tracing as --trace-config asks for it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from rocserve.observability.tracing.json_sink import JsonSink
from rocserve.observability.tracing.options import TraceConfig, TraceLevel, TraceOptions, trace_options
from rocserve.observability.tracing.trace_file import why_unwritable
from rocserve.observability.tracing.tracing import TraceSink, Tracing

NEEDS_EXTRA = (
    "--trace-config=mode=opentelemetry needs OpenTelemetry's SDK and its OTLP/HTTP exporter, which are not installed"
    " ({0}); install them with `pip install 'rocserve[tracing]'`"
)


def create_tracing(
    config: TraceConfig, service_name: str, log: logging.Logger, environment: Mapping[str, str] = os.environ
) -> Tracing:
    """
    Args:
        service_name: what spans are attributed to where nobody says so.

    Raises:
        ValueError: the configuration makes no sense, or asks for OpenTelemetry whose packages are not installed.
    """
    options = trace_options(config, environment)
    return Tracing(options, _create_sink(options, service_name, log))


def _create_sink(options: TraceOptions, service_name: str, log: logging.Logger) -> TraceSink:
    if options.mode == "triton":
        if options.values.level is not TraceLevel.OFF and not options.file:
            log.warning("nothing is traced: the trace file is not named; --trace-config=triton,file=FILE does so")
        elif options.file and (why := why_unwritable(options.file)):
            log.warning("traces will be lost: the trace file %s cannot be written: %s", options.file, why)
        return JsonSink(options.file, log)
    if options.values.level & TraceLevel.TENSORS:
        log.warning("Tensor level tracing is not supported by the mode: opentelemetry")
    try:
        # Only here: the packages are an extra, and take a third of a second to import.
        from rocserve.observability.tracing.span_sink import SpanSink
    except ImportError as error:
        raise ValueError(NEEDS_EXTRA.format(error)) from error
    return SpanSink(options.spans, service_name, log)
