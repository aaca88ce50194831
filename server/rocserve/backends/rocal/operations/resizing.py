"""Operations that resize an image, cut a part out of it, or do both: AMD Inference Server's by its JSON, and those of
amd.rocal's fn.

Where the latter are given a longer or a shorter side, their result's size is the largest that any image could get, so
that it is the same for all; the rest is zeros and not seen by the next operation. What cuts a part out and stretches it
hands on as much as the part had.
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
from rocserve.backends.rocal.image import Extent, Image, Pixels, PixelsError, ResultExtent, with_channels
from rocserve.backends.rocal.operations.base import AmdForm, Call, Node, Operation, Tensor, Values
from rocserve.backends.rocal.sampling import (
    Scaling,
    resize_by_weights,
    resize_by_weights_to_bytes,
    resize_nearest,
    resize_to_bytes,
    resize_to_floats,
)
from rocserve.backends.rocal.schema import Key
from rocserve.core.datatypes import DataType

_LARGEST_ASPECT_RATIO = 6
"""How much longer a side that is not given may become than the one that is."""

_FETCHED_COLUMNS = 8

_TABLES = 64
"""Tables of normalised levels that are kept ready, of a kilobyte a channel."""


def _renamed(**names: str) -> Callable[..., Values]:
    """Arguments that are the keys' values under other names."""
    return lambda **values: {names.get(key, key): value for key, value in values.items()}


def _limited(wanted: int, available: int | None) -> int | None:
    """A side of a crop: as asked for, at most as available; None where that is not known."""
    return None if available is None else min(wanted, available)


def _reads_beside(width: float, height: float, resized_width: int) -> str | None:
    """Why a part of an image cannot be resized by RPP's kernels; None = it can.

    They step back from the last row and column without looking whether there is one before, and fetch 8 columns at
    once.
    """
    if width < 2 or height < 2:
        return (
            f"rocAL reads other memory where it resizes less than two rows or columns, here {int(width)}x{int(height)}"
            " pixels (width x height)"
        )
    if width < resized_width and width <= _FETCHED_COLUMNS:
        return f"rocAL may read other memory where it resizes {int(width)} columns to {resized_width}"
    return None


def _resized(
    pixels: Pixels,
    target: Extent,
    as_float: bool,
    interpolation_type: str = "LINEAR",
    mirror: bool = False,
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
    **others: Any,
) -> Pixels:
    """UINT8, or FP32 neither rounded nor clamped.

    LINEAR is between pixels and without antialiasing; it alone may be mirrored left to right, with
    (level - mean) / std for each channel after that.
    """
    height, width = target.sides
    if interpolation_type == "LINEAR":
        stretch = resize_to_floats if as_float else resize_to_bytes
        return stretch(pixels, width, height, mirror, Scaling.of(mean, std) if mean else None)
    if interpolation_type == "NEAREST_NEIGHBOR":
        return resize_nearest(pixels, width, height)
    by_weights = resize_by_weights if as_float else resize_by_weights_to_bytes
    return by_weights(pixels, width, height, interpolation_type)


def _resize(image: Image, result: ResultExtent, as_float: bool, **arguments: Any) -> Pixels:
    return _resized(image.valid, result.valid, as_float, **arguments)


def _stretched_extent(source: ResultExtent, dest_width: int, dest_height: int, **normalisation: Any) -> ResultExtent:
    """A side of 0 keeps that side."""
    return ResultExtent.whole(Extent(dest_height or source.valid.height, dest_width or source.valid.width))


def _amd_resize(node: Node, keywords: Values) -> Tensor:
    if "mean" not in keywords:
        if node.datatype != node.binding.types.FLOAT:
            return node.call("resize", keywords)
        # To FP32, bilinear: fn.resize would leave the tensor unwritten.
        channels = 1 if node.is_grey else 3
        size = {key: value for key, value in keywords.items() if key != "interpolation_type"}
        keywords = {**size, "mean": (0.0,) * channels, "std": (1.0,) * channels, "mirror": False}
    return node.call("resize_mirror_normalize", keywords)


def _amd_stretch(node: Node, call: Call) -> Tensor:
    names = {"dest_width": "resize_width", "dest_height": "resize_height"}
    keywords = {names.get(key, key): value for key, value in call.arguments.items()}
    # What rocAL's C interface does by default, and AMD Inference Server with it; fn's default keeps proportions.
    return _amd_resize(node, {**keywords, "scaling_mode": "STRETCH"})


