"""`preprocess` in a model's configuration: encoded images to labels or boxes, by networks whose answers are known."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto
from PIL import Image
from support.image_networks import COLOURS, colour_classifier, shapes_like_yolov4, shapes_like_yolov8
from support.server import RocserveProcess
from support.waiting import wait_until

from rocserve_client import Client

EXAMPLES = Path(__file__).parents[2] / "clients" / "examples"
PICTURES = Path(__file__).parents[1] / "data" / "shapes"
SHAPES = "circle\nsquare\ntriangle\n"


def put(repository: Path, name: str, network: bytes, preset: str, labels: str = "", more: str = "") -> Path:
    folder = repository / name
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "1" / "model.onnx").write_bytes(network)
    if labels:
        (folder / "labels.txt").write_text(labels)
    line = f'parameters {{ key: "preprocess" value {{ string_value: "{preset}" }} }}\n'
    (folder / "config.pbtxt").write_text(line + more)
    return folder


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import average_precision
    import shapes

    return shapes, average_precision


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocserveProcess]:
    """On all networks that find shapes or name colours."""
    repository = tmp_path_factory.mktemp("networks")
    for name, (preset, network) in FINDERS.items():
        put(repository, name, network, preset, SHAPES)
    for name, (preset, network, _) in NAMERS.items():
        put(repository, name, colour_classifier(**network), preset, "\n".join(COLOURS))
    with RocserveProcess([repository], log=repository.with_suffix(".log")) as running:
        running.wait_until_ready()
        yield running


FINDERS = {
    "yolov8": ("yolov8", shapes_like_yolov8()),
    "yolov8_one": ("yolov8", shapes_like_yolov8(batch=1)),
    "yolov4": ("yolov4", shapes_like_yolov4()),
    "yolov4_one": ("yolov4", shapes_like_yolov4(batch=1)),
}


@pytest.mark.parametrize("model", FINDERS)
def test_shapes_are_found(server: RocserveProcess, examples, model: str) -> None:
    """As well as by the sample's own ensemble."""
    shapes, average_precision = examples
    pictures = shapes.draw_pictures(seed=161803, count=30)
    with Client(server.address) as client:

        def ask(picture):
            return client.infer(f"{model}_image", {"ENCODED": np.array([picture.jpeg], dtype=object)})

        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(ask, pictures))
    found, true = [], []
    for index, (picture, answer) in enumerate(zip(pictures, answers, strict=True)):
        true += [average_precision.LabelledBox(str(index), shape.label, shape.box) for shape in picture.shapes]
        found += [
            average_precision.LabelledBox(str(index), label.decode(), tuple(map(float, box)), float(score))
            for label, box, score in zip(answer["LABELS"], answer["BOXES"], answer["SCORES"], strict=True)
        ]
    assert average_precision.mean_average_precision(found, true) >= 0.9


