"""`rocserve status`: what a running server serves, as a table that follows it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from rocserve.core.printable import printable
from rocserve.settings.flag import FILE, SWITCH, Kind, flag, number, setting, text
from rocserve.tools.printing import UNWRAPPED_WIDTH, console_on, show_folded
from rocserve.tools.verb import Verb
from rocserve_client import Client, IndexEntry, ModelStatistics, RocserveError, Tls

Key = tuple[str, str]
"""A model's name and version."""

_NOT_KNOWN: Mapping[Key, str] = {}


@dataclass(frozen=True, slots=True)
class StatusRow:
    """One version of a model; the figures are None for one that has no statistics."""

    model: str
    version: str
    state: str
    reason: str
    engine: str = ""
    """What runs it, in a few words; "" where that is not known."""
    succeeded: int | None = None
    failed: int | None = None
    mean_batch: float | None = None
    """Batch elements an execution."""
    request_ms: float | None = None
    """Mean time of a request that succeeded, from its arrival to its answer."""
    queue_ms: float | None = None
    """Mean time of a request in the queue."""
    compute_ms: float | None = None
    """Mean time of a request's batch: inputs, inference and outputs."""
    rate: float | None = None
    """Requests a second, failed ones included, since the poll before; None at the first."""


class StatusRows:
    """Makes the rows of each poll and remembers the counters that the next poll's rates need."""

    def __init__(self) -> None:
        self._counts: dict[Key, int] = {}
        self._updated_at: float | None = None

    def update(
        self,
        index: Iterable[IndexEntry],
        statistics: Iterable[ModelStatistics],
        now: float,
        engines: Mapping[Key, str] = _NOT_KNOWN,
    ) -> list[StatusRow]:
        """The rows in the order of names and versions; `now` is time.monotonic() seconds."""
        by_key = {(stats.name, stats.version): stats for stats in statistics}
        entries = sorted(index, key=lambda entry: (entry.name, len(entry.version), entry.version))
        elapsed = None if self._updated_at is None else now - self._updated_at
        rows = []
        for entry in entries:
            key = (entry.name, entry.version)
            rows.append(self._row(entry, engines.get(key, ""), by_key.get(key), elapsed))
        self._counts = {key: stats.success.count + stats.fail.count for key, stats in by_key.items()}
        self._updated_at = now
        return rows

    def _row(self, entry: IndexEntry, engine: str, stats: ModelStatistics | None, elapsed: float | None) -> StatusRow:
        if stats is None:
            return StatusRow(entry.name, entry.version, entry.state, printable(entry.reason), engine)
        compute_ns = stats.compute_input.ns + stats.compute_infer.ns + stats.compute_output.ns
        return StatusRow(
            model=entry.name,
            version=entry.version,
            state=entry.state,
            reason=printable(entry.reason),
            engine=engine,
            succeeded=stats.success.count,
            failed=stats.fail.count,
            mean_batch=_mean(stats.inference_count, stats.execution_count),
            request_ms=_mean(stats.success.ns / 1e6, stats.success.count),
            queue_ms=_mean(stats.queue.ns / 1e6, stats.queue.count),
            compute_ms=_mean(compute_ns / 1e6, stats.compute_infer.count),
            rate=self._rate(stats, elapsed),
        )

    def _rate(self, stats: ModelStatistics, elapsed: float | None) -> float | None:
        before = self._counts.get((stats.name, stats.version))
        if before is None or not elapsed:
            return None
        # A version that was loaded again in between counts from zero.
        return max(0, stats.success.count + stats.fail.count - before) / elapsed


def _mean(total: float, count: int) -> float | None:
    return total / count if count else None


_WORDS = ("engine", "target", "precision")
"""The properties that together say it: "migraphx gpu fp16", "onnxruntime"."""


class StatusEngines:
    """Remembers the engine of each version for as long as it is READY."""

    def __init__(self, properties: Callable[[str, str], Mapping[str, str]]) -> None:
        """`properties`: of a model's version, as its metadata has them; may raise RocserveError."""
        self._properties = properties
        self._known: dict[Key, str] = {}

    def update(self, index: Iterable[IndexEntry]) -> Mapping[Key, str]:
        """By name and version, in a few words; "" where a server does not say."""
        ready = [(entry.name, entry.version) for entry in index if entry.state == "READY"]
        self._known = {key: self._known[key] for key in ready if key in self._known}
        for key in ready:
            if key in self._known:
                continue
            try:
                properties = self._properties(*key)
            except RocserveError:
                # It has just gone, or the server has: the next poll shows which. Others might wait as long.
                break
            self._known[key] = " ".join(properties[word] for word in _WORDS if word in properties)
        return self._known


_CALL_TIMEOUT_S = 5.0

_LEAST_REASON = 40
"""Columns that a reason has beside the figures; it stands below the table where there are fewer."""
_GAP = 3
"""Columns between two of the table's."""

_ENGINE = "engine"
_FIGURES: dict[str, Callable[[StatusRow], str | Text]] = {
    _ENGINE: lambda row: Text(row.engine or "-"),
    "ok": lambda row: _count(row.succeeded),
    "failed": lambda row: Text(_count(row.failed), style="red" if row.failed else ""),
    "req/s": lambda row: _figure(row.rate, 1),
    "batch": lambda row: _figure(row.mean_batch, 2),
    "total ms": lambda row: _figure(row.request_ms, 3),
    "queue ms": lambda row: _figure(row.queue_ms, 3),
    "compute ms": lambda row: _figure(row.compute_ms, 3),
}
_DISPENSABLE = ("queue ms", "compute ms", "batch", _ENGINE, "total ms", "req/s")
"""What a narrow terminal goes without, in this order."""

