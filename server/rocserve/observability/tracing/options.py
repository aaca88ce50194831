"""Reads --trace-config, and samples: which requests a setting's values have traced."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rocserve.core.trace import TraceLevel

TraceConfig = Sequence[tuple[str, str, str]]
"""Mode ("" = of all modes), setting, value."""

MODES = ("triton", "opentelemetry")
_SETTINGS = {
    "": ("mode", "level", "rate", "count"),
    "triton": ("file", "log-frequency"),
    "opentelemetry": (
        "url",
        "resource",
        "bsp_max_queue_size",
        "bsp_schedule_delay",
        "bsp_max_export_batch_size",
    ),
}
_DEFAULT_URL = "http://localhost:4318/v1/traces"
_BATCH_DEFAULTS = {"bsp_max_queue_size": 2048, "bsp_schedule_delay": 5000, "bsp_max_export_batch_size": 512}
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]+")
_LARGEST_COUNT = (1 << 31) - 1
_LARGEST = (1 << 32) - 1

_LEVELS = {
    **dict.fromkeys(("false", "off"), TraceLevel.OFF),
    **dict.fromkeys(("true", "on", "min", "max", "timestamps"), TraceLevel.TIMESTAMPS),
    "tensors": TraceLevel.TENSORS,
}
"""tritonserver takes them all."""


@dataclass(frozen=True, slots=True)
class TraceValues:
    """What may be changed while the server runs, for all models and for one."""

    level: TraceLevel = TraceLevel.OFF
    rate: int = 1000
    """Each rate-th request is traced; 0 = only those that a client traces already (mode opentelemetry)."""
    count: int = -1
    """How many more are traced; -1 = no end."""
    log_frequency: int = 0
    """After how many traces a file of their own is written; 0 = all go into one file."""


@dataclass(frozen=True, slots=True)
class SpanOptions:
    """Where and how OpenTelemetry's spans go."""

    url: str = _DEFAULT_URL
    resource: Mapping[str, str] = field(default_factory=dict)
    max_queue_size: int = _BATCH_DEFAULTS["bsp_max_queue_size"]
    schedule_delay_ms: int = _BATCH_DEFAULTS["bsp_schedule_delay"]
    max_export_batch_size: int = _BATCH_DEFAULTS["bsp_max_export_batch_size"]


@dataclass(frozen=True, slots=True)
class TraceOptions:
    mode: str = "triton"
    file: str = ""
    """Of the mode triton; empty: nothing is traced."""
    values: TraceValues = field(default_factory=TraceValues)
    spans: SpanOptions = field(default_factory=SpanOptions)
    shown: tuple[tuple[str, str], ...] = ()
    """Further settings of the mode, as clients see them."""


def trace_options(config: TraceConfig, environment: Mapping[str, str] = os.environ) -> TraceOptions:
    """What the settings ask for.

    Raises:
        ValueError: an unknown mode or setting, or a value that it cannot have.
    """
    mode, levels, numbers = "triton", [], {"rate": 1000, "count": -1, "log-frequency": 0}
    file = ""
    for scope, name, value in config:
        _check_setting(scope, name, value)
        where = f"{scope}{',' if scope else ''}{name}={value}"
        if name == "mode":
            mode = _mode(value)
        elif name == "level":
            levels.append(_level(value))
        elif name == "file":
            file = value
        elif name == "count":
            numbers[name] = _number(where, value, -1, _LARGEST_COUNT)
        elif name in numbers:
            numbers[name] = _number(where, value, 0, _LARGEST)
    level = TraceLevel.OFF if TraceLevel.OFF in levels else TraceLevel.of(levels)
    values = TraceValues(level, numbers["rate"], numbers["count"], numbers["log-frequency"])
    spans, shown = _spans(config, environment) if mode == "opentelemetry" else (SpanOptions(), ())
    return TraceOptions(mode, file, values, spans, shown)


def _check_setting(scope: str, name: str, value: str) -> None:
    if scope.lower() not in _SETTINGS:
        _mode(scope)
    known = _SETTINGS[scope.lower()]
    if name not in known:
        whose = f"of the mode '{scope}' " if scope else ""
        raise ValueError(f"unknown setting {whose}'{name}', expected one of {', '.join(known)}")
    if not value:
        raise ValueError(f"the setting '{name}' has no value; expected [MODE,]SETTING=VALUE")


