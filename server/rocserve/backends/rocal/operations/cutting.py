"""Declares operations that crop an image and may normalise or resize it.

The valid part of a stretched crop is at most as large as the crop was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

import cv2
import numpy as np

from rocserve.backends.rocal import schema
from rocserve.backends.rocal.image import Extent, Image, Pixels, ResultExtent, with_channels
from rocserve.backends.rocal.operations.base import AmdForm, Call, Node, Operation, Tensor, Values
from rocserve.backends.rocal.operations.resizing import (
    INTERPOLATION,
    MIRROR,
    MIRROR_OF_FN,
    NORMALISATION,
    NORMALISATION_OF_FN,
    resize_refusal,
    resized,
)
from rocserve.backends.rocal.schema import Key
from rocserve.core.datatypes import DataType


def _limited(wanted: int, available: int | None) -> int | None:
    """Return a side of a crop: the wanted size, at most the available one; None = unknown."""
    return None if available is None else min(wanted, available)


@dataclass(frozen=True, slots=True)
class _PartRule:
    """Determines the part of an image that an operation takes."""

    find: Callable[..., tuple[int, int, Extent]]
    """Takes the source's extent, as far as it is known, and the arguments. Returns the part's top, left and size."""
    image_refusal: Callable[[Values, Extent, int, int], str | None] = lambda arguments, known, height, width: None

    def cut(self, image: Image, **arguments: Any) -> Pixels:
        top, left, size = self.find(image.extent.valid, **arguments)
        height, width = size.sides
        return image.part(top, left, height, width)

    def run(self, image: Image, result: ResultExtent, as_float: bool, **arguments: Any) -> Pixels:
        return self.cut(image, **arguments)

    def extent(self, source: ResultExtent, **arguments: Any) -> ResultExtent:
        return ResultExtent.whole(self.find(source.valid, **arguments)[2])


def _cut_start(position: float, size: int, available: int | None) -> int:
    """Return the start of a crop along one side, moved back into the side if the side is known. Fractions are
    truncated, and a position at or beyond the side's end counts as 0. rocAL crops at one position for all images,
    and reads other memory if the crop exceeds an image. If the image's size is known, rocAL gets this start, like
    the CPU engine. Otherwise `_overhang` refuses such an image."""
    start = int(position)
    if available is None:
        return start
    return min(start if start < available else 0, available - min(size, available))


def _overhang(arguments: Values, known: Extent, height: int, width: int) -> str | None:
    for name, position, size, known_side, available in (
        ("width", arguments["crop_pos_x"], arguments["crop_width"], known.width, width),
        ("height", arguments["crop_pos_y"], arguments["crop_height"], known.height, height),
    ):
        start = _cut_start(position, size, known_side)
        end = start + min(size, available)
        if start < available < end:
            return (
                f"the crop from {start} to {end} exceeds its {name} of {available} pixels, where rocAL would read other"
                " memory; resize to a fixed size before, or use the CPU engine"
            )
    return None


def _crop(start_of: Callable[[float, int, int], int]) -> _PartRule:
    """Return a rule for a crop of the wanted size, at most the full side. `start_of` takes the wanted position, the
    crop's length and the side's length, and returns the crop's start."""

    def find(
        source: Extent, crop_height: int, crop_width: int, crop_pos_x: float = 0, crop_pos_y: float = 0, **others: Any
    ) -> tuple[int, int, Extent]:
        top, left = (
            0 if side is None else start_of(position, min(length, side), side)
            for position, length, side in (
                (crop_pos_y, crop_height, source.height),
                (crop_pos_x, crop_width, source.width),
            )
        )
        return top, left, Extent(_limited(crop_height, source.height), _limited(crop_width, source.width))

    return _PartRule(find)


