"""Writes the pictures of the page that docs/guides/page.md shows, from a server under load, with a real Chromium.

Run: make screenshots, or .venv/bin/python docs/screenshots.py [FOLDER] [--seconds SECONDS] [--texts]
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

TREE = Path(__file__).parents[1]
SAMPLES = ("digits", "digits_classifier", "digits_preprocess", "detect_shapes", "detect_shapes_network",
           "detect_shapes_postprocess", "detect_shapes_preprocess")  # fmt: skip
PHOTO = TREE / "tests" / "data" / "shapes" / "03.jpg"
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
LOAD_SECONDS = 40.0
"""How long clients send requests before the first picture, so that charts and rates have something to show."""
PAGE_SECONDS = 12.0
"""How long a page is open before its picture, unless the load before the first is shorter: its charts begin with it."""
START_SECONDS = 300.0
ADDRESS = re.compile(r"Started HTTPService at (127\.0\.0\.1:\d+)")
ROWS = {"inputs": [{"name": "IMAGE", "datatype": "FP32", "shape": [1, 1, 16, 16], "data": [0.5] * 256}]}
BROKEN = """
import json
from pathlib import Path


class TritonPythonModel:
    def initialize(self, args):
        labels = Path(args["model_repository"]) / "labels.json"
        self.labels = json.loads(labels.read_text())

    def execute(self, requests):
        return []
