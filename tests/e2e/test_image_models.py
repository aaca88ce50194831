"""`preprocess` in a model's configuration: encoded images to labels or boxes, with networks whose answers are known."""

from __future__ import annotations

import io
import itertools
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from support.models import drop
from support.server import RocserveProcess, Start
from support.waiting import PATIENCE_SECONDS, wait_until

from rocserve.cli import main
from rocserve_client import Client, RocserveError

_SHAPES = Path(__file__).parents[2] / "model_repository" / "detect_shapes_network" / "1" / "model.onnx"
_SIDE = 192
YOLOV4_ANCHORS = np.array([12, 16, 19, 36, 40, 28, 36, 75, 76, 55, 72, 146], dtype=np.float32).reshape(2, 3, 2)
COLOURS = ("red\u2028", "gr\x85e\x0ben", "blue")
"""Names may contain characters that other programs take for the end of a line."""


def shapes_like_yolov8(batch: int | str = "N", form: str = "classes") -> bytes:
    """The sample's detector of shapes with one output [batch, 4 + 3, boxes], as YOLOv8's exports have it, or in another
    of the forms of a head."""
    network = _Shapes(batch)
    boxes = []
    for head, cells, stride, anchors, scale in network.heads:
        shift = (scale - 1) / 2
        place = np.stack(np.meshgrid(np.arange(cells), np.arange(cells)), axis=-1)[:, :, np.newaxis].astype(np.float32)
        raw, sides, sure, kinds = network.split(head, (2, 2, 1, 3))
        centres = network.node("Sigmoid", raw)
        centres = network.node("Mul", centres, network.constant(scale * stride))
        centres = network.node("Add", centres, network.constant((place - shift) * stride))
        sides = network.node("Mul", network.node("Exp", sides), network.constant(anchors))
        scores = (sure, kinds) if form == "object_rows" else (network.node("Mul", sure, kinds),)
        joined = network.node("Concat", centres, sides, *scores, axis=-1)
        boxes.append(network.node("Reshape", joined, network.integers(0, -1, 8 if len(scores) > 1 else 7)))
    rows, count = network.node("Concat", *boxes, axis=1), (24 * 24 + 12 * 12) * 3
    if form == "finished":
        return network.model({network.finished(rows): (6,)}, rows="boxes")
    if form == "classes":
        return network.model({network.node("Transpose", rows, perm=[0, 2, 1]): (7, count)})
    return network.model({rows: (count, 8 if form == "object_rows" else 7)})


def shapes_like_yolov4(batch: int | str = "N") -> bytes:
    """The same detector with YOLOv4's three outputs: raw sides for its anchors, and nothing in the coarsest cells."""
    network = _Shapes(batch)
    outputs = {}
    for (head, cells, _, anchors, _), others in zip(network.heads, YOLOV4_ANCHORS, strict=True):
        shift = np.zeros((3, 8), dtype=np.float32)
        shift[:, 2:4] = np.log(anchors / others)
        outputs[network.node("Add", head, network.constant(shift))] = (cells, cells, 3, 8)
    coarse = network.node("Slice", head, network.integers(0, 0), network.integers(6, 6), network.integers(1, 2))
    outputs[network.node("Mul", coarse, network.constant(0))] = (6, 6, 3, 8)
    return network.model(outputs)