def _without_size(arguments: Values, source: ResultExtent) -> str | None:
    if arguments["dest_width"] or arguments["dest_height"]:
        return None
    return "rocAL does not resize to a dest_width and a dest_height that are both 0; give one of them"


@dataclass(frozen=True, slots=True)
class SizeRule:
    """The size of a result, as in amd.rocal's fn.

    DEFAULT and STRETCH take width and height as they are; of a side of 0 the first makes what keeps the aspect ratio,
    the second the source's side. NOT_LARGER keeps the aspect ratio and fits into the two, NOT_SMALLER covers them.
    """

    mode: str
    width: int
    height: int
    max_width: int
    """0 = any."""
    max_height: int

    def extent(self, source: ResultExtent) -> ResultExtent:
        largest = self.largest(source.size)
        if source.valid.is_known:
            return ResultExtent(largest, Extent(*self.target(*source.valid.sides, largest)))
        # Without a longest size the sides that are given are kept to the pixel.
        exact = self.mode == "DEFAULT" and self.width and self.height and not self.max_width and not self.max_height
        return ResultExtent(largest, Extent(self.height, self.width) if exact else Extent(None, None))

    def largest(self, source: Extent) -> Extent:
        """The size of the result; a side that is None comes from a source of unknown size."""
        width, height = self.width, self.height
        widest: int | None
        highest: int | None
        if self.mode == "STRETCH":
            widest, highest = width or source.width, height or source.height
        elif self.mode == "NOT_SMALLER":
            widest, highest = (width or height) * _LARGEST_ASPECT_RATIO, (height or width) * _LARGEST_ASPECT_RATIO
        else:
            widest, highest = width or height * _LARGEST_ASPECT_RATIO, height or width * _LARGEST_ASPECT_RATIO
        return Extent(self.max_height or highest, self.max_width or widest)

    def target(self, source_height: int, source_width: int, largest: Extent) -> tuple[int, int]:
        """Height and width for an image."""
        if self.mode == "STRETCH":
            width, height = self.width or source_width, self.height or source_height
        elif self.mode == "DEFAULT":
            width = self.width or _scaled(source_width, np.float32(self.height) / np.float32(source_height))
            height = self.height or _scaled(source_height, np.float32(self.width) / np.float32(source_width))
        else:
            by_width = np.float32(self.width) / np.float32(source_width)
            by_height = np.float32(self.height) / np.float32(source_height)
            scale = max(by_width, by_height)
            if self.mode == "NOT_LARGER" and self.width and self.height:
                scale = min(by_width, by_height)
            for limit, size in ((self.max_width, source_width), (self.max_height, source_height)):
                if limit:
                    scale = min(scale, np.float32(limit) / np.float32(size))
            width = self.width if self.width and by_width == scale else _scaled(source_width, scale)
            height = self.height if self.height and by_height == scale else _scaled(source_height, scale)
        most_high, most_wide = largest.sides
        return max(min(height, most_high), 1), max(min(width, most_wide), 1)

    def misfit(self, height: int, width: int) -> str | None:
        return _reads_beside(width, height, self.target(height, width, self.largest(Extent(height, width)))[1])


def _scaled(size: int, scale: np.float32) -> int:
    """Half rounded up."""
    return int(np.floor(np.float64(np.float32(size) * scale) + 0.5))


def _scaled_extent(source: ResultExtent, size: SizeRule, **others: Any) -> ResultExtent:
    return size.extent(source)


def _by_rule(
    resize_width: int,
    resize_height: int,
    resize_longer: int,
    resize_shorter: int,
    max_size: tuple[int, ...],
    scaling_mode: str,
    **others: Any,
) -> Values:
    """`resize_longer` and `resize_shorter` are NOT_LARGER and NOT_SMALLER for a square."""
    if [bool(resize_width or resize_height), bool(resize_longer), bool(resize_shorter)].count(True) != 1:
        sides = zip(_SIDES, (resize_width, resize_height, resize_longer, resize_shorter), strict=True)
        given = [key for key, side in sides if side]
        raise ValueError(
            "the size must be given in one way: by 'resize_width', 'resize_height' or both, by 'resize_longer', or"
            f" by 'resize_shorter', not by {' and '.join(given) or 'none of these'}"
        )
    mode = "NOT_SMALLER" if resize_shorter else "NOT_LARGER" if resize_longer else scaling_mode
    square = resize_shorter or resize_longer
    limits = (max_size[0], max_size[-1]) if max_size else (0, 0)
    return {"size": SizeRule(mode, square or resize_width, square or resize_height, *limits), **others}


