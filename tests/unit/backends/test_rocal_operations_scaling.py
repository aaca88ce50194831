"""Sizes and interpolations of resizing against rocAL's rules, and crops by the names of amd.rocal's fn."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.rocal_operations import Array, assert_rounded, make, picture, result, seen

from rocserve.backends.rocal.image import Extent, Image, ResultExtent
from rocserve.backends.rocal.schema import PipelineError

UNKNOWN = Extent(None, None)


@pytest.mark.parametrize(
    ("keys", "size", "valid"),
    [
        # The image is 500 x 375 (width x height); sizes are height and width.
        ({"resize_width": 224, "resize_height": 200}, (200, 224), (200, 224)),
        ({"resize_width": 200}, (1200, 200), (150, 200)),
        ({"resize_height": 200}, (200, 1200), (200, 267)),
        ({"resize_width": 64, "scaling_mode": "STRETCH"}, (375, 64), (375, 64)),
        ({"resize_longer": 128}, (128, 128), (96, 128)),
        ({"resize_width": 128, "resize_height": 128, "scaling_mode": "NOT_LARGER"}, (128, 128), (96, 128)),
        ({"resize_width": 128, "scaling_mode": "SCALING_MODE_NOT_LARGER"}, (768, 128), (96, 128)),
        ({"resize_shorter": 90}, (540, 540), (90, 120)),
        ({"resize_width": 100, "resize_height": 90, "scaling_mode": "NOT_SMALLER"}, (540, 600), (90, 120)),
        ({"resize_shorter": 90, "max_size": [100]}, (100, 100), (75, 100)),
        ({"resize_shorter": 90, "max_size": [400, 50]}, (50, 400), (50, 67)),
        ({"resize_longer": 128, "max_size": [100, 0]}, (128, 100), (75, 100)),
        ({"resize_width": 224, "resize_height": 200, "max_size": [0, 50]}, (50, 224), (50, 224)),
        ({"resize_width": 30, "resize_height": 20, "max_size": [40, 40]}, (40, 40), (20, 30)),
        ({"resize_shorter": 375}, (2250, 2250), (375, 500)),
    ],
)
def test_size_of_the_result(keys: dict[str, Any], size: tuple[int, int], valid: tuple[int, int]) -> None:
    source = Extent(375, 500)
    operation = make("resize", interpolation_type="NEAREST_NEIGHBOR", **keys)
    assert operation.extent(ResultExtent.whole(source)) == ResultExtent(Extent(*size), Extent(*valid))
    image = operation.run(Image.whole(np.full((375, 500, 3), 77, dtype=np.uint8)), as_float=False)
    assert image.padded.shape == (*size, 3)
    assert image.valid.shape[:2] == valid
    assert (image.valid == 77).all()
    # Everything that is not valid is black.
    assert int(image.padded.astype(np.int64).sum()) == 77 * 3 * math.prod(valid)
    normalised = make("resize_mirror_normalize", **keys).run(Image.whole(picture(375, 500)), as_float=True)
    assert normalised.valid.shape[:2] == valid
    assert normalised.padded.shape == (*size, 3)


@pytest.mark.parametrize(
    ("keys", "size", "valid"),
    [
        ({"resize_width": 224, "resize_height": 200}, Extent(200, 224), Extent(200, 224)),
        ({"resize_width": 224, "resize_height": 200, "max_size": [0, 50]}, Extent(50, 224), UNKNOWN),
        ({"resize_longer": 128}, Extent(128, 128), UNKNOWN),
        ({"resize_width": 64, "scaling_mode": "STRETCH"}, Extent(None, 64), Extent(None, 64)),
    ],
)
def test_size_for_images_of_unknown_size(keys: dict[str, Any], size: Extent, valid: Extent) -> None:
    assert make("resize", **keys).extent(ResultExtent.whole(UNKNOWN)) == ResultExtent(size, valid)


@pytest.mark.parametrize(
    ("name", "keys"),
    [("resize", {"resize_width": 10, "scaling_mode": "STRETCH"}), ("Resize", {"dest_width": 10, "dest_height": 0})],
)
def test_a_side_that_is_kept_is_that_of_the_whole_image_where_it_is_padded(name: str, keys: dict[str, Any]) -> None:
    image = seen(picture(30, 40), 20, 25)
    stretched = make(name, **keys).run(image, as_float=False)
    assert stretched.padded.shape == (30, 10, 3)
    assert stretched.valid.shape[:2] == (20, 10)
    assert not stretched.padded[20:].any()


_SIZE, _DESTINATION = {"resize_width": 24, "resize_height": 16}, {"dest_width": 24, "dest_height": 16}
_LEVELS, _JSON_LEVELS = ({"mean": [100, 110, 120], key: [20, 30, 40]} for key in ("std", "std_dev"))
_AREA = {"crop_area_factor": 0.4, "crop_aspect_ratio": 1.2, "x_drift": 0.3, "y_drift": 0.9}
_JSON_AREA = {"area": 0.4, "aspect_ratio": 1.2, "x_center_drift": 0.3, "y_center_drift": 0.9}


@pytest.mark.parametrize(
    ("name", "keys", "alias", "its_keys"),
    [
        ("resize", {**_SIZE, "antialias": False}, "Resize", _DESTINATION),
        # fn mirrors by default.
        (
            "resize_mirror_normalize",
            {**_SIZE, **_LEVELS, "interpolation_type": "CUBIC"},
            "ResizeMirrorNormalize",
            {**_DESTINATION, **_JSON_LEVELS, "mirror": True},
        ),
        (
            "resize_mirror_normalize",
            {**_SIZE, **_LEVELS, "mirror": 0},
            "ResizeMirrorNormalize",
            {**_DESTINATION, **_JSON_LEVELS},
        ),
        (
            "crop_mirror_normalize",
            {"crop": [16, 24], "crop_pos_x": 0.2, "crop_pos_y": 0.9, **_LEVELS},
            "CropMirrorNormalize",
            {"crop_width": 24, "crop_height": 16, "start_x": 0.2, "start_y": 0.9, **_JSON_LEVELS, "mirror": True},
        ),
        (
            "crop",
            {"crop_h": 16, "crop_w": 24, "crop_pos_x": 3, "crop_pos_y": 5},
            "CropFixed",
            {"crop_width": 24, "crop_height": 16, "crop_pos_x": 3, "crop_pos_y": 5},
        ),
        ("resize_crop", {**_SIZE, **_AREA}, "CropResizeFixed", {**_DESTINATION, **_JSON_AREA}),
        # rocAL's fn takes the width for the height.
        (
            "resize_crop_mirror",
            {**_SIZE, "crop_w": 10, "crop_h": 20},
            "ResizeCropMirrorFixed",
            {**_DESTINATION, "crop_w": 20, "crop_h": 10, "mirror": True},
        ),
    ],
)
@pytest.mark.parametrize("as_float", [False, True])
def test_an_operation_of_the_servers_json_is_one_of_fn(
    name: str, keys: dict[str, Any], alias: str, its_keys: dict[str, Any], as_float: bool
) -> None:
    pixels, operation, other = picture(33, 47), make(name, **keys), make(alias, **its_keys)
    np.testing.assert_array_equal(result(operation, pixels, as_float), result(other, pixels, as_float))
    for size in (Extent(33, 47), UNKNOWN):
        assert operation.extent(ResultExtent.whole(size)).size == other.extent(ResultExtent.whole(size)).size


@pytest.mark.parametrize(("height", "width"), [(5, 7), (20, 33), (41, 90)])
@pytest.mark.parametrize("channels", [1, 3])
def test_nearest_is_the_pixel_that_holds_the_middle(height: int, width: int, channels: int) -> None:
    pixels = picture(17, 29, channels)
    operation = make(
        "resize", channels, resize_width=width, resize_height=height, interpolation_type="NEAREST_NEIGHBOR"
    )
    given = result(operation, pixels)
    for row, column in np.ndindex(height, width):
        source = pixels[math.floor((row + 0.5) * 17 / height), math.floor((column + 0.5) * 29 / width)]
        np.testing.assert_array_equal(given[row, column], source)
    np.testing.assert_array_equal(result(operation, pixels, as_float=True), given)


def cubic(x: float) -> float:
    x = abs(x)
    return 1.5 * x**3 - 2.5 * x**2 + 1 if x <= 1 else -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2 if x < 2 else 0


def lanczos(x: float) -> float:
    return 0 if abs(x) >= 3 else sinc(x) * sinc(x / 3)


def sinc(x: float) -> float:
    return 1 if x == 0 else math.sin(math.pi * x) / (math.pi * x)


def gaussian(x: float) -> float:
    return math.exp(-4 * x * x)


def triangular(x: float) -> float:
    return max(1 - abs(x), 0)


KERNELS: dict[str, tuple[Callable[[float], float], float, bool]] = {
    "CUBIC": (cubic, 2, False),
    "LANCZOS": (lanczos, 3, True),
    "GAUSSIAN": (gaussian, 1, True),
    "TRIANGULAR": (triangular, 1, True),
}


def weights_of(source_size: int, size: int, kernel: str, place: int) -> list[tuple[int, float]]:
    """For one pixel of the result: its source pixels, and the weight of each."""
    function, reach, widens = KERNELS[kernel]
    ratio = source_size / size
    scale = ratio if widens and ratio > 1 else 1.0
    radius = float(np.float32(reach * scale))
    middle = (place + 0.5) * ratio - 0.5
    first = math.ceil(middle - radius)
    shares = [function((first + tap - middle) / scale) for tap in range(math.ceil(2 * radius))]
    total = sum(shares)
    return [(min(max(first + tap, 0), source_size - 1), share / total) for tap, share in enumerate(shares)]


def weights(source_size: int, size: int, kernel: str) -> Array:
    """size x source_size: the weight of each source pixel in each pixel of the result."""
    table = np.zeros((size, source_size))
    for place in range(size):
        for source, share in weights_of(source_size, size, kernel, place):
            table[place, source] += share
    return table


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("height", "width"), [(34, 58), (8, 14), (40, 12), (23, 31)])
@pytest.mark.parametrize("channels", [1, 3])
def test_weighted_interpolations(kernel: str, height: int, width: int, channels: int) -> None:
    pixels = picture(23, 31, channels)
    exact = np.einsum(
        "hs,wt,stc->hwc", weights(23, height, kernel), weights(31, width, kernel), pixels.astype(np.float64)
    )
    operation = make(
        "resize", channels, resize_width=width, resize_height=height, interpolation_type=f"{kernel}_INTERPOLATION"
    )
    np.testing.assert_allclose(result(operation, pixels, as_float=True), exact, atol=0.01)
    assert_rounded(result(operation, pixels), exact, error=0.01)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("source_width", "width"), [(40_000, 40), (40, 40_000), (20_000, 30_000)])
def test_weights_of_long_sides(kernel: str, source_width: int, width: int) -> None:
    """They are computed in blocks, or are a million in a row."""
    pixels = np.random.default_rng(5).integers(0, 256, (1, source_width, 1), np.uint8)
    operation = make("resize", 1, resize_width=width, resize_height=1, interpolation_type=kernel)
    shown = slice(0, width, max(1, width // 50))
    exact = [weights_of(source_width, width, kernel, place) for place in range(width)[shown]]
    levels = [sum(share * float(pixels[0, source, 0]) for source, share in shares) for shares in exact]
    given = result(operation, pixels, as_float=True)
    # Positions have 32 bits, which leave some hundredths of a pixel on a long side.
    np.testing.assert_allclose(given[0, shown, 0], levels, atol=1.0)
    np.testing.assert_array_equal(result(operation, pixels), np.clip(np.rint(given), 0, 255))


@pytest.mark.parametrize("kernel", [*KERNELS, "LINEAR"])
def test_what_is_made_of_long_sides_is_not_kept_for_many_of_them(kernel: str) -> None:
    """With a million pixels a side each would take 60 MB."""
    pixels = np.zeros((1, 24_000, 1), np.uint8)
    kept = []
    tracemalloc.start()
    try:
        for width in range(20_000, 20_004):
            operation = make("resize", 1, resize_width=width, resize_height=1, interpolation_type=kernel)
            result(operation, pixels)
            kept.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert kept[-1] < 3 * kept[0]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("height", "width"), [(37, 21), (50, 140), (100, 100), (9, 400)])
def test_bytes_are_the_levels_rounded(kernel: str, height: int, width: int) -> None:
    random = np.random.default_rng([height, *kernel.encode()])
    noise = random.integers(0, 256, (100, 140, 3), dtype=np.uint8)
    # Two levels, whose weighted sums often lie halfway between two whole numbers.
    for pixels in (noise, noise // 128 * 255, picture(100, 140)):
        size = {"resize_width": width, "resize_height": height}
        operation = make("resize", 3, **size, interpolation_type=f"{kernel}_INTERPOLATION")
        levels = result(operation, pixels, as_float=True)
        np.testing.assert_array_equal(result(operation, pixels), np.clip(np.rint(levels), 0, 255))


@pytest.mark.parametrize("kernel", [*KERNELS, "LINEAR", "NEAREST_NEIGHBOR"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_part_is_that_of_the_whole(kernel: str, channels: int) -> None:
    pixels = picture(97, 143, channels)
    for height, width in ((41, 59), (130, 205), (97, 70)):
        size = {"resize_width": width, "resize_height": height}
        operation = make("resize", channels, **size, interpolation_type=f"{kernel}_INTERPOLATION")
        whole = result(operation, pixels)
        for top, left in ((0, 0), (7, 5), (height - 30, width - 50)):
            image = operation.run(Image.whole(pixels), as_float=False)
            # The second time the part is cut out of the whole.
            for _ in range(2):
                np.testing.assert_array_equal(image.part(top, left, 30, 50), whole[top : top + 30, left : left + 50])


def test_a_part_of_what_is_mirrored_and_normalised() -> None:
    pixels, keys = picture(97, 143), {"dest_width": 61, "dest_height": 44, "mean": [90], "std_dev": [0.7], "mirror": 1}
    operation = make("ResizeMirrorNormalize", **keys)
    image = operation.run(Image.whole(pixels), as_float=False)
    np.testing.assert_array_equal(image.part(5, 9, 30, 52), result(operation, pixels)[5:35, 9:61])


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_even_picture_stays_even(kernel: str) -> None:
    pixels = np.full((13, 19, 3), 201, dtype=np.uint8)
    operation = make("resize", resize_width=8, resize_height=30, interpolation_type=kernel)
    assert (result(operation, pixels) == 201).all()


PIXELS = picture(23, 31)


@pytest.mark.parametrize(
    "size",
    [{"crop": [10, 14]}, {"crop": [1, 10, 14]}, {"crop_h": 10, "crop_w": 14}, {"crop": [], "crop_h": 10, "crop_w": 14}],
)
@pytest.mark.parametrize("as_float", [False, True])
def test_size_of_a_crop(size: dict[str, Any], as_float: bool) -> None:
    # Half of 13 rows of room is 6.5, of 17 columns 8.5: halves go to even.
    np.testing.assert_array_equal(result(make("center_crop", **size), PIXELS, as_float), PIXELS[6:16, 8:22])
    at_a_place = make("crop", **size, crop_pos_x=3.9, crop_pos_y=2)
    np.testing.assert_array_equal(result(at_a_place, PIXELS, as_float), PIXELS[2:12, 3:17])
    in_the_corner = make("crop", **size)
    np.testing.assert_array_equal(result(in_the_corner, PIXELS, as_float), PIXELS[:10, :14])
    assert make("center_crop", **size).extent(ResultExtent.whole(Extent(23, None))).size == Extent(10, None)


@pytest.mark.parametrize("name", ["crop", "center_crop", "crop_mirror_normalize"])
def test_a_crop_larger_than_the_image_is_the_image(name: str) -> None:
    operation = make(name, crop=[100, 20], **({"mirror": 0} if name == "crop_mirror_normalize" else {}))
    assert result(operation, PIXELS).shape == (23, 20, 3)
    assert operation.extent(ResultExtent.whole(Extent(23, 31))) == ResultExtent(Extent(23, 20), Extent(23, 20))


@pytest.mark.parametrize("name", ["crop", "center_crop", "crop_mirror_normalize"])
@pytest.mark.parametrize("size", [{}, {"crop": [0, 0]}, {"crop": [3, 0]}, {"crop_h": 3}, {"crop": [3, 3], "crop_w": 3}])
def test_a_crop_needs_one_size(name: str, size: dict[str, Any]) -> None:
    with pytest.raises(PipelineError, match="the size must be given in one way: by 'crop'"):
        make(name, **size)


@pytest.mark.parametrize("mirror", [0, 1, None])
@pytest.mark.parametrize("as_float", [False, True])
def test_crop_mirror_normalize_mirrors_unless_told_not_to(mirror: int | None, as_float: bool) -> None:
    ours = make(
        "crop_mirror_normalize",
        crop=[10, 14],
        crop_pos_x=0.25,
        mean=[100, 90, 80],
        std=[0.5, 2, 1],
        **({} if mirror is None else {"mirror": mirror}),
    )
    crop = PIXELS[6:16, 4:18].astype(np.float64)
    expected = (crop - np.array([100, 90, 80])) / np.array([0.5, 2, 1])
    if mirror != 0:
        expected = expected[:, ::-1]
    if not as_float:
        expected = np.clip(np.rint(expected), 0, 255)
    np.testing.assert_allclose(result(ours, PIXELS, as_float), expected, atol=1e-3)


def test_nothing_is_normalised_unless_it_is_asked_for() -> None:
    given = result(make("crop_mirror_normalize", crop=[23, 31], mirror=0), PIXELS)
    np.testing.assert_array_equal(given, PIXELS)


@pytest.mark.parametrize("interpolation", ["LINEAR", "NEAREST_NEIGHBOR", "CUBIC"])
@pytest.mark.parametrize("as_float", [False, True])
def test_roi_resize_stretches_a_part(interpolation: str, as_float: bool) -> None:
    operation = make(
        "roi_resize",
        resize_width=12,
        resize_height=30,
        roi_w=17,
        roi_h=9,
        roi_pos_x=5.5,
        roi_pos_y=4,
        interpolation_type=interpolation,
    )
    image = operation.run(Image.whole(PIXELS), as_float=as_float)
    stretch = make("resize", resize_width=12, resize_height=30, interpolation_type=interpolation)
    np.testing.assert_array_equal(image.padded, result(stretch, PIXELS[4:13, 5:22].copy(), as_float))
    # The next operation sees as much as the part had, up to the result's size.
    assert image.valid.shape[:2] == (9, 12)
    assert operation.extent(ResultExtent.whole(Extent(23, 31))) == ResultExtent(Extent(30, 12), Extent(9, 12))