class _Shapes:
    """Builds the sample's network with further nodes at its end."""

    def __init__(self, batch: int | str) -> None:
        self._model = onnx.load(_SHAPES)
        self._batch = batch
        self._graph = self._model.graph
        self._count = 0
        written = {entry.key: entry.value for entry in self._model.metadata_props}
        strides, scales = (json.loads(written[key]) for key in ("strides", "xy_scale"))
        anchors = np.array(json.loads(written["anchors"]), dtype=np.float32).reshape(2, 3, 2)
        self.heads = [
            (f"HEAD_{index}", _SIDE // stride, stride, anchors[index], scales[index])
            for index, stride in enumerate(strides)
        ]

    def node(self, operator: str, *inputs: str, **attributes: object) -> str:
        name = self._name()
        self._graph.node.append(helper.make_node(operator, inputs, [name], **attributes))
        return name

    def split(self, tensor: str, sizes: tuple[int, ...]) -> list[str]:
        ends = np.cumsum((0, *sizes))
        last = self.integers(-1)
        return [
            self.node("Slice", tensor, self.integers(begin), self.integers(end), last)
            for begin, end in itertools.pairwise(ends)
        ]

    def constant(self, values: object) -> str:
        return self._keep(np.asarray(values, dtype=np.float32))

    def integers(self, *values: int) -> str:
        return self._keep(np.array(values, dtype=np.int64))

    def finished(self, rows: str) -> str:
        """Return [n, 6], the boxes that suppression leaves of one image: corners, score and class."""
        centres, sides, scores = self.split(rows, (2, 2, 3))
        halves = self.node("Mul", sides, self.constant(0.5))
        corners = self.node("Concat", self.node("Sub", centres, halves), self.node("Add", centres, halves), axis=-1)
        by_class = self.node("Transpose", scores, perm=[0, 2, 1])
        limits = (self.integers(100), self.constant(0.7), self.constant(0.25))
        chosen = self.node("NonMaxSuppression", corners, by_class, *limits)
        _, kind, box = self.split(chosen, (1, 1, 1))
        place = self.node("Concat", box, kind, axis=-1)
        first = self.integers(0)
        return self.node(
            "Concat",
            self.node("GatherND", self.node("Squeeze", corners, first), box),
            self.node("Unsqueeze", self.node("GatherND", self.node("Squeeze", scores, first), place), self.integers(1)),
            self.node("Cast", kind, to=TensorProto.FLOAT),
            axis=-1,
        )

    def model(self, outputs: dict[str, tuple[int, ...]], rows: int | str = "") -> bytes:
        """`rows`: the outputs' first dimension, if not the batch."""
        del self._graph.output[:]
        for name, dims in outputs.items():
            shape = [rows or self._batch, *dims]
            self._graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        lead = self._graph.input[0].type.tensor_type.shape.dim[0]
        lead.Clear()
        if isinstance(self._batch, int):
            lead.dim_value = self._batch
        else:
            lead.dim_param = self._batch
        onnx.checker.check_model(self._model)
        return self._model.SerializeToString()

    def _keep(self, values: np.ndarray) -> str:
        name = self._name()
        self._graph.initializer.append(numpy_helper.from_array(values, name))
        return name

    def _name(self) -> str:
        self._count += 1
        return f"behind_{self._count}"


def colour_classifier(
    *,
    datatype: int = TensorProto.FLOAT,
    is_nchw: bool = True,
    batch: int | str = "N",
    side: int = 32,
    softmax: bool = False,
) -> bytes:
    """Scores of red, green and blue: the means of the three channels, through a softmax if wanted."""
    dims = [batch, 3, side, side] if is_nchw else [batch, side, side, 3]
    nodes = [
        helper.make_node("Cast", ["pixels"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["numbers"], ["means"], axes=[2, 3] if is_nchw else [1, 2], keepdims=0),
        helper.make_node("Softmax" if softmax else "Identity", ["means"], ["scores"]),
    ]
    graph = helper.make_graph(
        nodes,
        "colours",
        [helper.make_tensor_value_info("pixels", datatype, dims)],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [batch, 3])],
    )
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 13)]).SerializeToString()


EXAMPLES = Path(__file__).parents[2] / "clients" / "examples"
PICTURES = Path(__file__).parents[1] / "data" / "shapes"
SHAPES = "circle\nsquare\ntriangle\n"


def put(repository: Path, name: str, network: bytes, preset: str, labels: str = "", more: str = "") -> Path:
    """Drop a network. `preset`: "" = none. `labels`: only before a server looks, because they are written last."""
    line = f'parameters {{ key: "preprocess" value {{ string_value: "{preset}" }} }}\n' if preset else ""
    folder = drop(repository, name, network, line + more)
    if labels:
        (folder / "labels.txt").write_text(labels)
    return folder


