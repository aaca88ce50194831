"""h2load (Debian's nghttp2-client) as the load generator for every server, and its reports.

It repeats one request: a gRPC unary call over HTTP/2 (a file with the framed message), or a request over HTTP/1.1. It
is one C process that does not parse answers, so it takes little of the machine away from the servers, and the same from
each.
"""

from __future__ import annotations

import math
import re
import shutil
import struct
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

INFER_PATH = "/inference.GRPCInferenceService/ModelInfer"
FRAME_HEADER = struct.Struct(">BI")
"""A gRPC frame's head: compression flag, message length (PROTOCOL-HTTP2 of gRPC)."""


@dataclass(frozen=True, slots=True)
class Call:
    """The request without its body."""

    path: str
    headers: tuple[str, ...]
    options: tuple[str, ...] = ()
    """Options of h2load."""


INFER_CALL = Call(INFER_PATH, ("content-type: application/grpc", "te: trailers"))


class LoadFailed(RuntimeError):
    """The load generator is missing, did not run, or a request of it failed."""


@dataclass(frozen=True, slots=True)
class Load:
    """How a server is loaded: `streams` requests in flight on each of `connections`, for `seconds`."""

    connections: int
    streams: int
    seconds: float
    threads: int = 1
    """Threads of h2load, at most one a connection."""

    @property
    def in_flight(self) -> int:
        return self.connections * self.streams


@dataclass(frozen=True, slots=True)
class Report:
    """The totals that h2load prints."""

    seconds: float
    done: int
    succeeded: int
    failed: int
    errored: int
    timed_out: int
    body_bytes: int
    """Bytes of answers with their frame headers, unfinished answers included."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One run of the load generator; latencies are seconds."""

    report: Report
    p50: float
    p99: float

    @property
    def requests_per_second(self) -> float:
        return self.report.succeeded / self.report.seconds


def frame(message: bytes) -> bytes:
    """A message as the body of a unary gRPC call."""
    return FRAME_HEADER.pack(0, len(message)) + message


def run_load(address: str, body_file: Path, load: Load, log_file: Path, call: Call = INFER_CALL) -> LoadResult:
    """Send the body over and over to `address` (host:port or unix:path) for the load's time.

    Raises:
        LoadFailed: h2load is not installed, failed, or did not get HTTP status 200 for each request.
    """
    log_file.unlink(missing_ok=True)  # h2load appends to the file.
    is_socket = address.startswith("unix:")
    command = [
        h2load_program(),
        *([f"--base-uri={address}"] if is_socket else []),
        f"--duration={round(load.seconds * 1000)}ms",
        f"--clients={load.connections}",
        f"--threads={min(load.threads, load.connections)}",
        f"--max-concurrent-streams={load.streams}",
        f"--data={body_file}",
        f"--log-file={log_file}",
        *(f"--header={header}" for header in call.headers),
        *call.options,
        f"http://{'localhost' if is_socket else address}{call.path}",
    ]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=load.seconds + 60.0, check=False)
    if finished.returncode:
        raise LoadFailed(f"h2load ended with status {finished.returncode}: {finished.stderr.strip()}")
    report = parse_report(finished.stdout)
    if report.succeeded == 0 or report.succeeded != report.done:
        raise LoadFailed(
            f"of {report.done} requests {report.succeeded} succeeded, {report.failed} failed,"
            f" {report.errored} errored, {report.timed_out} timed out"
        )
    with log_file.open() as lines:
        latencies = sorted(parse_log(lines))
    return LoadResult(report, percentile(latencies, 0.50), percentile(latencies, 0.99))


def h2load_program() -> str:
    """The path of h2load; LoadFailed says how to get it."""
    program = shutil.which("h2load")
    if program is None:
        raise LoadFailed("h2load is not installed; Debian and Ubuntu have it in the package nghttp2-client")
    return program


def parse_report(text: str) -> Report:
    """Read the totals that h2load printed. Raises LoadFailed if a line is missing."""
    duration = search(r"^finished in ([\d.]+)(us|ms|s|m|h),", text)
    requests = search(
        r"^requests: \d+ total, \d+ started, (\d+) done, (\d+) succeeded, (\d+) failed, (\d+) errored, (\d+) timeout",
        text,
    )
    body = search(r"^traffic: .*\((\d+)\) data$", text)
    unit = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}[duration[2]]
    done, succeeded, failed, errored, timed_out = (int(number) for number in requests.groups())
    return Report(float(duration[1]) * unit, done, succeeded, failed, errored, timed_out, int(body[1]))


def search(pattern: str, text: str) -> re.Match[str]:
    """The first match in any line."""
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        raise LoadFailed(f"h2load printed no line like {pattern!r}:\n{text}")
    return match


def parse_log(lines: Iterable[str]) -> list[float]:
    """Seconds to the end of each answer; a row is start time (us), HTTP status, time (us), tab-separated. Raises
    LoadFailed if a stream failed (status -1) or got an HTTP status other than 200."""
    latencies: list[float] = []
    for line in lines:
        columns = line.split("\t")
        if columns[1] != "200":
            raise LoadFailed(f"a request ended with HTTP status {columns[1]} (-1: its stream failed)")
        latencies.append(int(columns[2]) * 1e-6)
    return latencies


def percentile(ascending: Sequence[float], fraction: float) -> float:
    """The nearest-rank percentile of values in ascending order: the smallest one with `fraction` at or below it. Raises
    ValueError if there are no values."""
    if not ascending:
        raise ValueError("a percentile needs at least one value")
    return ascending[max(1, math.ceil(fraction * len(ascending))) - 1]