@dataclass(frozen=True, slots=True)
class _PartRule:
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


def _cut_start(position: float, size: int, available: int | None) -> int:
    """Where a crop of a side begins, in whole pixels (fractions are cut off; a position at or beyond the side's end
    counts as 0), moved back into the side where that is known.

    rocAL cuts at one position for all images, and reads other memory where the crop reaches out of one. So it is given
    this start where the image's size is known, as the CPU engine takes it; else `_overhang` refuses such an image.
    """
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
                f"the crop from {start} to {end} stands out of its {name} of {available} pixels, where rocAL would read"
                " other memory; resize to a fixed size before, or use the CPU engine"
            )
    return None


def _crop(start_of: Callable[[float, int, int], int]) -> _PartRule:
    """A crop of the size that is asked for, at most the full side; `start_of` finds the start of a side by the position
    that is asked for, the crop's length and the side's."""

    def size(source: Extent, crop_height: int, crop_width: int, **others: Any) -> Extent:
        return Extent(_limited(crop_height, source.height), _limited(crop_width, source.width))

    def start(
        source: Extent, part: Extent, crop_pos_x: float = 0, crop_pos_y: float = 0, **others: Any
    ) -> tuple[int, int]:
        (height, width), (part_height, part_width) = source.sides, part.sides
        return start_of(crop_pos_y, part_height, height), start_of(crop_pos_x, part_width, width)

    return _PartRule(size, start)


_BY_POSITION = replace(_crop(_cut_start), misfit=_overhang)
# Both round half to even, as rocAL does; a fraction is that of the room that the crop leaves, in 32 bits: 0 = left or
# top, 0.5 = centre, 1 = right or bottom.
_CENTRAL = _crop(lambda position, length, side: round((side - length) / 2))
_BY_FRACTION = _crop(lambda fraction, length, side: int(np.rint(np.float32(fraction) * np.float32(side - length))))


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
    if part.shape[:2] == result.size.sides and part.size:
        return part
    if out_of_bounds_policy != "PAD":
        raise PixelsError(
            f'{_standing_out(anchor, shape, source.shape[:2])}; "out_of_bounds_policy" may be PAD or TRIMTOSHAPE'
        )
    filling = fill_values[0] if as_float else np.clip(np.rint(fill_values[0]), 0, 255)
    pixels: Pixels = np.full((*shape, source.shape[2]), filling, dtype=np.float32 if as_float else np.uint8)
    pixels[: part.shape[0], : part.shape[1]] = part
    return pixels


def _standing_out(anchor: tuple[int, int], shape: tuple[int, int], sides: tuple[int, ...]) -> str:
    return f"slice from {list(anchor)} of {list(shape)} stands out of the image's {list(sides)} (height, width)"


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
    fits = anchor[0] + shape[0] <= height and anchor[1] + shape[1] <= width
    return None if fits else _standing_out(anchor, shape, (height, width))


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
    # Channel by channel: OpenCV looks levels up faster in one table than in three, and outputs mostly are planes.
    tables = _normalised_levels(mean, std, as_float)
    planes = np.empty((part.shape[2], *part.shape[:2]), tables.dtype)
    for channel, table, plane in zip(cv2.split(part), tables, planes, strict=True):
        cv2.LUT(channel, table, plane)
    return planes.transpose(1, 2, 0)


@lru_cache(_TABLES)
def _normalised_levels(mean: tuple[float, ...], std: tuple[float, ...], as_float: bool) -> Pixels:
    """The result for each channel and each of the 256 levels, channels x 256."""
    # In 32 bits with one fused multiplication and addition, as RPP has it: the product is exact in 64 bits.
    factor = np.float32(1) / np.asarray(std, dtype=np.float32)
    offset = -(np.asarray(mean, dtype=np.float32) * factor)
    table = (factor[:, np.newaxis] * np.arange(256, dtype=np.float64) + offset[:, np.newaxis]).astype(np.float32)
    return table if as_float else np.clip(np.rint(table), 0, 255).astype(np.uint8)


