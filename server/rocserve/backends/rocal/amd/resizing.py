"""Operations that resize, in amd.rocal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rocserve.backends.rocal.amd.node import Expression, Node, Tensor
from rocserve.backends.rocal.image import Extent, ResultExtent
from rocserve.backends.rocal.operations.cropping import ResizeCrop
from rocserve.backends.rocal.operations.normalize import ResizeMirrorNormalize
from rocserve.backends.rocal.operations.resize import CropResizeFixed, Resize, ResizeCropMirrorFixed


def _resize(node: Node, operation: Resize, images: Sequence[Tensor]) -> Tensor:
    return node.binding.functions.resize(
        images[0],
        resize_width=operation.dest_width,
        resize_height=operation.dest_height,
        # What rocAL's C interface takes by default, and AMD Inference Server with it; fn's default keeps proportions.
        scaling_mode=node.binding.types.SCALING_MODE_STRETCH,
        **node.output,
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


def _too_small_a_part(operation: CropResizeFixed, known: Extent, source: Extent) -> str | None:
    assert source.height is not None and source.width is not None
    target = operation.area * source.height * source.width
    if math.sqrt(target * operation.aspect_ratio) < 1 or math.sqrt(target / operation.aspect_ratio) < 1:
        return (
            f"the part that is {operation.area} of its {source.width}x{source.height} pixels is less than a pixel wide"
            " or high, which rocAL cannot resize"
        )
    return None


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


EXPRESSIONS: Mapping[str, Expression] = {
    Resize.name: Expression(_resize, gives_floats=True, gives_layouts=True, refusal=_without_size),
    ResizeMirrorNormalize.name: Expression(
        _resize_mirror_normalize, gives_floats=True, gives_layouts=True, only_planes=True, refusal=_without_size
    ),
    CropResizeFixed.name: Expression(
        _crop_resize, gives_floats=True, gives_layouts=True, fills_result=True, misfit=_too_small_a_part
    ),
    ResizeCropMirrorFixed.name: Expression(
        _resize_crop_mirror, gives_floats=True, gives_layouts=True, fills_result=True
    ),
    ResizeCrop.name: Expression(
        _resize_crop,
        gives_floats=True,
        gives_layouts=True,
        fills_result=True,
        misfit=lambda operation, known, source: _too_small_a_part(_fixed(operation), known, source),
    ),
}