_BY_POSITION = replace(_crop(_cut_start), image_refusal=_overhang)
# Both round half to even, as rocAL does. A fraction, in 32 bits, is of the room that the crop leaves: 0 = left or top,
# 0.5 = centre, 1 = right or bottom.
_CENTRAL = _crop(lambda position, length, side: round((side - length) / 2))
_BY_FRACTION = _crop(lambda fraction, length, side: int(np.rint(np.float32(fraction) * np.float32(side - length))))


def _by_one_size(crop: tuple[int, ...], crop_h: int, crop_w: int, **others: Any) -> Values:
    """Return the size from `crop`, [height, width] or [depth, height, width], or from `crop_h` and `crop_w`."""
    height, width = (crop[-2], crop[-1]) if any(crop) else (crop_h, crop_w)
    if any(crop) == any((crop_h, crop_w)) or not height or not width:
        raise ValueError(
            "the size must be given in one way: by 'crop', [height, width], or by 'crop_h' and 'crop_w', not by"
            f" crop {list(crop)}, crop_h {crop_h} and crop_w {crop_w}"
        )
    return {"crop_height": height, "crop_width": width, **others}


def _amd_cut(node: Node, call: Call) -> Tensor:
    height, width, x, y = (call.arguments[key] for key in ("crop_height", "crop_width", "crop_pos_x", "crop_pos_y"))
    valid = node.source.valid
    starts = _cut_start(x, width, valid.width), _cut_start(y, height, valid.height)
    keywords = {"crop": (height, width), "crop_pos_x": float(starts[0]), "crop_pos_y": float(starts[1])}
    return node.call("crop", keywords)


def _slice(
    image: Image,
    result: ResultExtent,
    as_float: bool,
    anchor: tuple[int, int],
    shape: tuple[int, int],
    fill_values: tuple[float, ...],
    out_of_bounds_policy: str,
) -> Pixels:
    source = image.valid
    top, left = anchor
    part = source[top : top + shape[0], left : left + shape[1]]
    if part.shape[:2] == result.size.sides:
        return part
    filling = fill_values[0] if as_float else np.clip(np.rint(fill_values[0]), 0, 255)
    pixels: Pixels = np.full((*shape, source.shape[2]), filling, dtype=np.float32 if as_float else np.uint8)
    pixels[: part.shape[0], : part.shape[1]] = part
    return pixels


def _slice_extent(
    source: ResultExtent, anchor: tuple[int, int], shape: tuple[int, int], out_of_bounds_policy: str, **others: Any
) -> ResultExtent:
    if out_of_bounds_policy == "PAD":
        return ResultExtent.whole(Extent(*shape))
    is_trimmed = out_of_bounds_policy == "TRIMTOSHAPE"
    sizes: list[int | None] = []
    for start, length, side in zip(anchor, shape, (source.valid.height, source.valid.width), strict=True):
        if side is not None and start + (1 if is_trimmed else length) > side:
            sides = f"[{source.valid.height or '?'}, {source.valid.width or '?'}]"
            raise ValueError(
                f"slice from {list(anchor)} of {list(shape)} exceeds the image's {sides} (height, width);"
                f' "out_of_bounds_policy" may be PAD{"" if is_trimmed else " or TRIMTOSHAPE"}'
            )
        sizes.append(length if not is_trimmed else None if side is None else min(length, side - start))
    return ResultExtent.whole(Extent(*sizes))


def _amd_slice(node: Node, call: Call) -> Tensor:
    (top, left), shape = call.arguments["anchor"], call.arguments["shape"]
    return node.call("crop", {"crop": shape, "crop_pos_x": float(left), "crop_pos_y": float(top)})


def _slice_refusal(arguments: Values, source: ResultExtent) -> str | None:
    # fn.slice takes its anchor only from another tensor. A slice within the image is equal to a crop.
    policy = arguments["out_of_bounds_policy"]
    if policy == "ERROR":
        return None
    return (
        f'rocAL takes no written anchor; with "out_of_bounds_policy": "ERROR", not "{policy}", it can be done as a crop'
    )


