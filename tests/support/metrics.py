"""The metrics of a real server."""

from __future__ import annotations

import re
import urllib.request

from support.server import RocserveProcess

FLAGS = ("--allow-metrics=true", "--metrics-address=127.0.0.1", "--metrics-port=0", "--metrics-interval-ms=500")


def port_of(server: RocserveProcess) -> int:
    found = re.search(r"Started Metrics Service at 127\.0\.0\.1:(\d+)", server.log_text)
    assert found is not None, server.log_text
    return int(found[1])


def scrape(port: int) -> dict[str, str]:
    """Metric with its labels -> value."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
