"""Blending, normalising, slicing and passing on."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from support.rocal_operations import Array, half_even, make, picture, result, seen

from rocserve.backends.rocal.image import Extent, Image, PixelsError, ResultExtent
from rocserve.backends.rocal.pipeline import parse_pipeline
from rocserve.backends.rocal.schema import PipelineError
from rocserve.core.datatypes import DataType

PIXELS = picture(9, 13)


def blend(ratio: float) -> Any:
    document = {
        "pipeline": [
            {"operation": "nop", "name": "first"},
            {"operation": "blend", "inputs": ["first", "decoded"], "ratio": ratio, "is_output": True},
        ]
    }
    return parse_pipeline(json.dumps(document), channels=3).steps[1].call


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
    assert parse_pipeline(json.dumps(document), channels=3).steps[0].default_datatype is DataType.FP32


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
    with pytest.raises(PixelsError, match=r"from \[7, 10\] of \[4, 20\] stands out of the image's \[9, 13\]"):
        make("slice", anchor=[7, 10], shape=[4, 20]).run(Image.whole(PIXELS), as_float=False)
    beyond = make("slice", anchor=[9, 0], shape=[4, 4], out_of_bounds_policy="TRIMTOSHAPE")
    with pytest.raises(PixelsError, match="stands out"):
        beyond.run(Image.whole(PIXELS), as_float=False)


@pytest.mark.parametrize("name", ["copy", "nop"])
@pytest.mark.parametrize("as_float", [False, True])
def test_the_image_is_passed_on(name: str, as_float: bool) -> None:
    np.testing.assert_array_equal(result(make(name), PIXELS, as_float), PIXELS)
    image = make(name).run(seen(PIXELS, 4, 6), as_float=as_float)
    assert (image.padded.shape, image.valid.shape[:2]) == (PIXELS.shape, (4, 6))
    np.testing.assert_array_equal(image.valid, PIXELS[:4, :6])
