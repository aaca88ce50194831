"""Runs `rocserve status`: shows the models of a running server in a table that is updated."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from rocserve.core.errors import invalid_argument, unavailable
from rocserve.core.printable import printable
from rocserve.settings.flag import FILE, SWITCH, Kind, flag, number, repeated, text
from rocserve.verbs.printing import UNWRAPPED_WIDTH, console_on, show, table
from rocserve.verbs.verb import UsageError, Verb
from rocserve_client import Client, IndexEntry, ModelStatistics, RocserveError, Tls

_CALL_TIMEOUT_S = 30.0
"""A server on a busy machine may need seconds. That no server listens is known at once."""
_LONGEST_PAUSE_S = 86_400
_HEADER = re.compile(r"([A-Za-z0-9_.-]+)=([ -~]*)")
_LEAST_REASON = 40
"""Columns that the reasons need next to the figures. If there are fewer, the reasons are printed below the table."""
_LEAST_FOLDED = 60
"""Columns of a terminal with room for a folded model name next to version, state and the last figures."""
_GAP = 3
_STATE_STYLES = {
    "READY": "green",
    "LOADING": "yellow",
    "CHECKING": "yellow",
    "UNLOADING": "yellow",
    "UNAVAILABLE": "red",
}
_ENGINE_PROPERTIES = ("engine", "target", "precision")
"""Properties that together name the engine of a model: "migraphx gpu fp16", "onnxruntime"."""
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
_FIGURES = ("engine", "ok", "failed", "req/s", *_MEANS)
_DISPENSABLE = ("queue ms", "compute ms", "batch", "engine", "total ms", "req/s")
"""Columns that are dropped on a narrow terminal, the first one first."""


@dataclass(frozen=True, slots=True)
class StatusRow:
    model: str
    version: str
    state: str
    reason: str
    figures: Mapping[str, str | Text]
    """Column -> figure; an unknown figure is absent."""


class StatusPoll:
    """Polls one server. Keeps counters for the next poll's rates, and a version's engine while it is READY."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._counts: dict[tuple[str, str], int] = {}
        self._engines: dict[tuple[str, str, bool], str] = {}
        """(Name, version, whether the index gives a reason) -> engine. A version that loads on its first request is
        READY with a reason until it is loaded, and only then has an engine."""
        self._polled_at: float | None = None

    def rows(self, now: float) -> list[StatusRow]:
        """Poll the server and return its versions, sorted by name and version. `now` is in time.monotonic() seconds.
        Raises RocserveError if the server does not answer or refuses."""
        index = self._client.repository_index(timeout=_CALL_TIMEOUT_S)
        # If several namespaces have a model of the same name, the statistics do not say which one they are about.
        rows_of = Counter((entry.name, entry.version) for entry in index)
        statistics = {
            (one.name, one.version): one
            for one in self._client.statistics(timeout=_CALL_TIMEOUT_S)
            if rows_of[one.name, one.version] == 1
        }
        ready = [
            _engine_key(entry) for entry in index if entry.state == "READY" and rows_of[entry.name, entry.version] == 1
        ]
        self._engines = {key: self._engines[key] for key in ready if key in self._engines}
        for key in ready:
            if key not in self._engines:
                try:
                    properties = self._client.model_metadata(*key[:2], timeout=_CALL_TIMEOUT_S).properties
                except RocserveError:
                    # The version or the server has just gone; the next poll shows which. Other calls might wait as
                    # long.
                    break
                self._engines[key] = " ".join(properties[name] for name in _ENGINE_PROPERTIES if name in properties)
        elapsed = None if self._polled_at is None else now - self._polled_at
        entries = sorted(index, key=lambda entry: (entry.name, len(entry.version), entry.version))
        rows = [self._row(entry, statistics.get((entry.name, entry.version)), elapsed) for entry in entries]
        self._counts = {key: stats.success.count + stats.fail.count for key, stats in statistics.items()}
        self._polled_at = now
        return rows

    def _row(self, entry: IndexEntry, stats: ModelStatistics | None, elapsed: float | None) -> StatusRow:
        key = (entry.name, entry.version)
        figures: dict[str, str | Text] = {}
        if engine := self._engines.get(_engine_key(entry)):
            figures["engine"] = engine
        if stats is not None:
            failed = stats.fail.count
            figures |= {"ok": str(stats.success.count), "failed": Text(str(failed), style="red" if failed else "")}
            if elapsed and key in self._counts:
                # max, because a version that was reloaded since the last poll counts from zero.
                figures["req/s"] = f"{max(0, stats.success.count + failed - self._counts[key]) / elapsed:.1f}"
            for name, (decimals, parts) in _MEANS.items():
                total, count = parts(stats)
                if count:
                    figures[name] = f"{total / count:.{decimals}f}"
        return StatusRow(*key, entry.state, printable(entry.reason), figures)


def _engine_key(entry: IndexEntry) -> tuple[str, str, bool]:
    return entry.name, entry.version, bool(entry.reason)


def header(text: str) -> tuple[str, str]:
    """Parse `name=value` as a gRPC metadata entry."""
    found = _HEADER.fullmatch(text)
    if found is None or found[1].lower().endswith("-bin"):
        raise ValueError(f"expected NAME=VALUE, a name of letters, digits and -_. and a value of ASCII, got {text!r}")
    return found[1], found[2]


