"""The settings of all models, as they are changed while the server runs, and the start of a trace; made as
--trace-config asks for it."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from rocserve.core.errors import invalid_argument
from rocserve.core.trace import SpanContext, TraceGroup, TraceLevel
from rocserve.observability.tracing.json_sink import JsonSink, why_unwritable
from rocserve.observability.tracing.options import (
    TraceConfig,
    TraceOptions,
    TraceSetting,
    TraceValues,
    trace_options,
)

TraceChange = Mapping[str, int | None]
"""New values by the fields of TraceValues; None = that of the setting above again."""


class TraceSink(Protocol):
    """Where finished traces go. Called from any thread; nothing is written in the caller's time."""

    def take(self, setting: TraceSetting, group: TraceGroup) -> None: ...

    def retire(self, setting: TraceSetting) -> None:
        """The setting has been replaced; of its traces only those come that have begun."""

    def close(self) -> None:
        """Write the traces that are there, and end. Blocks."""


class Tracing:
    """On the data plane's thread."""

    def __init__(self, options: TraceOptions, sink: TraceSink) -> None:
        self.options = options
        self.is_on = False
        """Whether any request may be traced."""
        self.on_switched: Callable[[], None] | None = None
        """Called when `is_on` has changed."""
        self._sink = sink
        self._numbers = itertools.count(1)
        self._default = TraceSetting(options.values)
        self._global = TraceSetting(options.values, fault=self._fault(options.values))
        self._models: dict[str, TraceSetting] = {}
        self._switch()

    def values_of(self, model_name: str) -> TraceValues:
        """What holds for a model; "" = for all that have nothing of their own."""
        return self._setting(model_name).values

    def change(self, model_name: str, change: TraceChange) -> None:
        """Change what holds for one model, or ("") for all.

        A model follows the changes for all in what was not asked for it by name.

        Raises:
            ServeError: INVALID_ARGUMENT, the result would not make sense.
        """
        try:
            self._change_one(model_name, change)
            if not model_name:
                for name in list(self._models):
                    self._change_one(name, {})
        finally:
            self._switch()

    def begin(self, model_name: str, headers: Mapping[str, str]) -> TraceGroup | None:
        """The trace of a request that has come, or None where it is not chosen.

        Args:
            headers: what came beside the request, names in lower case.
        """
        setting = self._setting(model_name)
        if not setting.is_on:
            return None
        makes_spans = self.options.mode == "opentelemetry"
        parent = client_context(headers) if makes_spans else None
        if not setting.choose(parent is not None):
            return None
        return TraceGroup(setting.level, self._numbers, partial(self._sink.take, setting), parent, makes_spans)

    def close(self) -> None:
        """Write the traces that are there. Blocks."""
        self.is_on = False
        for setting in (self._global, *self._models.values()):
            self._sink.retire(setting)
        self._sink.close()

    def _setting(self, model_name: str) -> TraceSetting:
        return self._models.get(model_name, self._global)

    def _change_one(self, model_name: str, change: TraceChange) -> None:
        if model_name:
            current, above = self._models.get(model_name), self._global
        else:
            current, above = self._global, self._default
        before = current.specified if current is not None else frozenset()
        cleared = {name for name, value in change.items() if value is None}
        specified = (before | change.keys()) - cleared
        if model_name and not specified:
            if self._models.pop(model_name, None) is not None and current is not None:
                self._sink.retire(current)
            return
        values = above.values
        if current is not None:
            now = current.values
            values = _changed(values, {name: getattr(now, name) for name in specified})
        values = _changed(values, change)
        fault = self._fault(values)
        if fault and values.level is not TraceLevel.OFF:
            raise invalid_argument(f"Attempting to set invalid trace setting :{fault}")
        setting = TraceSetting(values, specified, fault)
        if model_name:
            self._models[model_name] = setting
        else:
            self._global = setting
        if current is not None:
            self._sink.retire(current)

    def _fault(self, values: TraceValues) -> str:
        """Why nothing can be traced; in Triton's words."""
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
    """The client's span, by the headers `traceparent` and `tracestate`; None = none that is valid.

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


def _changed(values: TraceValues, change: TraceChange) -> TraceValues:
    given: dict[str, Any] = {name: value for name, value in change.items() if value is not None}
    if "level" in given:
        given["level"] = TraceLevel(given["level"])
    return replace(values, **given)


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