def _mode(text: str) -> str:
    if text.lower() not in MODES:
        raise ValueError(
            f'invalid value for trace mode option: {text}. Available options are "triton" and "opentelemetry"'
        )
    return text.lower()


def _level(text: str) -> TraceLevel:
    level = _LEVELS.get(text.lower())
    if level is None:
        raise ValueError(f"invalid value for trace level option: {text}; expected OFF, TIMESTAMPS or TENSORS")
    return level


def _number(where: str, text: str, least: int, most: int) -> int:
    if not _WHOLE_NUMBER.fullmatch(text) or not least <= int(text) <= most:
        raise ValueError(f"{where}: expected a whole number from {least} to {most}")
    return int(text)


def _spans(config: TraceConfig, environment: Mapping[str, str]) -> tuple[SpanOptions, tuple[tuple[str, str], ...]]:
    """The mode's options, and its settings as they were written, behind them those that were not."""
    url, resource, batch = _DEFAULT_URL, {}, dict[str, int]()
    shown: list[tuple[str, str]] = []
    for scope, name, value in config:
        if scope.lower() != "opentelemetry":
            continue
        if name == "url":
            if not value.lower().startswith(("http://", "https://")):
                raise ValueError(f"opentelemetry,url={value}: expected http://HOST:PORT/PATH, such as {_DEFAULT_URL}")
            url = value
        elif name == "resource":
            key, equals, text = value.partition("=")
            if not equals or not key:
                raise ValueError(f"opentelemetry,resource={value}: expected KEY=VALUE, such as service.name=vision")
            resource[key] = text
        else:
            batch[name] = _number(f"opentelemetry,{name}={value}", value, 1, _LARGEST)
        shown.append((name, value))
    for name, default in _BATCH_DEFAULTS.items():
        if name not in batch:
            variable = f"OTEL_{name.upper()}"
            text = environment.get(variable, str(default))
            batch[name] = _number(f"${variable}={text}", text, 1, _LARGEST)
            shown.append((name, str(batch[name])))
    size, queue = batch["bsp_max_export_batch_size"], batch["bsp_max_queue_size"]
    if size > queue:
        raise ValueError(
            f"opentelemetry: bsp_max_export_batch_size is {size}, but must be at most bsp_max_queue_size, {queue}"
        )
    return SpanOptions(url, resource, queue, batch["bsp_schedule_delay"], size), tuple(shown)


class TraceSetting:
    """What holds for one model, or for all without a setting of their own, until it is replaced by another. On
    the data plane's thread, but for `has_all`."""

    def __init__(self, values: TraceValues, specified: frozenset[str] = frozenset(), fault: str = "") -> None:
        """
        Args:
            specified: the fields of `values` that were asked for; the others are those of the setting above.
            fault: why nothing can be traced by it; empty: something can.
        """
        self._values = values
        self.specified = specified
        self.fault = fault
        self._seen = 0
        self._remaining = values.count
        self._begun = 0

    @property
    def is_on(self) -> bool:
        """Whether a request may be traced by it."""
        return self._values.level is not TraceLevel.OFF

    @property
    def values(self) -> TraceValues:
        """As they are now: `count` is how many are left."""
        return replace(self._values, count=self._remaining)

    @property
    def level(self) -> TraceLevel:
        return self._values.level

    @property
    def log_frequency(self) -> int:
        return self._values.log_frequency

    @property
    def is_counted(self) -> bool:
        """Whether it ends by itself."""
        return self._values.count > 0

    def has_all(self, collected: int) -> bool:
        """Whether no more traces will follow `collected` finished ones."""
        return self._remaining == 0 and collected >= self._begun

    def choose(self, forced: bool = False) -> bool:
        """Whether the request that has come now is traced.

        Args:
            forced: its client traces it already, so that neither rate nor count matter.
        """
        rate, is_due = self._values.rate, False
        if rate and (forced or (self._remaining and not self.fault)):
            self._seen += 1
            is_due = self._seen % rate == 0 and self._remaining != 0
        self._begun += is_due or forced
        if is_due and self._remaining > 0:
            # In this order: the sink's thread asks whether all are there that have begun, when none remain.
            self._remaining -= 1
        return is_due or forced
