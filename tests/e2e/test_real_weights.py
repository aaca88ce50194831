"""`rocserve get efficientnet_lite0`, which downloads real weights: it gives PyTorch's numbers, and labels for
photographs, also as PyTorch's own files."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from support.models import drop
from support.pictures import PHOTOGRAPHS
from support.pytorch import NO_PYTORCH
from support.waiting import PATIENCE_SECONDS

from rocserve_client import Client, Output

ROOT = Path(__file__).parents[2]
WRITE_FILES = ROOT / "tests" / "support" / "real_weights.py"
TORCH_SCORES = {21: 7.22874, 92: 6.56386, 23: 6.50631, 22: 6.44024, 127: 6.05531, 128: 5.91956}
"""The best scores of efficientnet-lite-pytorch 0.1.0 on PyTorch 2.15, for the input below."""

QUANTISED = re.compile(
    r"50 of 50 layers with weights in int8, by static\n.*\n"
    r"OUTPUT__0: largest difference (\S+), of values up to (\S+);"
    r" the largest element is at the same place in (\S+)% of (\d+) rows"
)
"""What `rocserve quantise` prints."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights") / "models"
    shutil.copytree(ROOT / "model_repository" / "efficientnet_lite0", folder / "efficientnet_lite0")
    command = [sys.executable, "-m", "rocserve.cli", "get", "efficientnet_lite0", f"--model-repository={folder}"]
    got = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if "could not be downloaded" in got.stderr:
        pytest.skip("no network here")
    assert got.returncode == 0, got.stderr
    return folder


def test_the_network_gives_pytorch_s_numbers(repository: Path) -> None:
    assert {path.name for path in (repository / "efficientnet_lite0").iterdir()} == {"1", "config.pbtxt"}
    file = repository / "efficientnet_lite0" / "1" / "model.onnx"
    images = np.random.default_rng(7).standard_normal((1, 3, 224, 224)).astype(np.float32)
    scores = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"]).run(None, {"images": images})[0][0]
    assert np.argsort(scores)[::-1][: len(TORCH_SCORES)].tolist() == list(TORCH_SCORES)
    np.testing.assert_allclose(scores[list(TORCH_SCORES)], list(TORCH_SCORES.values()), atol=1e-4)


def test_photographs_get_their_labels(repository: Path, serve) -> None:
    server = serve(repository)
    server.wait_until_ready()
    photographs = np.array([[(PHOTOGRAPHS / f"{name}.jpg").read_bytes()] for name in ("china", "flower")], dtype=object)
    with Client(server.address) as client:
        wanted = [Output("PROBABILITIES", classification=3), "LABEL", "PROBABILITY"]
        answer = client.infer("efficientnet_lite0_image", {"ENCODED": photographs}, wanted)
    assert answer["LABEL"].ravel().tolist() == [b"palace", b"daisy"]
    best = [found[0] for found in answer.classes("PROBABILITIES")]
    assert [found.label for found in best] == ["palace", "daisy"]
    np.testing.assert_allclose(answer["PROBABILITY"].ravel(), [found.score for found in best], rtol=1e-5)


@pytest.fixture(scope="module")
def files(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that real_weights.py writes, and what it prints: printed.txt."""
    if not all(map(importlib.util.find_spec, ("torch", "torchao", "skimage"))):
        pytest.skip(NO_PYTORCH)
    model = repository / "efficientnet_lite0" / "1" / "model.onnx"
    folder = tmp_path_factory.mktemp("files")
    with (folder / "printed.txt").open("w") as printed:
        command = [sys.executable, "-W", "ignore", str(WRITE_FILES), str(model), str(folder)]
        subprocess.run(command, stdout=printed, check=True)
    return folder


def test_pytorch_s_files_give_photographs_the_same_labels(repository: Path, files: Path, serve, tmp_path: Path) -> None:
    # The answers below are compared with PyTorch's; a load check would do the same with made-up inputs.
    unchecked = 'parameters { key: "load_check" value { string_value: "off" } }'
    models = tmp_path / "models"
    drop(models, "exported", (files / "exported.pt2").read_bytes(), unchecked, filename="model.pt2")
    server = serve(models)
    stored = np.load(files / "photographs.npz")
    images, scores = stored["images"], stored["scores"]
    file = repository / "efficientnet_lite0" / "1" / "model.onnx"
    (of_onnx,) = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"]).run(None, {"images": images})
    compared = QUANTISED.search((files / "printed.txt").read_text())
    assert compared is not None
    difference, largest, same, images_compared = map(float, compared.groups())
    assert difference < 0.1 * largest
    # The two best scores of a portrait differ by no more than rounding.
    assert round(same / 100 * images_compared) >= len(scores) - 1
    with Client(server.address) as client:
        client.wait_until_ready(PATIENCE_SECONDS, model="exported")
        metadata = client.model_metadata("exported")
        answer = client.infer("exported", {metadata.inputs[0].name: images})
    for found in (of_onnx, answer[metadata.outputs[0].name]):
        np.testing.assert_allclose(found, scores, atol=1e-4)
