"""A pipeline on amd.rocal through the real server: its worker finds the stand-in where rocAL would be."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import tritonclient.grpc as triton
from support import rocal_reference
from support.amd_rocal import STAND_IN
from support.infer_inputs import infer_input
from support.server import RocserveProcess
from support.waiting import wait_until

from rocserve.backends.installed import is_installed
from rocserve.backends.rocal.decoding.decoder import Decoder
from rocserve.backends.rocal.decoding.options import ColorFormat, DecoderOptions

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
max_batch_size: %d
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


def one(image: bytes) -> list[triton.InferInput]:
    """A tensor for a model without batching."""
    return [infer_input("ENCODED", np.array([image], dtype=object))]


def entry_of(*images: bytes) -> list[triton.InferInput]:
    return [infer_input("ENCODED", np.array([[image] for image in images], dtype=object))]


Serve = Callable[..., RocserveProcess]


def test_the_same_tensors_as_from_the_cpu_engine(with_rocal: None, repository: Path, serve: Serve) -> None:
    add_model(repository, "rocal")
    add_model(repository, "cpu")
    server = serve(repository, flags=("--log-verbose=1",))
    server.wait_until_ready()
    client = server.client()
    wait_until(lambda: "runs on amd.rocal" in server.log_text, "the worker's line in the log")
    for count in (1, 3, 6):
        inputs = entry_of(*(jpeg(seed) for seed in range(count)))
        given = client.infer("on_rocal", inputs).as_numpy("IMAGE")
        assert given.shape == (count, 3, 20, 24)
        np.testing.assert_array_equal(given, client.infer("on_cpu", inputs).as_numpy("IMAGE"))


OWN_GOLDEN = Path(__file__).parents[1] / "data" / "rocal-golden"
WHOLE_GOLDEN = Path(
    os.environ.get("ROCSERVE_ROCAL_GOLDEN", Path(__file__).resolve().parents[3] / "shared" / "rocal-golden")
)
LARGEST_MEAN_DIFFERENCE = 0.02
"""In grey levels before normalisation: an RPP built by another compiler rounds some levels up or down."""
LARGEST_SHARE_BEYOND_ONE_LEVEL = 0.001
FIXED_SIZE = ("Resize", "ResizeMirrorNormalize")
"""Operations after which all images have one size."""


def add_golden_model(repository: Path, name: str, operations: list[dict[str, Any]]) -> bool:
    """Add a golden model; return whether it batches."""
    (repository / name / "1").mkdir(parents=True)
    document = {"mean_std_range": "pixel", "pipeline": operations}
    (repository / name / "1" / "pipeline.json").write_text(json.dumps(document))
    takes_batches = operations[0]["operation"] in FIXED_SIZE
    (repository / name / "config.pbtxt").write_text(GOLDEN_CONFIG % (4 if takes_batches else 0))
    return takes_batches


def differences(given: np.ndarray, expected: rocal_reference.Result, deviation: Any) -> np.ndarray:
    """Differences in the valid part, in grey levels, without pixels in which RPP is wrong: there ours is right and
    `expected` is not."""
    height, width = expected.valid.shape[:2]
    given, right = given[:height, :width], expected.valid
    assert (given.shape, given.dtype) == (right.shape, right.dtype)
    if given.dtype == np.uint8:
        # A level that normalises to less than one is still rounded to one.
        deviation = np.minimum(deviation, 1)
    return (np.abs(given.astype(np.float64) - right) * deviation)[~expected.mistaken[:height, :width]]


@pytest.mark.skipif(
    not is_installed("amd.rocal"),
    reason="no amd.rocal; docs/reference/rocal.md says how it is found, or a stand-in for it",
)
def test_the_installed_amd_rocal_against_the_golden_outputs(repository: Path, serve: Serve) -> None:
    data = WHOLE_GOLDEN if (WHOLE_GOLDEN / "manifest.json").is_file() else OWN_GOLDEN
    manifest = json.loads((data / "manifest.json").read_text())
    pipelines = manifest["pipelines"]
    batching = {name for name, operations in pipelines.items() if add_golden_model(repository, name, operations)}
    client = serve(repository).client()
    # The server is not ready if a model fails, and the index shows the reason.
    states = client.get_model_repository_index
    wait_until(
        lambda: (
            len({model.name for model in states().models if model.state in ("READY", "UNAVAILABLE")}) == len(pipelines)
        ),
        "the end of loading",
        seconds=240,
    )
    assert {model.name: model.reason for model in states().models if model.state != "READY"} == {}
    decoder = Decoder(ColorFormat.RGB24, DecoderOptions())
    found: dict[str, str] = {}
    for name, operations in pipelines.items():
        entries = [entry for entry in manifest["entries"] if entry["pipeline"] == name]
        encoded = [(data / entry["image"]).read_bytes() for entry in entries]
        results: list[np.ndarray] = []
        # Three images do not fill a batch of rocAL's: one is padded.
        for chunk in (encoded[start : start + 3] for start in range(0, len(encoded), 3)):
            if name in batching:
                results.extend(client.infer(name, entry_of(*chunk)).as_numpy("image"))
            else:
                results.extend(client.infer(name, one(image)).as_numpy("image") for image in chunk)
        levels: list[np.ndarray] = []
        for entry, image, given in zip(entries, encoded, results, strict=True):
            expected = rocal_reference.run_pipeline(operations, decoder.decode(image).pixels)
            assert hashlib.sha256(expected.pixels.tobytes()).hexdigest() == entry["sha256"], entry["key"]
            levels.append(differences(given, expected, operations[-1].get("std_dev", 1.0)))
        mean, share = np.mean(np.concatenate(levels)), np.mean(np.concatenate(levels) > 1.001)
        if mean > LARGEST_MEAN_DIFFERENCE or share > LARGEST_SHARE_BEYOND_ONE_LEVEL:
            found[name] = f"{mean:.3g} levels on average, {share:.2%} beyond one"
    assert found == {}
