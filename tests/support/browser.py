"""The page at / in a real Chromium."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS

_PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""The first is the same engine without the windows around it, which take a fifth of the processor's time."""
CHROMIUM = next(filter(None, map(shutil.which, _PROGRAMS)), None)
NEEDS_CHROMIUM = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
COPIES = ("Copy as curl", "Copy as Python", "Copy as Triton client")
_DESKTOP, _PHONE = (1280, "light"), (390, "dark")
WIDTHS = pytest.mark.parametrize(("width", "scheme"), [_DESKTOP, _PHONE])
"""For tests of what is drawn elsewhere on a phone; others work as on a phone, and see that the page fits."""


@contextmanager
def running_browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        patience = 1000 * PATIENCE_SECONDS
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=patience)


@contextmanager
def opened_page(browser: Any) -> Iterator[tuple[Any, list[str]]]:
    """A page, and what its content security policy has refused and the errors that its scripts have raised."""
    context = browser.new_context()
    page = context.new_page()
    faults: list[str] = []

    def note(message: Any) -> None:
        # The browser reports requests that the server refuses as errors, too.
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            faults.append(message.text)

    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", note)
    page.set_default_timeout(1000 * PATIENCE_SECONDS)
    yield page, faults
    context.close()


def begin_anew(page: Any) -> None:
    """Leave what a test has shown. The page at / stores nothing in the browser."""
    page.goto("about:blank")
    page.unroute_all()
    page.mouse.move(0, 0)
    page.set_viewport_size({"width": _DESKTOP[0], "height": 900})
    page.emulate_media(color_scheme=_DESKTOP[1])


def as_on_a_phone(page: Any) -> None:
    width, scheme = _PHONE
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)


def assert_fits(page: Any) -> None:
    """Fail if the page is wider than its window on a desktop, or on a phone, whose window it has afterwards."""
    for width, _ in (_DESKTOP, _PHONE):
        page.set_viewport_size({"width": width, "height": 900})
        # Scripts may draw graphs anew.
        page.wait_for_function(
            "width => innerWidth === width && document.documentElement.scrollWidth <= width", arg=width
        )


def visit(page: Any, server: RocserveProcess, model: str = "", version: str = "1") -> None:
    page.goto("about:blank")
    quoted = page.evaluate("encodeURIComponent", model)
    page.goto(f"http://{server.http_address}/" + (f"#/model/{quoted}/{version}" if model else ""))


def row(page: Any, model: str) -> Any:
    return page.locator(".models tbody").filter(has=page.get_by_role("link", name=model, exact=True))


def send_json(page: Any, server: RocserveProcess, model: str, request: Any) -> None:
    """Send a request from the box for JSON; wait for its answer."""
    visit(page, server, model)
    page.get_by_label("request as JSON").evaluate("box => { box.closest('details').open = true; }")
    page.get_by_label("request as JSON").fill(json.dumps(request))
    page.get_by_role("button", name="Send").click()
    page.locator(".answer section").first.wait_for()


def copied(page: Any, button: str) -> str:
    """Press a button of COPIES; return the code."""
    page.get_by_role("button", name=button).click()
    page.locator(".copies small", has_text=re.compile("Copied|Selected")).wait_for()
    code: str = page.locator(".copies pre").text_content()
    assert page.evaluate("getSelection().toString()").strip() == code.strip()
    return code


def ran(code: str, is_python: bool, folder: Path) -> str:
    """Run copied code; return what it prints."""
    command = [sys.executable, "-c", code] if is_python else ["bash", "-c", code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
