"""Runs `rocserve status`: shows the models of a running server in a table that is updated."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from rocserve.core.errors import invalid_argument, not_found, unavailable
from rocserve.core.printable import names_hint, printable
from rocserve.flags import FlagError
from rocserve.settings.flag import FILE, SWITCH, Kind, flag, number, positional, repeated, text
from rocserve.settings.unix_place import SCHEME
from rocserve.verbs.printing import UNWRAPPED_WIDTH, console_on, say_json, show, table
from rocserve.verbs.status_model import LoadReports, detail_lines, details, http_address, state_text
from rocserve.verbs.status_poll import CALL_TIMEOUT_S, DISPENSABLE, FIGURES, StatusPoll, StatusRow
from rocserve.verbs.status_rows import ATTENTION, in_order
from rocserve.verbs.status_screen import Polled, Screen, follow
from rocserve.verbs.verb import Verb
from rocserve_client import Client, RocserveError, Tls


def header(text: str) -> tuple[str, str]:
    """Parse `name=value` as a gRPC metadata entry."""
    found = re.fullmatch(r"([A-Za-z0-9_.-]+)=([ -~]*)", text)
    if found is None or found[1].lower().endswith("-bin"):
        raise ValueError(f"expected NAME=VALUE, a name of letters, digits and -_. and a value of ASCII, got {text!r}")
    return found[1], found[2]


@dataclass(frozen=True, slots=True)
class StatusOptions:
    url: str = flag("localhost:8001", text("URL"), "the server's gRPC address, host:port or unix:/PATH")
    interval: float = flag(1.0, number("SECONDS", 0.1, float, 86_400), "seconds between two polls")
    once: bool = flag(False, SWITCH, "print the table once and exit")
    header: tuple[tuple[str, str], ...] = repeated(
        Kind("NAME=VALUE", header), "a header for each call, as a server with --grpc-restricted-protocol expects it"
    )
    tls: bool = flag(False, SWITCH, "connect with TLS; implied by --root-cert, --client-cert and --client-key")
    root_cert: Path | None = flag(None, FILE, "root certificates to check the server's certificate against")
    client_cert: Path | None = flag(None, FILE, "the client's certificate, for mutual TLS")
    client_key: Path | None = flag(None, FILE, "the private key of the client's certificate")
    json: bool = flag(False, SWITCH, "print one object of JSON and exit")
    http_url: str = flag(
        "",
        text("URL"),
        "the server's HTTP address, also unix:/PATH, which gives tracebacks and files (default: port 8000 of the gRPC"
        " address' host; none if that is a Unix socket)",
    )
    model: str = positional(
        "", text("MODEL"), "show this model: reason, traceback, configuration; then exit", nargs="?"
    )


def run(options: StatusOptions, console: Console | None = None) -> None:
    """Show the server's models on the terminal until `q`. With `once`, `json` or `model`, or if input or output is not
    a terminal, print once. Raises ServeError: UNAVAILABLE if no server answers, NOT_FOUND if it has no such model."""
    files = (options.root_cert, options.client_cert, options.client_key)
    if bool(options.client_cert) != bool(options.client_key):
        raise FlagError("--client-cert and --client-key: expected both or neither, got one")
    tls = Tls(options.root_cert, options.client_key, options.client_cert) if options.tls or any(files) else None
    url, headers = options.url, dict(options.header)
    address = options.http_url.rstrip("/") or http_address(url, tls is not None)
    if address and not address.startswith(("http://", "https://", SCHEME)):
        address = f"{'http' if tls is None else 'https'}://{address}"
    reports = LoadReports(address, headers, *files)
    if console is None or not console.is_terminal:
        console = console_on(console.file if console is not None else None)
    try:
        connected = Client(url, tls=tls, headers=headers)
    except RocserveError as error:
        raise invalid_argument(error.text) from None
    with connected as client:
        poll = partial(_polled, client, url, StatusPoll(client))
        polled = poll()
        if polled.problem:
            raise unavailable(polled.problem)
        if options.model:
            _show_model(console, options, client, reports, polled)
        elif options.json:
            say_json(console, {**polled.server, "models": [row.plain() for row in polled.rows]})
        elif options.once or not console.is_terminal or not sys.stdin.isatty():
            show(console, status_table(console, polled.title, in_order(polled.rows, ATTENTION)), is_folded=True)
        else:
            screen = Screen(lambda row: list(detail_lines(details(client, reports, row))))
            follow(console, polled, poll, options.interval, screen)


def _show_model(console: Console, options: StatusOptions, client: Client, reports: LoadReports, polled: Polled) -> None:
    rows = [row for row in polled.rows if row.model == options.model]
    if not rows:
        hint = names_hint("its models are", options.model, {row.model for row in polled.rows})
        raise not_found(f"the server at {options.url} has no model '{options.model}'{hint}")
    versions = [details(client, reports, row) for row in rows]
    if options.json:
        say_json(console, {"versions": [one.plain() for one in versions]})
        return
    for place, one in enumerate(versions):
        for line in [*([Text()] if place else []), *detail_lines(one)]:
            console.print(line, soft_wrap=True)


def _polled(client: Client, url: str, models: StatusPoll) -> Polled:
    try:
        server = client.server_metadata(timeout=CALL_TIMEOUT_S)
        is_ready = client.server_ready(timeout=CALL_TIMEOUT_S)
        rows = models.rows(time.monotonic())
    except RocserveError as error:
        return Polled("", (), problem=_unreachable(url, error))
    facts = {"server": server.name, "version": server.version, "url": url, "ready": is_ready}
    state = "ready" if is_ready else "not ready"
    return Polled(f"{printable(server.name)} {printable(server.version)} at {url}: {state}", rows, facts)


def status_table(console: Console, title: str, rows: Sequence[StatusRow]) -> RenderableType:
    """Return the rows as a table that fits the console. An unknown figure is shown as "-"."""
    figures = [name for name in FIGURES if name != "engine" or any(name in row.figures for row in rows)]
    made = _table(console, title, rows, figures)
    longest = max((len(row.reason) for row in rows), default=0)
    # 3: the gap before a column. Reasons that have less than 40 columns next to the figures are printed below them.
    if _width(made, console) + 3 + max(len("reason"), min(longest, 40)) <= console.width:
        return _table(console, title, rows, figures, Column("reason", overflow="fold"))
    for name in filter(figures.__contains__, DISPENSABLE):
        if _width(made, console) <= console.width:
            break
        figures.remove(name)
        made = _table(console, title, rows, figures)
    named = ((f"{row.model} {row.version}".rstrip(), row.reason) for row in rows if row.reason)
    return Group(made, *(Text(f"{name}: {reason}") for name, reason in named))


def _table(console: Console, title: str, rows: Sequence[StatusRow], figures: Sequence[str], *reason: Column) -> Table:
    """Return the table. `reason` is the column for the reasons, if they are part of the table."""
    cells = [
        (
            row.model,
            row.version,
            state_text(row),
            *(row.figures.get(name, "-") for name in figures),
            *([row.reason] if reason else []),
        )
        for row in rows
    ]
    left = 4 if "engine" in figures else 3
    # In a pipe a header rule would be as wide as the longest reason.
    box = SIMPLE_HEAD if console.is_terminal else None
    # A long name is folded if the terminal has room for a part of it. Otherwise every row would lose its state.
    # In fewer than 60 columns a folded model name has no room next to version, state and the last figures.
    model = Column("model", overflow="fold", no_wrap=console.width < 60)
    return table(title, (model, "version", "state", *figures, *reason), cells, left=left, box=box)


def _width(made: Table, console: Console) -> int:
    return Measurement.get(console, console.options.update(max_width=UNWRAPPED_WIDTH), made).maximum


def _unreachable(url: str, error: RocserveError) -> str:
    if "This protocol is restricted" in error.text:
        return f"the server at {url} answers only calls with its header ({error}); send it with --header=NAME=VALUE"
    return f"no answer from a server at {url} ({error}); is it running, is this its gRPC port, and does it need TLS?"


VERB = Verb(
    "Show the models of a running server: state, requests, times, and why a model is not served; models with problems"
    " come first. On a terminal the table is updated, and keys scroll, filter and sort it, and open a model; into a"
    " pipe it is printed once.",
    StatusOptions(),
    run,
)