"""
BROKEN_CONFIG = """backend: "python"
# Names of what is sold, one for each class.
input { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "NAME" data_type: TYPE_STRING dims: [ 1 ] }
"""


def drop_broken(repository: Path) -> None:
    """Add a model that fails to load, with all of its files at once."""
    made = repository.parent / "product_names"
    (made / "1").mkdir(parents=True)
    (made / "1" / "model.py").write_text(BROKEN)
    (made / "config.pbtxt").write_text(BROKEN_CONFIG)
    made.rename(repository / made.name)


@contextmanager
def serving(repository: Path) -> Iterator[str]:
    """Run a server on free ports; yield its URL when all samples are ready."""
    command = [sys.executable, "-m", "rocserve.cli", "serve", str(repository), "--allow-metrics=false",
               "--http-address=127.0.0.1", "--http-port=0", "--grpc-address=127.0.0.1", "--grpc-port=0"]  # fmt: skip
    log = repository.parent / "log"
    with log.open("w") as written:
        server = subprocess.Popen(command, stdout=written, stderr=written)
    try:
        yield ready_url(server, log)
    finally:
        server.terminate()
        server.wait()


def ready_url(server: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and server.poll() is None:
        if found := ADDRESS.search(log.read_text()):
            url = f"http://{found[1]}"
            with suppress(urllib.error.HTTPError):  # 400: not ready
                for name in SAMPLES:
                    urllib.request.urlopen(f"{url}/v2/models/{name}/ready").close()
                return url
        time.sleep(0.5)
    raise SystemExit(f"the models were not ready within {START_SECONDS:.0f} s; the log:\n{log.read_text()}")


def post(url: str, body: Any) -> None:
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())).close()


@contextmanager
def loaded(url: str) -> Iterator[None]:
    """Let two clients send requests meanwhile: rows to a network, pictures to an ensemble."""
    picture = base64.b64encode(PHOTO.read_bytes()).decode()
    pictures = {"inputs": [{"name": "ENCODED", "datatype": "BYTES", "shape": [1], "data": [{"b64": picture}]}]}
    has_ended = threading.Event()

    def ask(model: str, body: Any, pause: float) -> None:
        while not has_ended.wait(pause):
            post(f"{url}/v2/models/{model}/infer", body)

    clients = [
        threading.Thread(target=ask, args=("digits_classifier", ROWS, 0.01)),
        threading.Thread(target=ask, args=("detect_shapes", pictures, 0.1)),
    ]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        has_ended.set()
        for client in clients:
            client.join()


def top(page: Any, what: str) -> None:
    """Scroll it to the upper edge."""
    page.locator(what).evaluate("element => element.scrollIntoView()")


def show_detection(page: Any) -> None:
    page.get_by_label("choose a file").set_input_files(PHOTO)
    page.locator(".drawn .plate").first.wait_for()
    page.locator(".times summary").click()
    top(page, ".try")


def show_graph(page: Any) -> None:
    page.wait_for_function("""() => {
        const times = [...document.querySelectorAll(".graph .time")];
        return times.length > 0 && times.every((time) => time.textContent.includes("%"));
    }""")
    top(page, "section:has(.graph)")


def show_vector(page: Any) -> None:
    page.get_by_label("request as JSON").fill(json.dumps(ROWS))
    page.get_by_role("button", name="Send").click()
    page.locator(".vector").wait_for()
    top(page, ".answer")


def failed_tries(page: Any) -> str:
    """Wait until no try to load the broken model runs; return what the page says of those that have failed."""
    page.locator(".badge.unavailable").first.wait_for()
    found = re.search(r"\(failed [^,]+,", page.locator("body").inner_text())
    return found[0] if found else ""


def take(page: Any, file: Path, shows_the_broken_model: bool) -> list[str]:
    """Write the picture and return its texts; again where the broken model was tried meanwhile, and was LOADING."""
    while True:
        before = failed_tries(page) if shows_the_broken_model else ""
        page.screenshot(path=file)
        texts: list[str] = page.evaluate(TEXTS_IN_VIEW)
        if not shows_the_broken_model or ("UNAVAILABLE" in texts and failed_tries(page) == before):
            return texts


PICTURES: dict[str, tuple[str, int, int, str, Callable[[Any], None]]] = {
    "models": ("", 1280, 640, "light", lambda page: page.locator(".badge.ready").nth(6).wait_for()),
    "failed": ("product_names", 1280, 820, "light", lambda page: page.locator(".repair pre").first.wait_for()),
    "detection": ("detect_shapes", 1280, 920, "dark", show_detection),
    "graph": ("detect_shapes", 390, 660, "light", show_graph),
    "vector": ("digits_classifier", 390, 560, "dark", show_vector),
}
"""Name -> the model whose page it is ("" = the first page), width, height, theme, what is done before the picture."""
TEXTS_IN_VIEW = """() => {
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const range = document.createRange(), texts = [];
    while (walker.nextNode()) {
        range.selectNodeContents(walker.currentNode);
        const { top, right, bottom, left } = range.getBoundingClientRect();
        const isShown = right > left && bottom > top;
        const isInView = right > 0 && bottom > 0 && left < innerWidth && top < innerHeight;
        if (isShown && isInView && walker.currentNode.data.trim()) texts.push(walker.currentNode.data.trim());
    }
    return texts;
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=TREE / "docs" / "screenshots")
    parser.add_argument("--seconds", type=float, default=LOAD_SECONDS, help="of load before the first picture")
    parser.add_argument("--texts", action="store_true", help="also write NAME.txt: the texts in the picture")
    options = parser.parse_args()
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        raise SystemExit(f"needs a browser: one of {', '.join(BROWSERS)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        repository = Path(temporary) / "models"
        for name in SAMPLES:
            shutil.copytree(TREE / "model_repository" / name, repository / name)
        with serving(repository) as url:
            drop_broken(repository)
            patience = 1000 * START_SECONDS
            browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"], timeout=patience)
            with loaded(url):
                page = browser.new_page()  # One for all: each is a process of the browser.
                page.set_default_timeout(patience)
                page.goto(url)
                time.sleep(options.seconds)
                for name, (model, width, height, theme, prepare) in PICTURES.items():
                    page.goto("about:blank")
                    page.set_viewport_size({"width": width, "height": height})
                    page.emulate_media(color_scheme=theme)
                    page.goto(f"{url}/#/model/{model}/1" if model else url)
                    page.wait_for_timeout(1000 * min(PAGE_SECONDS, options.seconds))
                    prepare(page)
                    file = options.folder / f"{name}.png"
                    texts = take(page, file, shows_the_broken_model=model in {"", "product_names"})
                    if options.texts:
                        file.with_suffix(".txt").write_text("\n".join(texts))
                    print(f"{file}: {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
