"""What the page shows of the whole server, in a real Chromium: figures, what needs attention, graphs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from support.browser import NEEDS_CHROMIUM, WIDTHS, as_on_a_phone, assert_fits, row, visit
from support.http_requests import ask
from support.models import add_constant, drop
from support.server import RocserveProcess, Start
from support.waiting import wait_until

pytestmark = NEEDS_CHROMIUM
TWO_VERSIONS = """
# max_batch_size follows from the file
version_policy { all {} }
metric_tags { key: "<b>who</b>" value: "me" }
"""
MARKUP = "<img src=x onerror=\"document.body.dataset.hacked='yes'\">"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocserveProcess]:
    folder = tmp_path_factory.mktemp("page")
    drop(folder / "repository", "good", add_constant(1.0))
    drop(folder / "repository", "bad", b"this is no model")
    two = drop(folder / "repository", "two", add_constant(1.0), TWO_VERSIONS)
    (two / "2").mkdir()
    (two / "2" / "model.onnx").write_bytes(add_constant(2.0))
    flags = ("--front-ends=2", "--allow-metrics=true", "--metrics-port=0", "--strict-readiness=false")
    with RocserveProcess([folder / "repository"], *flags, log=folder / "log") as running:
        running.wait_until_ready()
        yield running


def add(server: RocserveProcess) -> None:
    body = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}]}
    assert ask(server, "POST", "/v2/models/good/infer", body)[0] == 200


def points(server: RocserveProcess) -> list[Any]:
    status, state = ask(server, "GET", "/v2/server-state")
    assert status == 200
    return state["points"]  # type: ignore[no-any-return]


def test_a_query_that_the_state_does_not_know_is_refused(server: RocserveProcess) -> None:
    assert ask(server, "GET", "/v2/server-state?after=0")[0] == 200
    for query, told in (
        ("after=x", "expected a time in milliseconds as after, got 'x'"),
        ("after=", "expected a time in milliseconds as after, got ''"),
        ("since=1", "expected after in the query, got 'since'"),
    ):
        status, answer = ask(server, "GET", f"/v2/server-state?{query}")
        assert (status, answer) == (400, {"error": told})
    assert ask(server, "GET", "/v2/load-report?model=good")[0] == 400


def test_figures_and_graphs_outlast_the_page(page: Any, server: RocserveProcess) -> None:
    as_on_a_phone(page)

    def has_answered() -> bool:
        add(server)
        return max((point["answered_rate"] for point in points(server)[1:]), default=0) > 0

    # Nobody has the page open meanwhile.
    wait_until(has_answered)
    visit(page, server)
    page.locator("#server", has_text="ready · 3 ready, 1 failed").wait_for()
    figures = page.locator(".facts div")
    for title in ("CPU", "Memory", "Running for"):
        value = figures.filter(has_text=title).locator("dd")
        page.wait_for_function("element => /\\d/.test(element.textContent)", arg=value.element_handle())
    lines = page.locator(".line.rate")
    lines.first.wait_for(state="attached")
    drawn = lines.first.get_attribute("d")
    page.reload()
    lines.first.wait_for(state="attached")
    # As many points as before, at least: each but the first is a line to it.
    assert lines.first.get_attribute("d").count("L") >= drawn.count("L") > 0
    assert_fits(page)


def test_only_new_points_are_asked_for(page: Any, server: RocserveProcess) -> None:
    asked: list[str] = []

    page.on("request", lambda request: asked.append(request.url) if "server-state" in request.url else None)
    wait_until(lambda: points(server))
    visit(page, server)
    wait_until(lambda: page.wait_for_timeout(100) or len(asked) >= 2)
    assert asked[0].endswith("after=0")
    assert int(asked[1].partition("after=")[2]) > 0


def test_what_needs_attention_is_first(page: Any, server: RocserveProcess) -> None:
    as_on_a_phone(page)
    status, real = ask(server, "GET", "/v2/overview?name=good")
    assert status == 200
    silent = "1 of 2 instances has not answered for 40 s"
    rows = {
        "calm": {},
        "full": {},
        "hung": {"reason": silent},
        "kept": {"reason": "newer content failed to load: no <b>"},
        "mixed": {"load_warning": "its rows depend on each other, though max_batch_size is 8"},
        MARKUP: {"state": "UNAVAILABLE", "reason": MARKUP},
    }
    count = 0

    def answer(route: Any) -> None:
        nonlocal count
        count += 1
        # A page that has just asked for all asks for the rows that it shows.
        asked = parse_qs(urlsplit(route.request.url).query).get("name", [*rows])
        models = [{**real["models"][0], "name": name, **row} for name, row in rows.items() if name in asked]
        for model in models:
            if model["name"] == "full":
                model["rejected_count"] = 3 * count
        route.fulfill(json={**real, "now_ms": real["now_ms"] + 1000 * count, "models": models})

    page.route("**/v2/overview*", answer)
    visit(page, server)
    needs = page.get_by_role("region", name="Needs attention")
    needs.get_by_text("turned away").wait_for()
    assert needs.get_by_role("link").all_inner_texts() == [MARKUP, "hung", "full", "kept", "mixed"]
    assert silent in needs.locator("li").nth(1).inner_text()
    assert page.evaluate("document.body.dataset.hacked") is None
    assert page.locator("img[src=x]").count() == 0
    # By the keyboard alone: the first link of the page's content is the most harmful.
    needs.get_by_role("link").nth(1).focus()
    page.keyboard.press("Enter")
    page.locator("h2", has_text="hung version 1").wait_for()
    assert_fits(page)
    rows |= {f"bad_{number}": {"state": "UNAVAILABLE", "reason": "broken"} for number in range(10)}
    visit(page, server)
    needs.get_by_text("and 9 more").wait_for()


def test_without_trouble_nothing_needs_attention(page: Any, server: RocserveProcess) -> None:
    status, real = ask(server, "GET", "/v2/overview?name=good")
    assert status == 200
    page.route("**/v2/overview*", lambda route: route.fulfill(json=real))
    visit(page, server)
    row(page, "good").wait_for()
    page.locator(".facts div").first.wait_for()
    assert page.get_by_role("region", name="Needs attention").count() == 0


CHATTY = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        print("loaded <img src=x> anew", flush=True)

    def execute(self, requests):
        return []
"""
CHATTY_CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_FP32 dims: 1 }
output { name: "OUT" data_type: TYPE_FP32 dims: 1 }
"""


@pytest.fixture(scope="module")
def explicit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocserveProcess]:
    folder = tmp_path_factory.mktemp("explicit")
    drop(folder / "repository", "chatty", CHATTY, CHATTY_CONFIG)
    flags = ("--model-control-mode=explicit", "--load-model=chatty")
    with RocserveProcess([folder / "repository"], *flags, log=folder / "log") as running:
        running.wait_until_ready()
        yield running


def test_an_operator_reloads_unloads_and_reads_the_log(page: Any, explicit: RocserveProcess) -> None:
    def accept(dialog: Any) -> None:
        dialog.accept()

    as_on_a_phone(page)
    page.on("dialog", accept)
    visit(page, explicit, "chatty")
    page.locator("h2 .badge.ready").wait_for()
    acts = page.get_by_role("region", name="Acts")
    summary = acts.get_by_text("Log of its workers")
    summary.focus()
    page.keyboard.press("Enter")
    log = acts.get_by_label("Log of the workers")
    log.get_by_text("loaded <img src=x> anew").wait_for()
    before = log.inner_text().count("anew")
    acts.get_by_role("button", name="Reload").focus()
    page.keyboard.press("Enter")
    acts.get_by_role("status").get_by_text("Done.").wait_for()
    for _ in range(2):  # Closed, and opened again.
        summary.click()
    page.wait_for_function(
        "([element, count]) => element.textContent.split('anew').length - 1 > count", arg=[log.element_handle(), before]
    )
    acts.get_by_role("button", name="Unload").press("Enter")
    acts.get_by_role("status").get_by_text("Unloaded.").wait_for()
    page.locator("h2 .badge.unavailable").wait_for()
    acts.get_by_role("button", name="Load").press("Enter")
    page.locator("h2 .badge.ready").wait_for()
    assert_fits(page)
    visit(page, explicit)
    events = page.locator(".events li", has_text="by the page at 127.0.0.1")
    events.filter(has_text="unload chatty").first.wait_for()
    events.filter(has_text="reload chatty").first.wait_for()
    choice = page.get_by_label("Log of the server")
    choice.select_option("verbose")
    events.filter(has_text="log verbosity 1").first.wait_for()
    wait_until(lambda: ask(explicit, "GET", "/v2/logging")[1]["log_verbose_level"] == 1)
    choice.select_option("normal")
    wait_until(lambda: ask(explicit, "GET", "/v2/logging")[1]["log_verbose_level"] == 0)
    assert page.locator("img[src=x]").count() == 0
    page.remove_listener("dialog", accept)


def test_a_failed_model_is_tried_again(page: Any, server: RocserveProcess) -> None:
    def failed_ms() -> int:
        return int(ask(server, "GET", "/v2/load-report?name=bad&version=1")[1]["failed_ms"])

    visit(page, server, "bad")
    page.locator("h2 .badge.unavailable").wait_for()
    before = failed_ms()
    acts = page.get_by_role("region", name="Acts")
    acts.get_by_role("button", name="Try again").press("Enter")
    acts.get_by_role("status").get_by_text("Requested; the state shows the progress.").wait_for()
    # The server follows its files, so nothing is unloaded by request.
    assert acts.get_by_role("button", name="Unload").count() == 0
    wait_until(lambda: failed_ms() > before)


@pytest.fixture(scope="module")
def closed(start: Start, tmp_path_factory: pytest.TempPathFactory) -> RocserveProcess:
    """Takes admin calls from elsewhere only."""
    repository = tmp_path_factory.mktemp("closed")
    drop(repository, "m", add_constant(1.0))
    return start(repository, "--admin-address=10.0.0.0/8")


def test_where_acts_are_not_permitted_the_page_says_so(page: Any, closed: RocserveProcess) -> None:
    as_on_a_phone(page)
    visit(page, closed, "m")
    acts = page.get_by_role("region", name="Acts")
    acts.get_by_text("not permitted from here").wait_for()
    acts.get_by_text("takes from 10.0.0.0/8").wait_for()
    assert acts.get_by_role("button").count() == 0
    visit(page, closed)
    page.get_by_text("Log verbosity: not permitted from here").wait_for()
    assert_fits(page)


def test_a_secret_for_admin_calls_is_asked_for(page: Any, tmp_path: Path) -> None:
    drop(tmp_path / "repository", "m", add_constant(1.0))
    flags = ("--http-restricted-api=model-repository,statistics,logging:admin-key=secret",)
    with RocserveProcess([tmp_path / "repository"], *flags, log=tmp_path / "log") as server:
        server.wait_until_ready()
        visit(page, server)
        # Other parts of the page ask for it too.
        page.locator("#notice").get_by_label("value of admin-key").fill("secret")
        page.locator("#notice").get_by_role("button", name="Use").click()
        page.locator(".events li", has_text="m version 1").first.wait_for()
        row(page, "m").get_by_role("link").click()
        page.get_by_role("region", name="Acts").get_by_role("button", name="Reload").press("Enter")
        page.get_by_role("status").get_by_text("Requested; the state shows the progress.").wait_for()


@WIDTHS
def test_versions_are_shown_side_by_side(page: Any, server: RocserveProcess, width: int, scheme: str) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    body = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}]}
    # Latencies are counted from the first look on.
    assert ask(server, "GET", "/v2/version-details?name=two&version=2")[0] == 200
    assert ask(server, "POST", "/v2/models/two/versions/2/infer", body)[0] == 200
    visit(page, server, "two", "2")
    cards = [page.get_by_role("region", name=f"version {number}", exact=True) for number in (2, 1)]
    for number, card in zip((2, 1), cards, strict=True):
        card.locator(".badge.ready").wait_for()
        config = card.get_by_label(f"configuration of version {number}")
        config.locator(".completed", has_text='name: "X"').wait_for()
        # What the file says has no mark, and a comment says nothing.
        assert config.locator("span:not(.completed, .written)", has_text="<b>who</b>").count() == 1
        assert "follows" not in config.inner_text()
        card.get_by_text("Load check", exact=True).wait_for()
    cards[0].locator(".latencies li").first.wait_for()
    tops = [card.bounding_box() for card in cards]
    assert (tops[0]["y"] == tops[1]["y"]) is (width > 900)
    # By the keyboard alone.
    cards[1].get_by_role("link", name="Version 1").focus()
    page.keyboard.press("Enter")
    page.locator("h2", has_text="two version 1").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
