"""Requests of the page in a real Chromium, and how it shows their answers."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.browser import (
    COPIES,
    NEEDS_CHROMIUM,
    as_on_a_phone,
    assert_fits,
    copied,
    ran,
    row,
    send_json,
    visit,
)
from support.models import drop
from support.page_models import MARKUP
from support.server import RocserveProcess
from support.text_models import vector_of

from rocserve_tools.images.drawing import class_colour

DATA = Path(__file__).parents[2] / "data"

pytestmark = NEEDS_CHROMIUM


def test_a_picture_is_classified(page: Any, server: RocserveProcess) -> None:
    visit(page, server, "digits")
    picture = next((DATA / "digits").glob("*_two.jpg"))
    page.get_by_label("choose a file").set_input_files(picture)
    page.locator(".answer .bars li").nth(4).wait_for()
    assert page.locator(".answer .bars .label").first.inner_text() == "two"
    assert page.locator(".sent").evaluate("image => image.decode().then(() => image.naturalWidth)") > 0
    page.locator(".chart .line.rate").first.wait_for(state="attached")
    assert page.locator("dt", has_text="Answered").locator("xpath=following-sibling::dd").inner_text() >= "0"
    page.get_by_label("configuration of version 1").get_by_text("ensemble_scheduling {").wait_for()


def test_boxes_are_drawn(page: Any, server: RocserveProcess) -> None:
    visit(page, server, "detect_shapes")
    truth = json.loads((DATA / "shapes" / "truth.json").read_text())
    name, shapes = "03.jpg", truth["03.jpg"]
    page.get_by_label("choose a file").set_input_files(DATA / "shapes" / name)
    page.locator(".drawn rect").first.wait_for()
    labels = [text.partition(" ")[0] for text in page.locator(".picture li").all_inner_texts()]
    assert sorted(labels) == sorted(shape["label"] for shape in shapes)
    image = page.locator(".drawn img")
    image.evaluate("image => image.decode()")
    place, scale = image.bounding_box(), image.evaluate("image => image.clientWidth / image.naturalWidth")
    drawn = [rectangle.bounding_box() for rectangle in page.locator(".drawn .box-line").all()]
    for shape in shapes:
        middle = [(shape["box"][axis] + shape["box"][axis + 2]) / 2 * scale for axis in (0, 1)]
        found = [(box["x"] + box["width"] / 2 - place["x"], box["y"] + box["height"] / 2 - place["y"]) for box in drawn]
        assert min(abs(x - middle[0]) + abs(y - middle[1]) for x, y in found) < 12
    # Each class has a colour, the same at its boxes, its labels and in the list, as in `rocserve detect --out`.
    plates = page.locator(".drawn .plate").evaluate_all("plates => plates.map(plate => plate.getAttribute('fill'))")
    swatches = page.locator(".swatch").evaluate_all("found => found.map(each => each.style.background)")
    numbers = page.locator(".picture li").all_inner_texts()
    assert all(re.fullmatch(r"\w+ \d+%", text) for text in numbers)
    colours = {text.partition(" ")[0]: colour for text, colour in zip(numbers, plates, strict=True)}
    index_of = {name: index for index, name in enumerate(("circle", "square", "triangle"))}
    assert colours == {name: "rgb({} {} {})".format(*class_colour(index_of[name])) for name in colours}
    assert [[int(part) for part in re.findall(r"\d+", one)] for one in swatches] == [
        [int(part) for part in re.findall(r"\d+", one)] for one in plates
    ]
    # Where the time went: in each step, and in the server.
    page.locator(".times summary").press("Enter")
    spent = page.locator(".spent .label").all_inner_texts()
    assert [text.split()[0] for text in spent] == [
        "detect_shapes_preprocess",
        "detect_shapes_network",
        "detect_shapes_postprocess",
        "all",
    ]
    assert all(float(value) > 0 for value in page.locator(".spent .value").all_inner_texts())


BOXES_ONLY = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        boxes = np.array([[10 + n, 12 + n, 60 + n, 40 + n] for n in range(8)] + [[-20, -5, 500, 300]], np.float32)
        names = np.array(["cat", "a long name of a dog"] * 4 + ["<b>"], dtype=object)
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("BOXES", boxes), pb_utils.Tensor("LABELS", names)])
            for _ in requests
        ]
"""


