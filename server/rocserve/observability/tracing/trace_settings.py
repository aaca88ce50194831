"""The settings of traces: those of --trace-config, and the current ones of each model."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rocserve.core.trace import TraceLevel

TraceConfig = Sequence[tuple[str, str, str]]
"""Mode ("" = both modes), setting, value."""

_DEFAULT_URL = "http://localhost:4318/v1/traces"
_BATCH_DEFAULTS = {"bsp_max_queue_size": 2048, "bsp_schedule_delay": 5000, "bsp_max_export_batch_size": 512}
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
    """The settings of --trace-config."""

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
    if text.lower() not in ("triton", "opentelemetry"):
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
        if not re.fullmatch(r"[+-]?[0-9]+", text) or not least <= int(text) <= most:
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
