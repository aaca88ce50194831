"""The rules of operations on images small enough to compute by hand: resizing, cropping, blending, normalising,
slicing, passing on."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from support.rocal_operations import Array, half_even, make, picture, result, seen

from rocserve.backends.rocal.image import Extent, Image, Pixels, PixelsError, ResultExtent, cached_by_image_size
from rocserve.backends.rocal.operations import OPERATIONS
from rocserve.backends.rocal.operations.base import Call, Operation
from rocserve.backends.rocal.pipeline import parse_pipeline
from rocserve.backends.rocal.schema import PipelineError
from rocserve.core.datatypes import DataType


def call(name: str, *values: Any) -> Call:
    """Run the operation with values for its keys, in order."""
    operation = OPERATIONS[name]
    assert isinstance(operation, Operation)
    return operation(**dict(zip(operation.keys, values, strict=True)))


def numbered(height: int, width: int, channels: int = 3) -> Pixels:
    """Every pixel differs from its neighbours; all channels are equal."""
    levels = (np.arange(height * width) % 251).astype(np.uint8).reshape(height, width, 1)
    return np.repeat(levels, channels, axis=2)


def run(operation: Call, pixels: Pixels, as_float: bool = False) -> Pixels:
    return operation.run(Image.whole(pixels), as_float=as_float).padded


def test_resize_takes_two_taps_at_half_pixel_centres() -> None:
    pixels = np.array([[0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120, 130, 140, 150]] * 2, np.uint8)[..., None]
    # Centres of every second pixel pair: halfway between the two.
    expected = np.arange(8) * 20 + 5
    expected[-1] = 140  # The last source column counts as a copy of the previous one.
    np.testing.assert_array_equal(run(call("Resize", 8, 2), pixels)[0, :, 0], expected)
    floats = run(call("Resize", 8, 2), pixels, as_float=True)[0, :, 0]
    np.testing.assert_allclose(floats, np.arange(8) * 20 + 5)


def test_resize_rounds_half_to_even_but_truncates_the_columns_beyond_a_multiple_of_eight() -> None:
    # Pairs (n, n + 1) fall exactly on n + 0.5.
    pixels = np.array([[0, 1, 1, 2] * 5] * 2, np.uint8)[..., None]
    # Ten columns: eight rounded (0.5 -> 0, 1.5 -> 2), two truncated (0.5 -> 0; the last one sees 1, 1).
    np.testing.assert_array_equal(run(call("Resize", 10, 2), pixels)[0, :, 0], [0, 2, 0, 2, 0, 2, 0, 2, 0, 1])


def test_resize_to_bytes_never_reads_the_last_row() -> None:
    pixels = numbered(16, 16)
    changed = pixels.copy()
    changed[-1] = 255
    np.testing.assert_array_equal(run(call("Resize", 8, 8), pixels), run(call("Resize", 8, 8), changed))
    assert not np.array_equal(run(call("Resize", 8, 8), pixels, True), run(call("Resize", 8, 8), changed, True))


def test_a_side_of_zero_keeps_the_images_side() -> None:
    assert run(call("Resize", 0, 8), numbered(20, 30)).shape == (8, 30, 3)
    assert call("Resize", 0, 8).extent(ResultExtent.whole(Extent(None, None))).size == Extent(8, None)
    assert run(call("ResizeMirrorNormalize", 8, 0, (0.0,) * 3, (1.0,) * 3, False), numbered(20, 30)).shape == (20, 8, 3)


def test_resize_mirror_normalize() -> None:
    pixels = np.full((8, 16, 3), (50, 100, 200), np.uint8)
    pixels[:, :8] = 0
    operation = call("ResizeMirrorNormalize", 16, 8, (10.0, 20.0, 30.0), (2.0, 4.0, 0.5), True)
    floats = run(operation, pixels, as_float=True)
    np.testing.assert_allclose(floats[0, 0], [20, 20, 340])
    np.testing.assert_allclose(floats[0, -1], [-5, -5, -60])
    np.testing.assert_array_equal(run(operation, pixels)[0, 0], [20, 20, 255])
    np.testing.assert_array_equal(run(operation, pixels)[0, -1], [0, 0, 0])


def test_resize_mirror_normalize_divides_each_channel_by_its_own_deviation_in_every_column() -> None:
    pixels = np.full((4, 9, 3), 120, np.uint8)
    operation = call("ResizeMirrorNormalize", 9, 4, (0.0, 0.0, 0.0), (2.0, 4.0, 8.0), False)
    for as_float in (False, True):
        np.testing.assert_allclose(run(operation, pixels, as_float), np.full((4, 9, 3), (60, 30, 15)))


def test_resizing_a_part_of_an_image_equals_resizing_its_copy() -> None:
    generator = np.random.default_rng(5)
    whole = generator.integers(0, 256, (60, 50, 3), dtype=np.uint8)
    part = whole[7:44, 3:40]
    for as_float in (False, True):
        for size in ((21, 13), (80, 90), (1, 1)):
            np.testing.assert_array_equal(
                run(call("Resize", *size), part, as_float), run(call("Resize", *size), part.copy(), as_float)
            )


@pytest.mark.parametrize("source", [(1, 1), (1, 9), (9, 1), (2, 2)])
def test_images_of_a_row_or_a_column_are_resized(source: tuple[int, int]) -> None:
    pixels = np.full((*source, 3), 77, np.uint8)
    for size in ((1, 1), (9, 8), (17, 3)):
        for as_float in (False, True):
            # The weights add up to nearly one, and the last columns are truncated.
            result = run(call("Resize", *size), pixels, as_float)
            np.testing.assert_allclose(result, np.full((size[1], size[0], 3), 77), atol=0.001 if as_float else 1)


def test_crop_mirror_normalize_starts_at_fractions_of_the_room() -> None:
    pixels = numbered(11, 21)
    identity = ((0.0,) * 3, (1.0,) * 3, False)
    for start, top, left in ((0.0, 0, 0), (0.5, 4, 8), (1.0, 9, 17)):
        # Room of 9 rows and 17 columns; halves are rounded to even.
        result = run(call("CropMirrorNormalize", 4, 2, start, start, *identity), pixels)
        np.testing.assert_array_equal(result, pixels[top : top + 2, left : left + 4])


def test_crop_mirror_normalize_mirrors_and_normalises() -> None:
    pixels = numbered(4, 4)
    operation = call("CropMirrorNormalize", 4, 4, 0, 0, (4.0, 4.0, 4.0), (2.0, 1.0, 0.01), True)
    floats = run(operation, pixels, as_float=True)
    np.testing.assert_allclose(floats[0, 0], [(3 - 4) / 2, 3 - 4, (3 - 4) / 0.01], rtol=1e-5)
    np.testing.assert_array_equal(run(operation, pixels)[1, 0], [2, 3, 255])  # 1.5 -> 2, 3, 300


@pytest.mark.parametrize(
    ("position", "left"),
    [
        (0, 0),
        (2, 2),
        (3.9, 3),
        (0.5, 0),
        (10, 0),
        (25, 0),
        (8, 6),
    ],  # 8 would exceed the image, so the part is moved back.
)
def test_crop_fixed_positions(position: float, left: int) -> None:
    pixels = numbered(10, 10)
    result = run(call("CropFixed", 4, 4, position, 0), pixels)
    np.testing.assert_array_equal(result, pixels[:4, left : left + 4])


@pytest.mark.parametrize(
    ("size", "area", "aspect_ratio", "drift", "part"),
    [
        ((40, 40), 0.25, 1.0, (0.5, 0.5), (10, 10, 20, 20)),
        ((40, 40), 0.25, 4.0, (1.0, 0.0), (0, 0, 40, 40)),  # 40 wide does not fit within 40: centred.
        ((40, 80), 0.25, 2.0, (1.0, 0.0), (0, 40, 20, 40)),
        ((40, 40), 1.0, 1.0, (0.0, 0.0), (0, 0, 40, 40)),
        ((40, 100), 1.0, 1.0, (0.0, 0.0), (0, 23, 40, 53)),  # too wide: 1.333 * 40
        ((100, 30), 1.0, 1.0, (0.0, 0.0), (30, 0, 40, 30)),  # too narrow: 30 / 0.75
    ],
)
def test_crop_resize_fixed_takes_the_part(
    size: tuple[int, int], area: float, aspect_ratio: float, drift: tuple[float, float], part: tuple[int, int, int, int]
) -> None:
    pixels = numbered(*size)
    top, left, height, width = part
    result = run(call("CropResizeFixed", 16, 8, area, aspect_ratio, *drift), pixels)
    np.testing.assert_array_equal(result, run(call("Resize", 16, 8), pixels[top : top + height, left : left + width]))


def test_resize_crop_mirror_fixed_crops_first() -> None:
    pixels = numbered(40, 40)
    result = run(call("ResizeCropMirrorFixed", 8, 8, 20, 16, False), pixels)
    np.testing.assert_array_equal(result, run(call("Resize", 8, 8), pixels[:16, :20]))
    whole = run(call("ResizeCropMirrorFixed", 8, 8, 0, 500, False), pixels)
    np.testing.assert_array_equal(whole, run(call("Resize", 8, 8), pixels))
    mirrored = run(call("ResizeCropMirrorFixed", 8, 8, 20, 16, True), pixels)
    np.testing.assert_array_equal(mirrored, result[:, ::-1])


@pytest.mark.parametrize(
    ("operation", "valid"),
    [
        (call("CropResizeFixed", 16, 24, 0.25, 1, 0.5, 0.5), (20, 16)),  # part 20 x 20, destination 24 high and 16 wide
        (call("ResizeCropMirrorFixed", 16, 24, 10, 30, False), (24, 10)),
        (call("ResizeCropMirrorFixed", 16, 24, 0, 0, False), (24, 16)),
    ],
)
def test_the_next_operation_sees_no_more_than_the_crop(operation: Call, valid: tuple[int, int]) -> None:
    image = operation.run(Image.whole(numbered(40, 40)), as_float=False)
    assert image.padded.shape == (24, 16, 3)
    assert image.valid.shape == (*valid, 3)
    known = operation.extent(ResultExtent.whole(Extent(40, 40)))
    assert (known.size, known.valid) == (Extent(24, 16), Extent(*valid))
    following = call("CropFixed", 50, 50, 0, 0).run(image, as_float=False)
    np.testing.assert_array_equal(following.padded, image.padded[: valid[0], : valid[1]])


PIXELS = picture(9, 13)


def blend(ratio: float) -> Any:
    document = {
        "pipeline": [
            {"operation": "nop", "name": "first"},
            {"operation": "blend", "inputs": ["first", "decoded"], "ratio": ratio, "is_output": True},
        ]
    }
    return parse_pipeline(json.dumps(document), channels=3).images[1].call


@pytest.mark.parametrize("ratio", [0, 0.25, 0.5, 1])
@pytest.mark.parametrize("channels", [1, 3])
def test_blend_mixes_level_by_level(ratio: float, channels: int) -> None:
    first, second = picture(5, 7, channels, seed=1), picture(5, 7, channels, seed=2)
    given = blend(ratio).run(Image.whole(first), Image.whole(second), as_float=False).padded
    for place in np.ndindex(first.shape):
        one, other = int(first[place]), int(second[place])
        assert given[place] == half_even((one - other) * ratio + other)
    floats = blend(ratio).run(Image.whole(first), Image.whole(second), as_float=True).padded
    assert floats.dtype == np.float32
    np.testing.assert_array_equal(floats, given)


def test_blend_takes_the_valid_parts_of_two_images() -> None:
    mixed = blend(1).run(seen(PIXELS, 4, 5), seen(picture(20, 20), 4, 5), as_float=False)
    np.testing.assert_array_equal(mixed.padded, PIXELS[:4, :5])


def test_blend_refuses_two_sizes() -> None:
    with pytest.raises(PixelsError, match="of one size, not 9x13 and 9x12"):
        blend(0.5).run(Image.whole(PIXELS), Image.whole(PIXELS[:, :12]), as_float=False)
    with pytest.raises(ValueError, match=r"of one size, not \?x13 and 9x12"):
        blend(0.5).extent(*map(ResultExtent.whole, (Extent(None, 13), Extent(9, 12))))
    size = Extent(9, 13)
    given = blend(0.5).extent(*map(ResultExtent.whole, (Extent(None, 13), Extent(9, None))))
    assert given == ResultExtent.whole(size)


def normalised(axes: tuple[int, ...], mean: Array | None, deviation: Array | None, scale: float, shift: float) -> Array:
    levels = PIXELS.astype(np.float64)
    if mean is None or deviation is None:
        mean = levels.mean(axis=axes, keepdims=True)
        deviation = np.sqrt(((levels - mean) ** 2).mean(axis=axes, keepdims=True))
    changed: Array = (levels - mean) / deviation * scale + shift
    return changed


@pytest.mark.parametrize(
    ("axes", "mean", "stddev"),
    [
        ([0, 1], [100, 110.5, 120], [10, 20, 30]),
        ([0, 1], [100], [10, 20, 30]),
        ([0, 1, 2], [100], [0.5]),
        ([2], [100], [3]),
        ([0, 1], [], []),
        ([0, 1, 2], [], []),
        ([0], [], []),
        ([1, 2], [], []),
        ([2], [], []),
    ],
)
@pytest.mark.parametrize(("scale", "shift"), [(1, 0), (50, 128)])
def test_normalize(axes: list[int], mean: list[float], stddev: list[float], scale: float, shift: float) -> None:
    operation = make("normalize", axes=axes, mean=mean, stddev=stddev, scale=scale, shift=shift)
    given_mean, given_deviation = (np.array(values) if values else None for values in (mean, stddev))
    expected = normalised(tuple(axes), given_mean, given_deviation, scale, shift)
    floats = result(operation, PIXELS, as_float=True)
    np.testing.assert_allclose(floats, expected, rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal(result(operation, PIXELS), np.clip(np.trunc(floats), 0, 255))


def test_normalize_gives_floats_unless_told_otherwise() -> None:
    document = {"pipeline": [{"operation": "normalize", "axes": [0, 1], "is_output": True}]}
    assert parse_pipeline(json.dumps(document), channels=3).images[0].default_datatype is DataType.FP32


def test_nothing_but_the_shift_is_left_of_an_even_picture() -> None:
    even = np.full((4, 4, 3), 9, dtype=np.uint8)
    assert (result(make("normalize", axes=[0, 1], scale=2, shift=7), even, as_float=True) == 7).all()


def test_normalize_leaves_what_is_not_valid_black() -> None:
    image = make("normalize", axes=[0, 1], shift=5).run(seen(PIXELS, 4, 6), as_float=True)
    assert image.padded.shape == PIXELS.shape
    assert not image.padded[4:].any() and not image.padded[:, 6:].any()
    np.testing.assert_allclose(image.valid.mean(axis=(0, 1)), [5, 5, 5], rtol=1e-4)


def test_normalize_of_grey_images_takes_one_value() -> None:
    with pytest.raises(PipelineError, match=r"\(normalize\): key 'mean' has 3 values, but the images have 1 channel"):
        make("normalize", channels=1, axes=[0, 1], mean=[1, 2, 3], stddev=[1])
    with pytest.raises(PipelineError, match="key 'stddev' has 3 values"):
        make("normalize", channels=1, axes=[0, 1], mean=[1], stddev=[1, 2, 3])
    grey = make("normalize", channels=1, axes=[0, 1], mean=[10], stddev=[2])
    np.testing.assert_allclose(
        result(grey, picture(4, 4, 1), as_float=True), (picture(4, 4, 1).astype(np.float64) - 10) / 2
    )


@pytest.mark.parametrize("as_float", [False, True])
def test_slice_cuts_out_a_part(as_float: bool) -> None:
    operation = make("slice", anchor=[2, 3], shape=[4, 5])
    np.testing.assert_array_equal(result(operation, PIXELS, as_float), PIXELS[2:6, 3:8])
    assert operation.extent(ResultExtent.whole(Extent(None, None))).size == Extent(4, 5)


@pytest.mark.parametrize("as_float", [False, True])
@pytest.mark.parametrize("anchor", [[7, 10], [7, 30], [0, 0]])
def test_slice_pads_with_a_level(as_float: bool, anchor: list[int]) -> None:
    operation = make("slice", anchor=anchor, shape=[4, 20], fill_values=[6.5], out_of_bounds_policy="PAD")
    expected = np.full((4, 20, 3), 6.5 if as_float else 6)
    part = PIXELS[anchor[0] : anchor[0] + 4, anchor[1] : anchor[1] + 20]
    expected[: part.shape[0], : part.shape[1]] = part
    np.testing.assert_array_equal(result(operation, PIXELS, as_float), expected)


def test_slice_trims_or_refuses_what_stands_out() -> None:
    trimming = make("slice", anchor=[7, 10], shape=[4, 20], out_of_bounds_policy="TRIMTOSHAPE")
    np.testing.assert_array_equal(result(trimming, PIXELS), PIXELS[7:, 10:])
    assert trimming.extent(ResultExtent.whole(Extent(9, None))).size == Extent(2, None)
    with pytest.raises(PixelsError, match=r"from \[7, 10\] of \[4, 20\] exceeds the image's \[9, 13\]"):
        make("slice", anchor=[7, 10], shape=[4, 20]).run(Image.whole(PIXELS), as_float=False)
    beyond = make("slice", anchor=[9, 0], shape=[4, 4], out_of_bounds_policy="TRIMTOSHAPE")
    with pytest.raises(PixelsError, match=r'exceeds the .* "out_of_bounds_policy" may be PAD$'):
        beyond.run(Image.whole(PIXELS), as_float=False)
    with pytest.raises(ValueError, match=r"exceeds the image's \[8, \?\] \(height, width\)"):
        beyond.extent(ResultExtent.whole(Extent(8, None)))


@pytest.mark.parametrize("name", ["copy", "nop"])
@pytest.mark.parametrize("as_float", [False, True])
def test_the_image_is_passed_on(name: str, as_float: bool) -> None:
    np.testing.assert_array_equal(result(make(name), PIXELS, as_float), PIXELS)
    image = make(name).run(seen(PIXELS, 4, 6), as_float=as_float)
    assert (image.padded.shape, image.valid.shape[:2]) == (PIXELS.shape, (4, 6))
    np.testing.assert_array_equal(image.valid, PIXELS[:4, :6])


def test_what_is_as_large_as_an_image_is_kept_for_eight_sizes_and_one_large_one() -> None:
    made: list[tuple[int, int, str]] = []

    @cached_by_image_size
    def make(height: int, width: int, name: str) -> str:
        made.append((height, width, name))
        return name

    small, large = [(1000 + index, 2000 - 2 * index, "a") for index in range(8)], [(1001, 2000, "a"), (1001, 2001, "a")]
    for arguments in (*small, *small, *large, large[1], *small, large[0], (*small[0][:2], "b")):
        assert make(*arguments) == arguments[2]
    assert made == [*small, *large, large[0], (*small[0][:2], "b")]