@dataclass(frozen=True, slots=True)
class StatusOptions:
    url: str = flag("localhost:8001", text("URL"), "the server's gRPC address")
    interval: float = flag(1.0, number("SECONDS", 0.1, float, _LONGEST_PAUSE_S), "seconds between two polls")
    once: bool = flag(False, SWITCH, "print the table once and exit")
    header: tuple[tuple[str, str], ...] = repeated(
        Kind("NAME=VALUE", header), "a header for each call, as a server with --grpc-restricted-protocol expects it"
    )
    tls: bool = flag(False, SWITCH, "connect with TLS; implied by --root-cert, --client-cert and --client-key")
    root_cert: Path | None = flag(None, FILE, "root certificates to check the server's certificate against")
    client_cert: Path | None = flag(None, FILE, "the client's certificate, for mutual TLS")
    client_key: Path | None = flag(None, FILE, "the private key of the client's certificate")


def run(options: StatusOptions, console: Console | None = None) -> None:
    """Show the server's models and poll every `interval` seconds until Ctrl-C. With `once`, or if the output is no
    terminal, print the table once. Raises ServeError (UNAVAILABLE) if no server answers."""
    files = (options.root_cert, options.client_key, options.client_cert)
    if bool(options.client_cert) != bool(options.client_key):
        raise UsageError("--client-cert and --client-key go together")
    tls = Tls(*files) if options.tls or any(files) else None
    url = options.url
    if console is None or not console.is_terminal:
        console = console_on(console.file if console is not None else None)
    try:
        connected = Client(url, tls=tls, headers=dict(options.header))
    except RocserveError as error:
        raise invalid_argument(error.text) from None
    with connected as client:
        poll = StatusPoll(client)
        try:
            shown = _polled(client, poll, url, console)
        except RocserveError as error:
            raise unavailable(_unreachable(url, error)) from None
        if options.once or not console.is_terminal:
            show(console, shown, is_folded=True)
            return
        last = shown
        with Live(last, console=console, auto_refresh=False) as live:
            try:
                while True:
                    time.sleep(options.interval)
                    try:
                        shown = last = _polled(client, poll, url, console)
                    except RocserveError as error:
                        # The last table stays visible: it shows the state before the server went away.
                        shown = Group(last, Text(_unreachable(url, error), style="red"))
                    live.update(shown, refresh=True)
            except KeyboardInterrupt:
                return


def _polled(client: Client, poll: StatusPoll, url: str, console: Console) -> RenderableType:
    """Poll once and return the table. Raises RocserveError if the server does not answer or refuses."""
    server = client.server_metadata(timeout=_CALL_TIMEOUT_S)
    state = "ready" if client.server_ready(timeout=_CALL_TIMEOUT_S) else "not ready"
    title = f"{printable(server.name)} {printable(server.version)} at {url}: {state}"
    return status_table(console, title, poll.rows(time.monotonic()))


def status_table(console: Console, title: str, rows: Sequence[StatusRow]) -> RenderableType:
    """Return the rows as a table that fits the console. An unknown figure is shown as "-"."""
    figures = [name for name in _FIGURES if name != "engine" or any(name in row.figures for row in rows)]
    made = _table(console, title, rows, figures)
    longest = max((len(row.reason) for row in rows), default=0)
    if _width(made, console) + _GAP + max(len("reason"), min(longest, _LEAST_REASON)) <= console.width:
        return _table(console, title, rows, figures, Column("reason", overflow="fold"))
    for name in filter(figures.__contains__, _DISPENSABLE):
        if _width(made, console) <= console.width:
            break
        figures.remove(name)
        made = _table(console, title, rows, figures)
    return Group(made, *(Text(f"{row.model} {row.version}: {row.reason}") for row in rows if row.reason))


def _table(console: Console, title: str, rows: Sequence[StatusRow], figures: Sequence[str], *reason: Column) -> Table:
    """Return the table. `reason` is the column for the reasons, if they are part of the table."""
    cells = [
        (
            row.model,
            row.version,
            Text(row.state or "not loaded", style=_STATE_STYLES.get(row.state, "")),
            *(row.figures.get(name, "-") for name in figures),
            *([row.reason] if reason else []),
        )
        for row in rows
    ]
    left = 4 if "engine" in figures else 3
    # In a pipe a header rule would be as wide as the longest reason.
    box = SIMPLE_HEAD if console.is_terminal else None
    # A long name is folded if the terminal has room for a part of it. Otherwise every row would lose its state.
    model = Column("model", overflow="fold", no_wrap=console.width < _LEAST_FOLDED)
    return table(title, (model, "version", "state", *figures, *reason), cells, left=left, box=box)


def _width(made: Table, console: Console) -> int:
    return Measurement.get(console, console.options.update(max_width=UNWRAPPED_WIDTH), made).maximum


def _unreachable(url: str, error: RocserveError) -> str:
    if "This protocol is restricted" in error.text:
        return f"the server at {url} answers only calls with its header ({error}); send it with --header=NAME=VALUE"
    return f"no answer from a server at {url} ({error}); is it running, is this its gRPC port, and does it want TLS?"


VERB = Verb(
    "Show the models of a running server: state, requests, times, and why a model is not served. The table is updated"
    " until Ctrl-C; into a pipe it is printed once.",
    StatusOptions(),
    run,
)
