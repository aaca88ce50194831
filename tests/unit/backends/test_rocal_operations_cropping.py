"""Crops by the names of amd.rocal's fn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.rocal_operations import make, picture, result

from rocserve.backends.rocal.image import Extent, Image, ResultExtent
from rocserve.backends.rocal.schema import PipelineError

PIXELS = picture(23, 31)


@pytest.mark.parametrize(
    "size",
    [{"crop": [10, 14]}, {"crop": [1, 10, 14]}, {"crop_h": 10, "crop_w": 14}, {"crop": [], "crop_h": 10, "crop_w": 14}],
)
@pytest.mark.parametrize("as_float", [False, True])
def test_size_of_a_crop(size: dict[str, Any], as_float: bool) -> None:
    # Of 13 rows of room half are 6.5, of 17 columns 8.5: half to even.
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


@pytest.mark.parametrize("as_float", [False, True])
def test_resize_crop_is_the_servers_crop_resize(as_float: bool) -> None:
    ours = make(
        "resize_crop",
        resize_width=12,
        resize_height=9,
        crop_area_factor=0.4,
        crop_aspect_ratio=1.2,
        x_drift=0.3,
        y_drift=0.9,
    )
    json = make(
        "CropResizeFixed",
        dest_width=12,
        dest_height=9,
        area=0.4,
        aspect_ratio=1.2,
        x_center_drift=0.3,
        y_center_drift=0.9,
    )
    np.testing.assert_array_equal(result(ours, PIXELS, as_float), result(json, PIXELS, as_float))
    assert ours.extent(ResultExtent.whole(Extent(23, 31))) == json.extent(ResultExtent.whole(Extent(23, 31)))


@pytest.mark.parametrize("mirror", [0, 1])
@pytest.mark.parametrize("as_float", [False, True])
def test_resize_crop_mirror_takes_width_for_height(mirror: int, as_float: bool) -> None:
    ours = make("resize_crop_mirror", resize_width=8, resize_height=6, crop_w=10, crop_h=20, mirror=mirror)
    json = make("ResizeCropMirrorFixed", dest_width=8, dest_height=6, crop_w=20, crop_h=10, mirror=mirror == 1)
    np.testing.assert_array_equal(result(ours, PIXELS, as_float), result(json, PIXELS, as_float))
    assert make("resize_crop_mirror", resize_width=8, resize_height=6).values["mirror"]


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
