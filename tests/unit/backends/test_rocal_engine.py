"""Runs of whole pipelines: output formats, several outputs, images by name, values that come with the request."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.pictures import jpeg
from support.rocal_operations import UINT8_NHWC, cpu_engine

from rocserve.backends.rocal.decoding.options import ColorFormat
from rocserve.backends.rocal.engine import CpuEngine
from rocserve.backends.rocal.image import Extent, PixelsError
from rocserve.backends.rocal.pipeline import Layout, OutputFormat, output_extents, parse_pipeline
from rocserve.backends.rocal.schema import PipelineError
from rocserve.core.datatypes import DataType

Operation = dict[str, Any]

MEAN, DEVIATION = [100.0, 110.0, 120.0], [2.0, 3.0, 4.0]
DESTINATION = {"dest_width": 19, "dest_height": 11}
OPERATIONS: list[Operation] = [
    {"operation": "Resize", **DESTINATION},
    {"operation": "ResizeMirrorNormalize", **DESTINATION, "mean": MEAN, "std_dev": DEVIATION, "mirror": True},
    {
        "operation": "CropMirrorNormalize",
        "crop_width": 19,
        "crop_height": 11,
        "start_x": 0.3,
        "start_y": 0.7,
        "mean": MEAN,
        "std_dev": DEVIATION,
        "mirror": True,
    },
    {"operation": "CropFixed", "crop_width": 19, "crop_height": 11, "crop_pos_x": 3, "crop_pos_y": 4},
    {
        "operation": "CropResizeFixed",
        **DESTINATION,
        "area": 0.3,
        "aspect_ratio": 1.2,
        "x_center_drift": 0.2,
        "y_center_drift": 0.9,
    },
    {"operation": "ResizeCropMirrorFixed", **DESTINATION, "crop_w": 30, "crop_h": 21, "mirror": True},
]
RESIZE: Operation = {"operation": "Resize", "dest_width": 16, "dest_height": 8}

each_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=[item["operation"] for item in OPERATIONS])


def engine(
    operations: list[Operation],
    formats: list[OutputFormat] | None = None,
    color_format: ColorFormat = ColorFormat.RGB24,
    **top_level: Any,
) -> CpuEngine:
    pipeline = parse_pipeline(json.dumps({"pipeline": operations, **top_level}), color_format.channels)
    return cpu_engine(pipeline, *formats or (), color_format=color_format)


def output(operation: Operation, encoded: bytes, output_format: OutputFormat, color_format: ColorFormat) -> Any:
    return engine([{**operation, "is_output": True}], [output_format], color_format).run_image(encoded)[0]


def in_grey(operation: Operation) -> Operation:
    return {**operation, **{key: operation[key][:1] for key in ("mean", "std_dev") if key in operation}}


@each_operation
@pytest.mark.parametrize("color_format", ColorFormat)
def test_every_datatype_and_layout_of_every_operation(operation: Operation, color_format: ColorFormat) -> None:
    encoded = jpeg(64, 48)
    if color_format is ColorFormat.U8:
        operation = in_grey(operation)
    floats = output(operation, encoded, OutputFormat(DataType.FP32, Layout.NHWC), color_format)
    assert floats.dtype == np.float32
    assert floats.shape == (11, 19, color_format.channels)
    for datatype, layout in itertools.product((DataType.UINT8, DataType.FP32, DataType.FP16), Layout):
        given = output(operation, encoded, OutputFormat(datatype, layout), color_format)
        assert given.dtype == datatype.numpy_dtype
        if layout is Layout.NCHW:
            given = given.transpose(1, 2, 0)
        if datatype is DataType.UINT8:
            # Resizing to bytes truncates in the last columns, and reads next to nothing of the source's last row and
            # column, which is the first one after mirroring.
            inside = slice(0, -1), slice(3, 16)
            assert np.max(np.abs(given[inside] - np.clip(floats, 0, 255)[inside])) <= 0.51
        else:
            np.testing.assert_array_equal(given, floats.astype(given.dtype))


@each_operation
def test_bgr_is_rgb_with_the_channels_in_the_other_order(operation: Operation) -> None:
    encoded = jpeg(64, 48)
    swapped = {**operation, **{key: operation[key][::-1] for key in ("mean", "std_dev") if key in operation}}
    for datatype in (DataType.UINT8, DataType.FP32):
        output_format = OutputFormat(datatype, Layout.NHWC)
        rgb = output(operation, encoded, output_format, ColorFormat.RGB24)
        bgr = output(swapped, encoded, output_format, ColorFormat.BGR24)
        np.testing.assert_array_equal(bgr, rgb[:, :, ::-1])


@pytest.mark.parametrize("name", ["ResizeMirrorNormalize", "CropMirrorNormalize"])
@pytest.mark.parametrize("given", ["auto", "unit"])
def test_mean_and_deviation_for_levels_of_0_to_1_are_those_of_0_to_255_times_255(name: str, given: str) -> None:
    encoded = jpeg(64, 48)
    (operation,) = (item for item in OPERATIONS if item["operation"] == name)
    unit = {"mean": [0.4, 0.5, 0.6], "std_dev": [0.2, 0.3, 0.4]}
    pixel = {key: [number * 255 for number in numbers] for key, numbers in unit.items()}
    floats = OutputFormat(DataType.FP32, Layout.NHWC)
    scaled = output({**operation, **unit, "mean_std_range": given}, encoded, floats, ColorFormat.RGB24)
    expected = output({**operation, **pixel, "mean_std_range": "pixel"}, encoded, floats, ColorFormat.RGB24)
    np.testing.assert_array_equal(scaled, expected)
    as_they_are = output({**operation, **unit, "mean_std_range": "pixel"}, encoded, floats, ColorFormat.RGB24)
    assert np.max(as_they_are) > 255 * 0.9 * np.max(scaled)


def test_several_outputs_come_in_the_order_of_their_operations_and_in_formats_of_their_own() -> None:
    encoded = jpeg(64, 48)
    crop = {"operation": "CropFixed", "crop_width": 5, "crop_height": 4, "crop_pos_x": 1, "crop_pos_y": 2}
    operations = [{**RESIZE, "is_output": True}, {**crop, "is_output": True}, {**RESIZE, "dest_width": 3}]
    formats = [OutputFormat(DataType.FP32, Layout.NCHW), UINT8_NHWC]
    resized, cropped = engine(operations, formats).run_image(encoded)
    assert resized.shape == (3, 8, 16)
    assert resized.dtype == np.float32
    # The next operation reads UINT8, whatever was returned before it.
    (bytes_,) = engine([{**RESIZE, "is_output": True}]).run_image(encoded)
    np.testing.assert_array_equal(cropped, bytes_[2:6, 1:6])


def test_image_size_is_that_of_the_image_that_was_sent() -> None:
    operations = [{"operation": "ImageSize", "is_output": True}, {**RESIZE, "is_output": True}]
    size, resized = engine(operations).run_image(jpeg(300, 200))
    assert size.dtype == np.int32
    assert size.tolist() == [200, 300]
    (alone,) = engine([{**RESIZE, "is_output": True}]).run_image(jpeg(300, 200))
    np.testing.assert_array_equal(resized, alone)
    pipeline = parse_pipeline(json.dumps({"pipeline": operations}), 3)
    assert output_extents(pipeline, Extent(None, None)) == [None, Extent(8, 16)]


def test_operations_read_the_images_that_they_name() -> None:
    encoded = jpeg(64, 48)
    small = {**RESIZE, "name": "small"}
    blend = {"operation": "blend", "inputs": ["small", "mirrored"], "ratio": 1.0, "is_output": True}
    mirrored = {
        "operation": "ResizeCropMirrorFixed",
        "dest_width": 16,
        "dest_height": 8,
        "crop_w": 0,
        "crop_h": 0,
        "mirror": True,
        "inputs": ["decoded"],
        "name": "mirrored",
    }
    (plain,) = engine([{**RESIZE, "is_output": True}]).run_image(encoded)
    (flipped,) = engine([{**mirrored, "is_output": True}]).run_image(encoded)
    np.testing.assert_array_equal(engine([small, mirrored, blend]).run_image(encoded)[0], plain)
    other = {**blend, "inputs": ["mirrored", "small"]}
    np.testing.assert_array_equal(engine([small, mirrored, other]).run_image(encoded)[0], flipped)


def test_images_that_never_fit_each_other_are_refused_when_the_model_is_loaded() -> None:
    operations = [
        {**RESIZE, "name": "one"},
        {**RESIZE, "dest_width": 9, "name": "other"},
        {"operation": "blend", "inputs": ["one", "other"], "ratio": 0.5, "is_output": True},
    ]
    with pytest.raises(PipelineError, match=r"pipeline\[2\] \(blend\): "):
        output_extents(parse_pipeline(json.dumps({"pipeline": operations}), 3), Extent(None, None))


@pytest.mark.parametrize(
    ("shape", "policy", "stands_out"),
    [([4, 14], "ERROR", True), ([4, 13], "ERROR", False), ([9, 99], "PAD", False), ([9, 99], "TRIMTOSHAPE", False)],
)
def test_a_slice_that_always_stands_out_is_refused_when_the_model_is_loaded(
    shape: list[int], policy: str, stands_out: bool
) -> None:
    part = {"operation": "slice", "anchor": [4, 3], "shape": shape, "out_of_bounds_policy": policy, "is_output": True}
    pipeline = parse_pipeline(json.dumps({"pipeline": [RESIZE, part]}), 3)
    if stands_out:
        with pytest.raises(PipelineError, match=r"pipeline\[1\] \(slice\): .* exceeds the image's \[8, 16\]"):
            output_extents(pipeline, Extent(None, None))
    else:
        (size,) = output_extents(pipeline, Extent(None, None))
        assert size == (Extent(4, 13) if policy != "PAD" else Extent(9, 99))


@pytest.mark.parametrize(
    "operation",
    [
        {"operation": "Resize", "dest_width": 20_000, "dest_height": 20_000},
        {"operation": "resize", "resize_shorter": 2000},
        {"operation": "slice", "anchor": [0, 0], "shape": [50_000, 50_000], "out_of_bounds_policy": "PAD"},
    ],
)
def test_results_that_would_take_all_memory_are_refused_when_the_model_is_loaded(operation: Operation) -> None:
    document = json.dumps({"pipeline": [{**operation, "is_output": True}]})
    with pytest.raises(PipelineError, match=r"pipeline\[0\] \(\w+\): its result would have .* 100000000 are allowed"):
        output_extents(parse_pipeline(document, 3), Extent(None, None))


def test_results_that_would_take_all_memory_are_refused_where_the_image_decides_their_size() -> None:
    runner = engine(
        [{"operation": "Resize", "dest_width": 60_000, "dest_height": 0, "is_output": True}], decoder={"input": "raw"}
    )
    assert runner.run_image(np.zeros((2, 5, 3), np.uint8))[0].shape == (2, 60_000, 3)
    with pytest.raises(PixelsError, match="Resize: its result would have 60000x2000 pixels"):
        runner.run_image(np.zeros((2000, 5, 3), np.uint8))


@pytest.mark.parametrize(
    "operation",
    [
        {"operation": "rotate", "angle": 3},
        {"operation": "rotate", "angle": 3, "interpolation_type": "NEAREST_NEIGHBOR"},
        {"operation": "lens_correction", "camera_matrix": [1, 1, 1, 1], "distortion_coeffs": [0, 0, 0, 0, 0]},
    ],
)
def test_an_error_names_the_size_of_an_image_that_is_too_long_to_be_rotated(operation: Operation) -> None:
    runner = engine([{**operation, "is_output": True}], decoder={"input": "raw"})
    assert runner.run_image(np.zeros((1, 32_766, 3), np.uint8))[0].shape == (1, 32_766, 3)
    with pytest.raises(PixelsError, match="an image of 32767x1 pixels cannot be rotated, warped or corrected"):
        runner.run_image(np.zeros((1, 32_767, 3), np.uint8))


def peak_of(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def peak(runner: CpuEngine, pixels: Any) -> float:
    """The peak memory of a run, in units of its largest image (a blend is FP32)."""
    return peak_of(lambda: runner.run_image(pixels)) / pixels.nbytes


TURN: Operation = {"operation": "flip", "horizontal": True, "vertical": False}
LAST: Operation = {**TURN, "is_output": True}
SIZE: Operation = {"operation": "ImageSize", "is_output": True}
EARLY: Operation = {**TURN, "name": "early"}
BLEND: Operation = {"operation": "blend", "ratio": 0.5, "is_output": True}


@pytest.mark.parametrize(
    ("operations", "images"),
    [
        ([*[TURN] * 8, LAST], 3),
        ([*[TURN] * 8, LAST, SIZE], 3),
        ([LAST, *[TURN] * 8], 2),
        ([EARLY, *[TURN] * 7, {**TURN, "name": "late"}, {**BLEND, "inputs": ["early", "late"]}], 11),
    ],
    ids=["each by the next", "measured late", "not at all", "one late"],
)
def test_no_image_is_kept_that_no_later_step_reads(operations: list[Operation], images: int) -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (400, 500, 3), np.uint8)
    assert peak(engine(operations, decoder={"input": "raw"}), pixels) < images + 0.2


def test_a_step_that_reads_an_image_twice_drops_it_once() -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (20, 30, 3), np.uint8)
    operations = [EARLY, {**BLEND, "inputs": ["early", "early"]}, {**LAST, "inputs": ["decoded"]}]
    blended, turned = engine(operations, decoder={"input": "raw"}).run_image(pixels)
    np.testing.assert_array_equal(blended, pixels[:, ::-1])
    np.testing.assert_array_equal(turned, pixels[:, ::-1])


def test_no_results_are_kept_that_have_been_handed_out() -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (400, 500, 3), np.uint8)
    pipeline = parse_pipeline(json.dumps({"pipeline": [LAST], "decoder": {"input": "raw"}}), 3)
    runner = cpu_engine(pipeline)
    one, three = (
        peak_of(lambda images=images: runner.run([pixels] * images, {}, lambda row, place, result: None))
        for images in (1, 3)
    )
    assert three < 1.2 * one
