"""Operations that cut a part out of an image, some of which normalise it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import cv2
import numpy as np

from rocserve.backends.rocal import schema
from rocserve.backends.rocal.image import Extent, Image, Pixels, PixelsError, ResultExtent, with_channels
from rocserve.backends.rocal.operations.base import (
    MIRROR,
    MIRROR_OF_FN,
    NORMALISATION,
    NORMALISATION_OF_FN,
    AmdForm,
    Call,
    Node,
    Operation,
    Tensor,
    Values,
    always,
    cut_start,
    limited,
    overhang,
    renamed,
)
from rocserve.core.datatypes import DataType

_TABLES = 64
"""Tables of normalised levels that are kept ready, of a kilobyte a channel."""


@dataclass(frozen=True, slots=True)
class PartRule:
    """The part of an image that an operation takes, by its arguments."""

    size: Callable[..., Extent]
    """Of the source's extent, as far as it is known, and the arguments."""
    start: Callable[..., tuple[int, int]]
    """Its top and left, of the source's extent, the part's, and the arguments."""
    misfit: Callable[[Values, Extent, int, int], str | None] = lambda arguments, known, height, width: None
    """See AmdForm.misfit."""

    def cut(self, image: Image, **arguments: Any) -> Pixels:
        source = image.extent.valid
        part = self.size(source, **arguments)
        height, width = part.sides
        top, left = self.start(source, part, **arguments)
        return image.valid[top : top + height, left : left + width]

    def run(self, image: Image, result: ResultExtent, as_float: bool, **arguments: Any) -> Pixels:
        return self.cut(image, **arguments)

    def extent(self, source: ResultExtent, **arguments: Any) -> ResultExtent:
        return ResultExtent.whole(self.size(source.valid, **arguments))


def _of_size(source: Extent, crop_height: int, crop_width: int, **others: Any) -> Extent:
    """A crop larger than the image is the full side."""
    return Extent(limited(crop_height, source.height), limited(crop_width, source.width))


def _at_position(source: Extent, part: Extent, crop_pos_x: float, crop_pos_y: float, **others: Any) -> tuple[int, int]:
    """In whole pixels (fractions are cut off); one at or beyond the image's side counts as 0.

    Where the crop would reach out of the image it is moved back into it; rocAL reads other memory there.
    """
    (height, width), (part_height, part_width) = source.sides, part.sides
    return cut_start(crop_pos_y, part_height, height), cut_start(crop_pos_x, part_width, width)


def _at_centre(source: Extent, part: Extent, **others: Any) -> tuple[int, int]:
    """Half to even, as rocAL rounds."""
    (height, width), (part_height, part_width) = source.sides, part.sides
    return round((height - part_height) / 2), round((width - part_width) / 2)


def _at_fraction(source: Extent, part: Extent, crop_pos_x: float, crop_pos_y: float, **others: Any) -> tuple[int, int]:
    """Of the room that the crop leaves: 0 = left or top, 0.5 = centre, 1 = right or bottom."""
    (height, width), (part_height, part_width) = source.sides, part.sides
    return _fraction_of(height - part_height, crop_pos_y), _fraction_of(width - part_width, crop_pos_x)


def _fraction_of(room: int, fraction: float) -> int:
    """Half to even, of a product in 32 bits."""
    return int(np.rint(np.float32(fraction) * np.float32(room)))


def _overhang(arguments: Values, known: Extent, height: int, width: int) -> str | None:
    crop_height, crop_width, x, y = (
        arguments[key] for key in ("crop_height", "crop_width", "crop_pos_x", "crop_pos_y")
    )
    return overhang("width", x, crop_width, known.width, width) or overhang(
        "height", y, crop_height, known.height, height
    )


BY_POSITION = PartRule(_of_size, _at_position, _overhang)
_CENTRAL = PartRule(_of_size, _at_centre)
_BY_FRACTION = PartRule(_of_size, _at_fraction)


def _by_one_size(crop: tuple[int, ...], crop_h: int, crop_w: int, **others: Any) -> Values:
    """The size by `crop`, [height, width] or [depth, height, width], or by the crop's sides."""
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
    starts = cut_start(x, width, valid.width), cut_start(y, height, valid.height)
    keywords = {"crop": (height, width), "crop_pos_x": float(starts[0]), "crop_pos_y": float(starts[1])}
    return node.call("crop", keywords)


_CUTTING = AmdForm(make=_amd_cut, misfit=BY_POSITION.misfit)


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
    if part.shape[:2] == result.size.sides and part.size:
        return part
    if out_of_bounds_policy != "PAD":
        raise PixelsError(
            f"slice from {list(anchor)} of {list(shape)} stands out of the image's"
            f' {list(source.shape[:2])} (height, width); "out_of_bounds_policy" may be PAD or TRIMTOSHAPE'
        )
    filling = fill_values[0] if as_float else np.clip(np.rint(fill_values[0]), 0, 255)
    pixels: Pixels = np.full((*shape, source.shape[2]), filling, dtype=np.float32 if as_float else np.uint8)
    pixels[: part.shape[0], : part.shape[1]] = part
    return pixels


def _slice_extent(
    source: ResultExtent, anchor: tuple[int, int], shape: tuple[int, int], out_of_bounds_policy: str, **others: Any
) -> ResultExtent:
    if out_of_bounds_policy != "TRIMTOSHAPE":
        return ResultExtent.whole(Extent(*shape))
    sides = zip(anchor, shape, (source.valid.height, source.valid.width), strict=True)
    trimmed = (None if side is None else max(min(length, side - start), 0) for start, length, side in sides)
    return ResultExtent.whole(Extent(*trimmed))