BOXES_ONLY_CONFIG = """
backend: "python"
input { name: "IMAGE" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "BOXES" data_type: TYPE_FP32 dims: [ -1, 4 ] }
output { name: "LABELS" data_type: TYPE_STRING dims: [ -1 ] }
"""


def test_labels_of_boxes_do_not_cover_each_other(page: Any, server: RocserveProcess, models: Path) -> None:
    page.set_viewport_size({"width": 390, "height": 900})
    drop(models, "crowd", BOXES_ONLY, BOXES_ONLY_CONFIG)
    visit(page, server)
    page.get_by_label("search models").fill("crowd")
    row(page, "crowd").locator(".badge.ready").wait_for()
    visit(page, server, "crowd")
    page.get_by_label("choose a file").set_input_files(DATA / "shapes" / "03.jpg")
    page.locator(".drawn .plate").nth(8).wait_for()
    view = [float(number) for number in page.locator(".drawn svg").get_attribute("viewBox").split()]
    of = "found => found.map(each => { const box = each.getBBox(); return [box.x, box.y, box.width, box.height]; })"
    plates, texts = (page.locator(f".drawn {what}").evaluate_all(of) for what in (".plate", "text"))
    for index, (x, y, broad, high) in enumerate(plates):
        assert 0 <= x <= x + broad <= view[2]
        assert 0 <= y <= y + high <= view[3]
        for other in plates[index + 1 :]:
            assert x + broad <= other[0] or other[0] + other[2] <= x or y + high <= other[1] or other[1] + other[3] <= y
        # The text is in its plate.
        assert x <= texts[index][0] <= texts[index][0] + texts[index][2] <= x + broad + 0.5
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    shutil.rmtree(models / "crowd")


def test_the_page_sends_json_and_shows_failures_in_its_events(page: Any, server: RocserveProcess, models: Path) -> None:
    visit(page, server, "digits_classifier")
    page.get_by_role("button", name="Send").click()
    page.locator(".answer h3", has_text="PROBABILITIES").wait_for()
    # An output with labels is shown by their names.
    names = (models / "digits_classifier" / "labels.txt").read_text().split()
    assert set(page.locator(".answer .bars .label").all_inner_texts()) <= set(names)
    assert page.locator(".answer .bars li").count() == 5
    # The same output as a vector of numbers is a plot, of which each number has a line.
    proposed = page.get_by_label("request as JSON").input_value()
    assert '"shape": [1, 1, 16, 16],' in proposed, "a list of numbers is one line"
    page.get_by_label("request as JSON").fill(json.dumps({"inputs": json.loads(proposed)["inputs"]}))
    page.get_by_role("button", name="Send").click()
    plot = page.locator(".vector svg")
    plot.wait_for()
    assert re.match(r"plot of 10 numbers from 0(\.\d+)? to 0\.\d+$", plot.get_attribute("aria-label"))
    assert plot.locator(".line").get_attribute("d").count("M") == 10
    spent = page.locator(".spent .label").all_text_contents()
    assert {"queue", "compute", "all in the server"} <= set(spent)
    page.get_by_label("request as JSON").fill('{"inputs": []}')
    page.get_by_role("button", name="Send").click()
    page.locator(".answer .reason").wait_for()
    page.locator(".events li", has_text="expected 1 inputs but got 0").wait_for()


def cosine(one: str, other: str) -> float:
    vectors = np.array([vector_of(one), vector_of(other)])
    return float(vectors[0] @ vectors[1] / np.prod(np.linalg.norm(vectors, axis=1)))