def _cut_and_normalise(
    image: Image,
    result: ResultExtent,
    as_float: bool,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    mirror: bool,
    **crop: Any,
) -> Pixels:
    """Return level / std - mean / std for each channel."""
    part = _BY_FRACTION.cut(image, **crop)
    if mirror:
        part = with_channels(cast(Pixels, cv2.flip(part, 1)))
    # OpenCV's lookup is faster with one table per channel than with three in one, and most outputs are planes.
    tables = _normalised_levels(mean, std, as_float)
    planes = np.empty((part.shape[2], *part.shape[:2]), tables.dtype)
    for channel, table, plane in zip(cv2.split(part), tables, planes, strict=True):
        cv2.LUT(channel, table, plane)
    return planes.transpose(1, 2, 0)


@lru_cache
def _normalised_levels(mean: tuple[float, ...], std: tuple[float, ...], as_float: bool) -> Pixels:
    """Return the result for each of the 256 levels, channels x 256."""
    # In 32 bits with one fused multiply-add, as in RPP; the product is exact in 64 bits.
    factor = np.float32(1) / np.asarray(std, dtype=np.float32)
    offset = -(np.asarray(mean, dtype=np.float32) * factor)
    table = (factor[:, np.newaxis] * np.arange(256, dtype=np.float64) + offset[:, np.newaxis]).astype(np.float32)
    return table if as_float else np.clip(np.rint(table), 0, 255).astype(np.uint8)


def _amd_cut_and_normalise(node: Node, call: Call) -> Tensor:
    keywords = dict(call.arguments)
    crop = keywords.pop("crop_height"), keywords.pop("crop_width")
    return node.call("crop_mirror_normalize", {"crop": crop, **keywords})


_NARROWEST, _WIDEST = 0.75, 1.333
"""Bounds of the aspect ratio if the wanted part does not fit."""


def _area(
    source: Extent,
    crop_area_factor: float,
    crop_aspect_ratio: float,
    x_drift: float,
    y_drift: float,
    **others: float,
) -> tuple[int, int, Extent]:
    """Return a part by its share of the image's area, and its aspect ratio (width / height). The drifts are
    fractions of the room that the part leaves. If the part does not fit, the result is the largest central part with
    an aspect ratio from 0.75 to 1.333."""
    if not source.is_known:
        return 0, 0, Extent(None, None)
    image_height, image_width = source.sides
    target = crop_area_factor * image_height * image_width
    width = int(math.sqrt(target * crop_aspect_ratio))
    height = int(math.sqrt(target / crop_aspect_ratio))
    if 0 < width < image_width and 0 < height < image_height:
        return int(y_drift * (image_height - height)), int(x_drift * (image_width - width)), Extent(height, width)
    aspect_ratio = image_width / image_height
    width, height = image_width, image_height
    if aspect_ratio < _NARROWEST:
        height = int(image_width / _NARROWEST)
    elif aspect_ratio > _WIDEST:
        width = int(image_height * _WIDEST)
    return (image_height - height) // 2, (image_width - width) // 2, Extent(height, width)


def _area_refusal(arguments: Values, known: Extent, height: int, width: int) -> str | None:
    target, aspect_ratio = arguments["crop_area_factor"] * height * width, arguments["crop_aspect_ratio"]
    part_width, part_height = math.sqrt(target * aspect_ratio), math.sqrt(target / aspect_ratio)
    return resize_refusal(min(part_width, width), min(part_height, height), arguments["resize_width"])


def _corner(source: Extent, crop_w: int, crop_h: int, **others: Any) -> tuple[int, int, Extent]:
    """Return the top left part: whatever the names say, rocAL crops first. A side of 0 or too large = the full one."""
    sides = ((crop_h, source.height), (crop_w, source.width))
    return 0, 0, Extent(*(_limited(wanted, side) if wanted else side for wanted, side in sides))


