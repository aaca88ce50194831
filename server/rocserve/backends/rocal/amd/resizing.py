"""Operations that resize, in amd.rocal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rocserve.backends.rocal.amd.node import Expression, Node, Tensor
from rocserve.backends.rocal.image import Extent, ResultExtent
from rocserve.backends.rocal.operations.cropping import ResizeCrop, ResizeCropMirror
from rocserve.backends.rocal.operations.normalize import ResizeMirrorNormalize
from rocserve.backends.rocal.operations.resize import CropResizeFixed, Resize, ResizeCropMirrorFixed

_FETCHED_COLUMNS = 8


def _resize(node: Node, operation: Resize, images: Sequence[Tensor]) -> Tensor:
    # What rocAL's C interface takes by default, and AMD Inference Server with it; fn's default keeps proportions.
    size = {
        "resize_width": operation.dest_width,
        "resize_height": operation.dest_height,
        "scaling_mode": node.binding.types.SCALING_MODE_STRETCH,
    }
    if node.is_float:
        return unnormalised(node, images, size)
    return node.binding.functions.resize(images[0], **size, **node.output)


def unnormalised(node: Node, images: Sequence[Tensor], size: Mapping[str, Any]) -> Tensor:
    """Resizing to FP32, bilinear: fn.resize would leave the tensor unwritten."""
    channels = 1 if node.is_grey else 3
    return node.binding.functions.resize_mirror_normalize(
        images[0], **size, mean=[0.0] * channels, std=[1.0] * channels, mirror=0, **node.output
    )


def _resize_mirror_normalize(node: Node, operation: ResizeMirrorNormalize, images: Sequence[Tensor]) -> Tensor:
    return node.binding.functions.resize_mirror_normalize(
        images[0],
        resize_width=operation.dest_width,
        resize_height=operation.dest_height,
        scaling_mode=node.binding.types.SCALING_MODE_STRETCH,
        mean=list(operation.mean),
        std=list(operation.std_dev),
        mirror=int(operation.mirror),
        **node.output,
    )


def _without_size(operation: Resize | ResizeMirrorNormalize, source: ResultExtent) -> str | None:
    if operation.dest_width or operation.dest_height:
        return None
    return "rocAL does not resize to a dest_width and a dest_height that are both 0; give one of them"


def _crop_resize(node: Node, operation: CropResizeFixed, images: Sequence[Tensor]) -> Tensor:
    # rocAL's own CropResizeFixed is not bound, but it is this operation with constant parameters.
    return node.binding.functions.resize_crop(
        images[0],
        resize_width=operation.dest_width,
        resize_height=operation.dest_height,
        crop_area_factor=float(operation.area),
        crop_aspect_ratio=float(operation.aspect_ratio),
        x_drift=float(operation.x_center_drift),
        y_drift=float(operation.y_center_drift),
        **node.output,
    )


def _resize_crop(node: Node, operation: ResizeCrop, images: Sequence[Tensor]) -> Tensor:
    return _crop_resize(node, _fixed(operation), images)


def _fixed(operation: ResizeCrop) -> CropResizeFixed:
    return CropResizeFixed(
        operation.resize_width,
        operation.resize_height,
        operation.crop_area_factor,
        operation.crop_aspect_ratio,
        operation.x_drift,
        operation.y_drift,
    )


def reads_beside(width: float, height: float, resized_width: int) -> str | None:
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


def whole_misfit(operation: Any, known: Extent, source: Extent) -> str | None:
    """Of operations that resize all of their source; by either of the two names of a width."""
    assert source.height is not None and source.width is not None
    width = operation.dest_width if hasattr(operation, "dest_width") else operation.resize_width
    return reads_beside(source.width, source.height, width)


def _area_misfit(operation: CropResizeFixed, known: Extent, source: Extent) -> str | None:
    assert source.height is not None and source.width is not None
    target = operation.area * source.height * source.width
    width, height = math.sqrt(target * operation.aspect_ratio), math.sqrt(target / operation.aspect_ratio)
    return reads_beside(min(width, source.width), min(height, source.height), operation.dest_width)


def _corner_misfit(operation: ResizeCropMirrorFixed, known: Extent, source: Extent) -> str | None:
    assert source.height is not None and source.width is not None
    width = min(operation.crop_w or source.width, source.width)
    height = min(operation.crop_h or source.height, source.height)
    return reads_beside(width, height, operation.dest_width)


def _resize_crop_mirror(node: Node, operation: ResizeCropMirrorFixed, images: Sequence[Tensor]) -> Tensor:
    # Not fn.resize_crop_mirror, which hands the crop's sides on in the wrong order.
    native = node.binding.native
    return native.resizeCropMirrorFixed(
        node.handle,
        images[0],
        operation.dest_width,
        operation.dest_height,
        False,
        operation.crop_h,
        operation.crop_w,
        native.createIntParameter(int(operation.mirror)),
        node.layout,
        node.datatype,
    )


def corner_misfit_of_fn(operation: ResizeCropMirror, known: Extent, source: Extent) -> str | None:
    # fn exchanges the crop's sides.
    width, height = operation.resize_width, operation.resize_height
    return _corner_misfit(
        ResizeCropMirrorFixed(width, height, operation.crop_h, operation.crop_w, operation.mirror), known, source
    )


EXPRESSIONS: Mapping[str, Expression] = {
    Resize.name: Expression(_resize, gives_floats=True, gives_layouts=True, refusal=_without_size, misfit=whole_misfit),
    ResizeMirrorNormalize.name: Expression(
        _resize_mirror_normalize,
        gives_floats=True,
        gives_layouts=True,
        only_planes=True,
        refusal=_without_size,
        misfit=whole_misfit,
    ),
    CropResizeFixed.name: Expression(_crop_resize, gives_layouts=True, fills_result=True, misfit=_area_misfit),
    ResizeCropMirrorFixed.name: Expression(
        _resize_crop_mirror, gives_layouts=True, fills_result=True, misfit=_corner_misfit
    ),
    ResizeCrop.name: Expression(
        _resize_crop,
        gives_layouts=True,
        fills_result=True,
        misfit=lambda operation, known, source: _area_misfit(_fixed(operation), known, source),
    ),
}
