"""Makes rocAL operations from JSON and runs them on small pictures."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from rocserve.backends.rocal.decoding.options import ColorFormat
from rocserve.backends.rocal.engine import CpuEngine, EngineSetup
from rocserve.backends.rocal.image import Extent, Image, ResultExtent
from rocserve.backends.rocal.operations.base import Call
from rocserve.backends.rocal.pipeline import Layout, OutputFormat, Pipeline, parse_pipeline
from rocserve.core.datatypes import DataType

Array = np.ndarray[Any, Any]

_NORMALISATION = {"mean": [20], "std_dev": [0.5]}

EXAMPLES: dict[str, dict[str, Any]] = {
    "Resize": {"dest_width": 24, "dest_height": 17},
    "ResizeMirrorNormalize": {"dest_width": 24, "dest_height": 17, **_NORMALISATION},
    "CropMirrorNormalize": {"crop_width": 20, "crop_height": 15, **_NORMALISATION},
    "CropFixed": {"crop_width": 20, "crop_height": 15, "crop_pos_x": 3.5, "crop_pos_y": 4},
    "CropResizeFixed": {
        "dest_width": 24,
        "dest_height": 17,
        "area": 0.5,
        "aspect_ratio": 1.1,
        "x_center_drift": 0.5,
        "y_center_drift": 0.5,
    },
    "ResizeCropMirrorFixed": {"dest_width": 24, "dest_height": 17, "crop_w": 30, "crop_h": 20},
    "ImageSize": {},
    "resize": {"resize_longer": 32, "interpolation_type": "CUBIC"},
    "resize_mirror_normalize": {"resize_shorter": 20, "max_size": [32]},
    "crop": {"crop": [15, 20], "crop_pos_x": 3, "crop_pos_y": 2},
    "center_crop": {"crop_h": 15, "crop_w": 20},
    "crop_mirror_normalize": {"crop": [15, 20], "mean": [20], "std": [0.5], "mirror": 0},
    "resize_crop": {
        "resize_width": 24,
        "resize_height": 17,
        "crop_area_factor": 0.5,
        "crop_aspect_ratio": 1.1,
        "x_drift": 0.5,
        "y_drift": 0.5,
    },
    "resize_crop_mirror": {"resize_width": 24, "resize_height": 17, "crop_w": 30, "crop_h": 20},
    "roi_resize": {"resize_width": 24, "resize_height": 17, "roi_w": 30, "roi_h": 20, "roi_pos_x": 5, "roi_pos_y": 2},
    "flip": {"horizontal": 1},
    "transpose": {"perm": [1, 0, 2]},
    "rotate": {"angle": 15},
    "warp_affine": {"matrix": [1, 0, 0.1, 0, 1, 3], "dest_width": 50, "dest_height": 30},
    "fish_eye": {},
    "lens_correction": {"camera_matrix": [40, 30, 40, 20], "distortion_coeffs": [0.1, 0, 0, 0, 0]},
    "brightness": {"brightness": 1.1, "brightness_shift": 4},
    "brightness_fixed": {"brightness": 0.9},
    "contrast": {"contrast": 1.2, "contrast_center": 128},
    "exposure": {"exposure": 0.25},
    "gamma_correction": {"gamma": 1.8},
    "color_temp": {"adjustment_value": 20},
    "hue": {"hue": 40},
    "saturation": {"saturation": 1.3},
    "color_twist": {"hue": 10, "saturation": 0.8},
    "blur": {},
    "pixelate": {"pixelate_percent": 75},
    "vignette": {"vignette": 2},
    "blend": {"inputs": ["turned", "decoded"], "ratio": 0.6},
    "normalize": {"axes": [0, 1]},
    "slice": {"anchor": [5, 6], "shape": [20, 30]},
    "copy": {},
    "nop": {},
}
"""Keys for one use of each operation, on an image of 60 x 40 pixels (which the decoder makes 120 x 80)."""


def make(name: str, channels: int = 3, **keys: Any) -> Any:
    """The operation as a pipeline file would give it. Means are in levels of 0 to 255."""
    document = {"pipeline": [{"operation": name, **keys, "is_output": True}], "mean_std_range": "pixel"}
    return parse_pipeline(json.dumps(document), channels).images[0].call


UINT8_NHWC = OutputFormat(DataType.UINT8, Layout.NHWC)


def cpu_engine(pipeline: Pipeline, *formats: OutputFormat, color_format: ColorFormat = ColorFormat.RGB24) -> CpuEngine:
    """The engine with one thread. `formats`: of the outputs; left out, all are UINT8 and NHWC."""
    formats = formats or (UINT8_NHWC,) * len(pipeline.outputs)
    return CpuEngine(EngineSetup("model", pipeline, color_format, formats, batch_size=1, threads=1, device=None))


def picture(height: int, width: int, channels: int = 3, seed: int = 5) -> Array:
    """Noise that is smooth enough for interpolation and rough enough that each pixel matters."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (height // 4 + 2, width // 4 + 2, channels))
    smooth = np.repeat(np.repeat(coarse, 4, axis=0), 4, axis=1)[:height, :width]
    return np.clip(smooth + random.integers(-30, 31, smooth.shape), 0, 255).astype(np.uint8)


def seen(pixels: Array, height: int, width: int) -> Image:
    """An image of which only this part is visible to the next operation."""
    return Image(pixels, ResultExtent(Extent(*pixels.shape[:2]), Extent(height, width)))


def result(operation: Call, pixels: Array, as_float: bool = False) -> Array:
    """Run the operation on a fully visible source; return the valid part of the result. Checks that the source is
    unchanged."""
    before = pixels.copy()
    image = operation.run(Image.whole(pixels), as_float=as_float)
    np.testing.assert_array_equal(pixels, before)
    assert image.pixels.dtype == (np.float32 if as_float else np.uint8)
    assert image.pixels.ndim == 3
    return image.valid


def half_even(level: float) -> int:
    """Round half to even, and clamp to a byte."""
    return min(max(round(level), 0), 255)


def assert_rounded(given: Array, exact: Array, error: float = 1e-3) -> None:
    """Check that each level is the nearest to the exact one, either neighbour at a tie, within `error`."""
    assert given.shape == exact.shape
    assert np.abs(given - np.clip(exact, 0, 255)).max() <= 0.5 + error
