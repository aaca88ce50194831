"""Every operation in a pipeline file, on a JPEG, and the errors for wrong keys."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from support.pictures import jpeg
from support.rocal_operations import EXAMPLES, cpu_engine, make, picture, result

from rocserve.backends.rocal.decoding.options import ColorFormat
from rocserve.backends.rocal.image import Extent, Image, Part, Pixels, ResultExtent
from rocserve.backends.rocal.operations import OPERATIONS
from rocserve.backends.rocal.operations.base import Measurement, Operation, same_extent
from rocserve.backends.rocal.pipeline import RANDOM_OPERATIONS, Layout, OutputFormat, output_extents, parse_pipeline
from rocserve.backends.rocal.schema import PipelineError
from rocserve.core.datatypes import DataType

BEFORE: dict[str, dict[str, Any]] = {"blend": {"operation": "flip", "vertical": 1, "name": "turned"}}
"""The steps before an operation."""


def documents(name: str) -> str:
    assert name in EXAMPLES, f"give EXAMPLES one for the operation '{name}'"
    step = {"operation": name, **EXAMPLES[name], "is_output": True}
    return json.dumps({"pipeline": [BEFORE[name], step] if name in BEFORE else [step], "mean_std_range": "pixel"})


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("color_format", ColorFormat)
@pytest.mark.parametrize("datatype", [DataType.UINT8, DataType.FP32, DataType.FP16])
def test_every_operation_serves_an_image(name: str, color_format: ColorFormat, datatype: DataType) -> None:
    operation = OPERATIONS[name]
    is_measurement = isinstance(operation, Measurement)
    if not is_measurement and operation.colour_only and color_format is ColorFormat.U8:
        with pytest.raises(PipelineError, match="needs colour"):
            parse_pipeline(documents(name), color_format.channels)
        return
    pipeline = parse_pipeline(documents(name), color_format.channels)
    formats = (OutputFormat(datatype, Layout.NHWC),)
    engine = cpu_engine(pipeline, *formats, color_format=color_format)
    (output,) = engine.run_image(jpeg(60, 40))
    if is_measurement:
        assert output.shape == operation.shape
        return
    assert output.dtype == datatype.numpy_dtype
    assert np.isfinite(output).all()
    assert output.any()
    for decoded in (Extent(None, None), Extent(80, 120)):
        (size,) = output_extents(pipeline, decoded)
        assert size is not None
        declared = formats[0].shape(size, color_format.channels)
        assert all(side in (-1, actual) for side, actual in zip(declared, output.shape, strict=True))
    # If the image's size is known, the result's is known.
    assert -1 not in declared


def test_a_padded_image_keeps_its_size_through_operations_that_keep_it() -> None:
    steps: list[dict[str, Any]] = [
        {"operation": "resize", "resize_longer": 48},
        {"operation": "brightness", "brightness": 1, "brightness_shift": 40},
        {"operation": "blur"},
        {"operation": "flip", "horizontal": 1, "is_output": True},
    ]
    pipeline = parse_pipeline(json.dumps({"pipeline": steps}), channels=3)
    assert output_extents(pipeline, Extent(None, None)) == [Extent(48, 48)]
    engine = cpu_engine(pipeline)
    (output,) = engine.run_image(jpeg(60, 40))
    assert output.shape == (48, 48, 3)
    # For three to two the valid part is 48 x 32, at least 40 bright; below it all is black.
    assert (output[:32].max(axis=2) >= 40).all()
    assert not output[32:].any()


@pytest.mark.parametrize(
    ("operation", "key"),
    [
        ({"operation": "flip"}, "horizontal"),
        ({"operation": "flip"}, "vertical"),
        ({"operation": "crop_mirror_normalize", "crop": [20, 30]}, "mirror"),
        ({"operation": "resize_mirror_normalize", "resize_width": 24, "resize_height": 16}, "mirror"),
        ({"operation": "resize_crop_mirror", "resize_width": 24, "resize_height": 16}, "mirror"),
    ],
)
def test_flags_may_come_with_each_image(operation: dict[str, Any], key: str) -> None:
    document = {"pipeline": [{**operation, key: {"input": "TURN"}, "is_output": True}]}
    pipeline = parse_pipeline(json.dumps(document), channels=3)
    engine = cpu_engine(pipeline)
    (plain,), (turned,) = (engine.run_image(jpeg(60, 40), {"TURN": flag}) for flag in (np.uint8(0), np.bool_(True)))
    np.testing.assert_array_equal(turned, np.flip(plain, axis=0 if key == "vertical" else 1))
    assert not np.array_equal(turned, plain)


@pytest.mark.parametrize("name", RANDOM_OPERATIONS)
def test_random_operations_are_refused_as_random(name: str) -> None:
    document = {"pipeline": [{"operation": name, "is_output": True}]}
    text = rf"pipeline\[0\]: key 'operation' must be an operation without random numbers, not \"{name}\""
    with pytest.raises(PipelineError, match=text):
        parse_pipeline(json.dumps(document), channels=3)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, operation in OPERATIONS.items()
        if isinstance(operation, Operation) and operation.extent is same_extent and name != "normalize"
    ],
)
def test_floats_of_what_keeps_the_size_are_whole_levels(name: str) -> None:
    operation = make(name, **EXAMPLES[name])
    np.testing.assert_array_equal(result(operation, picture(11, 15), as_float=True), result(operation, picture(11, 15)))


WRONG_SIZES: list[tuple[dict[str, Any], str]] = [
    ({}, "the size must be given in one way: .*, not by none of these"),
    ({"resize_width": 3, "resize_longer": 3}, "in one way: .*, not by resize_width and resize_longer"),
    ({"resize_longer": 3, "resize_shorter": 3}, "in one way: .*, not by resize_longer and resize_shorter"),
    ({"resize_width": 3, "max_size": [1, 2, 3]}, r"a list of 0, 1 or 2 sizes in pixels, \[width, height\], not"),
    ({"resize_width": 3, "max_size": [-1]}, r"\[width, height\], each a size in pixels"),
    ({"resize_width": 3, "scaling_mode": "MIN_MAX"}, 'one of "DEFAULT", "STRETCH"'),
    ({"resize_width": 3, "interpolation_type": "AREA"}, 'one of "LINEAR", "NEAREST_NEIGHBOR", "CUBIC"'),
    ({"resize_width": 3, "dest_width": 3}, "unknown key 'dest_width'"),
]


@pytest.mark.parametrize(
    ("name", "keys", "text"),
    [
        *((name, *row) for name in ("resize", "resize_mirror_normalize") for row in WRONG_SIZES),
        ("resize_crop", {"resize_width": 3, "resize_height": 3}, "key 'crop_area_factor' is missing"),
        ("roi_resize", {"resize_width": 3, "resize_height": 3}, "key 'roi_w' is missing"),
        ("roi_resize", {"resize_width": 0}, "'resize_width' must be a size in pixels, a whole number from 1 to 65535"),
        ("crop_mirror_normalize", {"crop": [3, 3], "std": [0]}, "'std' must be a list of .*, none of them 0"),
        ("crop_mirror_normalize", {"crop": [3, 3], "crop_pos_x": 2}, "'crop_pos_x' must be a fraction"),
        ("center_crop", {"crop": [3]}, "'crop' must be a list of 0, 2 or 3 sizes in pixels"),
        ("rotate", {}, "key 'angle' is missing"),
        ("rotate", {"angle": 3, "interpolation_type": "CUBIC"}, 'must be one of "LINEAR", "NEAREST_NEIGHBOR"'),
        ("warp_affine", {"matrix": [1, 0, 0, 0, 1]}, "'matrix' must be a list of 6 numbers"),
        ("warp_affine", {"matrix": [1, 0, 0, 0, 1, "x"]}, "a list of 6 numbers, each a number"),
        ("flip", {"horizontal": 2}, "'horizontal' must be true or false, or 1 or 0, not 2"),
        *(("flip", {"horizontal": value}, "'horizontal' must be true or false") for value in (1.0, "true", None)),
        ("transpose", {"perm": [2, 0, 1]}, r"'perm' must be \[1, 0, 2\] or \[0, 1, 2\], not \[2, 0, 1\]"),
        ("transpose", {"perm": [1, 0]}, "'perm' must be a list of 3 axes"),
        ("lens_correction", {}, "key 'camera_matrix' is missing"),
        ("lens_correction", {"camera_matrix": [1, 2, 3]}, r"a list of 4 numbers \[fx, cx, fy, cy\], not \[1, 2, 3\]"),
        (
            "lens_correction",
            {"camera_matrix": [0, 2, 3, 4], "distortion_coeffs": [0] * 5},
            "fx and fy, .*, must not be 0",
        ),
        ("brightness", {"brightness": 1}, "key 'brightness_shift' is missing"),
        ("contrast", {"contrast": 1}, "key 'contrast_center' is missing"),
        ("gamma_correction", {"gamma": -1}, "'gamma' must be a number of 0 or more, not -1"),
        ("exposure", {"exposure": 99}, "'exposure' must be a number from -32 to 32, not 99"),
        ("color_temp", {"adjustment_value": 0.5}, "must be a whole number from -65535 to 65535, not 0.5"),
        ("hue", {}, "key 'hue' is missing"),
        ("saturation", {"saturation": -1}, "'saturation' must be a number of 0 or more"),
        ("color_twist", {"hue": "red"}, "'hue' must be a number, not \"red\""),
        ("pixelate", {"pixelate_percent": 100}, "must be a percentage of 0 or more, below 100, not 100"),
        ("vignette", {"vignette": -0.1}, "'vignette' must be a number of 0 or more"),
        ("blur", {"window": 3}, "unknown key 'window'"),
        ("blend", {}, "key 'ratio' is missing"),
        ("blend", {"ratio": 0.5}, "key 'inputs' is missing"),
        ("normalize", {}, "key 'axes' is missing"),
        ("normalize", {"axes": [3]}, "a list of 1, 2 or 3 axes, each 0, 1 or 2"),
        ("normalize", {"axes": [0], "mean": [1]}, "must be given both or neither"),
        ("normalize", {"axes": [0, 2, 0]}, r"key 'axes' must name each axis once, not \[0, 2, 0\]"),
        ("normalize", {"axes": [0], "mean": [1, 2, 3], "stddev": [1]}, r"only where 'axes' is \[0, 1\]"),
        ("normalize", {"axes": [0, 1], "mean": [1], "stddev": [0]}, "each a number above 0"),
        ("slice", {"anchor": [0, 0]}, "key 'shape' is missing"),
        ("slice", {"anchor": [-1, 0], "shape": [1, 1]}, r"places in pixels, \[top, left\], each a size"),
        ("slice", {"anchor": [0, 0], "shape": [1, 1], "out_of_bounds_policy": "WRAP"}, 'one of "ERROR", "PAD"'),
    ],
)
def test_an_error_names_wrong_keys(name: str, keys: dict[str, Any], text: str) -> None:
    with pytest.raises(PipelineError, match=text):
        make(name, **keys)


def test_the_second_part_of_an_image_has_the_whole_made_once() -> None:
    whole = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    made: list[Part] = []

    def make(part: Part) -> Pixels:
        made.append(part)
        top, left, height, width = part
        return whole[top : top + height, left : left + width]

    image = Image(make, ResultExtent.whole(Extent(4, 4)))
    parts = [(0, 0, 2, 2), (1, 1, 2, 2), (2, 2, 2, 2)]
    for top, left, height, width in parts:
        expected = whole[top : top + height, left : left + width]
        assert np.array_equal(image.part(top, left, height, width), expected)
    assert made == [(0, 0, 2, 2), (0, 0, 4, 4)]
