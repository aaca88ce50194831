"""How long one request keeps other clients waiting.

usage: python -m benchmarks.stalls [--server TREE] [--only TEXT] [--rounds N] [--flag=--front-ends=1] (see --help)

Each large or odd request is sent to a server that small ones are asked of all the time, over gRPC and HTTP, by clients
in a separate process; the table has the longest that one of those took.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks.line_process import LineProcess
from benchmarks.rocserve_peer import rocserve_server
from benchmarks.server_process import free_port
from benchmarks.stall_cases import CASES, SERVER_FLAGS, SMALL, Addresses, Case, write_models
from benchmarks.table import markdown_table

_SETTLE_SECONDS = 1.0
"""Pause after a request, in which its memory is returned to the system."""


def main() -> int:
    options = parse_arguments()
    chosen = [case for case in CASES if any(part in case.name for part in options.only)]
    delays: dict[Case, list[tuple[float, float, float]]] = {case: [] for case in chosen}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        loads = [f"--load-model={name}" for name in write_models(folder / "models")]
        server = rocserve_server(
            folder / "models",
            free_port(),
            folder / "log",
            *SERVER_FLAGS,
            *loads,
            *options.flags,
            http_port=free_port(),
            tree=options.server,
        )
        stack.enter_context(server)
        addresses = Addresses(server.address, server.http_address)
        command = [sys.executable, "-m", "benchmarks.stall_clients", addresses.grpc, addresses.http, SMALL.name]
        others = stack.enter_context(LineProcess("the small clients", command))
        for case in [case for case in chosen for _ in range(options.rounds)]:
            delays[case].append(measure(case, addresses, others))
            print(f"{case.name}: {cells([delays[case][-1]])}", file=sys.stderr, flush=True)
    print(markdown_table(["request", "took s", "gRPC delayed ms", "HTTP delayed ms"], rows(delays)))
    return 0


def measure(case: Case, addresses: Addresses, others: LineProcess) -> tuple[float, float, float]:
    """Seconds of the request, and the longest delay of others over gRPC and HTTP, in milliseconds."""
    send = case.make()
    time.sleep(_SETTLE_SECONDS)
    others.ask("")
    began = time.monotonic()
    send(addresses)
    took = time.monotonic() - began
    time.sleep(_SETTLE_SECONDS)
    longest = others.ask("")
    return took, longest["grpc"], longest["http"]


def rows(delays: dict[Case, list[tuple[float, float, float]]]) -> list[list[str]]:
    return [[case.name, *cells(found)] for case, found in delays.items()]


def cells(found: Sequence[tuple[float, float, float]]) -> list[str]:
    """The median of the rounds."""
    took, over_grpc, over_http = (median(column) for column in zip(*found, strict=True))
    return [f"{took:.2f}", f"{over_grpc:.0f}", f"{over_http:.0f}"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stalls", description=__doc__)
    parser.add_argument(
        "--server", type=Path, default=Path.cwd(), help="the checkout to serve from (default: this one)"
    )
    parser.add_argument("--only", action="append", help="requests whose names contain this; repeatable")
    parser.add_argument("--rounds", type=int, default=3, help="of which the median is shown (default 3)")
    parser.add_argument("--flag", dest="flags", action="append", default=[], help="a flag for the server; repeatable")
    options = parser.parse_args()
    options.only = options.only or [""]
    return options


if __name__ == "__main__":
    sys.exit(main())
