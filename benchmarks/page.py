"""What an open page costs the server, and how soon it shows something, by the number of models.

usage: python -m benchmarks.page [--models 60,10000] [--resident 60] [--seconds 30] [--write NAME]

The models are alike: INT32 sums and differences by ONNX Runtime; up to --resident of them are loaded at once. A real
Chromium opens the page on loopback. Costs are CPU time of all the server's processes in percent of one core, with the
page open and without it, when nobody sends requests. First paint is the browser's own figure (first-contentful-paint);
the table is there when its first row is.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from benchmarks.machine import machine_facts
from benchmarks.models import add_sub
from benchmarks.rocserve_peer import rocserve_server
from benchmarks.server_process import ServerProcess, free_port

_RESULTS = Path(__file__).parent / "results"
_BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_OPENINGS = 7
_SETTLING_SECONDS = 5.0
"""After the page's first answers, which come once."""
_LONGEST_MS = 300_000
_PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime"


def main() -> int:
    options = parse_arguments()
    program = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if program is None:
        raise SystemExit(f"needs a browser: one of {', '.join(_BROWSERS)}")
    facts = machine_facts(None)
    rows = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for count in options.models:
            rows.append((str(count), *of_models(browser, count, options)))
            print(*rows[-1], sep="; ", flush=True)
    columns = (
        "models",
        "CPU without the page, %",
        "CPU with the page open, %",
        "the page's cost, %",
        "first paint, ms: median / most",
        "first row, ms: median / most",
    )
    page = "\n".join(
        (
            "# The page",
            "",
            *(f"- {fact}" for fact in facts),
            f"- CPU time of {options.seconds:.0f} s in percent of one core; {_OPENINGS} openings of the page",
            "- the page asks for all models after a hundred times as long as that answer takes: with thousands, once or"
            " not at all in this time",
            "",
            f"| {' | '.join(columns)} |",
            f"|{'---|' * len(columns)}",
            *(f"| {' | '.join(row)} |" for row in rows),
        )
    )
    print(page)
    if options.write:
        (_RESULTS / f"{options.write}.md").write_text(page + "\n")
    return 0


def of_models(browser: Any, count: int, options: argparse.Namespace) -> tuple[str, ...]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for number in range(count):
            add_sub(f"m{number:05d}", dynamic_batching=False).write_for_rocserve(folder / "models")
        server = rocserve_server(
            folder / "models",
            free_port(),
            folder / "log",
            f"--max-loaded-models={options.resident}",
            http_port=free_port(),
            tree=Path(__file__).parents[1],
        )
        time.sleep(2.0)  # The server waits until younger files have settled.
        with server:
            url = f"http://{server.http_address}/"
            opened = [opening(browser, url) for _ in range(_OPENINGS)]
            alone = percent(server, options.seconds)
            page = browser.new_page()
            page.goto(url)
            page.locator(".models tbody a").first.wait_for(timeout=_LONGEST_MS)
            time.sleep(_SETTLING_SECONDS)
            shown = percent(server, options.seconds)
            page.close()
    paints, rows = (in_milliseconds(values) for values in zip(*opened, strict=True))
    return f"{alone:.2f}", f"{shown:.2f}", f"{shown - alone:.2f}", paints, rows


def opening(browser: Any, url: str) -> tuple[float, float]:
    """Milliseconds until the first paint and the first row, in a browser that knows nothing of the server."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(url, wait_until="commit")
    page.wait_for_selector(".models tbody a", timeout=_LONGEST_MS)
    row = page.evaluate("performance.now()")
    paint = page.evaluate(_PAINT)
    context.close()
    return paint, row


def percent(server: ServerProcess, seconds: float) -> float:
    began, used = time.monotonic(), server.cpu_seconds()
    time.sleep(seconds)
    return 100 * (server.cpu_seconds() - used) / (time.monotonic() - began)


def in_milliseconds(values: tuple[float, ...]) -> str:
    return f"{statistics.median(values):.0f} / {max(values):.0f}"


def counts(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=counts, default=[60, 10_000], metavar="N,N,...")
    parser.add_argument("--resident", type=int, default=60, help="models that are loaded at once")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each measurement of CPU time")
    parser.add_argument("--write", metavar="NAME", help="also write benchmarks/results/NAME.md")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
