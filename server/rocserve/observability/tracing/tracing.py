"""Chooses the requests to trace: parses --trace-config, keeps each model's settings as they change, begins traces."""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from rocserve.core.errors import invalid_argument
from rocserve.core.extras import install_command
from rocserve.core.trace import SpanContext, Trace, TraceGroup, TraceLevel
from rocserve.observability.tracing.json_sink import JsonSink, write_problem

TraceConfig = Sequence[tuple[str, str, str]]
"""Mode ("" = both modes), setting, value."""

MODES = ("triton", "opentelemetry")
_DEFAULT_URL = "http://localhost:4318/v1/traces"
_BATCH_DEFAULTS = {"bsp_max_queue_size": 2048, "bsp_schedule_delay": 5000, "bsp_max_export_batch_size": 512}
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]+")
_LARGEST = (1 << 32) - 1

_LEVELS = {
    **dict.fromkeys(("false", "off"), TraceLevel.OFF),
    **dict.fromkeys(("true", "on", "min", "max", "timestamps"), TraceLevel.TIMESTAMPS),
    "tensors": TraceLevel.TENSORS,
}
"""Triton's synonyms."""


@dataclass(frozen=True, slots=True)
class TraceValues:
    """The settings that may be changed while the server runs, for all models or for one model."""

    level: TraceLevel = TraceLevel.OFF
    rate: int = 1000
    """Every rate-th request is traced; 0 = only requests that their client traces (mode opentelemetry)."""
    count: int = -1
    """Number of requests that will still be traced; -1 = no limit."""
    log_frequency: int = 0
    """Number of traces in one file; 0 = all traces go to one file."""


@dataclass(frozen=True, slots=True)
class TraceOptions:
    mode: str = "triton"
    file: str = ""
    """The trace file of the mode triton; "" = nothing is traced."""
    values: TraceValues = field(default_factory=TraceValues)
    url: str = _DEFAULT_URL
    """The collector of the mode opentelemetry."""
    resource: Mapping[str, str] = field(default_factory=dict)
    batch: Mapping[str, int] = field(default_factory=_BATCH_DEFAULTS.copy)
    """Options of the SDK's batch processor; the delay is in milliseconds."""
    shown: tuple[tuple[str, str], ...] = ()
    """Further settings of the mode, for clients to read."""


def trace_options(config: TraceConfig, environment: Mapping[str, str] = os.environ) -> TraceOptions:
    """Parse --trace-config. Raises ValueError for an unknown mode or setting, or an impossible value."""
    given: dict[str, Any] = {"level": [], "resource": []}
    shown: list[tuple[str, str]] = []
    for scope, name, text in config:
        known = _SETTINGS["" if not scope else _mode("", scope)]
        if name not in known:
            whose = f"of the mode '{scope}' " if scope else ""
            raise ValueError(f"unknown setting {whose}'{name}', expected one of {', '.join(known)}")
        if not text:
            raise ValueError(f"the setting '{name}' has no value; expected [MODE,]SETTING=VALUE")
        value = known[name](f"{scope}{',' if scope else ''}{name}={text}", text)
        given[name] = [*given[name], value] if name in ("level", "resource") else value
        if scope.lower() == "opentelemetry":
            shown.append((name, text))
    makes_spans = given.get("mode") == "opentelemetry"
    for name, default in _BATCH_DEFAULTS.items():
        if name not in given:
            variable = f"OTEL_{name.upper()}"
            text = environment.get(variable, str(default)) if makes_spans else str(default)
            given[name] = _BATCH_NUMBER(f"${variable}={text}", text)
            shown.append((name, text))
    size, queue = given["bsp_max_export_batch_size"], given["bsp_max_queue_size"]
    if size > queue:
        raise ValueError(
            f"opentelemetry: bsp_max_export_batch_size is {size}, but must be at most bsp_max_queue_size, {queue}"
        )
    level = TraceLevel.OFF if TraceLevel.OFF in given["level"] else TraceLevel.of(given["level"])
    values = TraceValues(level, given.get("rate", 1000), given.get("count", -1), given.get("log-frequency", 0))
    batch = {name: given[name] for name in _BATCH_DEFAULTS}
    return TraceOptions(
        given.get("mode", "triton"),
        given.get("file", ""),
        values,
        given.get("url", _DEFAULT_URL),
        dict(given["resource"]),
        batch,
        tuple(shown) if makes_spans else (),
    )


# Parsers of values. `where` is the setting with its value. They raise ValueError.


def _mode(where: str, text: str) -> str:
    if text.lower() not in MODES:
        raise ValueError(
            f'invalid value for trace mode option: {text}. Available options are "triton" and "opentelemetry"'
        )
    return text.lower()


def _level(where: str, text: str) -> TraceLevel:
    level = _LEVELS.get(text.lower())
    if level is None:
        raise ValueError(f"invalid value for trace level option: {text}; expected OFF, TIMESTAMPS or TENSORS")
    return level


def _url(where: str, text: str) -> str:
    if not text.lower().startswith(("http://", "https://")):
        raise ValueError(f"{where}: expected http://HOST:PORT/PATH, such as {_DEFAULT_URL}")
    return text