def _amd_cut_and_normalise(node: Node, call: Call) -> Tensor:
    keywords = dict(call.arguments)
    crop = keywords.pop("crop_height"), keywords.pop("crop_width")
    return node.call("crop_mirror_normalize", {"crop": crop, **keywords})


_NARROWEST, _WIDEST = 0.75, 1.333
"""The bounds of the aspect ratio where the part that is asked for does not fit."""


def _area(
    source: Extent,
    crop_area_factor: float,
    crop_aspect_ratio: float,
    x_drift: float,
    y_drift: float,
    **others: float,
) -> tuple[int, int, int, int]:
    """Top, left, height and width of a part by its share of the image's area and its width over its height.

    The drifts are fractions of the room that the part leaves. Where the part does not fit, the largest central part
    with an aspect ratio from 0.75 to 1.333 is taken.
    """
    image_height, image_width = source.sides
    target = crop_area_factor * image_height * image_width
    width = int(math.sqrt(target * crop_aspect_ratio))
    height = int(math.sqrt(target / crop_aspect_ratio))
    if 0 < width < image_width and 0 < height < image_height:
        return int(y_drift * (image_height - height)), int(x_drift * (image_width - width)), height, width
    aspect_ratio = image_width / image_height
    width, height = image_width, image_height
    if aspect_ratio < _NARROWEST:
        height = int(image_width / _NARROWEST)
    elif aspect_ratio > _WIDEST:
        width = int(image_height * _WIDEST)
    return (image_height - height) // 2, (image_width - width) // 2, height, width


def _area_misfit(arguments: Values, known: Extent, height: int, width: int) -> str | None:
    target, aspect_ratio = arguments["crop_area_factor"] * height * width, arguments["crop_aspect_ratio"]
    part_width, part_height = math.sqrt(target * aspect_ratio), math.sqrt(target / aspect_ratio)
    return _reads_beside(min(part_width, width), min(part_height, height), arguments["resize_width"])


_AREA = _PartRule(
    lambda source, **area: Extent(*_area(source, **area)[2:]) if source.is_known else Extent(None, None),
    lambda source, part, **area: _area(source, **area)[:2],
    _area_misfit,
)


def _amd_resize_area(node: Node, call: Call) -> Tensor:
    # rocAL's own CropResizeFixed is not bound, but it is fn's resize_crop with constant parameters.
    return node.call("resize_crop", call.arguments)


def _corner_size(source: Extent, crop_w: int, crop_h: int, **others: Any) -> Extent:
    """0 or too large: the full side."""
    return Extent(
        _limited(crop_h, source.height) if crop_h else source.height,
        _limited(crop_w, source.width) if crop_w else source.width,
    )


# The top left: the operations' names say otherwise, but rocAL crops first.
_CORNER = _PartRule(_corner_size, lambda source, part, **others: (0, 0))


def _amd_resize_corner(node: Node, call: Call) -> Tensor:
    # Not fn.resize_crop_mirror, which hands the crop's sides on in the wrong order.
    native = node.binding.native
    width, height, crop_w, crop_h, mirror = (
        call.arguments[key] for key in ("resize_width", "resize_height", "crop_w", "crop_h", "mirror")
    )
    parameter = native.createIntParameter(int(mirror))
    return native.resizeCropMirrorFixed(
        node.handle, node.images[0], width, height, False, crop_h, crop_w, parameter, node.layout, node.datatype
    )


def _amd_resize_roi(node: Node, call: Call) -> Tensor:
    values, valid = call.values, node.source.valid
    starts = {
        "roi_pos_x": float(_cut_start(values["roi_pos_x"], values["roi_w"], valid.width)),
        "roi_pos_y": float(_cut_start(values["roi_pos_y"], values["roi_h"], valid.height)),
    }
    return node.call("roi_resize", {**values, **starts})


