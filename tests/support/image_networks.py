"""Networks with the signatures that `preprocess` knows, whose answers are known."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_SHAPES = Path(__file__).parents[2] / "model_repository" / "detect_shapes_network" / "1" / "model.onnx"
_SIDE = 192
YOLOV4_ANCHORS = np.array([12, 16, 19, 36, 40, 28, 36, 75, 76, 55, 72, 146], dtype=np.float32).reshape(2, 3, 2)
COLOURS = ("red", "green", "blue")


def shapes_like_yolov8(batch: int | str = "N") -> bytes:
    """The sample's detector of shapes with one output [batch, 4 + 3, boxes], as YOLOv8's exports have it."""
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
        scores = network.node("Mul", sure, kinds)
        joined = network.node("Concat", centres, sides, scores, axis=-1)
        boxes.append(network.node("Reshape", joined, network.integers(0, -1, 7)))
    rows = network.node("Concat", *boxes, axis=1)
    return network.model({network.node("Transpose", rows, perm=[0, 2, 1]): (7, (24 * 24 + 12 * 12) * 3)})


def shapes_like_yolov4(batch: int | str = "N") -> bytes:
    """The same with YOLOv4's three outputs: raw sides for its anchors, and nothing in the coarsest cells."""
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
    """The sample's network, with nodes behind it."""

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

    def model(self, outputs: dict[str, tuple[int, ...]]) -> bytes:
        del self._graph.output[:]
        for name, dims in outputs.items():
            self._graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [self._batch, *dims]))
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
    """Scores of red, green and blue: the means of the three channels as they come, behind a softmax if wanted."""
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
