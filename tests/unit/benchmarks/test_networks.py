"""The untrained networks on ONNX Runtime: the published tensors and sizes, and finite answers that differ between
images."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from benchmarks.networks.layers import photo_like_images, seeded_weights

pytestmark = pytest.mark.long

UNSEEN_SEED = 1234
COSTLY = ("Conv", "Gemm", "BatchNormalization", "Exp", "Log", "Tanh", "Mul", "Softplus", "Relu", "LeakyRelu")


@dataclass(frozen=True)
class Built:
    file: Path
    model: onnx.ModelProto
    session: Any

    def parameters(self) -> int:
        weights = [weight for weight in self.model.graph.initializer if weight.data_type == onnx.TensorProto.FLOAT]
        return sum(math.prod(weight.dims) for weight in weights)

    def costly_nodes(self) -> dict[str, int]:
        """The number of nodes of the operators that take most of a network's time."""
        counts = Counter(node.op_type for node in self.model.graph.node)
        return {operator: counts[operator] for operator in COSTLY if counts[operator]}

    def tensors(self) -> dict[str, list[int | str]]:
        return {value.name: value.shape for value in (*self.session.get_inputs(), *self.session.get_outputs())}


def opened(file: Path) -> Built:
    return Built(file, onnx.load(file), onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"]))


@pytest.fixture(scope="module")
def classifier(untrained_resnet50: Path) -> Built:
    return opened(untrained_resnet50)


@pytest.fixture(scope="module")
def detector(untrained_yolov4: Path) -> Built:
    return opened(untrained_yolov4)


def test_resnet50_has_the_published_tensors_and_size(classifier: Built) -> None:
    assert classifier.tensors() == {"data": ["N", 3, 224, 224], "resnetv17_dense0_fwd": ["N", 1000]}
    published = 25_629_032
    assert classifier.parameters() == pytest.approx(published, rel=0.01)
    assert classifier.costly_nodes() == {"Conv": 53, "BatchNormalization": 53, "Relu": 49, "Gemm": 1}
    onnx.checker.check_model(classifier.file)
    assert classifier.model.opset_import[0].version == 12


def test_resnet50_tells_images_apart(classifier: Built) -> None:
    images = (photo_like_images(3, 224, UNSEEN_SEED) - 0.45) / 0.225
    batch = np.concatenate([images, np.zeros_like(images[:1])]).transpose(0, 3, 1, 2).astype(np.float32)
    (scores,) = classifier.session.run(None, {"data": batch})
    assert np.isfinite(scores).all()
    assert 0.1 < scores.std() < 10
    assert all(np.corrcoef(scores)[one, other] < 0.99 for one in range(4) for other in range(one))


def test_weights_are_the_seed_s_and_the_name_s() -> None:
    drawn = seeded_weights(4, "stem", (8, 3, 3, 3))
    np.testing.assert_array_equal(seeded_weights(4, "stem", (8, 3, 3, 3)), drawn)
    for seed, name in ((5, "stem"), (4, "head")):
        assert not np.allclose(seeded_weights(seed, name, (8, 3, 3, 3)), drawn)


def test_yolov4_has_the_published_tensors_and_size(detector: Built) -> None:
    assert detector.tensors() == {
        "input_1:0": ["N", 416, 416, 3],
        "Identity:0": ["N", 52, 52, 3, 85],
        "Identity_1:0": ["N", 26, 26, 3, 85],
        "Identity_2:0": ["N", 13, 13, 3, 85],
    }
    published = 64_329_950
    assert detector.parameters() == pytest.approx(published, rel=0.01)
    assert detector.costly_nodes() == {"Conv": 110, "Exp": 72, "Log": 72, "Tanh": 72, "Mul": 72, "LeakyRelu": 35}
    onnx.checker.check_model(detector.file)
    assert detector.model.opset_import[0].version == 11


def test_yolov4_finds_some_boxes_of_plausible_size_and_not_thousands(detector: Built) -> None:
    images = photo_like_images(2, 416, UNSEEN_SEED)
    found = []
    for image in images:
        heads = detector.session.run(None, {"input_1:0": image[None]})
        cells = np.concatenate([head.reshape(-1, 85) for head in heads])
        assert np.isfinite(cells).all()
        assert (np.abs(cells[:, 2:4]) < 4).mean() > 0.99, "sizes are powers of e times the anchors'"
        assert ((cells[:, 4:] >= 0) & (cells[:, 4:] <= 1)).all()
        found.append(int((cells[:, 4] * cells[:, 5:].max(axis=1) > 0.25).sum()))
    assert all(1 <= count <= 400 for count in found), found
    assert len(set(found)) > 1, "images differ"


def test_both_say_that_they_are_untrained(classifier: Built, detector: Built) -> None:
    for built in (classifier, detector):
        assert built.model.producer_name == "rocserve untrained"
        assert "answers mean nothing" in built.session.get_modelmeta().description
