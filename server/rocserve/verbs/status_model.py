"""Shows one model of a running server: why it is not served, what helps to repair it, and its configuration."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from rich.text import Text

from rocserve.core.printable import printable, readable_size
from rocserve.settings.unix_place import SCHEME, UnixPlace, unix_place
from rocserve.verbs.printing import counted
from rocserve.verbs.status_poll import CALL_TIMEOUT_S, FIGURES, StatusRow
from rocserve_client import Client, RocserveError

_REPORT_TIMEOUT_S = 10.0


def state_text(row: StatusRow) -> Text:
    yellow = dict.fromkeys(("LOADING", "CHECKING", "UNLOADING"), "yellow")
    styles = {"READY": "green", "UNAVAILABLE": "red", **yellow}
    return Text(row.state or "not loaded", style=styles.get(row.state, ""))


def http_address(url: str, tls: bool) -> str:
    """Return where the server of a gRPC address answers HTTP, if it uses the usual port; "" for a Unix socket."""
    if url.startswith(SCHEME):
        return ""
    host = url.rpartition(":")[0] or url
    return f"{'https' if tls else 'http'}://{host}:8000"


@dataclass(frozen=True, slots=True)
class LoadReports:
    """Asks a server's HTTP port what helps to repair a version."""

    address: str
    """"" = not known."""
    headers: Mapping[str, str]
    root_cert: Path | None = None
    client_cert: Path | None = None
    client_key: Path | None = None

    def of(self, row: StatusRow) -> Mapping[str, Any]:
        """Return the version's report. Raises OSError or ValueError if the server gives none."""
        query = urllib.parse.urlencode({"name": row.model, "version": row.version})
        if (place := unix_place(self.address)) is not None:
            return self._read(_ask_socket(place, f"/v2/load-report?{query}", self.headers))
        request = urllib.request.Request(f"{self.address}/v2/load-report?{query}", headers=dict(self.headers))
        context: ssl.SSLContext | None = None
        if self.address.startswith("https"):
            context = ssl.create_default_context(cafile=self.root_cert)
            if self.client_cert is not None:
                context.load_cert_chain(self.client_cert, self.client_key)
        # The server is addressed directly, as over gRPC.
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        with opener.open(request, timeout=_REPORT_TIMEOUT_S) as response:
            return self._read(response.read())

    def _read(self, text: bytes) -> Mapping[str, Any]:
        report = json.loads(text)
        if not isinstance(report, dict):
            raise ValueError(f"expected a report from {self.address}, got other JSON; is this the server's HTTP port?")
        return report


def _ask_socket(place: UnixPlace, target: str, headers: Mapping[str, str]) -> bytes:
    """Return the body of the answer to a GET over a Unix socket. Raises OSError or ValueError."""
    connection = http.client.HTTPConnection("localhost", timeout=_REPORT_TIMEOUT_S)
    connection.sock = socket.socket(socket.AF_UNIX)
    with contextlib.closing(connection):
        connection.sock.settimeout(_REPORT_TIMEOUT_S)
        connection.sock.connect(place.path)
        connection.request("GET", target, headers=dict(headers))
        try:
            response = connection.getresponse()
            text = response.read()
        except http.client.HTTPException as error:
            raise ValueError(f"expected HTTP at {place}: {error}") from None
    if response.status != http.client.OK:
        raise OSError(f"HTTP status {response.status}")
    return text


@dataclass(frozen=True, slots=True)
class VersionDetails:
    """What is known of one version."""

    row: StatusRow
    config: str
    """The configuration as it is served, in the form of config.pbtxt; "" = it is not served."""
    report: Mapping[str, Any]
    """What helps to repair it; empty = there is nothing to repair, or the server does not say."""
    lacking: str
    """Why there is no report, for the user; "" = nothing is lacking."""

    def plain(self) -> dict[str, Any]:
        """Return values of JSON."""
        return {**self.row.plain(), "config": self.config, "report": dict(self.report), "lacking": self.lacking}


