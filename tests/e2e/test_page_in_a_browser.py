"""The page in a real Chromium, as people see it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from support.browser import COPIES, NEEDS_CHROMIUM, WIDTHS, copied, ran, row, send_json, visit
from support.http_requests import ask
from support.models import ADD_CONSTANT_CONFIG, add_constant, answering, drop
from support.server import RocserveProcess
from support.text_models import drop_text_model, vector_of

from rocserve.load_check.recorded import RecordedAnswers, write_recorded
from rocserve_tools.images.drawing import class_colour

SAMPLE_REPOSITORY = Path(__file__).parents[2] / "model_repository"
DATA = Path(__file__).parents[1] / "data"
MARKUP = "<img src=x onerror=\"document.body.dataset.hacked='yes'\">"
HOSTILE = """
import numpy as np
import triton_python_backend_utils as pb_utils

MARKUP = %r


class TritonPythonModel:
    def execute(self, requests):
        texts = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().ravel()[0] for request in requests]
        return [
            pb_utils.InferenceResponse(error=pb_utils.TritonError(MARKUP))
            if text == b"fail"
            else pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([MARKUP.encode()], dtype=object))])
            for text in texts
        ]
"""
HOSTILE_CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }
"""
MOODS = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        texts = [pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy().ravel()[0] for request in requests]
        scores = [np.array([0.25, 0.75] if text.isupper() else [0.75, 0.25], np.float32) for text in texts]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("PROBABILITIES", score)]) for score in scores]
"""
MOODS_CONFIG = """
backend: "python"
input { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "PROBABILITIES" data_type: TYPE_FP32 dims: [ 2 ] label_filename: "labels.txt" }
"""
MOODS_OF_AN_ENSEMBLE = """
platform: "ensemble"
input { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "PROBABILITIES" data_type: TYPE_FP32 dims: [ 2 ] }
ensemble_scheduling { step {
  model_name: "moods" model_version: -1
  input_map { key: "TEXT" value: "TEXT" } output_map { key: "PROBABILITIES" value: "PROBABILITIES" }
} }
"""

STORIES = """
import os
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            text = pb_utils.get_input_tensor_by_name(request, "prompt").as_numpy().ravel()[0].decode()
            for word in text.split():
                if word == "fail":
                    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("no <b>more")))
                    break
                while word == "wait" and not os.path.exists(%r):
                    time.sleep(0.01)
                token = np.array([f"{word} ".encode()], dtype=object)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("token", token)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
STORIES_CONFIG = """
backend: "python"
input { name: "prompt" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "token" data_type: TYPE_STRING dims: [ 1 ] }
model_transaction_policy { decoupled: true }
"""
STORIES_OF_AN_ENSEMBLE = """
platform: "ensemble"
input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }
ensemble_scheduling { step {
  model_name: "stories" model_version: -1
  input_map { key: "prompt" value: "text_input" } output_map { key: "token" value: "text_output" }
} }
"""

pytestmark = NEEDS_CHROMIUM


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("page") / "repository"
    for model in SAMPLE_REPOSITORY.iterdir():
        if model.name.startswith(("digits", "detect_shapes")):
            shutil.copytree(model, repository / model.name)
    labelled = HOSTILE_CONFIG.replace('name: "OUT"', 'name: "OUT" label_filename: "labels.txt"')
    drop(repository, MARKUP, HOSTILE % MARKUP, labelled)
    (repository / MARKUP / "labels.txt").write_text("one\n")
    drop_text_model(repository, "sentences", "TEXT or IDS", rows=4)
    drop_text_model(repository, "judge", "QUERY")
    drop(repository, "moods", MOODS, MOODS_CONFIG)
    (repository / "moods" / "labels.txt").write_text("calm\nloud\n")
    (repository / "moods_text" / "1").mkdir(parents=True)
    (repository / "moods_text" / "config.pbtxt").write_text(MOODS_OF_AN_ENSEMBLE)
    drop(repository, "stories", STORIES % str(repository.parent / "go on"), STORIES_CONFIG)
    (repository / "stories_text" / "1").mkdir(parents=True)
    (repository / "stories_text" / "config.pbtxt").write_text(STORIES_OF_AN_ENSEMBLE)
    return repository


