"""What Ray Serve's proxy and replica cost: the same models asked directly, and as an application of Serve.

usage: python -m benchmarks.ray_serve (see --help)

Both are up on this machine, Serve with one replica and one proxy, and loaded in turn by h2load. It needs what `make
cluster-tools` installs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from benchmarks.comparison import Comparison, compare
from benchmarks.contenders import ServedContender
from benchmarks.front_ends import HTTP_GROUP, subjects
from benchmarks.machine import machine_facts
from benchmarks.ratios import Spread
from benchmarks.ray_cluster import RayCluster
from benchmarks.rocserve_peer import rocserve_server
from benchmarks.server_process import free_port, run_seconds
from benchmarks.table import markdown_table, scaled

GROUPS = ("python", HTTP_GROUP)
IN_FLIGHT = (1, 32)
START_SECONDS = 120.0


class ServeApplication(RayCluster):
    """A cluster of one node, treated as a server."""

    name = "Ray Serve"

    def cpu_seconds(self) -> float:
        """CPU seconds of the proxy, the replica, its server, and Ray's other processes."""
        (node,) = self.raylets
        return sum(map(run_seconds, (node, *node.children(recursive=True))))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ray_serve", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a measurement (default 2)")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # The servers' models run as user nobody.
        folder.chmod(0o755)
        chosen = [subject for subject in subjects([1], python=True) if subject.group in GROUPS]
        for subject in chosen:
            subject.model.write_for_rocserve(folder / "models")
        port, http_port = free_port(), free_port()
        direct = rocserve_server(folder / "models", port, folder / "direct.log", http_port=http_port, name="direct")
        application = stack.enter_context(ServeApplication(nodes=1))
        application.deploy([str(folder / "models")], autoscaling_config=None, num_replicas=1)
        until = time.monotonic() + START_SECONDS
        while not application.replicas() and time.monotonic() < until:
            time.sleep(0.1)
        contenders = [
            stack.enter_context(closing(ServedContender(server, folder)))
            for server in (stack.enter_context(direct), application)
        ]
        compared = [
            compare(subject.case(in_flight), contenders, options.rounds, options.seconds, progress)
            for subject in chosen
            for in_flight in IN_FLIGHT
        ]
    print("\n".join(f"- {fact}" for fact in machine_facts(None)))
    print(f"\n{table(compared)}")
    return 0


def table(compared: Sequence[Comparison]) -> str:
    header = ["case", "direct /s", "Serve /s", "ratio", "least to most", "p50 ms", "Serve's", "CPU us", "Serve's"]
    rows = []
    for comparison in compared:
        direct, served = comparison.measurements.values()
        ratio = Spread.of([theirs.rate / ours.rate for ours, theirs in zip(direct, served, strict=True)])
        rows.append(
            [
                comparison.case.title,
                scaled([one.rate for one in direct], 1, 0),
                scaled([one.rate for one in served], 1, 0),
                f"{ratio.median:.3f}",
                f"{ratio.least:.3f} to {ratio.most:.3f}",
                *(scaled([one.p50 for one in item], 1e3, 2) for item in (direct, served)),
                *(scaled([one.cpu for one in item], 1e6, 0) for item in (direct, served)),
            ]
        )
    return markdown_table(header, rows)


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
