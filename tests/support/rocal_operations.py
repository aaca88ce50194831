"""Operations made from JSON and run on small pictures."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from rocserve.backends.rocal.image import Image
from rocserve.backends.rocal.operations.base import Call
from rocserve.backends.rocal.pipeline import parse_pipeline

Array = np.ndarray[Any, Any]


def make(name: str, channels: int = 3, **keys: Any) -> Any:
    """The operation as a pipeline file would give it, with levels of 0..255 for a mean."""
    document = {"pipeline": [{"operation": name, **keys, "is_output": True}], "mean_std_range": "pixel"}
    return parse_pipeline(json.dumps(document), channels).steps[0].call


def picture(height: int, width: int, channels: int = 3, seed: int = 5) -> Array:
    """Noise, smooth enough that neighbours are alike and rough enough that each pixel shows."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (height // 4 + 2, width // 4 + 2, channels))
    smooth = np.repeat(np.repeat(coarse, 4, axis=0), 4, axis=1)[:height, :width]
    return np.clip(smooth + random.integers(-30, 31, smooth.shape), 0, 255).astype(np.uint8)


def result(operation: Call, pixels: Array, as_float: bool = False) -> Array:
    """The valid part of the result, the source being seen whole and left as it was."""
    before = pixels.copy()
    image = operation.run(Image.whole(pixels), as_float=as_float)
    np.testing.assert_array_equal(pixels, before)
    assert image.pixels.dtype == (np.float32 if as_float else np.uint8)
    assert image.pixels.ndim == 3
    return image.valid


def half_even(level: float) -> int:
    """Rounded and clamped to a byte."""
    return min(max(round(level), 0), 255)


def assert_rounded(given: Array, exact: Array, error: float = 1e-3) -> None:
    """Each level is the nearest to the exact one, either of the two where it lies in the middle (but for `error`)."""
    assert given.shape == exact.shape
    assert np.abs(given - np.clip(exact, 0, 255)).max() <= 0.5 + error
