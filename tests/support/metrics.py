"""The metrics of a real server."""

from __future__ import annotations

import re
import urllib.request

from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS, wait_until

FLAGS = ("--allow-metrics=true", "--metrics-address=127.0.0.1", "--metrics-port=0", "--metrics-interval-ms=500")


def port_of(server: RocserveProcess) -> int:
    found: list[str] = []

    def is_told() -> bool:
        found[:] = re.findall(r"Started Metrics Service at 127\.0\.0\.1:(\d+)", server.log_text)
        return bool(found)

    wait_until(is_told, "the port of the metrics in the log")
    return int(found[-1])


def scrape(port: int) -> dict[str, str]:
    """Metric with its labels -> value."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_SECONDS) as answer:
        text = answer.read().decode()
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
