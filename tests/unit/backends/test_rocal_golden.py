"""The CPU engine against the outputs of real rocAL (see the manifest for its versions)."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rocserve.backends.rocal.decoding.decoder import Decoder
from rocserve.backends.rocal.decoding.options import ColorFormat, DecoderOptions
from rocserve.backends.rocal.engine import OutputFormat, PipelineEngine
from rocserve.backends.rocal.pipeline import Layout, parse_pipeline
from rocserve.core.datatypes import DataType

ROOT = Path(__file__).resolve().parents[3]
OWN_DATA = ROOT / "tests" / "data" / "rocal-golden"
WHOLE_DATA = Path(os.environ.get("ROCSERVE_ROCAL_GOLDEN", ROOT.parent / "shared" / "rocal-golden"))

LARGEST_MEAN_DIFFERENCE = 0.1
"""Grey levels, averaged over the pixels and the images of a pipeline."""

PIPELINES = sorted(json.loads((OWN_DATA / "manifest.json").read_text())["pipelines"])

data_sets = pytest.mark.parametrize(
    "data",
    [
        pytest.param(OWN_DATA, id="own"),
        pytest.param(
            WHOLE_DATA,
            id="whole",
            marks=pytest.mark.skipif(
                not (WHOLE_DATA / "manifest.json").is_file(),
                reason=f"{WHOLE_DATA} holds no golden data; set ROCSERVE_ROCAL_GOLDEN to the folder that does",
            ),
        ),
    ],
)


def engine_for(operations: list[dict[str, Any]]) -> tuple[PipelineEngine, np.ndarray[Any, Any]]:
    """The engine, and what one unit of its output is in grey levels, for each channel."""
    # rocAL takes mean and deviation as they are, and so were these made.
    pipeline = parse_pipeline(json.dumps({"pipeline": operations, "mean_std_range": "pixel"}), channels=3)
    (output,) = (step for step in pipeline.steps if step.is_output)
    datatype = output.datatype or DataType.UINT8
    formats = (OutputFormat(datatype, Layout.NHWC),)
    # A difference of FP32 outputs is a difference in units of the deviation; of UINT8 outputs it counts as it is.
    unit = np.asarray(output.operation.std_dev) if datatype is DataType.FP32 else np.ones(3)
    return PipelineEngine(pipeline, Decoder(ColorFormat.RGB24, pipeline.decoder), formats), unit


def expected_and_given(
    entry: dict[str, Any], expected: np.ndarray[Any, Any], given: np.ndarray[Any, Any]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Both cut to what is stored and valid: rocAL leaves what lies outside the region of interest undefined."""
    _, _, width, height = entry["roi_xywh"]
    if entry["stored"] == "full":
        return expected[:height, :width], given
    return expected, np.concatenate([given[start:end] for start, end in entry["stored"]["rows"]])


@data_sets
@pytest.mark.parametrize("name", PIPELINES)
def test_pipeline_matches_rocal(data: Path, name: str) -> None:
    manifest = json.loads((data / "manifest.json").read_text())
    engine, unit = engine_for(manifest["pipelines"][name])
    entries = [entry for entry in manifest["entries"] if entry["pipeline"] == name and entry["stored"]]
    assert entries
    differences = []
    for entry in entries:
        (given,) = engine.run((data / entry["image"]).read_bytes())
        with np.load(data / entry["npz"]) as stored:
            expected, given = expected_and_given(entry, stored[entry["key"]], given)
        assert given.dtype == expected.dtype
        assert given.shape == expected.shape
        differences.append(float(np.mean(np.abs(given.astype(np.float64) - expected) * unit)))
    assert np.mean(differences) <= LARGEST_MEAN_DIFFERENCE, dict(
        zip((entry["key"] for entry in entries), differences, strict=True)
    )


@data_sets
def test_decoder_matches_rocal_to_the_bit(data: Path) -> None:
    decoder = Decoder(ColorFormat.RGB24, DecoderOptions())
    decoded = json.loads((data / "manifest.json").read_text())["decoded"]
    assert decoded
    for name, expected in decoded.items():
        pixels = decoder.decode((data / "images" / name).read_bytes()).pixels
        assert list(pixels.shape[:2]) == expected["rocal_decoded_hw"], name
        assert hashlib.sha256(pixels.tobytes()).hexdigest() == expected["sha256_decoded_rgb"], name
