"""Chooses the requests to trace: keeps each model's current settings, and begins traces."""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from rocserve.core.errors import invalid_argument
from rocserve.core.extras import install_command
from rocserve.core.trace import SpanContext, Trace, TraceGroup, TraceLevel
from rocserve.observability.tracing.json_sink import JsonSink, write_problem
from rocserve.observability.tracing.trace_settings import (
    TraceConfig,
    TraceOptions,
    TraceSetting,
    TraceValues,
    trace_options,
)

TraceChange = Mapping[str, Any]
"""Field of TraceValues -> new value; None = inherit the value again."""


class TraceSink(Protocol):
    """Takes finished traces. Called on any thread; a separate thread writes the traces."""

    def take(self, setting: TraceSetting, group: TraceGroup) -> None: ...

    def retire(self, setting: TraceSetting) -> None:
        """Note that a setting was replaced: it will choose no further requests."""

    def close(self) -> None:
        """Write the remaining traces and end. Blocks."""


class Tracing:
    """The trace settings of all models. Used on the data plane's thread."""

    def __init__(self, options: TraceOptions, sink: TraceSink) -> None:
        self.options = options
        self.is_on = False
        self.on_switched: Callable[[], None] | None = None
        """Called after a change of `is_on`."""
        self._sink = sink
        self._numbers = itertools.count(1)
        self._default = TraceSetting(options.values)
        self._global = TraceSetting(options.values, fault=self._fault(options.values))
        self._models: dict[str, TraceSetting] = {}
        self._switch()

    def values_of(self, model_name: str) -> TraceValues:
        """Return the values of a model; "" = of all models without separate settings."""
        return self._setting(model_name).values

    def change(self, model_name: str, change: TraceChange) -> None:
        """Change the settings of one model; "" = of all models, except for fields that were set for a model itself.
        Raises ServeError (INVALID_ARGUMENT), with nothing changed, if any model's new settings could trace nothing."""
        above, models = self._global, self._models
        if model_name:
            models = {**models, model_name: self._changed(models.get(model_name), above, change)}
        else:
            above = self._changed(above, self._default, change)
            models = {name: self._changed(setting, above, {}) for name, setting in models.items()}
        before = self._global, *self._models.values()
        self._global = above
        self._models = {name: setting for name, setting in models.items() if setting.specified}
        kept = {above, *self._models.values()}
        for setting in before:
            if setting not in kept:
                self._sink.retire(setting)
        self._switch()

    def begin(
        self, model_name: str, model_version: str, request_id: str, headers: Mapping[str, str], now_ns: int
    ) -> Trace | None:
        """Begin the trace of a client's request; None if the request is not chosen. Names of `headers` are in lower
        case."""
        setting = self._setting(model_name)
        if not setting.is_on:
            return None
        makes_spans = self.options.mode == "opentelemetry"
        parent = client_context(headers) if makes_spans else None
        if not setting.choose(parent is not None):
            return None
        on_done = partial(self._sink.take, setting)
        group = TraceGroup(setting.initial_values.level, self._numbers, on_done, parent, makes_spans)
        return group.begin(model_name, model_version, request_id, 0, now_ns)

    def close(self) -> None:
        """Write the remaining traces. Blocks."""
        self.is_on = False
        for setting in (self._global, *self._models.values()):
            self._sink.retire(setting)
        self._sink.close()

    def _setting(self, model_name: str) -> TraceSetting:
        return self._models.get(model_name, self._global)

    def _changed(self, current: TraceSetting | None, above: TraceSetting, change: TraceChange) -> TraceSetting:
        """Return the setting that replaces the current one. Raises ServeError as `change` does."""
        before = current.specified if current is not None else frozenset()
        new_values = {name: value for name, value in change.items() if value is not None}
        specified = (before | new_values.keys()) - (change.keys() - new_values.keys())
        kept = {name: getattr(current.values, name) for name in specified} if current is not None else {}
        values: TraceValues = replace(above.values, **(kept | new_values))
        fault = self._fault(values)
        if fault and values.level is not TraceLevel.OFF:
            raise invalid_argument(f"Attempting to set invalid trace setting :{fault}")
        return TraceSetting(values, specified, fault)

    def _fault(self, values: TraceValues) -> str:
        """Return why these values can trace nothing, in Triton's words; "" if they can."""
        if values.level is TraceLevel.OFF:
            return "tracing is disabled"
        if values.rate == 0:
            return "sample rate must be non-zero"
        if self.options.mode == "triton" and not self.options.file:
            return "trace file name is not given"
        return ""

    def _switch(self) -> None:
        is_on = any(setting.is_on for setting in (self._global, *self._models.values()))
        changed, self.is_on = is_on != self.is_on, is_on
        if changed and self.on_switched is not None:
            self.on_switched()


def client_context(headers: Mapping[str, str]) -> SpanContext | None:
    """Return the client's span from the headers traceparent and tracestate (lower case); None without a valid span."""
    # Version, trace id, span id, flags. Versions after 00 may append fields.
    found = re.fullmatch(
        "([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?", headers.get("traceparent", "").strip()
    )
    if found is None:
        return None
    version, trace, span, more = found.groups()
    trace_id, span_id = int(trace, 16), int(span, 16)
    if version == "ff" or (version == "00" and more) or not trace_id or not span_id:
        return None
    return SpanContext(trace_id, span_id, headers.get("tracestate", "").strip())


def create_tracing(
    config: TraceConfig, service_name: str, log: logging.Logger, environment: Mapping[str, str] = os.environ
) -> Tracing:
    """Create the tracing of these settings. `service_name`: the default service.name of spans. Raises ValueError for
    invalid settings, or for OpenTelemetry without its packages."""
    options = trace_options(config, environment)
    if options.mode == "triton":
        if options.values.level is not TraceLevel.OFF and not options.file:
            log.warning("nothing is traced: no trace file is named; name it with --trace-config=triton,file=FILE")
        elif options.file and (why := write_problem(options.file)):
            log.warning("traces will be lost: the trace file %s cannot be written: %s", options.file, why)
        return Tracing(options, JsonSink(options.file, log))
    if options.values.level & TraceLevel.TENSORS:
        log.warning("Tensor level tracing is not supported by the mode: opentelemetry")
    try:
        # Imported here, because the packages are optional and take a third of a second to import.
        from rocserve.observability.tracing.span_sink import SpanSink
    except ImportError as error:
        raise ValueError(
            "--trace-config=mode=opentelemetry needs OpenTelemetry's SDK and its OTLP/HTTP exporter, which are not"
            f" installed ({error}); run: {install_command('tracing')}"
        ) from error
    return Tracing(options, SpanSink(options, service_name, log))
