"""`rocserve get efficientnet_lite0`, whose real weights are downloaded: PyTorch's numbers, and photographs, also by
PyTorch's own files of it."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import sklearn.datasets
from support.migraphx_serving import config
from support.models import drop

from rocserve_client import Client, Output

ROOT = Path(__file__).parents[2]
WRITE_FILES = ROOT / "tests" / "support" / "real_weights.py"
TORCHSCRIPT = """
platform: "pytorch_libtorch"
max_batch_size: 8
input { name: "images" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] }
"""
LOAD_SECONDS = 400
"""PyTorch takes many seconds to import where three models load beside other tests."""
PHOTOGRAPHS = Path(sklearn.datasets.__file__).with_name("images")
TORCH_SCORES = {21: 7.22874, 92: 6.56386, 23: 6.50631, 22: 6.44024, 127: 6.05531, 128: 5.91956}
"""The best of efficientnet-lite-pytorch 0.1.0 on PyTorch 2.15, for the input below."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights") / "models"
    shutil.copytree(ROOT / "model_repository" / "efficientnet_lite0", folder / "efficientnet_lite0")
    command = [sys.executable, "-m", "rocserve.cli", "get", "efficientnet_lite0", f"--model-repository={folder}"]
    got = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
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


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torch", "torchao", "skimage"))), reason="no PyTorch here; `make pytorch`"
)
@pytest.mark.timeout(900)
def test_pytorch_s_files_give_photographs_the_same_labels(
    repository: Path, serve, migraphx_root: Path, tmp_path: Path
) -> None:
    model = repository / "efficientnet_lite0" / "1" / "model.onnx"
    subprocess.run([sys.executable, "-W", "ignore", str(WRITE_FILES), str(model), str(tmp_path)], check=True)
    models = tmp_path / "models"
    drop(models, "onnx", model.read_bytes())
    drop(models, "exported", (tmp_path / "exported.pt2").read_bytes(), filename="model.pt2")
    drop(models, "scripted", (tmp_path / "scripted.pt").read_bytes(), TORCHSCRIPT, filename="model.pt")
    drop(models, "quantised", (tmp_path / "quantised.pt2").read_bytes(), filename="model.pt2")
    on_migraphx = config(6, "pytorch_libtorch", engine="migraphx-onnx", batch_sizes=6)
    drop(models, "small", (tmp_path / "small.pt2").read_bytes(), on_migraphx, filename="model.pt2")
    server = serve(models, flags=(f"--migraphx-root={migraphx_root}", f"--cache-directory={tmp_path / 'cache'}"))
    stored = np.load(tmp_path / "photographs.npz")
    images, scores = stored["images"], stored["scores"]
    best = scores.argsort(1)[:, ::-1]
    with Client(server.address) as client:
        for name in ("onnx", "exported", "scripted", "quantised", "small"):
            client.wait_until_ready(LOAD_SECONDS, model=name)
            metadata = client.model_metadata(name)
            given = stored["small"] if name == "small" else images
            found = client.infer(name, {metadata.inputs[0].name: given})[metadata.outputs[0].name]
            if name == "quantised":
                labels = found.argmax(1)
                same = labels == best[:, 0]
                # Of a portrait the two best scores are as close to each other as rounding moves them.
                assert same.sum() >= len(images) - 1
                assert (labels == best[:, 1])[~same].all()
                assert metadata.properties["precision"].startswith("int8")
            else:
                np.testing.assert_allclose(found, stored["small_scores"] if name == "small" else scores, atol=1e-4)