@pytest.fixture(scope="module")
def examples():
    """Pictures of shapes, and the module that measures what is found in them."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(EXAMPLES))
        import average_precision
        import shapes

    return shapes.draw_pictures(seed=161803, count=15), average_precision


@pytest.fixture(scope="module")
def server(start: Start, tmp_path_factory: pytest.TempPathFactory) -> RocserveProcess:
    """A server on all networks that find shapes or name colours."""
    repository = tmp_path_factory.mktemp("networks")
    for name, (preset, network) in FINDERS.items():
        put(repository, name, network, preset, SHAPES)
    for name, (preset, network, _) in NAMERS.items():
        put(repository, name, colour_classifier(**network), preset, "\n".join(COLOURS))
    return start(repository)


FINDERS = {
    "yolov8": ("yolov8", shapes_like_yolov8()),
    "yolov8_one": ("yolov8", shapes_like_yolov8(batch=1)),
    "yolov8_rows": ("yolov8", shapes_like_yolov8(form="class_rows")),
    "yolov5": ("yolov5", shapes_like_yolov8(form="object_rows")),
    "yolo_end2end": ("yolo_end2end", shapes_like_yolov8(batch=1, form="finished")),
    "yolov4": ("yolov4", shapes_like_yolov4()),
    "yolov4_one": ("yolov4", shapes_like_yolov4(batch=1)),
}


@pytest.mark.parametrize("model", FINDERS)
def test_shapes_are_found(server: RocserveProcess, examples, model: str) -> None:
    """As well as by the sample's own ensemble."""
    pictures, average_precision = examples
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