def serving(models: Path, front_ends: int) -> RocserveProcess:
    return RocserveProcess([models], f"--front-ends={front_ends}", log=models.parent / f"server-{front_ends}.log")


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[RocserveProcess]:
    with serving(models, front_ends=0) as running:
        running.wait_until_ready()
        yield running


@pytest.fixture(scope="module")
def server_with_front_ends(models: Path) -> Iterator[RocserveProcess]:
    with serving(models, front_ends=2) as running:
        running.wait_until_ready()
        yield running


@pytest.fixture(params=["server", "server_with_front_ends"])
def either(request: pytest.FixtureRequest) -> RocserveProcess:
    """The URL for events, and the URL for requests; the page behaves the same."""
    running: RocserveProcess = request.getfixturevalue(request.param)
    return running


def test_states_change_as_they_do(page: Any, either: RocserveProcess, models: Path) -> None:
    visit(page, either)
    row(page, "digits").locator(".badge.ready").wait_for()
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


def names(page: Any) -> list[str]:
    return page.locator(".models tbody a").all_inner_texts()  # type: ignore[no-any-return]


@WIDTHS
def test_models_are_searched_filtered_and_sorted(
    page: Any, server: RocserveProcess, models: Path, width: int, scheme: str
) -> None:
    # All rows are in view.
    page.set_viewport_size({"width": width, "height": 4000})
    page.emulate_media(color_scheme=scheme)
    drop(models, "sometimes", b"this is no model")
    visit(page, server)
    row(page, "sometimes").locator(".badge.unavailable").wait_for()
    page.get_by_role("button", name=re.compile(r"Failed 1")).wait_for()
    # What fails is first, the others follow by name.
    assert names(page)[:2] == ["sometimes", MARKUP]

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
    assert names(page) == ["sometimes"]
    page.get_by_role("button", name=re.compile("^All")).press("Enter")
    page.get_by_label("engine").select_option("ensemble")
    row(page, MARKUP).wait_for(state="detached")
    assert names(page) == ["detect_shapes", "digits", "moods_text", "stories_text"]
    page.get_by_label("engine").select_option("")
    row(page, MARKUP).wait_for()

    everything = [name for name in names(page) if name != "sometimes"]
    if width > 900:
        head = page.locator("thead th", has_text="Model")
        head.get_by_role("button").press("Enter")
        assert head.get_attribute("aria-sort") == "ascending"
        assert names(page) == sorted([*everything, "sometimes"])
        head.get_by_role("button").press("Enter")
        assert head.get_attribute("aria-sort") == "descending"
        assert names(page) == sorted([*everything, "sometimes"], reverse=True)
        head.get_by_role("button").press("Enter")
        assert head.get_attribute("aria-sort") is None
    else:
        page.get_by_label("sort by").select_option(label="Sort: Model")
        assert names(page)[0] == MARKUP
        page.get_by_label("sort by").select_option(label="Sort: failing first")
    assert names(page)[0] == "sometimes"

    row(page, "sometimes").get_by_role("link").focus()
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.textContent") == MARKUP
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    page.locator("h2", has_text="sometimes version 1").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    shutil.rmtree(models / "sometimes")


@WIDTHS
def test_of_ten_thousand_models_only_those_in_view_are_asked_for(
    page: Any, server: RocserveProcess, width: int, scheme: str
) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
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
    # The last rows are at the end, and nothing is behind them.
    gap = (
        "box => box.getBoundingClientRect().bottom - [...box.querySelectorAll('a')].at(-1).getBoundingClientRect().top"
    )
    assert page.locator(".box").evaluate(gap) < 300
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


def test_a_picture_is_classified(page: Any, either: RocserveProcess) -> None:
    visit(page, either, "digits")
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