def _amd_resize_corner(node: Node, call: Call) -> Tensor:
    # fn.resize_crop_mirror is not used, because it passes the crop's sides in the wrong order.
    native = node.binding.native
    width, height, crop_w, crop_h, mirror = (
        call.arguments[key] for key in ("resize_width", "resize_height", "crop_w", "crop_h", "mirror")
    )
    parameter = native.createIntParameter(int(mirror))
    return native.resizeCropMirrorFixed(
        node.handle, node.images[0], width, height, False, crop_h, crop_w, parameter, node.layout, node.datatype
    )


def _roi(roi_w: int, roi_h: int, roi_pos_x: float, roi_pos_y: float, **others: Any) -> Values:
    return {"crop_width": roi_w, "crop_height": roi_h, "crop_pos_x": roi_pos_x, "crop_pos_y": roi_pos_y, **others}


def _amd_resize_roi(node: Node, call: Call) -> Tensor:
    keywords, valid = call.keywords, node.source.valid
    starts = {
        "roi_pos_x": float(_cut_start(keywords["roi_pos_x"], keywords["roi_w"], valid.width)),
        "roi_pos_y": float(_cut_start(keywords["roi_pos_y"], keywords["roi_h"], valid.height)),
    }
    return node.call("roi_resize", {**keywords, **starts})


def _stretching(
    name: str,
    keys: Mapping[str, Key],
    rule: _PartRule,
    make: Callable[[Node, Call], Tensor] | None = None,
    **options: Any,
) -> Operation:
    """Declare an operation that stretches a part to `resize_width` x `resize_height`. Its other arguments are the
    rule's and those of `resized`. `make` adds the operation to rocAL's graph if a call of fn is not enough."""

    def run(image: Image, result: ResultExtent, as_float: bool, **arguments: Any) -> Pixels:
        return resized(rule.cut(image, **arguments), result.size, as_float, **arguments)

    def extent(source: ResultExtent, resize_width: int, resize_height: int, **arguments: Any) -> ResultExtent:
        part = rule.find(source.valid, **arguments)[2]
        valid = Extent(_limited(resize_height, part.height), _limited(resize_width, part.width))
        return ResultExtent(Extent(resize_height, resize_width), valid)

    def image_refusal(arguments: Values, known: Extent, height: int, width: int) -> str | None:
        part_height, part_width = rule.find(Extent(height, width), **arguments)[2].sides
        beside = resize_refusal(part_width, part_height, arguments["resize_width"])
        return rule.image_refusal(arguments, known, height, width) or beside

    amd = AmdForm(make=make, gives_layouts=True, fills_result=True, image_refusal=image_refusal)
    return Operation(
        name,
        {"resize_width": schema.positive_size, "resize_height": schema.positive_size, **keys},
        run,
        extent,
        amd=amd,
        **options,
    )


_DESTINATION = {
    "dest_width": ("resize_width", schema.positive_size),
    "dest_height": ("resize_height", schema.positive_size),
}
_CROP_OF_FN = {
    "crop": schema.list_of(schema.size, (0, 2, 3), "sizes in pixels, [height, width]")(()),
    "crop_h": schema.size(0),
    "crop_w": schema.size(0),
}
_CROP = {"crop_width": ("crop_w", schema.positive_size), "crop_height": ("crop_h", schema.positive_size)}
_DEPTH_OF_FN = {"crop_d": schema.positive_size(1)}

