"""A pipeline on amd.rocal through the real server: its worker finds the stand-in where it would find rocAL."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
import tritonclient.grpc as triton
from support.amd_rocal import STAND_IN
from support.server import RocserveProcess, wait_until
from tritonclient.utils import InferenceServerException

from rocserve.backends.installed import is_installed

PIPELINE = {
    "pipeline": [
        {"operation": "Resize", "dest_width": 40, "dest_height": 30},
        {
            "operation": "CropMirrorNormalize",
            "crop_width": 24,
            "crop_height": 20,
            "mean": [0.485, 0.456, 0.406],
            "std_dev": [0.229, 0.224, 0.225],
            "is_output": True,
        },
    ]
}
CONFIG = """
platform: "rocal_json"
max_batch_size: 6
input [ { name: "ENCODED" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "IMAGE" data_type: TYPE_FP32 dims: [ 3, 20, 24 ] } ]
instance_group [ { kind: KIND_CPU count: 2 } ]
dynamic_batching { max_queue_delay_microseconds: 20000 }
parameters { key: "engine" value: { string_value: "%s" } }
"""

GOLDEN_CONFIG = """
platform: "rocal_json"
max_batch_size: 0
input [ { name: "ENCODED" data_type: TYPE_STRING dims: [ 1 ] } ]
parameters { key: "engine" value: { string_value: "rocal" } }
"""


def add_model(repository: Path, engine: str) -> None:
    folder = repository / f"on_{engine}"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(CONFIG % engine)
    (folder / "1" / "pipeline.json").write_text(json.dumps(PIPELINE))


@pytest.fixture
def with_rocal(monkeypatch: pytest.MonkeyPatch) -> None:
    inherited = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", f"{STAND_IN}:{inherited}" if inherited else str(STAND_IN))


def jpeg(seed: int) -> bytes:
    small = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return cv2.imencode(".jpg", cv2.resize(small, (90 + seed, 70)))[1].tobytes()


def entry(*images: bytes) -> list[triton.InferInput]:
    tensor = triton.InferInput("ENCODED", [len(images), 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[image] for image in images], dtype=object))
    return [tensor]


Serve = Callable[..., RocserveProcess]


def test_the_same_tensors_as_from_the_cpu_engine(with_rocal: None, repository: Path, serve: Serve) -> None:
    add_model(repository, "rocal")
    add_model(repository, "cpu")
    server = serve(repository)
    server.wait_until_ready()
    client = server.client()
    assert "runs on amd.rocal" in server.log_text
    for count in (1, 3, 6):
        inputs = entry(*(jpeg(seed) for seed in range(count)))
        given = client.infer("on_rocal", inputs).as_numpy("IMAGE")
        assert given.shape == (count, 3, 20, 24)
        np.testing.assert_array_equal(given, client.infer("on_cpu", inputs).as_numpy("IMAGE"))


def test_a_bad_image_in_a_batch_fails_alone(with_rocal: None, repository: Path, serve: Serve) -> None:
    add_model(repository, "rocal")
    server = serve(repository)
    server.wait_until_ready()
    client = server.client()
    alone = {seed: client.infer("on_rocal", entry(jpeg(seed))).as_numpy("IMAGE") for seed in range(5)}
    answers: list[tuple[int, object, object]] = []
    images = [jpeg(seed) if seed != 2 else jpeg(seed)[:300] for seed in range(5)] * 4
    for index, image in enumerate(images):
        client.async_infer(
            "on_rocal", entry(image), lambda result, error, index=index: answers.append((index, result, error))
        )
    wait_until(lambda: len(answers) == len(images), what="all answers")
    for index, result, error in answers:
        if index % 5 == 2:
            assert isinstance(error, InferenceServerException)
            assert "Premature end of JPEG file" in str(error)
        else:
            assert error is None
            np.testing.assert_array_equal(result.as_numpy("IMAGE"), alone[index % 5])


@pytest.mark.skipif(is_installed("amd.rocal"), reason="this machine has amd.rocal")
def test_without_amd_rocal_the_model_says_so(repository: Path, serve: Serve) -> None:
    add_model(repository, "rocal")
    server = serve(repository)
    client = server.client()
    index = client.get_model_repository_index
    wait_until(lambda: any(model.state == "UNAVAILABLE" for model in index().models), what="the failure")
    (model,) = index().models
    assert "amd.rocal is not installed" in model.reason


GOLDEN = Path(__file__).parents[1] / "data" / "rocal-golden"
LARGEST_MEAN_DIFFERENCE = 0.1
"""Of a pipeline's outputs from those of the rocAL that made them, in grey levels or in the output's own units."""


@pytest.mark.skipif(
    not is_installed("amd.rocal"), reason="amd.rocal is not installed; put it, or the stand-in, on PYTHONPATH"
)
def test_the_installed_amd_rocal_against_the_golden_outputs(repository: Path, serve: Serve) -> None:
    manifest = json.loads((GOLDEN / "manifest.json").read_text())
    for name, operations in manifest["pipelines"].items():
        (repository / name / "1").mkdir(parents=True)
        document = {"mean_std_range": "pixel", "pipeline": operations}
        (repository / name / "1" / "pipeline.json").write_text(json.dumps(document))
        (repository / name / "config.pbtxt").write_text(GOLDEN_CONFIG)
    server = serve(repository)
    server.wait_until_ready(90)
    client = server.client()
    differences: dict[str, list[float]] = {}
    for entry_ in manifest["entries"]:
        if entry_["stored"]:
            tensor = triton.InferInput("ENCODED", [1], "BYTES")
            tensor.set_data_from_numpy(np.array([(GOLDEN / entry_["image"]).read_bytes()], dtype=object))
            given = client.infer(entry_["pipeline"], [tensor]).as_numpy("image")
            with np.load(GOLDEN / entry_["npz"]) as stored:
                expected = stored[entry_["key"]]
            _, _, width, height = entry_["roi_xywh"]
            if entry_["stored"] == "full":
                given, expected = given[:height, :width], expected[:height, :width]
            else:
                given = np.concatenate([given[start:end] for start, end in entry_["stored"]["rows"]])
            assert given.shape == expected.shape, entry_
            if any(step["operation"] == "ResizeMirrorNormalize" for step in manifest["pipelines"][entry_["pipeline"]]):
                # RPP exchanges two channels' std_dev in the last columns, unless it is asked for planes.
                given, expected = (array[:, : width - width % 8] for array in (given, expected))
            difference = np.mean(np.abs(given.astype(np.float64) - expected))
            differences.setdefault(entry_["pipeline"], []).append(float(difference))
    assert differences.keys() == manifest["pipelines"].keys()
    assert {name: found for name, found in differences.items() if np.mean(found) > LARGEST_MEAN_DIFFERENCE} == {}
