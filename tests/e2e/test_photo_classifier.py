"""The sample repository as a clone has it: ready without the downloaded weights, and serving with them."""

from __future__ import annotations

import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS

from benchmarks.networks.layers import photo_like_images
from rocserve_client import Client, Output

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("resnet50_preprocess", "resnet50", "resnet50_probabilities", "classify_image")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The models that classify photos, without files that `rocserve get` may have downloaded."""
    for name in MODELS:
        shutil.copytree(ROOT / "model_repository" / name, tmp_path / "models" / name)
    shutil.rmtree(tmp_path / "models" / "resnet50" / "1", ignore_errors=True)
    return tmp_path / "models"


def photo(seed: int) -> bytes:
    levels = (photo_like_images(1, 320, seed)[0, :240] * 255).astype(np.uint8)
    return bytes(cv2.imencode(".jpg", levels)[1])


def test_weights_come_while_the_server_runs(repository: Path, tmp_path: Path, untrained_resnet50: Path) -> None:
    with RocserveProcess([repository], log=tmp_path / "log") as server, Client(server.address) as client:
        client.wait_until_ready(PATIENCE_SECONDS)
        rows = {entry.name: entry for entry in client.repository_index()}
        assert (rows["resnet50"].version, rows["resnet50"].state) == ("", "")
        assert "get one with: rocserve get resnet50" in rows["resnet50"].reason
        assert rows["classify_image"].state == "UNAVAILABLE"
        assert "rocserve get resnet50" in rows["classify_image"].reason

        (repository / "resnet50" / "1").mkdir()
        shutil.copy(untrained_resnet50, repository / "resnet50" / "1" / "model.onnx")
        client.wait_until_ready(PATIENCE_SECONDS, "classify_image")
        images = np.array([[photo(1)], [photo(2)]], dtype=object)
        result = client.infer("classify_image", {"ENCODED": images})
        probabilities = result["PROBABILITIES"]
        assert probabilities.shape == (2, 1000)
        np.testing.assert_allclose(probabilities.sum(axis=1), 1.0, rtol=1e-4)
        assert not np.allclose(probabilities[0], probabilities[1])
        ranked = client.infer("classify_image", {"ENCODED": images}, [Output("PROBABILITIES", classification=5)])
        best = ranked.classes("PROBABILITIES")[0]
        labels = (repository / "resnet50" / "labels.txt").read_text().splitlines()
        assert [found.label for found in best] == [labels[index] for index in probabilities[0].argsort()[::-1][:5]]


def test_both_label_files_are_the_same() -> None:
    files = [ROOT / "model_repository" / name / "labels.txt" for name in ("resnet50", "resnet50_probabilities")]
    first, second = (file.read_text().splitlines() for file in files)
    assert first == second
    assert len(first) == 1000
