"""Operations that cut a part out of an image and stretch it.

Of the result the next operation sees as much as the part had.
"""

from __future__ import annotations

import math
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
    overhang,
    reads_beside,
    renamed,
)
from rocserve.backends.rocal.operations.cropping import cut, cut_extent
from rocserve.backends.rocal.operations.resizing import resized, stretched
from rocserve.backends.rocal.schema import Key


def _stretched_extent(part: Extent, resize_width: int, resize_height: int) -> ResultExtent:
    valid = Extent(limited(resize_height, part.height), limited(resize_width, part.width))
    return ResultExtent(Extent(resize_height, resize_width), valid)


_NARROWEST, _WIDEST = 0.75, 1.333
"""The bounds of the aspect ratio where the part that is asked for does not fit."""


def _area(
    image_height: int,
    image_width: int,
    crop_area_factor: float,
    crop_aspect_ratio: float,
    x_drift: float,
    y_drift: float,
) -> tuple[int, int, int, int]:
    """Top, left, height and width of a part by its share of the image's area and its width over its height.

    The drifts are fractions of the room that the part leaves. Where the part does not fit, the largest central part
    with an aspect ratio from 0.75 to 1.333 is taken.
    """
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


def _resize_area(
    image: Image, result: ResultExtent, as_float: bool, resize_width: int, resize_height: int, **area: float
) -> Pixels:
    source = image.valid
    top, left, height, width = _area(source.shape[0], source.shape[1], **area)
    part = source[top : top + height, left : left + width]
    return stretched(part, resize_width, resize_height, as_float)


def _area_extent(source: ResultExtent, resize_width: int, resize_height: int, **area: float) -> ResultExtent:
    valid = source.valid
    if not valid.is_known:
        return ResultExtent(Extent(resize_height, resize_width), Extent(None, None))
    image_height, image_width = valid.sides
    _, _, height, width = _area(image_height, image_width, **area)
    return _stretched_extent(Extent(height, width), resize_width, resize_height)


def _area_misfit(arguments: Values, known: Extent, height: int, width: int) -> str | None:
    target, aspect_ratio = arguments["crop_area_factor"] * height * width, arguments["crop_aspect_ratio"]
    part_width, part_height = math.sqrt(target * aspect_ratio), math.sqrt(target / aspect_ratio)
    return reads_beside(min(part_width, width), min(part_height, height), arguments["resize_width"])


def _amd_resize_area(node: Node, call: Call) -> Tensor:
    # rocAL's own CropResizeFixed is not bound, but it is fn's resize_crop with constant parameters.
    return node.call("resize_crop", call.arguments)


_AREA = AmdForm(make=_amd_resize_area, gives_layouts=True, fills_result=True, misfit=_area_misfit)


def _resize_corner(
    image: Image,
    result: ResultExtent,
    as_float: bool,
    dest_width: int,
    dest_height: int,
    crop_w: int,
    crop_h: int,
    mirror: bool,
) -> Pixels:
    """The top left `crop_w` x `crop_h`; 0 or too large: the full side.

    The names say otherwise, but rocAL crops first.
    """
    part = image.valid[: crop_h or None, : crop_w or None]
    return stretched(part, dest_width, dest_height, as_float, mirror)


def _corner_extent(
    source: ResultExtent, dest_width: int, dest_height: int, crop_w: int, crop_h: int, mirror: bool
) -> ResultExtent:
    valid = source.valid
    part = Extent(
        limited(crop_h, valid.height) if crop_h else valid.height,
        limited(crop_w, valid.width) if crop_w else valid.width,
    )
    return _stretched_extent(part, dest_width, dest_height)


def _amd_resize_corner(node: Node, call: Call) -> Tensor:
    # Not fn.resize_crop_mirror, which hands the crop's sides on in the wrong order.
    native = node.binding.native
    width, height, crop_w, crop_h, mirror = (
        call.arguments[key] for key in ("dest_width", "dest_height", "crop_w", "crop_h", "mirror")
    )
    parameter = native.createIntParameter(int(mirror))
    return native.resizeCropMirrorFixed(
        node.handle, node.images[0], width, height, False, crop_h, crop_w, parameter, node.layout, node.datatype
    )


def _corner_misfit(arguments: Values, known: Extent, height: int, width: int) -> str | None:
    part_width = min(arguments["crop_w"] or width, width)
    part_height = min(arguments["crop_h"] or height, height)
    return reads_beside(part_width, part_height, arguments["dest_width"])