def test_what_config_prints_serves_the_same(
    server: RocserveProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Saved as files next to the model, which then needs no `preprocess`."""
    folder = put(tmp_path, "shapes", shapes_like_yolov8(), "yolov8", SHAPES)
    assert main(["config", str(folder), "--save", str(tmp_path / "saved")]) == 0
    printed = capsys.readouterr().out
    for model in ("shapes_preprocess", "shapes_postprocess", "shapes_image"):
        text = (tmp_path / "saved" / model / "config.pbtxt").read_text()
        assert f"# {model}/config.pbtxt\n{text}" in printed
    pipeline = (tmp_path / "saved" / "shapes_preprocess" / "1" / "pipeline.json").read_text()
    assert f"# shapes_preprocess/1/pipeline.json\n{pipeline}" in printed
    (folder / "config.pbtxt").unlink()
    for model in (folder, *(tmp_path / "saved").iterdir()):
        model.rename(server.repositories[0] / model.name)
    encoded = {"ENCODED": np.array([(PICTURES / "04.jpg").read_bytes()], dtype=object)}
    with Client(server.address) as client:
        client.wait_until_ready(PATIENCE_SECONDS, model="shapes_image")
        answers = [client.infer(model, encoded) for model in ("yolov8_image", "shapes_image")]
    assert len(answers[0]["SCORES"]) > 0
    for name in ("BOXES", "SCORES", "CLASSES", "LABELS"):
        np.testing.assert_array_equal(answers[0][name], answers[1][name])


def test_it_follows_its_model(server: RocserveProcess) -> None:
    """Another network, other labels, another preset, none: as with dropped files."""
    (repository,) = server.repositories
    folder = put(repository, "colours", colour_classifier(), "imagenet")
    with Client(server.address) as client:

        def answered() -> tuple[list[bytes], int]:
            answer = client.infer("colours_image", {"ENCODED": np.array([[picture((0, 200, 0))]], dtype=object)})
            return answer["LABEL"].ravel().tolist(), client.model_metadata("colours_preprocess").outputs[0].shape[2]

        def index() -> dict[str, str]:
            return {"colours_image": "", **{entry.name: entry.reason for entry in client.repository_index()}}

        def answers(label: str, side: int) -> bool:
            """Whether they are these; an error while one of its models has changed, and others not yet."""
            with suppress(RocserveError):
                return answered() == ([label.encode()], side)
            return False

        wait_until(lambda: answers("1", 32), "its labels: without names, classes are numbers")
        put(repository, "colours", colour_classifier(side=48), "imagenet")
        wait_until(lambda: answers("1", 48), "the new size")
        (folder / "labels.txt").write_text("\n".join(COLOURS))
        wait_until(lambda: answers(COLOURS[1], 48), "the labels")
        put(repository, "colours", colour_classifier(side=48), "yolov8")
        wait_until(lambda: "preprocess 'yolov8' is for a model with one output of boxes" in index()["colours_image"])
        assert client.model_ready("colours")
        put(repository, "colours", colour_classifier(side=48), "imagnet")
        wait_until(lambda: "unknown preprocess 'imagnet'; did you mean 'imagenet'?" in index()["colours_image"])
        (folder / "labels.txt").write_text("one\ntwo\n")
        put(repository, "colours", colour_classifier(side=48), "imagenet")
        wait_until(lambda: "labels.txt has 2 labels, but output 'scores' of model" in index()["colours_image"])
        (folder / "labels.txt").write_text("\n".join(COLOURS))
        wait_until(lambda: client.model_ready("colours_image"))
        (folder / "config.pbtxt").unlink()
        wait_until(lambda: not client.model_ready("colours_image"))
        assert client.model_ready("colours")


def test_a_folder_of_one_of_the_names_goes_first(server: RocserveProcess) -> None:
    (repository,) = server.repositories
    with Client(server.address) as client:
        put(repository, "tints_image", colour_classifier(), preset="")
        client.wait_until_ready(PATIENCE_SECONDS, model="tints_image")
        put(repository, "tints", colour_classifier(), "imagenet")
        client.wait_until_ready(PATIENCE_SECONDS, model="tints")
        wait_until(lambda: "model 'tints_image' is defined by both the folders" in server.log_text)
        ready = [entry.name for entry in client.repository_index() if entry.state == "READY"]
        assert [name for name in ready if name.startswith("tints")] == ["tints", "tints_image"]
        shutil.rmtree(repository / "tints_image")
        wait_until(lambda: client.model_ready("tints_image") and client.model_ready("tints_preprocess"))


CHAIN = """
[[models]]
name = "shop"
platform = "onnx_onnxv1"
id = "{first}.onnx"
[[models.inputs]]
name = "pixels"
datatype = "FP32"
shape = [3, 32, 32]
id = ""
[[models.outputs]]
name = "scores"
datatype = "FP32"
shape = [3]
id = "means"

[[models]]
name = "again"
platform = "onnx_onnxv1"
id = "again.onnx"
[[models.inputs]]
name = "pixels"
datatype = "FP32"
shape = [3]
id = "means"
[[models.outputs]]
name = "same"
datatype = "FP32"
shape = [3]
id = ""
"""


def as_they_come() -> bytes:
    """The second network of the chain: it returns its input."""
    graph = helper.make_graph(
        [helper.make_node("Identity", ["pixels"], ["same"])],
        "again",
        [helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["N", 3])],
        [helper.make_tensor_value_info("same", TensorProto.FLOAT, ["N", 3])],
    )
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 13)]).SerializeToString()


def test_a_name_is_free_once_its_folder_of_several_models_has_it_no_more(
    server: RocserveProcess, tmp_path: Path
) -> None:
    """The folder itself stays, with its other models."""
    (repository,) = server.repositories
    made = tmp_path / "shop"
    (made / "1").mkdir(parents=True)
    for name, network in (
        ("colours_image", colour_classifier()),
        ("means", colour_classifier()),
        ("again", as_they_come()),
    ):
        (made / "1" / f"{name}.onnx").write_bytes(network)
    (made / "config.toml").write_text(CHAIN.format(first="colours_image"))
    chain = made.rename(repository / "shop")
    with Client(server.address) as client:
        client.wait_until_ready(PATIENCE_SECONDS, model="shop")
        put(repository, "shop_colours", colour_classifier(), "imagenet")
        wait_until(lambda: "model 'shop_colours_image' is defined by both the folders" in server.log_text)
        assert client.model_ready("shop")
        assert not client.model_ready("shop_colours_preprocess")
        (chain / "config.toml").write_text(CHAIN.format(first="means"))
        wait_until(lambda: client.model_ready("shop_colours_preprocess"))
        wait_until(lambda: client.model_ready("shop_colours_image"))
        wait_until(lambda: client.model_ready("shop") and client.model_ready("shop_means"))
        assert client.model_ready("shop_again")


def test_it_comes_and_goes_with_loads_and_unloads(repository: Path, serve) -> None:
    put(repository, "colours", colour_classifier(), "imagenet", "\n".join(COLOURS))
    server = serve(repository, flags=("--model-control-mode=explicit",))
    with Client(server.address) as client:
        client.load_model("colours")
        assert client.model_ready("colours_image")
        client.unload_model("colours_image")
        assert not client.model_ready("colours_image")
        client.load_model("colours")
        assert client.model_ready("colours_image")
        client.unload_model("colours")
        wait_until(lambda: not client.model_ready("colours_image"))


@pytest.mark.parametrize("labels", ["beside", "named"])
def test_a_file_is_served_for_images(tmp_path: Path, labels: str) -> None:
    """`rocserve serve FILE --preprocess`, typed by a user who has a network and the names of its classes."""
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
