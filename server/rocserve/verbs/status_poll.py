"""Polls a server for its models, their states and figures."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from rocserve.core.printable import printable
from rocserve_client import Client, IndexEntry, ModelStatistics, RocserveError

CALL_TIMEOUT_S = 30.0
"""A server on a busy machine may need seconds. That no server listens is known at once."""
_MEANS: Mapping[str, tuple[int, Callable[[ModelStatistics], tuple[float, int]]]] = {
    # Column -> (decimals, function that returns a total and its divisor). Times are milliseconds of successful
    # requests.
    "batch": (2, lambda stats: (stats.inference_count, stats.execution_count)),
    "total ms": (3, lambda stats: (stats.success.ns / 1e6, stats.success.count)),
    "queue ms": (3, lambda stats: (stats.queue.ns / 1e6, stats.queue.count)),
    "compute ms": (
        3,
        lambda stats: (
            (stats.compute_input.ns + stats.compute_infer.ns + stats.compute_output.ns) / 1e6,
            stats.compute_infer.count,
        ),
    ),
}
FIGURES = ("engine", "ok", "failed", "req/s", *_MEANS)
DISPENSABLE = ("queue ms", "compute ms", "batch", "engine", "total ms", "req/s")
"""Columns that are dropped on a narrow terminal, the first one first."""


@dataclass(frozen=True, slots=True)
class StatusRow:
    model: str
    version: str
    state: str
    reason: str
    figures: Mapping[str, str | Text]
    """Column -> figure; an unknown figure is absent."""
    rate: float = 0.0
    """Requests per second since the last poll, failed ones among them."""
    failure_rate: float = 0.0

    def number(self, column: str) -> float:
        """Return a figure as a number; an unknown one is less than all others."""
        return float(str(self.figures[column])) if column in self.figures else -1.0

    def plain(self) -> dict[str, Any]:
        """Return values of JSON; an unknown figure is null."""
        numbers = {name: json.loads(str(self.figures[name])) for name in self.figures if name != "engine"}
        figures = {name: numbers.get(name) for name in FIGURES if name != "engine"}
        known = {name.replace(" ", "_").replace("/", "_per_"): value for name, value in figures.items()}
        engine = str(self.figures.get("engine", ""))
        return {
            "model": self.model, "version": self.version, "state": self.state, "reason": self.reason, "engine": engine,
            **known,
        }  # fmt: skip

    @property
    def text(self) -> str:
        """Return all words of the row in small letters."""
        return " ".join((self.model, self.state, str(self.figures.get("engine", "")), self.reason)).lower()


class StatusPoll:
    """Polls one server. Keeps counters for the next poll's rates, and a version's engine while it is READY."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._counts: dict[tuple[str, str], tuple[int, int]] = {}
        """(Name, version) -> successful and failed requests."""
        self._engines: dict[tuple[str, str, bool], str] = {}
        """(Name, version, whether the index gives a reason) -> engine. A version that loads on its first request is
        READY with a reason until it is loaded, and only then has an engine."""
        self._polled_at: float | None = None

    def rows(self, now: float) -> list[StatusRow]:
        """Poll the server and return its versions, sorted by name and version. `now` is in time.monotonic() seconds.
        Raises RocserveError if the server does not answer or refuses."""
        index = self._client.repository_index(timeout=CALL_TIMEOUT_S)
        # If several namespaces have a model of the same name, the statistics do not say which one they are about.
        rows_of = Counter((entry.name, entry.version) for entry in index)
        statistics = {
            (one.name, one.version): one
            for one in self._client.statistics(timeout=CALL_TIMEOUT_S)
            if rows_of[one.name, one.version] == 1
        }
        ready = [
            _engine_key(entry) for entry in index if entry.state == "READY" and rows_of[entry.name, entry.version] == 1
        ]
        self._engines = {key: self._engines[key] for key in ready if key in self._engines}
        for key in ready:
            if key not in self._engines:
                try:
                    properties = self._client.model_metadata(*key[:2], timeout=CALL_TIMEOUT_S).properties
                except RocserveError:
                    # The version or the server has just gone; the next poll shows which. Other calls might wait as
                    # long.
                    break
                # Such as "migraphx gpu fp16".
                names = ("engine", "target", "precision")
                self._engines[key] = " ".join(properties[name] for name in names if name in properties)
        elapsed = None if self._polled_at is None else now - self._polled_at
        entries = sorted(index, key=lambda entry: (entry.name, len(entry.version), entry.version))
        rows = [self._row(entry, statistics.get((entry.name, entry.version)), elapsed) for entry in entries]
        self._counts = {key: (stats.success.count, stats.fail.count) for key, stats in statistics.items()}
        self._polled_at = now
        return rows

    def _row(self, entry: IndexEntry, stats: ModelStatistics | None, elapsed: float | None) -> StatusRow:
        key = (entry.name, entry.version)
        figures: dict[str, str | Text] = {}
        rate = failure_rate = 0.0
        if engine := self._engines.get(_engine_key(entry)):
            figures["engine"] = engine
        if stats is not None:
            failed = stats.fail.count
            figures |= {"ok": str(stats.success.count), "failed": Text(str(failed), style="red" if failed else "")}
            if elapsed and key in self._counts:
                # max, because a version that was reloaded since the last poll counts from zero.
                before, failed_before = self._counts[key]
                rate = max(0, stats.success.count + failed - before - failed_before) / elapsed
                failure_rate = max(0, failed - failed_before) / elapsed
                figures["req/s"] = f"{rate:.1f}"
            for name, (decimals, parts) in _MEANS.items():
                total, count = parts(stats)
                if count:
                    figures[name] = f"{total / count:.{decimals}f}"
        return StatusRow(*key, entry.state, printable(entry.reason), figures, rate, failure_rate)


def _engine_key(entry: IndexEntry) -> tuple[str, str, bool]:
    return entry.name, entry.version, bool(entry.reason)
