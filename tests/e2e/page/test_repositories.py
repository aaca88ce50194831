"""The page's table of several repositories, and of a thousand models, in a real Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.browser import NEEDS_CHROMIUM, as_on_a_phone, assert_fits
from support.http_requests import ask
from support.models import ADD_CONSTANT_CONFIG, add_constant, drop
from support.server import RocserveProcess

pytestmark = NEEDS_CHROMIUM


@pytest.fixture
def page(page: Any) -> Any:
    as_on_a_phone(page)
    return page


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocserveProcess]:
    folder = tmp_path_factory.mktemp("repositories")
    repositories = [folder / "one" / "models", folder / "other" / "models", folder / "<b>last"]
    for number, repository in enumerate(repositories):
        drop(repository, f"model_{number}", add_constant(1.0), ADD_CONSTANT_CONFIG)
    drop(repositories[0], "broken", b"this is no model")
    with RocserveProcess(repositories, log=folder / "server.log") as running:
        yield running


def test_models_are_below_the_name_of_their_repository(page: Any, server: RocserveProcess) -> None:
    page.goto(f"http://{server.http_address}/")
    headings = page.locator(".models .group button")
    headings.filter(has_text="1 failed, 1 ready").wait_for()
    page.get_by_role("button", name="Ready 3").wait_for()
    assert headings.locator("b").all_inner_texts() == ["<b>last", "one/models", "other/models"]
    names = page.locator(".models tbody a")
    assert names.all_inner_texts() == ["model_2", "broken", "model_0", "model_1"]
    # Folded and opened by the keyboard alone; searches leave out repositories without a model.
    headings.nth(1).focus()
    page.keyboard.press("Enter")
    broken = page.locator(".models").get_by_role("link", name="broken")
    broken.wait_for(state="detached")
    assert names.all_inner_texts() == ["model_2", "model_1"]
    assert headings.nth(1).get_attribute("aria-expanded") == "false"
    assert page.evaluate("document.activeElement.textContent") == "one/models 1 failed, 1 ready"
    page.keyboard.press("Enter")
    broken.wait_for()
    page.get_by_label("search models").fill("model_1")
    page.get_by_role("link", name="model_0").wait_for(state="detached")
    assert names.all_inner_texts() == ["model_1"]
    assert headings.all_inner_texts() == ["other/models 1 ready"]
    assert_fits(page)


MANY = 1_000


@pytest.fixture(scope="module")
def server_of_many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocserveProcess]:
    """Real models, which a client loads."""
    folder, data = tmp_path_factory.mktemp("many"), add_constant(1.0)
    repositories = [folder / "even", folder / "odd"]
    for number in range(MANY):
        model = repositories[number % 2] / f"model_{number:05d}"
        (model / "1").mkdir(parents=True)
        (model / "config.pbtxt").write_text(ADD_CONSTANT_CONFIG)
        (model / "1" / "model.onnx").write_bytes(data)
    with RocserveProcess(repositories, "--model-control-mode=explicit", log=folder / "server.log") as running:
        running.wait_until_ready()
        yield running


def test_a_thousand_real_models(page: Any, server_of_many: RocserveProcess) -> None:
    asked: list[int] = []
    page.on(
        "request", lambda request: asked.append(request.url.count("name=")) if "/v2/overview" in request.url else None
    )
    page.goto(f"http://{server_of_many.http_address}/")
    page.get_by_role("button", name="All 1,000").wait_for()
    headings = page.locator(".models .group button")
    assert headings.all_inner_texts() == ["even 500 not loaded"]  # The other heading is far below what is in view.
    rows, names = page.locator(".models tbody"), page.locator(".models tbody a")
    assert names.first.inner_text() == "model_00000"
    assert rows.count() < 100
    page.locator(".box").evaluate("box => { box.scrollTop = box.scrollHeight; }")
    page.get_by_role("link", name="model_00999").wait_for()
    assert rows.count() < 100
    # The last rows are at the end, and nothing is behind them.
    gap = (
        "box => box.getBoundingClientRect().bottom - [...box.querySelectorAll('a')].at(-1).getBoundingClientRect().top"
    )
    assert page.locator(".box").evaluate(gap) < 300
    page.locator(".box").evaluate("box => { box.scrollTop = 0; }")
    headings.first.filter(has_text="even").press("Enter")
    page.get_by_role("link", name="model_00001").wait_for()
    assert headings.all_inner_texts() == ["even 500 not loaded", "odd 500 not loaded"]
    headings.first.press("Enter")
    page.get_by_label("search models").fill("model_00777")
    page.get_by_role("link", name="model_00000").wait_for(state="detached")
    assert names.all_inner_texts() == ["model_00777"]
    row = page.locator(".models tbody", has=page.get_by_role("link", name="model_00777"))
    # The page learns of a load by its event, though it seldom asks for all models.
    for act, badge in (("load", ".badge.ready"), ("unload", ".badge.unavailable")):
        assert ask(server_of_many, "POST", f"/v2/repository/models/model_00777/{act}")[0] == 200
        row.locator(badge).wait_for()
    page.get_by_role("link", name="model_00777").press("Enter")
    page.locator("h2", has_text="model_00777").wait_for()
    assert max(asked) <= 100
    assert_fits(page)