_CUT = Operation(
    "crop",
    {**_CROP_OF_FN, "crop_pos_x": schema.pixel_position(0.5), "crop_pos_y": schema.pixel_position(0.5)},
    _BY_POSITION.run,
    _BY_POSITION.extent,
    _by_one_size,
    ignored_keys={**_DEPTH_OF_FN, "crop_pos_z": schema.number(0.5)},
    amd=AmdForm(make=_amd_cut, image_refusal=_overhang),
)
_CUT_AND_NORMALISE = Operation(
    "crop_mirror_normalize",
    {
        **_CROP_OF_FN,
        "crop_pos_x": schema.fraction(0.5),
        "crop_pos_y": schema.fraction(0.5),
        **NORMALISATION_OF_FN,
        **MIRROR_OF_FN,
    },
    _cut_and_normalise,
    _BY_FRACTION.extent,
    _by_one_size,
    channel_keys=("mean", "std"),
    normalises=True,
    amd=AmdForm(make=_amd_cut_and_normalise, gives_floats=lambda arguments: True, gives_layouts=True),
)
_RESIZE_AREA = _stretching(
    "resize_crop",
    {
        # These keys are required, because rocAL uses random values instead of defaults.
        "crop_area_factor": schema.area,
        "crop_aspect_ratio": schema.positive_number,
        "x_drift": schema.fraction,
        "y_drift": schema.fraction,
    },
    _PartRule(_area, _area_refusal),
)
_RESIZE_CORNER = _stretching(
    "resize_crop_mirror",
    {"crop_w": schema.size(0), "crop_h": schema.size(0), **MIRROR_OF_FN},
    _PartRule(_corner),
    _amd_resize_corner,
    # rocAL's Python module passes the crop's sides in the wrong order.
    arguments=lambda crop_w, crop_h, **others: {"crop_w": crop_h, "crop_h": crop_w, **others},
)

OPERATIONS = (
    _CUT.alias(
        "CropFixed",
        {
            **_CROP,
            "crop_pos_x": ("crop_pos_x", schema.pixel_position),
            "crop_pos_y": ("crop_pos_y", schema.pixel_position),
        },
        ignored_keys={"crop_depth": schema.positive_size(1), "crop_pos_z": schema.number(0)},
    ),
    _CUT,
    Operation("center_crop", _CROP_OF_FN, _CENTRAL.run, _CENTRAL.extent, _by_one_size, ignored_keys=_DEPTH_OF_FN),
    Operation(
        "slice",
        {
            "anchor": schema.list_of(schema.size, (2,), "places in pixels, [top, left]"),
            "shape": schema.list_of(schema.positive_size, (2,), "sizes in pixels, [height, width]"),
            "fill_values": schema.list_of(schema.number, (1,), "number")((0.0,)),
            # What to do with the part outside of the image: an error, the fill value, or leave it out.
            "out_of_bounds_policy": schema.choice("ERROR", "PAD", "TRIMTOSHAPE")("ERROR"),
        },
        _slice,
        _slice_extent,
        default_datatype=DataType.FP32,
        amd=AmdForm(make=_amd_slice, refusal=_slice_refusal),
    ),
    _CUT_AND_NORMALISE.alias(
        "CropMirrorNormalize",
        {
            **_CROP,
            "start_x": ("crop_pos_x", schema.fraction(0.5)),
            "start_y": ("crop_pos_y", schema.fraction(0.5)),
            **NORMALISATION,
            **MIRROR,
        },
        ignored_keys={"crop_depth": schema.size(1), "start_z": schema.number(0)},
    ),
    _CUT_AND_NORMALISE,
    _RESIZE_AREA.alias(
        # It has no Python binding, but equals resize_crop with constant parameters.
        "CropResizeFixed",
        {
            **_DESTINATION,
            "area": ("crop_area_factor", schema.area),
            "aspect_ratio": ("crop_aspect_ratio", schema.positive_number),
            "x_center_drift": ("x_drift", schema.fraction),
            "y_center_drift": ("y_drift", schema.fraction),
        },
    ),
    _RESIZE_AREA,
    _RESIZE_CORNER.alias(
        "ResizeCropMirrorFixed",
        {**_DESTINATION, "crop_w": ("crop_h", schema.size), "crop_h": ("crop_w", schema.size), **MIRROR},
    ),
    _RESIZE_CORNER,
    _stretching(
        "roi_resize",
        {
            "roi_w": schema.positive_size,
            "roi_h": schema.positive_size,
            "roi_pos_x": schema.pixel_position,
            "roi_pos_y": schema.pixel_position,
            **INTERPOLATION,
        },
        _BY_POSITION,
        _amd_resize_roi,
        arguments=_roi,
    ),
)
