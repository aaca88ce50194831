"""The six operations of the JSON on pictures of any size, against the reference version of rocAL's arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import rocal_reference
from support.rocal_operations import Array, make, picture

from rocserve.backends.rocal.image import Image

Operation = dict[str, Any]

PICTURES = 12
"""Pictures for each operation."""


def noise(random: np.random.Generator, height: int, width: int) -> Array:
    return random.integers(0, 256, (height, width, 3), dtype=np.uint8)


def drawn_operation(name: str, random: np.random.Generator, height: int, width: int) -> Operation:
    """An operation with random values for all its keys."""
    destination = {"dest_width": int(random.integers(9, 400)), "dest_height": int(random.integers(1, 300))}
    normalisation = {
        "mean": random.uniform(0, 255, 3).tolist(),
        "std_dev": random.uniform(0.3, 80, 3).tolist(),
        "mirror": bool(random.integers(2)),
    }
    keys: dict[str, Operation] = {
        "Resize": destination,
        "ResizeMirrorNormalize": {**destination, **normalisation},
        "CropMirrorNormalize": {
            "crop_width": int(random.integers(1, width + 20)),
            "crop_height": int(random.integers(1, height + 20)),
            "start_x": random.random(),
            "start_y": random.random(),
            **normalisation,
        },
        "CropFixed": {
            "crop_width": int(random.integers(1, width // 2 + 1)),
            "crop_height": int(random.integers(1, height // 2 + 1)),
            "crop_pos_x": random.uniform(0, width // 2),
            "crop_pos_y": random.uniform(0, height // 2),
        },
        "CropResizeFixed": {
            **destination,
            "area": random.uniform(0.1, 1),
            "aspect_ratio": random.uniform(0.4, 2.5),
            "x_center_drift": random.random(),
            "y_center_drift": random.random(),
        },
        "ResizeCropMirrorFixed": {
            **destination,
            "crop_w": int(random.choice([0, random.integers(2, width + 20)])),
            "crop_h": int(random.choice([0, random.integers(2, height + 20)])),
            "mirror": bool(random.integers(2)),
        },
    }
    return {"operation": name, **keys[name]}


@pytest.mark.parametrize(
    ("name", "as_float"),
    [
        ("Resize", False),
        ("ResizeMirrorNormalize", False),
        ("ResizeMirrorNormalize", True),
        ("CropMirrorNormalize", False),
        ("CropMirrorNormalize", True),
        ("CropFixed", False),
        ("CropResizeFixed", False),
        ("ResizeCropMirrorFixed", False),
    ],
)
@pytest.mark.parametrize("kind", ["picture", "noise"])
def test_an_operation_on_any_picture(name: str, as_float: bool, kind: str) -> None:
    random = np.random.default_rng([as_float, *name.encode(), *kind.encode()])
    for _ in range(PICTURES):
        height, width = (int(side) for side in random.integers(20, (400, 600)))
        pixels = noise(random, height, width) if kind == "noise" else picture(height, width, seed=height)
        operation = drawn_operation(name, random, height, width)
        expected = rocal_reference.run_pipeline([{**operation, "dtype": "FLOAT" if as_float else "UINT8"}], pixels)
        keys = {key: value for key, value in operation.items() if key != "operation"}
        given = make(name, **keys).run(Image.whole(pixels), as_float=as_float)
        assert given.valid.shape[:2] == (expected.height, expected.width), operation
        right = ~expected.mistaken[: expected.height, : expected.width]
        levels, wanted = (image.valid[right] for image in (given, expected))
        assert levels.dtype == wanted.dtype
        if name.startswith("Crop") and name != "CropResizeFixed":
            np.testing.assert_array_equal(levels, wanted, err_msg=str(operation))
            continue
        difference = np.abs(levels.astype(np.float64) - wanted)
        if as_float:
            # A level near the mean normalises to about zero, so relative differences mean nothing: a thousandth of a
            # grey level is allowed.
            least = 1 / np.broadcast_to(operation["std_dev"], given.valid.shape)[right]
            assert np.max(difference / np.maximum(np.abs(wanted), least)) <= 1e-3, operation
        else:
            assert np.max(difference) <= 1, operation
            assert np.mean(difference > 0) <= 1e-3, operation
