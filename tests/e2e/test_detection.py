"""JPEG bytes in, boxes out: the shape detector on the real server, and its clients."""

from __future__ import annotations

import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tritonclient.grpc as triton
from PIL import Image
from support.infer_inputs import infer_input
from support.slow_yolo import opencv_suppress, slow_decode
from support.tools import Command
from support.waiting import wait_until
from tritonclient.utils import InferenceServerException

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "clients" / "examples"
SHAPES = ROOT / "tests" / "data" / "shapes"
POSTPROCESS = ROOT / "model_repository" / "detect_shapes_postprocess"


@pytest.fixture(scope="module")
def examples():
    """The example modules that measure a detector."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import average_precision
        import shapes
    finally:
        sys.path.remove(str(EXAMPLES))
    return shapes, average_precision


def ask(client: triton.InferenceServerClient, image: bytes) -> dict[str, np.ndarray]:
    result = client.infer("detect_shapes", [infer_input("ENCODED", np.array([image], dtype=object))])
    return {name: result.as_numpy(name) for name in ("BOXES", "SCORES", "CLASSES", "LABELS")}


def test_shapes_in_fresh_pictures_are_found(rocserve_server, examples):
    """Newly drawn pictures that were not in the training: a mean average precision of at least 0.9, as the README
    says."""
    shapes, average_precision = examples
    pictures = shapes.draw_pictures(seed=141421, count=60)
    client = rocserve_server.client()
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda picture: ask(client, picture.jpeg), pictures))
    found, true = [], []
    for index, (picture, answer) in enumerate(zip(pictures, answers, strict=True)):
        true += [average_precision.LabelledBox(str(index), shape.label, shape.box) for shape in picture.shapes]
        found += [
            average_precision.LabelledBox(str(index), label.decode(), tuple(map(float, box)), float(score))
            for label, box, score in zip(answer["LABELS"], answer["BOXES"], answer["SCORES"], strict=True)
        ]
    assert len(true) > 150
    assert {box.label for box in true} == {"circle", "square", "triangle"}
    assert average_precision.mean_average_precision(found, true) >= 0.9


def test_the_detector_is_small():
    models = (ROOT / "model_repository").glob("detect_shapes*")
    files = [path for model in models for path in model.rglob("*") if path.is_file()]
    assert any(path.name == "model.onnx" for path in files)
    assert sum(path.stat().st_size for path in files) < 5_000_000


def test_an_answer_is_in_order_and_in_the_image(rocserve_server):
    names = (POSTPROCESS / "labels.txt").read_text().split()
    client = rocserve_server.client()
    for path in sorted(SHAPES.glob("*.jpg")):
        answer = ask(client, path.read_bytes())
        count = len(answer["SCORES"])
        with Image.open(path) as image:
            width, height = image.size
        assert count > 0
        assert answer["BOXES"].shape == (count, 4)
        assert (np.diff(answer["SCORES"]) <= 0).all()
        assert (answer["SCORES"] > 0.25).all()
        assert [names[number].encode() for number in answer["CLASSES"]] == list(answer["LABELS"])
        left, top, right, bottom = answer["BOXES"].T
        assert ((left >= 0) & (left < right) & (right <= width)).all()
        assert ((top >= 0) & (top < bottom) & (bottom <= height)).all()


def test_an_image_without_shapes_has_no_boxes(rocserve_server, tmp_path):
    Image.new("RGB", (300, 200), "#406080").save(tmp_path / "empty.png")
    answer = ask(rocserve_server.client(), (tmp_path / "empty.png").read_bytes())
    assert answer["BOXES"].shape == (0, 4)
    assert answer["SCORES"].shape == answer["CLASSES"].shape == answer["LABELS"].shape == (0,)


def test_a_bad_image_is_refused(rocserve_server):
    with pytest.raises(InferenceServerException, match="in ensemble 'detect_shapes'") as caught:
        ask(rocserve_server.client(), b"no image")
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


def empty_heads(height: int, width: int) -> list[triton.InferInput]:
    """What the network would return for an image of this size without shapes."""
    inputs = []
    for name, shape in (("HEAD_0", (24, 24, 3, 8)), ("HEAD_1", (12, 12, 3, 8))):
        inputs.append(triton.InferInput(name, shape, "FP32"))
        inputs[-1].set_data_from_numpy(np.zeros(shape, dtype=np.float32))
    inputs.append(triton.InferInput("SIZE", [2], "INT32"))
    inputs[-1].set_data_from_numpy(np.array([height, width], dtype=np.int32))
    return inputs


def test_the_post_processing_refuses_an_image_without_size(rocserve_server):
    with pytest.raises(
        InferenceServerException, match=r"height and width of the original image, got \[0, 5\]"
    ) as caught:
        rocserve_server.client().infer("detect_shapes_postprocess", empty_heads(0, 5))
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_errors_name_the_wrong_parameter_or_number_of_labels(repository, serve):
    faults = {
        "resize": ('"stretch"', '"squeeze"', "parameter 'resize' must be one of stretch, not_larger, letterbox"),
        "numbers": ('"1.2, 1.1"', '"1.2, wide"', "parameter 'xy_scale' must be numbers with commas between them"),
        "counts": ('"8, 16"', '"8, 16, 32"', "got 3 strides, 2 scales and 12 numbers in anchors"),
        "one": ('"50"', '"50, 60"', "parameter 'max_boxes' must be one number, not '50, 60'"),
        "negative": ('"50"', '"-1"', "parameter 'max_boxes' must be whole numbers of at least 1, not '-1'"),
        "fractions": ('"8, 16"', '"8.5, 16"', "parameter 'strides' must be whole numbers of at least 1"),
        "endless": ('"0.45"', '"nan"', "parameter 'iou_threshold' must be numbers with commas between them, not 'nan'"),
        "unlabelled": ('    label_filename: "labels.txt"\n', "", "output 'CLASSES' has no label_filename"),
        "missing": ('"score_threshold"', '"threshold"', "parameter 'score_threshold' is missing in config.pbtxt"),
    }
    for name, (right, wrong, _) in faults.items():
        config = copied(repository, f"faulty_{name}") / "config.pbtxt"
        text = config.read_text()
        assert text.count(right) == 1
        config.write_text(text.replace(right, wrong).replace('"detect_shapes_postprocess"', f'"faulty_{name}"'))
    labels = {"few_labels": ("circle", "square"), "many_labels": ("circle", "square", "triangle", "star")}
    for name, lines in labels.items():
        folder = copied(repository, name)
        (folder / "labels.txt").write_text("\n".join(lines))
        config = folder / "config.pbtxt"
        config.write_text(config.read_text().replace('"detect_shapes_postprocess"', f'"{name}"'))
    client = serve(repository).client()

    def reason_holds(model: str, text: str) -> bool:
        return any(text in entry.reason for entry in client.get_model_repository_index().models if entry.name == model)

    for name, (_, _, expected) in faults.items():
        is_reported = partial(reason_holds, f"faulty_{name}", expected)
        wait_until(is_reported, f'the reason "{expected}"')
    for name, lines in labels.items():
        wait_until(partial(client.is_model_ready, name), f"the model {name}")
        with pytest.raises(
            InferenceServerException, match=rf"there are {len(lines)} labels, but HEAD_0 has shape \[24"
        ):
            client.infer(name, empty_heads(9, 5))


def copied(repository: Path, name: str) -> Path:
    """A repository with a copy of the post-processing."""
    return Path(shutil.copytree(POSTPROCESS, repository / name))


def test_the_network_s_own_words_agree_with_the_post_processing(rocserve_server):
    """What train_shapes.py wrote into the model must equal the configuration's parameters."""
    import onnx

    model = onnx.load(ROOT / "model_repository" / "detect_shapes_network" / "1" / "model.onnx")
    written = {entry.key: entry.value for entry in model.metadata_props}
    config = rocserve_server.client().get_model_config("detect_shapes_postprocess").config
    parameters = {
        key: [float(number) for number in config.parameters[key].string_value.split(",")]
        for key in ("strides", "anchors", "xy_scale")
    }
    assert json.loads(written["strides"]) == parameters["strides"]
    assert json.loads(written["xy_scale"]) == parameters["xy_scale"]
    assert np.ravel(json.loads(written["anchors"])).tolist() == parameters["anchors"]
    assert written["labels"].split(", ") == (POSTPROCESS / "labels.txt").read_text().split()