def test_texts_get_vectors_and_the_nearest_of_the_last_texts(page: Any, server: RocserveProcess) -> None:
    visit(page, server, "sentences")
    box = page.get_by_label("text for TEXT")
    texts = ["a cat", MARKUP, "zzz " * 60, "banana"]
    for text in texts:
        box.fill(text)
        page.get_by_role("button", name="Run").click()
        page.locator(".answer h3", has_text="EMBEDDING").wait_for()
        shown = page.locator(".answer section", has_text="EMBEDDING").locator("pre").inner_text()
        assert [float(number) for number in shown.split(", ")] == pytest.approx(vector_of(text), rel=1e-3)
    assert page.locator(".answer section", has_text="TOKEN_COUNT").locator("pre").inner_text() == "1"
    page.locator(".times summary", has_text="the server took").wait_for()
    # A text that was sent before is not its own neighbour.
    for number, text in enumerate(("a cup", "a cat")):
        box.fill(text)
        box.press("Control+Enter")
        page.locator(".answer .bars.texts li").nth(3).wait_for()
        others = sorted({*texts, *(["a cup"] if number else [])} - {text}, key=lambda other: -cosine(text, other))
        assert page.locator(".answer .bars .label").all_inner_texts() == [other.strip() for other in others]
        values = [float(value) for value in page.locator(".answer .bars .value").all_inner_texts()]
        assert values == pytest.approx([cosine(text, other) for other in others], abs=1e-3)
    assert page.evaluate("document.body.dataset.hacked") is None
    assert page.locator("img[src=x]").count() == 0
    # Only what a request must have is proposed.
    proposed = json.loads(page.get_by_label("request as JSON").input_value())
    assert [tensor["name"] for tensor in proposed["inputs"]] == ["TEXT"]
    page.get_by_text("Drop JSON here").wait_for()


def test_a_text_gets_its_labels_which_are_no_vector(page: Any, server: RocserveProcess) -> None:
    # The configuration of the ensemble does not name the labels.
    visit(page, server, "moods_text")
    for text, label in (("QUICK", "loud"), ("slow", "calm")):
        page.get_by_label("text for TEXT").fill(text)
        page.get_by_role("button", name="Run").click()
        page.locator(".answer .bars li").nth(1).wait_for()
        assert page.locator(".answer .bars .label").all_inner_texts()[0] == label
        assert page.locator(".answer .bars .value").all_inner_texts() == ["0.750", "0.250"]
        assert page.get_by_text("Nearest of the last texts").count() == 0


def test_answers_are_shown_as_they_come(page: Any, server: RocserveProcess, models: Path) -> None:
    as_on_a_phone(page)
    gate = models.parent / "go on"
    gate.unlink(missing_ok=True)
    for model, name, output in (("stories", "prompt", "token"), ("stories_text", "text_input", "text_output")):
        visit(page, server, model)
        box = page.get_by_label(f"text for {name}")
        box.fill(f"once {MARKUP} wait upon")
        box.press("Control+Enter")
        shown = page.locator(".answer section", has_text=output).locator("pre")
        shown.get_by_text(f"once {MARKUP}").wait_for()
        assert "wait" not in shown.inner_text()
        gate.touch()
        page.locator(".answer", has_text=re.compile(r"answers in [\d,.]+ ms, the first after")).wait_for()
        assert shown.inner_text().split() == f"once {MARKUP} wait upon".split()
        gate.unlink()
        box.fill("one wait")
        page.get_by_role("button", name="Run").click()
        shown.get_by_text("one").wait_for()
        page.get_by_role("button", name="Stop").press("Enter")
        page.get_by_text("Stopped after 1 answer.").wait_for()
        gate.touch()
        box.fill("two fail three")
        page.get_by_role("button", name="Run").click()
        page.locator(".answer .reason", has_text="no <b>more").wait_for()
        assert shown.inner_text() == "two "
        gate.unlink()
    assert page.evaluate("document.body.dataset.hacked") is None
    assert_fits(page)