_CORNER = AmdForm(make=_amd_resize_corner, gives_layouts=True, fills_result=True, misfit=_corner_misfit)


def _resize_roi(
    image: Image,
    result: ResultExtent,
    as_float: bool,
    resize_width: int,
    resize_height: int,
    roi_w: int,
    roi_h: int,
    roi_pos_x: float,
    roi_pos_y: float,
    interpolation_type: str,
) -> Pixels:
    part = cut(image, result, False, roi_h, roi_w, roi_pos_x, roi_pos_y)
    return resized(part, resize_width, resize_height, interpolation_type, as_float)


def _roi_extent(
    source: ResultExtent, resize_width: int, resize_height: int, roi_w: int, roi_h: int, **others: Any
) -> ResultExtent:
    return _stretched_extent(cut_extent(source, roi_h, roi_w).size, resize_width, resize_height)


def _amd_resize_roi(node: Node, call: Call) -> Tensor:
    values, valid = call.values, node.source.valid
    starts = {
        "roi_pos_x": float(cut_start(values["roi_pos_x"], values["roi_w"], valid.width)),
        "roi_pos_y": float(cut_start(values["roi_pos_y"], values["roi_h"], valid.height)),
    }
    return node.call("roi_resize", {**values, **starts})


def _roi_misfit(arguments: Values, known: Extent, height: int, width: int) -> str | None:
    roi_height, roi_width = arguments["roi_h"], arguments["roi_w"]
    return (
        overhang("width", arguments["roi_pos_x"], roi_width, known.width, width)
        or overhang("height", arguments["roi_pos_y"], roi_height, known.height, height)
        or reads_beside(min(roi_width, width), min(roi_height, height), arguments["resize_width"])
    )


_DESTINATION = {"dest_width": Key(schema.read_positive_size), "dest_height": Key(schema.read_positive_size)}
_DESTINATION_OF_FN = {"resize_width": Key(schema.read_positive_size), "resize_height": Key(schema.read_positive_size)}

OPERATIONS = (
    Operation(
        "CropResizeFixed",
        {
            **_DESTINATION,
            "area": Key(schema.read_area),
            "aspect_ratio": Key(schema.read_positive_number),
            "x_center_drift": Key(schema.read_fraction),
            "y_center_drift": Key(schema.read_fraction),
        },
        _resize_area,
        _area_extent,
        renamed(
            dest_width="resize_width",
            dest_height="resize_height",
            area="crop_area_factor",
            aspect_ratio="crop_aspect_ratio",
            x_center_drift="x_drift",
            y_center_drift="y_drift",
        ),
        amd=_AREA,
    ),
    Operation(
        "resize_crop",
        {
            **_DESTINATION_OF_FN,
            # rocAL draws values that are left out at random.
            "crop_area_factor": Key(schema.read_area),
            "crop_aspect_ratio": Key(schema.read_positive_number),
            "x_drift": Key(schema.read_fraction),
            "y_drift": Key(schema.read_fraction),
        },
        _resize_area,
        _area_extent,
        amd=_AREA,
    ),
    Operation(
        "ResizeCropMirrorFixed",
        {**_DESTINATION, "crop_w": Key(schema.read_size), "crop_h": Key(schema.read_size), **MIRROR},
        _resize_corner,
        _corner_extent,
        amd=_CORNER,
    ),
    Operation(
        "resize_crop_mirror",
        {
            **_DESTINATION_OF_FN,
            "crop_w": Key(schema.read_size, default=0),
            "crop_h": Key(schema.read_size, default=0),
            **MIRROR_OF_FN,
        },
        _resize_corner,
        _corner_extent,
        # rocAL's Python module hands the crop's sides on in the wrong order.
        renamed(resize_width="dest_width", resize_height="dest_height", crop_w="crop_h", crop_h="crop_w"),
        amd=_CORNER,
    ),
    Operation(
        "roi_resize",
        {
            **_DESTINATION_OF_FN,
            "roi_w": Key(schema.read_positive_size),
            "roi_h": Key(schema.read_positive_size),
            "roi_pos_x": Key(schema.read_pixel_position),
            "roi_pos_y": Key(schema.read_pixel_position),
            **INTERPOLATION,
        },
        _resize_roi,
        _roi_extent,
        amd=AmdForm(make=_amd_resize_roi, gives_layouts=True, fills_result=True, misfit=_roi_misfit),
    ),
)
