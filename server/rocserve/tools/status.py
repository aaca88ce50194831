"""`rocserve status`: what a running server serves, as a table that follows it."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rocserve.tools.printing import show_folded
from rocserve.tools.status_rows import StatusRow, StatusRows
from rocserve_client import Client, RocserveError

_CALL_TIMEOUT_S = 5.0

_UNWRAPPED_WIDTH = 10_000
"""Columns for a file or a pipe, whose lines nobody wants broken."""

_STATE_STYLES = {"READY": "green", "LOADING": "yellow", "UNLOADING": "yellow", "UNAVAILABLE": "red"}


def run(url: str, interval: float, once: bool, console: Console | None = None) -> int:
    """Show the models of the server at `url` (host:port of its gRPC), with a look every `interval` seconds.

    It goes on until interrupted; with `once`, or where the output is no terminal, the table is printed once. Returns
    the exit status: 1 when no server answers.
    """
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=_UNWRAPPED_WIDTH, no_color=True)
    with Client(url) as client:
        watch = _Watch(client, url)
        try:
            first = watch.look()
        except RocserveError as error:
            print(f"rocserve status: {_unreachable(url, error)}", file=sys.stderr)
            return 1
        if once or not console.is_terminal:
            show_folded(console, first)
        else:
            _follow(watch, first, url, interval, console)
    return 0


class _Watch:
    """Looks at one server again and again."""

    def __init__(self, client: Client, url: str) -> None:
        self._client = client
        self._url = url
        self._rows = StatusRows()

    def look(self) -> Table:
        """The table of this moment.

        Raises:
            RocserveError: the server does not answer, or refuses.
        """
        server = self._client.server_metadata(timeout=_CALL_TIMEOUT_S)
        ready = self._client.server_ready(timeout=_CALL_TIMEOUT_S)
        index = self._client.repository_index(timeout=_CALL_TIMEOUT_S)
        statistics = self._client.statistics(timeout=_CALL_TIMEOUT_S)
        rows = self._rows.look(index, statistics, time.monotonic())
        state = "ready" if ready else "not ready"
        return status_table(f"{server.name} {server.version} at {self._url}: {state}", rows)


def _follow(watch: _Watch, first: Table, url: str, interval: float, console: Console) -> None:
    table = first
    with Live(table, console=console, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval)
                try:
                    table = watch.look()
                except RocserveError as error:
                    # The last table stays in sight: it is what was known before the server went.
                    table.caption = Text(_unreachable(url, error), style="red")
                live.update(table, refresh=True)
        except KeyboardInterrupt:
            return


def status_table(title: str, rows: Sequence[StatusRow]) -> Table:
    """The rows as people read them: times in milliseconds, "-" for what is not known yet."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("model", "version", "state"):
        table.add_column(name)
    for name in ("ok", "failed", "req/s", "batch", "total ms", "queue ms", "compute ms"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("reason", overflow="fold")
    for row in rows:
        table.add_row(
            Text(row.model),
            row.version,
            Text(row.state or "not loaded", style=_STATE_STYLES.get(row.state, "")),
            _count(row.succeeded),
            Text(_count(row.failed), style="red" if row.failed else ""),
            _figure(row.rate, 1),
            _figure(row.mean_batch, 2),
            _figure(row.request_ms, 3),
            _figure(row.queue_ms, 3),
            _figure(row.compute_ms, 3),
            Text(row.reason),
        )
    return table


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _figure(value: float | None, decimals: int) -> str:
    return "-" if value is None else f"{value:.{decimals}f}"


def _unreachable(url: str, error: RocserveError) -> str:
    return f"no answer from a server at {url} ({error}); is it running, and is this its gRPC port?"