def test_a_request_is_copied_as_what_sends_it_again(page: Any, server: RocserveProcess, tmp_path: Path) -> None:
    """The copied code is run, and gives the answer that the page shows."""
    photo = tmp_path / 'it\'s "two", a $photo;.jpg'
    shutil.copy(next((DATA / "digits").glob("*_two.jpg")), photo)
    visit(page, server, "digits")
    page.get_by_label("choose a file").set_input_files(photo)
    page.locator(".answer .bars li").nth(4).wait_for()
    for button in COPIES:
        assert ":two" in ran(copied(page, button), "curl" not in button, tmp_path)

    visit(page, server, "detect_shapes")
    page.get_by_label("choose a file").set_input_files(photo)
    page.locator(".drawn, .answer section, .answer .reason").first.wait_for()
    form = copied(page, "Copy as curl")
    assert "-F 'ENCODED=@" in form
    assert "BOXES" in ran(form, is_python=False, folder=tmp_path)

    visit(page, server, "moods")
    text = 'it\'s LOUD\n"$HOME" \\ %s `id` \u2028é'
    page.get_by_label("text for TEXT").fill(text)
    page.get_by_role("button", name="Run").click()
    page.locator(".answer .bars li").nth(1).wait_for()
    for button in COPIES:
        code = copied(page, button)
        assert "0.75" in ran(code, "curl" not in button, tmp_path)
        if "curl" not in button:
            assert json.dumps(text, ensure_ascii=False).replace("\\u2028", "\u2028") in code

    # What a person has typed: bytes in base64, nested lists, an id, parameters of a request and of its outputs.
    typed = {
        "id": "it's 1",
        "parameters": {"priority": 0, "own": "x"},
        "inputs": [{"name": "IN", "datatype": "BYTES", "shape": [1], "data": [{"b64": "/wA="}]}],
        "outputs": [{"name": "OUT"}],
    }
    send_json(page, server, MARKUP, typed)
    assert "onerror" in ran(copied(page, COPIES[2]), is_python=True, folder=tmp_path)
    numbers = {"name": "IMAGE", "datatype": "FP32", "shape": [1, 1, 16, 16], "data": [[[[0.5] * 16] * 16]]}
    classes = {"name": "PROBABILITIES", "parameters": {"classification": 2}}
    send_json(page, server, "digits_classifier", {"inputs": [numbers], "outputs": [classes]})
    assert ran(copied(page, COPIES[2]), is_python=True, folder=tmp_path)

    visit(page, server, "stories")
    page.get_by_label("text for prompt").fill("once upon 'a time'")
    page.get_by_role("button", name="Run").click()
    page.get_by_text("4 answers in").wait_for()
    for button in COPIES[:2]:
        assert ran(copied(page, button), "curl" not in button, tmp_path).count("token") == 4
    assert page.get_by_role("button", name=COPIES[2]).count() == 0  # Its HTTP client takes no streams.


def test_each_text_of_a_pair_has_a_box(page: Any, server: RocserveProcess) -> None:
    visit(page, server, "judge")
    page.get_by_label("text for QUERY").fill("red green blue")
    page.get_by_label("text for TEXT").fill("blue sky, green grass")
    page.get_by_role("button", name="Run").click()
    page.locator(".answer section", has_text="SCORE").locator("pre", has_text="2").wait_for()


def test_pictures_come_before_texts_where_a_model_may_take_both(page: Any, server: RocserveProcess) -> None:
    visit(page, server, "digits")
    page.get_by_text("Drop a picture or JSON here").wait_for()
    box = page.get_by_label("text for ENCODED")
    assert box.is_hidden()
    page.get_by_text("Text", exact=True).click()
    box.fill("no picture")
    page.get_by_role("button", name="Run").click()
    page.locator(".answer .reason").wait_for()


def test_what_is_dropped_is_asked(page: Any, server: RocserveProcess) -> None:
    visit(page, server, "digits")
    page.locator(".try").wait_for()
    picture = next((DATA / "digits").glob("*_seven.jpg")).read_bytes()
    drop_on = """(place, bytes) => {
        const dataTransfer = new DataTransfer();
        dataTransfer.items.add(new File([new Uint8Array(bytes)], "photo.jpg", { type: "image/jpeg" }));
        place.dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }));
    }"""
    page.locator(".try").evaluate(drop_on, list(picture))
    page.locator(".answer .bars li").nth(4).wait_for()
    assert page.locator(".answer .bars .label").first.inner_text() == "seven"
    page.locator(".try").evaluate(drop_on, list(b"no picture"))
    page.locator(".answer .reason").wait_for()


def test_markup_in_names_and_answers_does_nothing(page: Any, server: RocserveProcess) -> None:
    visit(page, server)
    row(page, MARKUP).locator(".badge.ready").wait_for()
    row(page, MARKUP).get_by_role("link").click()
    page.locator("h2", has_text=MARKUP).wait_for()
    page.get_by_text("Request as JSON").click()
    # Classes are made of numbers, whatever labels an output of texts has.
    assert "outputs" not in json.loads(page.get_by_label("request as JSON").input_value())
    for text in ("answer", "fail"):
        page.get_by_label("request as JSON").fill(
            json.dumps({"inputs": [{"name": "IN", "datatype": "BYTES", "shape": [1], "data": [text]}]})
        )
        page.get_by_role("button", name="Send").click()
        page.locator(".answer pre, .answer .reason", has_text="<img src=x").wait_for()
    page.locator(".events li", has_text=MARKUP).first.wait_for()
    assert page.evaluate("document.body.dataset.hacked") is None
    assert page.locator("img[src=x]").count() == 0