def _amd_slice(node: Node, call: Call) -> Tensor:
    (top, left), shape = call.arguments["anchor"], call.arguments["shape"]
    return node.call("crop", {"crop": shape, "crop_pos_x": float(left), "crop_pos_y": float(top)})


def _slice_refusal(arguments: Values, source: ResultExtent) -> str | None:
    # fn.slice takes its anchor from another tensor only; a slice that stays in the image is a crop.
    policy = arguments["out_of_bounds_policy"]
    if policy == "ERROR":
        return None
    return (
        f'rocAL takes no written anchor; with "out_of_bounds_policy": "ERROR", not "{policy}", it can be done as a crop'
    )


def _slice_misfit(arguments: Values, known: Extent, height: int, width: int) -> str | None:
    anchor, shape = arguments["anchor"], arguments["shape"]
    if anchor[0] + shape[0] <= height and anchor[1] + shape[1] <= width:
        return None
    return f"slice from {list(anchor)} of {list(shape)} stands out of the image's {[height, width]} (height, width)"


def _cut_and_normalise(
    image: Image,
    result: ResultExtent,
    as_float: bool,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    mirror: bool,
    **crop: Any,
) -> Pixels:
    """level / std - mean / std for each channel."""
    part = _BY_FRACTION.cut(image, **crop)
    if mirror:
        part = with_channels(cast(Pixels, cv2.flip(part, 1)))
    return with_channels(cast(Pixels, cv2.LUT(part, _normalised_levels(mean, std, as_float))))


@lru_cache(_TABLES)
def _normalised_levels(mean: tuple[float, ...], std: tuple[float, ...], as_float: bool) -> Pixels:
    """The result for each of the 256 levels and each channel, 1 x 256 x channels."""
    # In 32 bits with one fused multiplication and addition, as RPP has it: the product is exact in 64 bits.
    factor = np.float32(1) / np.asarray(std, dtype=np.float32)
    offset = -(np.asarray(mean, dtype=np.float32) * factor)
    levels = np.arange(256, dtype=np.float64)[:, np.newaxis]
    table = (levels * factor + offset).astype(np.float32)[np.newaxis]
    return table if as_float else np.clip(np.rint(table), 0, 255).astype(np.uint8)


def _amd_cut_and_normalise(node: Node, call: Call) -> Tensor:
    keywords = {key: call.arguments[key] for key in ("crop_pos_x", "crop_pos_y", "mean", "std", "mirror")}
    crop = (call.arguments["crop_height"], call.arguments["crop_width"])
    return node.call("crop_mirror_normalize", {"crop": crop, **keywords})


_NORMALISING = AmdForm(make=_amd_cut_and_normalise, gives_floats=always, gives_layouts=True)


_CROP = {"crop_width": schema.positive_size, "crop_height": schema.positive_size}
_CROP_OF_FN = {
    "crop": schema.list_of(schema.size, (0, 2, 3), "sizes in pixels, [height, width]")(()),
    "crop_h": schema.size(0),
    "crop_w": schema.size(0),
}
_DEPTH_OF_FN = {"crop_d": schema.positive_size(1)}

OPERATIONS = (
    Operation(
        "CropFixed",
        {**_CROP, "crop_pos_x": schema.pixel_position, "crop_pos_y": schema.pixel_position},
        BY_POSITION.run,
        BY_POSITION.extent,
        ignored_keys={"crop_depth": schema.positive_size(1), "crop_pos_z": schema.number(0)},
        amd=_CUTTING,
    ),
    Operation(
        "crop",
        {**_CROP_OF_FN, "crop_pos_x": schema.pixel_position(0.5), "crop_pos_y": schema.pixel_position(0.5)},
        BY_POSITION.run,
        BY_POSITION.extent,
        _by_one_size,
        ignored_keys={**_DEPTH_OF_FN, "crop_pos_z": schema.number(0.5)},
        amd=_CUTTING,
    ),
    Operation("center_crop", _CROP_OF_FN, _CENTRAL.run, _CENTRAL.extent, _by_one_size, ignored_keys=_DEPTH_OF_FN),
    Operation(
        "slice",
        {
            "anchor": schema.list_of(schema.size, (2,), "places in pixels, [top, left]"),
            "shape": schema.list_of(schema.positive_size, (2,), "sizes in pixels, [height, width]"),
            "fill_values": schema.list_of(schema.number, (1,), "number")((0.0,)),
            # The part outside of the image is an error, the fill value, or left away.
            "out_of_bounds_policy": schema.choice("ERROR", "PAD", "TRIMTOSHAPE")("ERROR"),
        },
        _slice,
        _slice_extent,
        default_datatype=DataType.FP32,
        amd=AmdForm(make=_amd_slice, refusal=_slice_refusal, misfit=_slice_misfit),
    ),
    Operation(
        "CropMirrorNormalize",
        {**_CROP, "start_x": schema.fraction(0.5), "start_y": schema.fraction(0.5), **NORMALISATION, **MIRROR},
        _cut_and_normalise,
        _BY_FRACTION.extent,
        renamed(start_x="crop_pos_x", start_y="crop_pos_y", std_dev="std"),
        ignored_keys={"crop_depth": schema.size(1), "start_z": schema.number(0)},
        channel_keys=("mean", "std_dev"),
        normalises=True,
        amd=_NORMALISING,
    ),
    Operation(
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
        amd=_NORMALISING,
    ),
)