def _resource(where: str, text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"{where}: expected KEY=VALUE, such as service.name=vision")
    return key, value


def _number(least: int, most: int) -> Callable[[str, str], int]:
    def parse(where: str, text: str) -> int:
        if not _WHOLE_NUMBER.fullmatch(text) or not least <= int(text) <= most:
            raise ValueError(f"{where}: expected a whole number from {least} to {most}")
        return int(text)

    return parse


_BATCH_NUMBER = _number(1, _LARGEST)
_SETTINGS: Mapping[str, Mapping[str, Callable[[str, str], Any]]] = {
    "": {"mode": _mode, "level": _level, "rate": _number(0, _LARGEST), "count": _number(-1, (1 << 31) - 1)},
    "triton": {"file": lambda where, text: text, "log-frequency": _number(0, _LARGEST)},
    "opentelemetry": {"url": _url, "resource": _resource, **dict.fromkeys(_BATCH_DEFAULTS, _BATCH_NUMBER)},
}
"""Mode -> setting -> parser."""


@dataclass(eq=False)
class TraceSetting:
    """The trace settings of one model, or of all models without separate settings. A change replaces the object. Used
    on the data plane's thread, except `is_complete`."""

    initial_values: TraceValues
    specified: frozenset[str] = frozenset()
    """The fields of `initial_values` that were set at this level; the others are inherited."""
    fault: str = ""
    """Why these settings can trace nothing; "" if they can."""
    _seen: int = field(default=0, init=False)
    _begun: int = field(default=0, init=False)
    # The sink uses these on its thread.
    finished: int = field(default=0, init=False)
    """Number of this setting's traces that have been added to `kept`."""
    kept: list[str] = field(default_factory=list, init=False)
    """JSON of traces for the next separate file."""
    is_retired: bool = field(default=False, init=False)
    """The sink has handled `retire`. Requests that this setting has chosen may still finish."""

    def __post_init__(self) -> None:
        self._remaining = self.initial_values.count

    @property
    def is_on(self) -> bool:
        return self.initial_values.level is not TraceLevel.OFF

    @property
    def values(self) -> TraceValues:
        """Return the current values: `count` is the remaining number."""
        return replace(self.initial_values, count=self._remaining)

    def is_complete(self) -> bool:
        """Return whether all traces that began have finished and no more will begin."""
        return self._remaining == 0 and self.finished >= self._begun

    def choose(self, forced: bool = False) -> bool:
        """Return whether to trace a request. `forced`: the client traces it, so rate and count do not apply."""
        rate, is_due = self.initial_values.rate, False
        if rate and (forced or (self._remaining and not self.fault)):
            self._seen += 1
            is_due = self._seen % rate == 0 and self._remaining != 0
        self._begun += is_due or forced
        if is_due and self._remaining > 0:
            # `_begun` before `_remaining`: is_complete, on the sink's thread, reads them in the other order.
            self._remaining -= 1
        return is_due or forced


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


_TRACE_PARENT = re.compile("([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")
"""Version, trace id, span id, flags. Versions after 00 may append fields."""


def client_context(headers: Mapping[str, str]) -> SpanContext | None:
    """Return the client's span from the headers traceparent and tracestate (lower case); None without a valid span."""
    found = _TRACE_PARENT.fullmatch(headers.get("traceparent", "").strip())
    if found is None:
        return None
    version, trace, span, more = found.groups()
    trace_id, span_id = int(trace, 16), int(span, 16)
    if version == "ff" or (version == "00" and more) or not trace_id or not span_id:
        return None
    return SpanContext(trace_id, span_id, headers.get("tracestate", "").strip())


NEEDS_EXTRA = (
    "--trace-config=mode=opentelemetry needs OpenTelemetry's SDK and its OTLP/HTTP exporter, which are not installed"
    " ({0}); run: {1}"
)


def create_tracing(
    config: TraceConfig, service_name: str, log: logging.Logger, environment: Mapping[str, str] = os.environ
) -> Tracing:
    """Create the tracing of these settings. `service_name`: the default service.name of spans. Raises ValueError for
    invalid settings, or for OpenTelemetry without its packages."""
    options = trace_options(config, environment)
    if options.mode == "triton":
        if options.values.level is not TraceLevel.OFF and not options.file:
            log.warning("nothing is traced: the trace file is not named; --trace-config=triton,file=FILE does so")
        elif options.file and (why := write_problem(options.file)):
            log.warning("traces will be lost: the trace file %s cannot be written: %s", options.file, why)
        return Tracing(options, JsonSink(options.file, log))
    if options.values.level & TraceLevel.TENSORS:
        log.warning("Tensor level tracing is not supported by the mode: opentelemetry")
    try:
        # Imported here, because the packages are optional and take a third of a second to import.
        from rocserve.observability.tracing.span_sink import SpanSink
    except ImportError as error:
        raise ValueError(NEEDS_EXTRA.format(error, install_command("tracing"))) from error
    return Tracing(options, SpanSink(options, service_name, log))