def _stretching(
    name: str, keys: Mapping[str, Key], rule: _PartRule, make: Callable[[Node, Call], Tensor], **options: Any
) -> Operation:
    """Declares an operation that stretches a part, with the arguments of its rule, `resize_width`, `resize_height` and
    those of `_resized`; `make` adds it to rocAL's graph."""

    def run(image: Image, result: ResultExtent, as_float: bool, **arguments: Any) -> Pixels:
        return _resized(rule.cut(image, **arguments), result.size, as_float, **arguments)

    def extent(source: ResultExtent, resize_width: int, resize_height: int, **arguments: Any) -> ResultExtent:
        part = rule.size(source.valid, **arguments)
        valid = Extent(_limited(resize_height, part.height), _limited(resize_width, part.width))
        return ResultExtent(Extent(resize_height, resize_width), valid)

    def misfit(arguments: Values, known: Extent, height: int, width: int) -> str | None:
        part_height, part_width = rule.size(Extent(height, width), **arguments).sides
        beside = _reads_beside(part_width, part_height, arguments["resize_width"])
        return rule.misfit(arguments, known, height, width) or beside

    amd = AmdForm(make=make, gives_layouts=True, fills_result=True, misfit=misfit)
    return Operation(name, keys, run, extent, amd=amd, **options)


_MIRROR = {"mirror": schema.switch(False, is_bindable=True)}
_MIRROR_OF_FN = {"mirror": schema.switch(True, is_bindable=True)}
"""rocAL's fn mirrors by default."""
_NORMALISATION = {"mean": schema.channel_numbers, "std_dev": schema.divisors}
_NORMALISATION_OF_FN = {"mean": schema.channel_numbers((0.0,)), "std": schema.divisors((1.0,))}
_INTERPOLATION = {
    "interpolation_type": schema.choice(
        "LINEAR", "NEAREST_NEIGHBOR", "CUBIC", "LANCZOS", "GAUSSIAN", "TRIANGULAR", suffix="_INTERPOLATION"
    )("LINEAR")
}
_DESTINATION = {"dest_width": schema.positive_size, "dest_height": schema.positive_size}
_DESTINATION_OF_FN = {"resize_width": schema.positive_size, "resize_height": schema.positive_size}
_OPEN_DESTINATION = {"dest_width": schema.size, "dest_height": schema.size}
_SIDES = ("resize_width", "resize_height", "resize_longer", "resize_shorter")
_SIZE = {
    **{side: schema.size(0) for side in _SIDES},
    "max_size": schema.list_of(schema.size, (0, 1, 2), "sizes in pixels, [width, height]")(()),
    "scaling_mode": schema.choice("DEFAULT", "STRETCH", "NOT_SMALLER", "NOT_LARGER", prefix="SCALING_MODE_")("DEFAULT"),
}
_CROP = {"crop_width": schema.positive_size, "crop_height": schema.positive_size}
_CROP_OF_FN = {
    "crop": schema.list_of(schema.size, (0, 2, 3), "sizes in pixels, [height, width]")(()),
    "crop_h": schema.size(0),
    "crop_w": schema.size(0),
}
_DEPTH_OF_FN = {"crop_d": schema.positive_size(1)}

_CUTTING = AmdForm(make=_amd_cut, misfit=_overhang)
_NORMALISING = AmdForm(make=_amd_cut_and_normalise, gives_floats=lambda arguments: True, gives_layouts=True)
_STRETCHING = AmdForm(
    make=_amd_stretch,
    gives_floats=lambda arguments: True,
    gives_layouts=True,
    refusal=_without_size,
    misfit=lambda arguments, known, height, width: _reads_beside(width, height, arguments["dest_width"]),
)
_SCALING = AmdForm(
    gives_floats=lambda arguments: True,
    gives_layouts=True,
    misfit=lambda arguments, known, height, width: cast(SizeRule, arguments["size"]).misfit(height, width),
)

