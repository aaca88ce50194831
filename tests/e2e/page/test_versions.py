"""The page of a version in a real Chromium: what helps if it has failed, and the graph of an ensemble."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.browser import NEEDS_CHROMIUM, as_on_a_phone, assert_fits, row, visit
from support.models import ADD_CONSTANT_CONFIG, add_constant, drop
from support.page_models import HOSTILE, HOSTILE_CONFIG, MARKUP
from support.server import RocserveProcess

DATA = Path(__file__).parents[2] / "data"

pytestmark = NEEDS_CHROMIUM


RAISES = """
class TritonPythonModel:
    def initialize(self, args):
        raise ValueError(%r)

    def execute(self, requests):
        return []
"""


def test_a_failed_version_shows_what_helps(page: Any, server: RocserveProcess, models: Path) -> None:
    as_on_a_phone(page)
    drop(models, "raises", RAISES % MARKUP, HOSTILE_CONFIG)
    drop(models, "typo", add_constant(1.0), "# <b>\n" * 60 + "max_batch_sise: 5\n# end")
    drop(models, "swapped", add_constant(1.0), ADD_CONSTANT_CONFIG)
    visit(page, server)
    row(page, "raises").locator(".badge.unavailable").wait_for()
    visit(page, server, "raises")
    trace = page.locator(".repair section", has=page.get_by_role("heading", name="Traceback")).locator("pre")
    trace.get_by_text(re.compile(r'File "raises/1/model.py", line 4, in initialize.*<img src=x', re.DOTALL)).wait_for()
    page.locator(".repair .files th", has_text="1/model.py").wait_for()
    page.locator(".repair dt", has_text="Failed").wait_for()

    visit(page, server, "typo", "")
    page.locator(".repair .lines mark", has_text="max_batch_sise: 5").wait_for()
    fault, box = page.locator("mark").bounding_box(), page.locator(".lines").bounding_box()
    assert box["y"] <= fault["y"] <= box["y"] + box["height"] - fault["height"]
    assert page.locator(".lines > *").count() == 62

    row_of = page.locator(".files tr", has_text="1/model.onnx")
    visit(page, server)
    page.get_by_label("search models").fill("swapped")  # On a phone it would be below what is in view.
    row(page, "swapped").locator(".badge.ready").wait_for()
    (models / "swapped" / "1" / "model.onnx").write_bytes(b"this is no model")
    visit(page, server, "swapped")
    row_of.get_by_text("changed").wait_for()
    page.locator("h2 .badge.ready").wait_for()
    assert_fits(page)
    drop(models, "swapped", add_constant(2.0), ADD_CONSTANT_CONFIG)
    row_of.wait_for(state="detached")
    assert page.evaluate("document.body.dataset.hacked") is None
    for name in ("raises", "typo", "swapped"):
        shutil.rmtree(models / name)


HOSTILE_ENSEMBLE = """
platform: "ensemble"
input { name: "IN" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "LAST" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "SIDE" data_type: TYPE_STRING dims: [ 1 ] }
ensemble_scheduling {
  step { model_name: NAME model_version: -1 input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: NAME } }
  step { model_name: NAME model_version: 1 input_map { key: "IN" value: NAME } output_map { key: "OUT" value: "LAST" } }
  step { model_name: NAME model_version: 1 input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "SIDE" } }
}
""".replace("NAME", json.dumps(MARKUP))


def shares(page: Any) -> list[float]:
    return [float(text.split(" %")[0]) for text in page.locator(".graph .time").all_text_contents() if " %" in text]


def test_an_ensemble_is_a_graph_of_links(page: Any, server: RocserveProcess, models: Path) -> None:
    page.set_viewport_size({"width": 390, "height": 900})
    visit(page, server, "detect_shapes")
    steps = page.locator(".graph a")
    steps.nth(2).wait_for()
    titles = page.locator(".graph a > title").evaluate_all("found => found.map(title => title.textContent)")
    assert titles == ["detect_shapes_preprocess", "detect_shapes_network", "detect_shapes_postprocess"]
    flows = page.locator(".graph .tensor > title").evaluate_all("found => found.map(title => title.textContent)")
    assert flows[:2] == ["ENCODED BYTES [1]", "prepared_image FP32 [-1,3,192,192]"]
    assert {"image_size INT32 [-1,2]", "BOXES FP32 [-1,4]"} <= set(flows)
    # No text covers another, and none is outside of the drawing.
    box_of = "found => found.map(text => { const box = text.getBBox(); return [box.x, box.y, box.width, box.height]; })"
    places = page.locator(".graph .tensor").evaluate_all(box_of)
    drawn = float(page.locator(".graph").get_attribute("width"))
    for index, (x, y, broad, high) in enumerate(places):
        assert 0 <= x <= x + broad <= drawn
        assert all(y + high <= other[1] + 1 or other[1] + other[3] <= y + 1 for other in places[index + 1 :])
    page.get_by_label("choose a file").set_input_files(DATA / "shapes" / "03.jpg")
    page.wait_for_function(
        "() => [...document.querySelectorAll('.graph .time')].every(t => t.textContent.includes(' %'))"
    )
    assert sum(shares(page)) == pytest.approx(100, abs=2)
    steps.nth(1).focus()
    page.keyboard.press("Enter")
    page.locator("h2", has_text="detect_shapes_network version 1").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390

    (models / "odd" / "1").mkdir(parents=True)
    (models / "odd" / "config.pbtxt").write_text(HOSTILE_ENSEMBLE)
    visit(page, server)
    page.get_by_label("search models").fill("odd")  # On a phone it would be below what is in view.
    row(page, "odd").locator(".badge.ready").wait_for()
    visit(page, server, "odd")
    page.locator(".graph .tensor", has_text="<img src=x").wait_for()
    assert page.locator(".graph a > title").all_text_contents() == [
        MARKUP,
        f"{MARKUP} version 1",
        f"{MARKUP} version 1",
    ]
    page.locator(".graph a").nth(1).click()
    page.locator("h2", has_text=MARKUP).wait_for()
    assert page.evaluate("document.body.dataset.hacked") is None
    assert page.locator("img[src=x]").count() == 0
    shutil.rmtree(models / "odd")


LACKS_A_STEP = """
platform: "ensemble"
input { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }
ensemble_scheduling {
  step { model_name: "moods" model_version: -1
    input_map { key: "TEXT" value: "TEXT" } output_map { key: "PROBABILITIES" value: "mood" } }
  step { model_name: "missing <b>" model_version: -1
    input_map { key: "IN" value: "mood" } output_map { key: "OUT" value: "OUT" } }
}
"""


def test_an_ensemble_that_is_not_served_is_a_graph_too(page: Any, server: RocserveProcess, models: Path) -> None:
    page.set_viewport_size({"width": 390, "height": 900})
    for name, text in (
        ("lacks_a_step", LACKS_A_STEP),
        ("lacks_a_tensor", LACKS_A_STEP.replace('key: "IN" value: "mood"', 'key: "IN" value: "mod"')),
    ):
        (models / name / "1").mkdir(parents=True)
        (models / name / "config.pbtxt").write_text(text)
    visit(page, server)
    page.get_by_label("search models").fill("lacks")  # On a phone they would be below what is in view.
    row(page, "lacks_a_step").locator(".badge.unavailable").wait_for()
    row(page, "lacks_a_step").get_by_role("link").press("Enter")
    times = page.locator(".graph a .time")
    gone = re.compile("not there|unavailable")  # A model that an earlier test took away is still in the index.
    times.nth(1).get_by_text(gone).wait_for()
    assert times.all_text_contents()[0] == ""
    flows = page.locator(".graph .tensor > title").all_text_contents()
    assert flows == ["TEXT BYTES [1]", "mood FP32 [2]", "OUT"]
    assert page.locator(".graph .step.bad").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    # Its configuration is refused, so it is drawn as written.
    visit(page, server)
    row(page, "lacks_a_tensor").locator(".badge.unavailable").wait_for()
    row(page, "lacks_a_tensor").get_by_role("link").click()
    page.locator(".graph", has_text="written by no step").wait_for()
    assert page.locator(".graph .end.bad").count() == 1
    # With a model of that name, which no longer gets what it reads, it is drawn again.
    visit(page, server, "lacks_a_step")
    times.nth(1).get_by_text(gone).wait_for()
    drop(models, "missing <b>", HOSTILE % MARKUP, HOSTILE_CONFIG)
    page.locator(".graph .tensor > title", has_text="OUT BYTES [1]").first.wait_for(state="attached")
    for name in ("lacks_a_step", "lacks_a_tensor", "missing <b>"):
        shutil.rmtree(models / name)
