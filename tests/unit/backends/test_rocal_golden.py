"""The CPU engine against real rocAL (the manifest has its versions). Only a checksum is known of some outputs. So a
slow reference version of rocAL's arithmetic is compared with all checksums first, and the engine then with the
reference, which has an array for each output. If the engine follows rocAL in every pixel to the bit, its own checksum
is compared too."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import rocal_reference
from support.rocal_operations import cpu_engine

from rocserve.backends.rocal.decoding.decoder import Decoder
from rocserve.backends.rocal.decoding.options import ColorFormat, DecoderOptions
from rocserve.backends.rocal.pipeline import Layout, OutputFormat, parse_pipeline
from rocserve.core.datatypes import DataType

ROOT = Path(__file__).resolve().parents[3]
OWN_DATA = ROOT / "tests" / "data" / "rocal-golden"
WHOLE_DATA = Path(os.environ.get("ROCSERVE_ROCAL_GOLDEN", ROOT.parent / "shared" / "rocal-golden"))

LARGEST_RELATIVE_DIFFERENCE = 1e-3
"""Of FP32 outputs."""

LEFT_OUT = {"rmn_u8_odd": 5 * 61 * 2, "rmn_f32_odd_mirror": 5 * 61 * 2}
"""Numbers of each output that RPP gets wrong and that do not count: two channels of the last five of 85 columns."""
SMALLER = ("cmn_crop_larger", "rcm_then_crop")
"""Pipelines with crops larger than the image: rocAL allocates the whole crop, here the output ends with it."""
NOT_TO_THE_BIT = ("rmn_f32", "rmn_f32_odd_mirror")
"""Pipelines that resize to FP32."""
OUTPUTS = {OWN_DATA: 29 * 3, WHOLE_DATA: 29 * 9}

PIPELINES = sorted(json.loads((OWN_DATA / "manifest.json").read_text())["pipelines"])

Array = np.ndarray[Any, Any]

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
pipelines = pytest.mark.parametrize("name", PIPELINES)


class Golden:
    """The outputs of one pipeline."""

    def __init__(self, data: Path, name: str) -> None:
        manifest = json.loads((data / "manifest.json").read_text())
        self.operations = manifest["pipelines"][name]
        self.entries = [entry for entry in manifest["entries"] if entry["pipeline"] == name]
        assert self.entries
        self._data = data
        self._decoder = Decoder(ColorFormat.RGB24, DecoderOptions())

    def encoded(self, entry: dict[str, Any]) -> bytes:
        return (self._data / entry["image"]).read_bytes()

    def restated(self, entry: dict[str, Any]) -> rocal_reference.Result:
        return rocal_reference.run_pipeline(self.operations, self._decoder.decode(self.encoded(entry)).pixels)

    def stored(self, entry: dict[str, Any]) -> Array | None:
        """The valid part of rocAL's own output, if all of it is known."""
        _, _, width, height = entry["roi_xywh"]
        if entry["stored"] != "full":
            return None
        with np.load(self._data / entry["npz"]) as arrays:
            return arrays[entry["key"]][:height, :width]


@data_sets
@pipelines
def test_restatement_is_rocal_to_the_bit(data: Path, name: str) -> None:
    golden = Golden(data, name)
    for entry in golden.entries:
        result = golden.restated(entry)
        assert [result.width, result.height] == entry["roi_xywh"][2:], entry["key"]
        assert hashlib.sha256(result.pixels.tobytes()).hexdigest() == entry["sha256"], entry["key"]
        if (stored := golden.stored(entry)) is not None:
            np.testing.assert_array_equal(result.valid, stored)


@data_sets
def test_no_output_is_left_out(data: Path) -> None:
    manifest = json.loads((data / "manifest.json").read_text())
    assert sorted(manifest["pipelines"]) == PIPELINES
    assert len(manifest["entries"]) == OUTPUTS[data]
    assert {entry["pipeline"] for entry in manifest["entries"]} == set(PIPELINES)


@data_sets
@pipelines
def test_engine_gives_what_rocal_gives(data: Path, name: str) -> None:
    golden = Golden(data, name)
    # rocAL uses mean and deviation unchanged, and so do these.
    document = json.dumps({"pipeline": golden.operations, "mean_std_range": "pixel"})
    pipeline = parse_pipeline(document, channels=3)
    (output,) = pipeline.outputs
    datatype = output.datatype or DataType.UINT8
    engine = cpu_engine(pipeline, OutputFormat(datatype, Layout.NHWC))
    for entry in golden.entries:
        (given,) = engine.run_image(golden.encoded(entry))
        result = golden.restated(entry)
        height, width = result.valid.shape[:2]
        assert given.dtype == result.pixels.dtype
        assert given.shape == ((height, width, 3) if name in SMALLER else tuple(entry["shape"]))
        right = ~result.mistaken
        assert np.sum(result.mistaken) == LEFT_OUT.get(name, 0)
        if name not in NOT_TO_THE_BIT:
            region = np.s_[: given.shape[0], : given.shape[1]]
            np.testing.assert_array_equal(given[right[region]], result.pixels[region][right[region]])
            if name not in LEFT_OUT and name not in SMALLER:
                assert hashlib.sha256(given.tobytes()).hexdigest() == entry["sha256"], entry["key"]
        else:
            np.testing.assert_allclose(given[right], result.pixels[right], rtol=LARGEST_RELATIVE_DIFFERENCE, atol=0)


@data_sets
def test_decoder_matches_rocal_to_the_bit(data: Path) -> None:
    decoder = Decoder(ColorFormat.RGB24, DecoderOptions())
    decoded = json.loads((data / "manifest.json").read_text())["decoded"]
    assert decoded
    for name, expected in decoded.items():
        pixels = decoder.decode((data / "images" / name).read_bytes()).pixels
        assert list(pixels.shape[:2]) == expected["rocal_decoded_hw"], name
        assert hashlib.sha256(pixels.tobytes()).hexdigest() == expected["sha256_decoded_rgb"], name