def details(client: Client, reports: LoadReports, row: StatusRow) -> VersionDetails:
    """Ask for the details of a version. What the server does not give is left out."""
    config = lacking = ""
    found: Mapping[str, Any] = {}
    try:
        message = client.model_config(row.model, row.version, timeout=CALL_TIMEOUT_S)
        config = text_format.MessageToString(message, as_utf8=True)
    except RocserveError:
        pass  # The version is not served; its report has the file.
    if (row.state != "READY" or row.reason) and not reports.address:
        lacking = (
            "traceback, files and configuration are not known, as --url is a Unix socket: name the server's HTTP"
            " address with --http-url, too"
        )
    elif row.state != "READY" or row.reason:
        try:
            found = reports.of(row)
        except (OSError, ValueError) as error:
            lacking = (
                f"traceback, files and configuration are not known, as {reports.address}/v2/load-report gives none"
                f" ({error}); --http-url names another HTTP address"
            )
    return VersionDetails(row, config, found, lacking)


def detail_lines(one: VersionDetails) -> Iterator[Text]:
    """Yield the lines that describe a version."""
    row, report = one.row, one.report
    title = Text(row.model, style="bold")
    title.append(f" version {row.version}: " if row.version else ": ", style="")
    yield title.append_text(state_text(row))
    reason = printable(str(report.get("reason") or "")) or row.reason
    if reason:
        yield Text("  " + reason, style="red" if row.state == "UNAVAILABLE" else "")
    figures = [f"{name} {row.figures[name]}" for name in FIGURES if name in row.figures]
    if figures:
        yield Text("  " + ", ".join(figures))
    if tries := _tries(report):
        yield Text("  " + tries)
    if one.lacking:
        yield Text("  " + printable(one.lacking), style="yellow")
    yield from _block("traceback", str(report.get("traceback") or "").splitlines())
    yield from _block(_files_title(report), [_file_line(file) for file in report.get("files") or ()])
    yield from _configuration(one)


def _tries(report: Mapping[str, Any]) -> str:
    attempts = int(report.get("attempts") or 0)
    if not attempts:
        return ""
    text = f"tried {counted(attempts, 'time')}"
    if failed_ms := int(report.get("failed_ms") or 0):
        text += f", last at {_clock(failed_ms)}"
    if retry_ms := int(report.get("retry_ms") or 0):
        return f"{text}; the next try is at {_clock(retry_ms)}"
    return f"{text}; not tried again until its files change" if report.get("waits_for_files") else text


def _clock(milliseconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(milliseconds / 1000))


def _files_title(report: Mapping[str, Any]) -> str:
    count, shown = int(report.get("file_count") or 0), len(report.get("files") or ())
    return "files" if count <= shown else f"files, the last changed {shown} of {count}"


def _file_line(file: Mapping[str, Any]) -> str:
    changed = "  changed since the version that is served" if file.get("is_changed") else ""
    size = readable_size(int(file.get("bytes") or 0))
    return f"{_clock(int(file.get('changed_ms') or 0))}  {size:>10}  {file.get('path')}{changed}"


def _configuration(one: VersionDetails) -> Iterator[Text]:
    written = str(one.report.get("config_text") or "")
    if not written:
        yield from _block("configuration, as it is served", one.config.splitlines())
        return
    fault = int(one.report.get("config_line") or 0)
    cut = ", its beginning" if one.report.get("config_is_cut") else ""
    lines = [
        f"{'>' if number == fault else ' '} {number:>4}  {line}"
        for number, line in enumerate(written.splitlines(), start=1)
    ]
    yield from _block(f"{one.report.get('config_file')}, as it is written{cut}", lines, fault)


def _block(title: str, lines: Sequence[str], fault: int = 0) -> Iterator[Text]:
    """Yield lines below a title; none if there are none. `fault`: the line to show in red, counted from 1."""
    if not lines:
        return
    yield Text()
    yield Text(printable(title), style="bold")
    for number, line in enumerate(lines, start=1):
        yield Text("  " + printable(line), style="red" if number == fault else "")
