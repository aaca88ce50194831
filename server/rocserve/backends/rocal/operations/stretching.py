"""Operations that cut a part out of an image and stretch it.

Of the result the next operation sees as much as the part had.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from rocserve.backends.rocal import schema
from rocserve.backends.rocal.image import Extent, Image, Pixels, ResultExtent
from rocserve.backends.rocal.operations.base import (
    INTERPOLATION,
    MIRROR,
    MIRROR_OF_FN,
    AmdForm,
    Call,
    Node,
    Operation,
    Tensor,
    Values,
    cut_start,
    limited,
    reads_beside,
    renamed,
)
from rocserve.backends.rocal.operations.cropping import BY_POSITION, PartRule
from rocserve.backends.rocal.operations.resizing import resized
from rocserve.backends.rocal.schema import Key


def _stretching(
    name: str, keys: Mapping[str, Key], rule: PartRule, make: Callable[[Node, Call], Tensor], **options: Any
) -> Operation:
    """Declares an operation with the arguments of its rule, `resize_width`, `resize_height` and those of `resized`.

    `make` adds it to rocAL's graph.
    """

    def run(image: Image, result: ResultExtent, as_float: bool, **arguments: Any) -> Pixels:
        return resized(rule.cut(image, **arguments), result.size, as_float, **arguments)

    def extent(source: ResultExtent, resize_width: int, resize_height: int, **arguments: Any) -> ResultExtent:
        part = rule.size(source.valid, **arguments)
        valid = Extent(limited(resize_height, part.height), limited(resize_width, part.width))
        return ResultExtent(Extent(resize_height, resize_width), valid)

    def misfit(arguments: Values, known: Extent, height: int, width: int) -> str | None:
        part_height, part_width = rule.size(Extent(height, width), **arguments).sides
        return rule.misfit(arguments, known, height, width) or reads_beside(
            part_width, part_height, arguments["resize_width"]
        )

    amd = AmdForm(make=make, gives_layouts=True, fills_result=True, misfit=misfit)
    return Operation(name, keys, run, extent, amd=amd, **options)


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


def _area_size(source: Extent, **area: float) -> Extent:
    if not source.is_known:
        return Extent(None, None)
    _, _, height, width = _area(source, **area)
    return Extent(height, width)


def _area_start(source: Extent, part: Extent, **area: float) -> tuple[int, int]:
    top, left, _, _ = _area(source, **area)
    return top, left


def _area_misfit(arguments: Values, known: Extent, height: int, width: int) -> str | None:
    target, aspect_ratio = arguments["crop_area_factor"] * height * width, arguments["crop_aspect_ratio"]
    part_width, part_height = math.sqrt(target * aspect_ratio), math.sqrt(target / aspect_ratio)
    return reads_beside(min(part_width, width), min(part_height, height), arguments["resize_width"])


_AREA = PartRule(_area_size, _area_start, _area_misfit)


def _amd_resize_area(node: Node, call: Call) -> Tensor:
    # rocAL's own CropResizeFixed is not bound, but it is fn's resize_crop with constant parameters.
    return node.call("resize_crop", call.arguments)


def _corner_size(source: Extent, crop_w: int, crop_h: int, **others: Any) -> Extent:
    """0 or too large: the full side."""
    return Extent(
        limited(crop_h, source.height) if crop_h else source.height,
        limited(crop_w, source.width) if crop_w else source.width,
    )


def _corner_start(source: Extent, part: Extent, **others: Any) -> tuple[int, int]:
    """The top left: the names say otherwise, but rocAL crops first."""
    return 0, 0


_CORNER = PartRule(_corner_size, _corner_start)


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
        "roi_pos_x": float(cut_start(values["roi_pos_x"], values["roi_w"], valid.width)),
        "roi_pos_y": float(cut_start(values["roi_pos_y"], values["roi_h"], valid.height)),
    }
    return node.call("roi_resize", {**values, **starts})


_DESTINATION = {"dest_width": schema.positive_size, "dest_height": schema.positive_size}
_DESTINATION_OF_FN = {"resize_width": schema.positive_size, "resize_height": schema.positive_size}

OPERATIONS = (
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
        arguments=renamed(
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
        {**_DESTINATION, "crop_w": schema.size, "crop_h": schema.size, **MIRROR},
        _CORNER,
        _amd_resize_corner,
        arguments=renamed(dest_width="resize_width", dest_height="resize_height"),
    ),
    _stretching(
        "resize_crop_mirror",
        {**_DESTINATION_OF_FN, "crop_w": schema.size(0), "crop_h": schema.size(0), **MIRROR_OF_FN},
        _CORNER,
        _amd_resize_corner,
        # rocAL's Python module hands the crop's sides on in the wrong order.
        arguments=renamed(crop_w="crop_h", crop_h="crop_w"),
    ),
    _stretching(
        "roi_resize",
        {
            **_DESTINATION_OF_FN,
            "roi_w": schema.positive_size,
            "roi_h": schema.positive_size,
            "roi_pos_x": schema.pixel_position,
            "roi_pos_y": schema.pixel_position,
            **INTERPOLATION,
        },
        BY_POSITION,
        _amd_resize_roi,
        arguments=renamed(roi_w="crop_width", roi_h="crop_height", roi_pos_x="crop_pos_x", roi_pos_y="crop_pos_y"),
    ),
)
