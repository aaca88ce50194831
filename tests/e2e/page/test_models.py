"""The list of models in a real Chromium: states, searches, checks, thousands of models."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from support.browser import NEEDS_CHROMIUM, WIDTHS, row, visit
from support.http_requests import ask
from support.models import ADD_CONSTANT_CONFIG, add_constant, answering, drop
from support.page_models import HOSTILE_CONFIG, MARKUP, MOODS_OF_AN_ENSEMBLE
from support.server import RocserveProcess

from rocserve.load_check.recorded import RecordedAnswers, write_recorded

pytestmark = NEEDS_CHROMIUM


def test_a_page_without_models_says_how_to_add_one(page: Any, server: RocserveProcess) -> None:
    overview = {**ask(server, "GET", "/v2/overview")[1], "models": []}
    page.route("**/v2/overview*", lambda route: route.fulfill(json=overview))
    visit(page, server)
    page.get_by_text("There is no model yet: put one into NAME/1/ of the repository").wait_for()
    page.unroute("**/v2/overview*")


def test_states_change_as_they_do(page: Any, server: RocserveProcess, models: Path) -> None:
    visit(page, server)
    row(page, "digits").locator(".badge.ready").wait_for()
    engine = row(page, "digits_classifier").locator("td", has_text="onnxruntime · cpu")
    lines = "cell => { const all = new Range(); all.selectNodeContents(cell); return all.getClientRects().length; }"
    assert engine.evaluate(lines) == 1, "the engine fits into one line"
    drop(models, "fresh", add_constant(1.0))
    row(page, "fresh").locator(".badge.ready").wait_for()
    drop(models, "broken", b"this is no model")
    row(page, "broken").locator(".badge.unavailable").wait_for()
    row(page, "broken").locator(".reason", has_text=re.compile("onnx", re.IGNORECASE)).wait_for()
    page.locator(".events li", has_text="broken").first.wait_for()
    drop(models, "broken", add_constant(1.0))
    row(page, "broken").locator(".badge.ready").wait_for()
    assert row(page, "broken").locator(".reason").is_hidden()
    shutil.rmtree(models / "fresh")
    row(page, "fresh").locator(".badge.unavailable").wait_for()
    shutil.rmtree(models / "broken")


@pytest.mark.parametrize("width", [320, 950, 1200, 1201])
def test_a_name_has_room_in_windows_of_all_widths(page: Any, server: RocserveProcess, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    visit(page, server)
    name = row(page, "digits_classifier").locator("a")
    name.wait_for()
    assert name.evaluate("link => link.getClientRects().length") == 1
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_a_repository_of_one_has_no_name(server: RocserveProcess) -> None:
    assert {model["repository"] for model in ask(server, "GET", "/v2/overview")[1]["models"]} == {""}


def names(page: Any) -> list[str]:
    return page.locator(".models tbody a").all_inner_texts()  # type: ignore[no-any-return]


@WIDTHS
def test_models_are_searched_filtered_and_sorted(
    page: Any, server: RocserveProcess, models: Path, width: int, scheme: str
) -> None:
    # All rows are in view.
    page.set_viewport_size({"width": width, "height": 4000})
    page.emulate_media(color_scheme=scheme)
    # A name that is dropped again would first show how it failed before.
    broken = f"sometimes_{scheme}"
    drop(models, broken, b"this is no model")
    visit(page, server)
    row(page, broken).locator(".badge.unavailable").wait_for()
    page.get_by_role("button", name=re.compile(r"Failed 1")).wait_for()
    # What fails is first, the others follow by name.
    assert names(page)[:2] == [broken, MARKUP]

    page.keyboard.press("/")
    page.keyboard.type("moods text")
    row(page, "moods").wait_for(state="detached")
    assert names(page) == ["moods_text"]
    page.get_by_label("search models").fill("nothing <b>")
    page.get_by_text("No model matches.").wait_for()
    page.get_by_label("search models").fill("")
    row(page, "moods").wait_for()

    page.get_by_role("button", name=re.compile("^Failed")).press("Enter")
    row(page, "moods").wait_for(state="detached")
    assert names(page) == [broken]
    page.get_by_role("button", name=re.compile("^All")).press("Enter")
    page.get_by_label("engine").select_option("ensemble")
    row(page, MARKUP).wait_for(state="detached")
    # Models that other tests have taken away stay in the index.
    dropped = {path.name for path in models.iterdir()}
    expected = ["detect_shapes", "digits", "moods_text", "stories_text"]
    assert [name for name in names(page) if name in dropped] == expected
    page.get_by_label("engine").select_option("")
    row(page, MARKUP).wait_for()

    everything = [name for name in names(page) if name != broken]
    if width > 900:
        head = page.locator("thead th", has_text="Model")
        head.get_by_role("button").press("Enter")
        assert head.get_attribute("aria-sort") == "ascending"
        assert names(page) == sorted([*everything, broken])
        head.get_by_role("button").press("Enter")
        assert head.get_attribute("aria-sort") == "descending"
        assert names(page) == sorted([*everything, broken], reverse=True)
        head.get_by_role("button").press("Enter")
        assert head.get_attribute("aria-sort") is None
    else:
        page.get_by_label("sort by").select_option(label="Sort: Model")
        assert names(page)[0] == MARKUP
        page.get_by_label("sort by").select_option(label="Sort: failing first")
    assert names(page)[0] == broken

    row(page, broken).get_by_role("link").focus()
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.textContent") == MARKUP
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    page.locator("h2", has_text=f"{broken} version 1").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    shutil.rmtree(models / broken)


def test_of_ten_thousand_models_only_those_in_view_are_asked_for(page: Any, server: RocserveProcess) -> None:
    # The browser takes the rows of one real model for all: so many real ones would take minutes to load.
    status, real = ask(server, "GET", "/v2/overview?name=judge")
    assert (status, [model["name"] for model in real["models"]]) == (200, ["judge"])
    rows = {f"model_{number:05d}": {**real["models"][0], "name": f"model_{number:05d}"} for number in range(10_000)}
    rows["model_07777"] |= {"state": "UNAVAILABLE", "reason": "broken", "platform": ""}
    asked: list[int] = []

    def answer(route: Any) -> None:
        wanted = parse_qs(urlsplit(route.request.url).query).get("name", [])
        asked.append(len(wanted))
        route.fulfill(
            json={**real, "models": [rows[name] for name in wanted if name in rows] if wanted else [*rows.values()]}
        )

    page.route("**/v2/overview*", answer)
    visit(page, server)
    page.get_by_role("button", name="All 10,000").wait_for()
    assert names(page)[:2] == ["model_07777", "model_00000"]
    assert page.locator(".models tbody").count() < 100
    page.locator(".box").evaluate("box => { box.scrollTop = box.scrollHeight; }")
    row(page, "model_09999").wait_for()
    assert page.locator(".models tbody").count() < 100
    rows["model_09999"] |= {"pending_requests": 4321}
    row(page, "model_09999").get_by_text("4,321").wait_for()
    assert len([count for count in asked if count == 0]) == 1
    assert max(asked) <= 100
    page.get_by_label("search models").fill("model_05000")
    row(page, "model_05000").wait_for()
    assert names(page) == ["model_05000"]
    page.wait_for_function("() => document.documentElement.scrollWidth <= innerWidth")


def test_a_check_is_seen_and_what_it_has_found(page: Any, server: RocserveProcess, models: Path) -> None:
    gate = models.parent / "gate"
    waits = f"while not os.path.exists({str(gate)!r}):\n    time.sleep(0.01)"
    config = HOSTILE_CONFIG.replace("TYPE_STRING", "TYPE_FP32")
    one = np.zeros(1, np.float32)
    folder = models / "checked"
    # The folder appears at once: a scan must not see it without its recorded answers.
    drop(models.parent / "prepared", "checked", answering("IN", "OUT", first=waits), config)
    write_recorded(models.parent / "prepared" / "checked" / "check.npz", RecordedAnswers({"IN": one}, {"OUT": one}))
    (models.parent / "prepared" / "checked").rename(folder)
    visit(page, server)
    row(page, "checked").locator(".badge.checking").wait_for()
    row(page, "checked").get_by_text("comparing its answer with check.npz").wait_for()
    gate.touch()
    row(page, "checked").locator(".badge.ready").wait_for()
    visit(page, server, "checked")
    fact = page.locator(".facts div").filter(has=page.get_by_text("Load check", exact=True))
    fact.get_by_text("recorded answers are equal").wait_for()
    shutil.rmtree(folder)


def test_models_of_one_name_in_several_namespaces_have_rows_of_their_own(page: Any, tmp_path: Path) -> None:
    repositories = [tmp_path / "one", tmp_path / "other"]
    for repository in repositories:
        drop(repository, "m", add_constant(1.0))
    log = tmp_path / "server.log"
    with RocserveProcess(repositories, "--model-namespacing=true", log=log) as server:
        server.wait_until_ready()
        visit(page, server)
        row(page, "m").nth(1).locator(".badge.ready").wait_for()
        assert row(page, "m").count() == 2


WITHOUT_WEIGHTS = """
backend: "onnxruntime"
input { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "PROBABILITIES" data_type: TYPE_FP32 dims: [ 2 ] }
parameters { key: "get_with" value: { string_value: "rocserve get <b>" } }
"""


def test_models_that_wait_for_their_weights_are_no_failures(page: Any, server: RocserveProcess, models: Path) -> None:
    for name, config in (("heavy", WITHOUT_WEIGHTS), ("heavy_text", MOODS_OF_AN_ENSEMBLE.replace("moods", "heavy"))):
        (models / name).mkdir()
        (models / name / "config.pbtxt").write_text(config)
    (models / "heavy_text" / "1").mkdir()
    visit(page, server)
    for name in ("heavy", "heavy_text"):
        row(page, name).locator(".badge.none", has_text="NOT LOADED").wait_for()
        assert row(page, name).locator(".reason.soft code").all_inner_texts() == ["rocserve get <b>"]
        page.locator(".events li", has_text=re.compile(rf"NOT LOADED {name}\b")).first.wait_for()
    # A model that another test has taken away may still have to go.
    page.get_by_role("button", name=re.compile("^Failed")).wait_for(state="hidden")
    page.get_by_role("button", name=re.compile("^Not loaded")).click()
    # Models that other tests have taken away stay in the index.
    assert {"heavy", "heavy_text"} <= set(names(page))
    row(page, "heavy_text").get_by_role("link").click()
    page.locator(".repair").get_by_role("link", name="heavy").click()
    page.locator(".reason.soft code", has_text="rocserve get <b>").wait_for()
    page.get_by_text("when its files are complete").wait_for()
    for name in ("heavy", "heavy_text"):
        shutil.rmtree(models / name)


def test_keyboard_dark_and_narrow(page: Any, server: RocserveProcess) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    page.emulate_media(color_scheme="dark")
    visit(page, server)
    page.get_by_label("search models").fill("digits")  # It would be below what is in view.
    row(page, "digits").locator(".badge.ready").wait_for()
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "digits":
            break
    page.keyboard.press("Enter")
    page.locator("h2", has_text="digits version 1").wait_for()
    page.get_by_text("Request as JSON").wait_for()
    for part in ("", "#/", "#/api"):
        page.evaluate("part => { if (part) location.hash = part; }", part)
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.get_by_text("/v2/models/{model}/infer").wait_for()
    brightness = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(map(int, brightness.removeprefix("rgb(").removesuffix(")").split(","))) < 64


def test_the_focus_stays_at_a_model_that_gets_another_row(page: Any, server: RocserveProcess, models: Path) -> None:
    # All rows are in view, wherever the model's row moves.
    page.set_viewport_size({"width": 1280, "height": 3000})
    folder = drop(models, "mended", add_constant(1.0), "max_batch_size: wrong")
    visit(page, server)
    row(page, "mended").locator(".badge.unavailable").wait_for()
    assert row(page, "mended").locator(".version").inner_text() == ""
    row(page, "mended").get_by_role("link").focus()
    drop(models, "mended", add_constant(1.0), ADD_CONSTANT_CONFIG)
    row(page, "mended").locator(".badge.ready").wait_for()
    assert page.evaluate("document.activeElement.textContent") == "mended"
    shutil.rmtree(folder)