_STATE_STYLES = {"READY": "green", "LOADING": "yellow", "UNLOADING": "yellow", "UNAVAILABLE": "red"}


@dataclass(frozen=True, slots=True)
class StatusOptions:
    url: str = flag("localhost:8001", text("URL"), "the server's gRPC address")
    interval: float = flag(1.0, number("SECONDS", 0.1, float), "between two polls")
    once: bool = flag(False, SWITCH, "print the table once and end")
    header: tuple[tuple[str, str], ...] = flag(
        (),
        Kind("NAME=VALUE", setting),
        "sent with each call, for servers with --grpc-restricted-protocol; repeatable",
        repeatable=True,
    )
    tls: bool = flag(False, SWITCH, "the server speaks TLS; implied by the files below")
    root_cert: Path | None = flag(None, FILE, "what the server's certificate is checked against")
    client_cert: Path | None = flag(None, FILE, "the client's own certificate, for mutual TLS")
    client_key: Path | None = flag(None, FILE, "its key")


def run(options: StatusOptions, console: Console | None = None) -> int:
    """Show the models of the server, with a poll every `interval` seconds.

    It goes on until interrupted; with `once`, or where the output is no terminal, the table is printed once. Returns
    the exit status: 1 when no server answers.
    """
    files = (options.root_cert, options.client_key, options.client_cert)
    tls = Tls(*files) if options.tls or any(files) else None
    url = options.url
    if console is None or not console.is_terminal:
        console = console_on(console.file if console is not None else None)
    with Client(url, tls=tls, headers=dict(options.header)) as client:
        watch = _Watch(client, url, console)
        try:
            first = watch.poll()
        except RocserveError as error:
            print(f"rocserve status: {_unreachable(url, error)}", file=sys.stderr)
            return 1
        if options.once or not console.is_terminal:
            show_folded(console, first)
        else:
            _follow(watch, first, url, options.interval, console)
    return 0


class _Watch:
    """Polls one server."""

    def __init__(self, client: Client, url: str, console: Console) -> None:
        self._client = client
        self._url = url
        self._console = console
        self._rows = StatusRows()
        self._engines = StatusEngines(self._properties)

    def poll(self) -> RenderableType:
        """The table of this moment.

        Raises:
            RocserveError: the server does not answer, or refuses.
        """
        server = self._client.server_metadata(timeout=_CALL_TIMEOUT_S)
        ready = self._client.server_ready(timeout=_CALL_TIMEOUT_S)
        index = self._client.repository_index(timeout=_CALL_TIMEOUT_S)
        statistics = self._client.statistics(timeout=_CALL_TIMEOUT_S)
        rows = self._rows.update(index, statistics, time.monotonic(), self._engines.update(index))
        state = "ready" if ready else "not ready"
        return status_table(self._console, f"{server.name} {server.version} at {self._url}: {state}", rows)

    def _properties(self, model: str, version: str) -> Mapping[str, str]:
        return self._client.model_metadata(model, version, timeout=_CALL_TIMEOUT_S).properties


def _follow(watch: _Watch, first: RenderableType, url: str, interval: float, console: Console) -> None:
    last = first
    with Live(last, console=console, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval)
                try:
                    shown = last = watch.poll()
                except RocserveError as error:
                    # The last table stays in sight: it is what was known before the server went.
                    shown = Group(last, Text(_unreachable(url, error), style="red"))
                live.update(shown, refresh=True)
        except KeyboardInterrupt:
            return


def status_table(console: Console, title: str, rows: Sequence[StatusRow]) -> RenderableType:
    """The rows as people read them, as wide as the console: times in milliseconds, "-" for what is not known yet."""
    figures = [name for name in _FIGURES if name != _ENGINE or any(row.engine for row in rows)]
    table = _table(title, rows, figures)
    longest = max((len(row.reason) for row in rows), default=0)
    if _width(table, console) + _GAP + max(len("reason"), min(longest, _LEAST_REASON)) <= console.width:
        return _table(title, rows, figures, with_reasons=True)
    for name in filter(figures.__contains__, _DISPENSABLE):
        if _width(table, console) <= console.width:
            break
        figures.remove(name)
        table = _table(title, rows, figures)
    return Group(table, *(Text(f"{row.model} {row.version}: {row.reason}") for row in rows if row.reason))


def _table(title: str, rows: Sequence[StatusRow], figures: Collection[str], *, with_reasons: bool = False) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("model", "version", "state"):
        table.add_column(name, no_wrap=True)
    for name in figures:
        table.add_column(name, justify="left" if name == _ENGINE else "right", no_wrap=True)
    if with_reasons:
        table.add_column("reason", overflow="fold")
    for row in rows:
        state = Text(row.state or "not loaded", style=_STATE_STYLES.get(row.state, ""))
        reason = (Text(row.reason),) if with_reasons else ()
        table.add_row(Text(row.model), row.version, state, *(_FIGURES[name](row) for name in figures), *reason)
    return table


def _width(table: Table, console: Console) -> int:
    unbounded = console.options.update(max_width=UNWRAPPED_WIDTH)
    return Measurement.get(console, unbounded, table).maximum


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _figure(value: float | None, decimals: int) -> str:
    return "-" if value is None else f"{value:.{decimals}f}"


def _unreachable(url: str, error: RocserveError) -> str:
    if "This protocol is restricted" in error.text:
        return f"the server at {url} does not tell everybody ({error}); send the header with --header=NAME=VALUE"
    return f"no answer from a server at {url} ({error}); is it running, is this its gRPC port, and does it want TLS?"


VERB = Verb(
    "Show the models of a running server: state, requests, times, and why one is not served. Follows until Ctrl-C; into"
    " a pipe the table is printed once.",
    StatusOptions(),
    run,
)