@WIDTHS
def test_labels_of_boxes_do_not_cover_each_other(
    page: Any, server: RocserveProcess, models: Path, width: int, scheme: str
) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    crowd = f"crowd_{width}"  # Another model for each run: the server may still be unloading the previous one.
    drop(models, crowd, BOXES_ONLY, BOXES_ONLY_CONFIG)
    visit(page, server)
    page.get_by_label("search models").fill(crowd)
    row(page, crowd).locator(".badge.ready").wait_for()
    visit(page, server, crowd)
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
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    shutil.rmtree(models / crowd)


def test_the_page_sends_json_and_shows_failures_in_its_events(page: Any, server: RocserveProcess, models: Path) -> None:
    visit(page, server, "digits_classifier")
    page.get_by_role("button", name="Send").click()
    page.locator(".answer h3", has_text="PROBABILITIES").wait_for()
    # An output with labels is shown by their names.
    names = (models / "digits_classifier" / "labels.txt").read_text().split()
    assert set(page.locator(".answer .bars .label").all_inner_texts()) <= set(names)
    assert page.locator(".answer .bars li").count() == 5
    # The same output as a vector of numbers is a plot, of which each number has a line.
    request = json.loads(page.get_by_label("request as JSON").input_value())
    page.get_by_label("request as JSON").fill(json.dumps({"inputs": request["inputs"]}))
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


def test_texts_get_vectors_and_the_nearest_of_the_last_texts(page: Any, either: RocserveProcess) -> None:
    visit(page, either, "sentences")
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


@pytest.mark.parametrize(
    ("either", "width", "scheme"),
    [("server", 1280, "light"), ("server_with_front_ends", 390, "dark")],
    indirect=["either"],
)
def test_answers_are_shown_as_they_come(
    page: Any, either: RocserveProcess, models: Path, width: int, scheme: str
) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    gate = models.parent / "go on"
    gate.unlink(missing_ok=True)
    for model, name, output in (("stories", "prompt", "token"), ("stories_text", "text_input", "text_output")):
        visit(page, either, model)
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
    assert page.evaluate("document.documentElement.scrollWidth") <= width


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


RAISES = """
class TritonPythonModel:
    def initialize(self, args):
        raise ValueError(%r)

    def execute(self, requests):
        return []
"""


@WIDTHS
def test_a_failed_version_shows_what_helps(
    page: Any, server: RocserveProcess, models: Path, width: int, scheme: str
) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
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
    assert page.evaluate("document.documentElement.scrollWidth") <= width
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


@WIDTHS
def test_an_ensemble_is_a_graph_of_links(
    page: Any, server: RocserveProcess, models: Path, width: int, scheme: str
) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
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
    assert page.evaluate("document.documentElement.scrollWidth") <= width

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


@WIDTHS
def test_an_ensemble_that_is_not_served_is_a_graph_too(
    page: Any, server: RocserveProcess, models: Path, width: int, scheme: str
) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
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
    assert page.evaluate("document.documentElement.scrollWidth") <= width
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
    assert page.get_by_role("button", name=re.compile("^Failed")).count() == 0
    page.get_by_role("button", name=re.compile("^Not loaded")).click()
    # Models that other tests have taken away stay in the index.
    assert {"heavy", "heavy_text"} <= set(names(page))
    row(page, "heavy_text").get_by_role("link").click()
    page.locator(".repair").get_by_role("link", name="heavy").click()
    page.locator(".reason.soft code", has_text="rocserve get <b>").wait_for()
    page.get_by_text("when its files are complete").wait_for()
    for name in ("heavy", "heavy_text"):
        shutil.rmtree(models / name)


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


def test_a_restricted_api_asks_for_its_header(page: Any, tmp_path: Path) -> None:
    drop(tmp_path / "repository", "m", add_constant(1.0))
    flags = ("--http-restricted-api=model-repository,statistics:admin-key=secret",)
    with RocserveProcess([tmp_path / "repository"], *flags, log=tmp_path / "log") as server:
        server.wait_until_ready()
        visit(page, server)
        page.get_by_label("value of admin-key").fill("secret")
        page.get_by_role("button", name="Use").click()
        row(page, "m").locator(".badge.ready").wait_for()
        page.locator(".events li", has_text="m version 1").first.wait_for()