OPERATIONS = (
    Operation("Resize", _OPEN_DESTINATION, _resize, _stretched_extent, amd=_STRETCHING),
    Operation(
        "ResizeMirrorNormalize",
        {**_OPEN_DESTINATION, **_NORMALISATION, **_MIRROR},
        _resize,
        _stretched_extent,
        _renamed(std_dev="std"),
        channel_keys=("mean", "std_dev"),
        normalises=True,
        amd=replace(_STRETCHING, only_planes=True),
    ),
    Operation(
        "resize",
        {**_SIZE, **_INTERPOLATION},
        _resize,
        _scaled_extent,
        _by_rule,
        # rocAL takes it and does nothing with it.
        ignored_keys={"antialias": schema.switch(True)},
        amd=replace(
            _SCALING,
            function="resize",
            make=lambda node, call: _amd_resize(node, call.values),
            # Through resize_mirror_normalize, which knows no other.
            gives_floats=lambda arguments: arguments["interpolation_type"] == "LINEAR",
        ),
    ),
    Operation(
        "resize_mirror_normalize",
        {**_SIZE, **_NORMALISATION_OF_FN, **_MIRROR_OF_FN},
        _resize,
        _scaled_extent,
        _by_rule,
        # On the way to RPP's kernel every interpolation becomes LINEAR.
        ignored_keys=_INTERPOLATION,
        channel_keys=("mean", "std"),
        normalises=True,
        amd=replace(_SCALING, only_planes=True),
    ),
    Operation(
        "CropFixed",
        {**_CROP, "crop_pos_x": schema.pixel_position, "crop_pos_y": schema.pixel_position},
        _BY_POSITION.run,
        _BY_POSITION.extent,
        ignored_keys={"crop_depth": schema.positive_size(1), "crop_pos_z": schema.number(0)},
        amd=_CUTTING,
    ),
    Operation(
        "crop",
        {**_CROP_OF_FN, "crop_pos_x": schema.pixel_position(0.5), "crop_pos_y": schema.pixel_position(0.5)},
        _BY_POSITION.run,
        _BY_POSITION.extent,
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
        {**_CROP, "start_x": schema.fraction(0.5), "start_y": schema.fraction(0.5), **_NORMALISATION, **_MIRROR},
        _cut_and_normalise,
        _BY_FRACTION.extent,
        _renamed(start_x="crop_pos_x", start_y="crop_pos_y", std_dev="std"),
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
            **_NORMALISATION_OF_FN,
            **_MIRROR_OF_FN,
        },
        _cut_and_normalise,
        _BY_FRACTION.extent,
        _by_one_size,
        channel_keys=("mean", "std"),
        normalises=True,
        amd=_NORMALISING,
    ),
    _stretching(
        "CropResizeFixed",
        {
            **_DESTINATION,
            "area": schema.area,
            "aspect_ratio": schema.positive_number,
            "x_center_drift": schema.fraction,
            "y_center_drift": schema.fraction,
        },
        _AREA,
        _amd_resize_area,
        arguments=_renamed(
            dest_width="resize_width",
            dest_height="resize_height",
            area="crop_area_factor",
            aspect_ratio="crop_aspect_ratio",
            x_center_drift="x_drift",
            y_center_drift="y_drift",
        ),
    ),
    _stretching(
        "resize_crop",
        {
            **_DESTINATION_OF_FN,
            # rocAL draws values that are left out at random.
            "crop_area_factor": schema.area,
            "crop_aspect_ratio": schema.positive_number,
            "x_drift": schema.fraction,
            "y_drift": schema.fraction,
        },
        _AREA,
        _amd_resize_area,
    ),
    _stretching(
        "ResizeCropMirrorFixed",
        {**_DESTINATION, "crop_w": schema.size, "crop_h": schema.size, **_MIRROR},
        _CORNER,
        _amd_resize_corner,
        arguments=_renamed(dest_width="resize_width", dest_height="resize_height"),
    ),
    _stretching(
        "resize_crop_mirror",
        {**_DESTINATION_OF_FN, "crop_w": schema.size(0), "crop_h": schema.size(0), **_MIRROR_OF_FN},
        _CORNER,
        _amd_resize_corner,
        # rocAL's Python module hands the crop's sides on in the wrong order.
        arguments=_renamed(crop_w="crop_h", crop_h="crop_w"),
    ),
    _stretching(
        "roi_resize",
        {
            **_DESTINATION_OF_FN,
            "roi_w": schema.positive_size,
            "roi_h": schema.positive_size,
            "roi_pos_x": schema.pixel_position,
            "roi_pos_y": schema.pixel_position,
            **_INTERPOLATION,
        },
        _BY_POSITION,
        _amd_resize_roi,
        arguments=_renamed(roi_w="crop_width", roi_h="crop_height", roi_pos_x="crop_pos_x", roi_pos_y="crop_pos_y"),
    ),
)