def test_the_command_prints_and_draws(rocserve_server, command: Command, tmp_path):
    twin = tmp_path / "other" / "04.jpg"
    twin.parent.mkdir()
    shutil.copy(SHAPES / "05.jpg", twin)
    (tmp_path / "text.jpg").write_text("no image")
    images = (SHAPES / "04.jpg", twin, tmp_path / "text.jpg")
    out = tmp_path / "drawn"
    ran = command("detect", *images, "--model", "detect_shapes", "--url", rocserve_server.address, "--out", out)
    assert ran.status == 1, "one of the images is none"
    assert ran.out.count("triangle") == 2
    assert "INVALID_ARGUMENT" in ran.err
    assert sorted(path.name for path in out.iterdir()) == ["04-2.png", "04.png"]
    for name, image in (("04.png", images[0]), ("04-2.png", images[1])):
        with Image.open(image) as original, Image.open(out / name) as drawn:
            assert drawn.size == original.size
            changed = np.asarray(original.convert("RGB")).astype(int) - np.asarray(drawn)
            assert 0.005 < np.any(changed, axis=-1).mean() < 0.5


def test_yolov4_s_heads_become_boxes_by_the_published_numbers(rocserve_server):
    """The served post-processing against the model zoo's formulas, cell by cell, and OpenCV's suppression."""
    anchors = (
        ((12, 16), (19, 36), (40, 28)),
        ((36, 75), (76, 55), (72, 146)),
        ((142, 110), (192, 243), (459, 401)),
    )
    random = np.random.default_rng(80)
    inputs, candidates = [], []
    for index, (stride, of_head, xy_scale) in enumerate(zip((8, 16, 32), anchors, (1.2, 1.1, 1.05), strict=True)):
        side = 416 // stride
        raw = random.normal(0, 1, (side, side, 3, 4))
        probabilities = random.random((side, side, 3, 81)) ** 12
        head = np.concatenate([raw, probabilities], axis=-1).astype(np.float32)
        inputs.append(triton.InferInput(f"HEAD_{index}", head.shape, "FP32"))
        inputs[-1].set_data_from_numpy(head)
        candidates += slow_decode(head, SimpleNamespace(stride=stride, anchors=of_head, xy_scale=xy_scale), 0.25)
    inputs.append(triton.InferInput("SIZE", [2], "INT32"))
    inputs[-1].set_data_from_numpy(np.array([832, 208], dtype=np.int32))
    result = rocserve_server.client().infer("yolov4_postprocess", inputs)

    placed = []
    for score, number, (left, top, right, bottom) in candidates:
        box = np.clip(np.array([left / 2, top * 2, right / 2, bottom * 2]), 0, [208, 832, 208, 832])
        placed.append((score, number, tuple(box)))
    expected = opencv_suppress(placed, 0.213)[:100]
    assert len(expected) == 100
    names = (ROOT / "model_repository" / "yolov4_postprocess" / "labels.txt").read_text().splitlines()
    np.testing.assert_allclose(result.as_numpy("SCORES"), [score for score, _, _ in expected], rtol=1e-5)
    np.testing.assert_allclose(result.as_numpy("BOXES"), [box for _, _, box in expected], atol=0.01)
    assert [label.decode() for label in result.as_numpy("LABELS")] == [names[number] for _, number, _ in expected]
    assert (names[0], names[16], names[79]) == ("person", "dog", "toothbrush")
