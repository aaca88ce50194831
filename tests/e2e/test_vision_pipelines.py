"""JPEG -> YOLOv4 -> boxes, complete, with untrained weights of the real size."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
from PIL import Image
from support.server import RocserveProcess, Start
from support.slow_yolo import opencv_suppress, slow_decode

from rocserve_client import Client

ROOT = Path(__file__).parents[2]
PHOTO = ROOT / "tests" / "data" / "shapes" / "02.jpg"
GEOMETRIES = (
    SimpleNamespace(stride=8, xy_scale=1.2, anchors=((12, 16), (19, 36), (40, 28))),
    SimpleNamespace(stride=16, xy_scale=1.1, anchors=((36, 75), (76, 55), (72, 146))),
    SimpleNamespace(stride=32, xy_scale=1.05, anchors=((142, 110), (192, 243), (459, 401))),
)
"""The published anchors and strides."""


@pytest.fixture(scope="module")
def server(start: Start, tmp_path_factory: pytest.TempPathFactory, untrained_yolov4: Path) -> RocserveProcess:
    folder = tmp_path_factory.mktemp("vision")
    for pattern in ("yolov4*", "detect_objects"):
        for model in (ROOT / "model_repository").glob(pattern):
            fetched = shutil.ignore_patterns("1") if model.name == "yolov4" else None
            shutil.copytree(model, folder / "models" / model.name, ignore=fetched)
    (folder / "models" / "yolov4" / "1").mkdir()
    (folder / "models" / "yolov4" / "1" / "model.onnx").hardlink_to(untrained_yolov4)
    return start(folder / "models")


def test_boxes_are_those_of_the_network_s_heads(server: RocserveProcess, untrained_yolov4: Path) -> None:
    """Compared with Pillow's resize, ONNX Runtime itself, the published formulas, and OpenCV's suppression."""
    with Image.open(PHOTO) as image:
        width, height = image.size
        pixels = np.asarray(image.convert("RGB").resize((416, 416), Image.Resampling.BILINEAR), dtype=np.float32) / 255
    encoded = np.array([PHOTO.read_bytes()], dtype=object)
    with Client(server.address) as client:
        answer = client.infer("detect_objects", {"ENCODED": encoded})
        prepared = client.infer("yolov4_preprocess", {"ENCODED": encoded[np.newaxis]})
    assert np.abs(prepared["IMAGE"][0] - pixels).mean() < 0.01
    np.testing.assert_array_equal(prepared["SIZE"], [[height, width]])

    network = onnxruntime.InferenceSession(untrained_yolov4, providers=["CPUExecutionProvider"])
    heads = network.run(None, {"input_1:0": prepared["IMAGE"]})
    scale = np.array([width / 416, height / 416])
    placed = []
    for head, geometry in zip(heads, GEOMETRIES, strict=True):
        for score, number, box in slow_decode(head[0], geometry, 0.25):
            corners = (np.array(box).reshape(2, 2) * scale).clip(0, [width, height])
            placed.append((score, number, tuple(corners.ravel())))
    expected = opencv_suppress(placed, 0.213)[:100]
    assert len(expected) > 3
    np.testing.assert_allclose(answer["SCORES"], [score for score, _, _ in expected], rtol=1e-3)
    np.testing.assert_allclose(answer["BOXES"], [box for _, _, box in expected], atol=0.5)
    np.testing.assert_array_equal(answer["CLASSES"], [number for _, number, _ in expected])
    names = (ROOT / "model_repository" / "yolov4_postprocess" / "labels.txt").read_text().splitlines()
    assert len(names) == len(set(names)) == 80
    assert [label.decode() for label in answer["LABELS"]] == [names[number] for _, number, _ in expected]