def picture(colour: tuple[int, int, int], size: tuple[int, int] = (80, 60)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


MEAN, DEVIATION = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


NAMERS = {
    "imagenet": ("imagenet", {}, lambda levels: (levels / 255 - MEAN) / DEVIATION),
    "nhwc": ("imagenet", {"is_nchw": False}, lambda levels: (levels / 255 - MEAN) / DEVIATION),
    "one_softmax": ("imagenet", {"batch": 1, "softmax": True}, lambda levels: (levels / 255 - MEAN) / DEVIATION),
    "fp16": ("imagenet", {"datatype": TensorProto.FLOAT16}, lambda levels: (levels / 255 - MEAN) / DEVIATION),
    "inception": ("inception", {"softmax": True}, lambda levels: levels / 127.5 - 1),
    "uint8": ("inception", {"datatype": TensorProto.UINT8, "is_nchw": False}, lambda levels: levels),
}


@pytest.mark.parametrize("model", NAMERS)
def test_a_colour_is_named(server: RocserveProcess, model: str) -> None:
    levels = (90, 110, 101)
    scores = NAMERS[model][2](np.array(levels))
    exponentials = np.exp(scores - scores.max())
    with Client(server.address) as client:
        shape = (1,) * len(client.model_metadata(f"{model}_image").inputs[0].shape)
        encoded = np.full(shape, picture(levels), dtype=object)
        answer = client.infer(f"{model}_image", {"ENCODED": encoded})
    np.testing.assert_allclose(answer["PROBABILITIES"].ravel(), exponentials / exponentials.sum(), atol=3e-3)
    assert answer["LABEL"].ravel().tolist() == [COLOURS[answer["PROBABILITIES"].argmax()].encode()]
    assert answer["PROBABILITY"].ravel().tolist() == [answer["PROBABILITIES"].max()]


def printed_config(folder: Path, *flags: str) -> str:
    command = [sys.executable, "-m", "rocserve.cli", "config", str(folder), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_what_config_prints_serves_the_same(repository: Path, tmp_path: Path, serve) -> None:
    """Saved as files beside the model, which then needs no `preprocess` any more."""
    put(repository, "shapes", shapes_like_yolov8(), "yolov8", SHAPES)
    printed = printed_config(repository / "shapes", "--save", str(tmp_path / "saved"))
    for model in ("shapes_preprocess", "shapes_postprocess", "shapes_image"):
        text = (tmp_path / "saved" / model / "config.pbtxt").read_text()
        assert f"# {model}/config.pbtxt\n{text}" in printed
    pipeline = (tmp_path / "saved" / "shapes_preprocess" / "1" / "pipeline.json").read_text()
    assert f"# shapes_preprocess/1/pipeline.json\n{pipeline}" in printed
    shutil.copytree(repository / "shapes", tmp_path / "saved" / "shapes")
    (tmp_path / "saved" / "shapes" / "config.pbtxt").unlink()
    encoded = {"ENCODED": np.array([(PICTURES / "04.jpg").read_bytes()], dtype=object)}
    answers = []
    for folder in (repository, tmp_path / "saved"):
        server = serve(folder)
        server.wait_until_ready()
        with Client(server.address) as client:
            answers.append(client.infer("shapes_image", encoded))
    assert len(answers[0]["SCORES"]) > 0
    for name in ("BOXES", "SCORES", "CLASSES", "LABELS"):
        np.testing.assert_array_equal(answers[0][name], answers[1][name])


def test_it_follows_its_model(repository: Path, serve) -> None:
    """Another network, other labels, another preset, none: as with files that are dropped."""
    folder = put(repository, "colours", colour_classifier(), "imagenet")
    server = serve(repository)
    server.wait_until_ready()
    with Client(server.address) as client:

        def answered() -> tuple[list[bytes], int]:
            answer = client.infer("colours_image", {"ENCODED": np.array([[picture((0, 200, 0))]], dtype=object)})
            return answer["LABEL"].ravel().tolist(), client.model_metadata("colours_preprocess").outputs[0].shape[2]

        def index() -> dict[str, str]:
            return {entry.name: entry.reason for entry in client.repository_index()}

        assert answered() == ([b"1"], 32), "without labels, classes are numbers"
        put(repository, "colours", colour_classifier(side=48), "imagenet")
        wait_until(lambda: client.model_metadata("colours_preprocess").outputs[0].shape[2] == 48, "the new size")
        wait_until(lambda: client.model_ready("colours_image"))
        assert answered() == ([b"1"], 48)
        (folder / "labels.txt").write_text("\n".join(COLOURS))
        wait_until(lambda: answered() == ([b"green"], 48), "the labels")
        put(repository, "colours", colour_classifier(side=48), "yolov8")
        wait_until(lambda: "preprocess 'yolov8' is for a model with one output of boxes" in index()["colours_image"])
        assert client.model_ready("colours")
        put(repository, "colours", colour_classifier(side=48), "imagnet")
        wait_until(lambda: "unknown preprocess 'imagnet'; did you mean 'imagenet'?" in index()["colours_image"])
        (folder / "labels.txt").write_text("one\ntwo\n")
        put(repository, "colours", colour_classifier(side=48), "imagenet")
        wait_until(lambda: "model 'colours' has 3 classes, and there are 2 labels" in index()["colours_image"])
        (folder / "labels.txt").write_text("\n".join(COLOURS))
        wait_until(lambda: client.model_ready("colours_image"))
        (folder / "config.pbtxt").unlink()
        wait_until(lambda: not client.model_ready("colours_image"))
        assert client.model_ready("colours")


def test_a_folder_of_one_of_the_names_goes_first(repository: Path, serve) -> None:
    put(repository, "colours", colour_classifier(), "imagenet")
    put(repository, "colours_image", colour_classifier(), "imagenet").joinpath("config.pbtxt").unlink()
    server = serve(repository)
    server.wait_until_ready()
    with Client(server.address) as client:
        wait_until(lambda: "model 'colours_image' is defined by both the folders" in server.log_text)
        assert [entry.name for entry in client.repository_index() if entry.state == "READY"] == [
            "colours",
            "colours_image",
        ]
        shutil.rmtree(repository / "colours_image")
        wait_until(lambda: client.model_ready("colours_image") and client.model_ready("colours_preprocess"))


def test_it_comes_and_goes_with_loads_and_unloads(repository: Path, serve) -> None:
    put(repository, "colours", colour_classifier(), "imagenet", "\n".join(COLOURS))
    server = serve(repository, flags=("--model-control-mode=explicit",))
    with Client(server.address) as client:
        client.load_model("colours")
        assert client.model_ready("colours_image")
        client.unload_model("colours")
        wait_until(lambda: not client.model_ready("colours_image"))


@pytest.mark.parametrize("labels", ["beside", "named"])
def test_a_file_is_served_for_images(tmp_path: Path, labels: str) -> None:
    """`rocserve serve FILE --preprocess`, as somebody types it who has a network and the names of its classes."""
    (tmp_path / "shapes.onnx").write_bytes(shapes_like_yolov8(batch=1))
    names = tmp_path / ("labels.txt" if labels == "beside" else "names")
    names.write_text(SHAPES)
    flags = (str(tmp_path / "shapes.onnx"), "--preprocess=yolov8")
    flags = flags if labels == "beside" else (*flags, f"--labels={names}")
    with RocserveProcess([], *flags, log=tmp_path / "server.log") as server:
        server.wait_until_ready()
        with Client(server.address) as client:
            answer = client.infer(
                "shapes_image", {"ENCODED": np.array([(PICTURES / "04.jpg").read_bytes()], dtype=object)}
            )
            assert client.model_ready("shapes")
        wait_until(lambda: "/shapes_image/infer -F ENCODED=@photo.jpg" in server.printed, "the line for images")
    assert b"triangle" in answer["LABELS"]
