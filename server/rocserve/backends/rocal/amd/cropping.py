"""Operations that cut a part out of an image, in amd.rocal.

rocAL cuts at one position for all images, and reads other memory where the part stands out of one. Where the image's
size is known the position is moved back so far that it does not, as the CPU engine moves it; else such an image is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rocserve.backends.rocal.amd.node import Expression, Node, Tensor
from rocserve.backends.rocal.amd.resizing import reads_beside
from rocserve.backends.rocal.image import Extent, ResultExtent
from rocserve.backends.rocal.operations.arithmetic import Slice
from rocserve.backends.rocal.operations.crop import CropFixed
from rocserve.backends.rocal.operations.cropping import Crop, RoiResize
from rocserve.backends.rocal.operations.normalize import CropMirrorNormalize


class Side(NamedTuple):
    """A crop along one side of an image, in pixels."""

    position: float
    size: int


class Part(NamedTuple):
    x: Side
    y: Side


def _start(side: Side, available: int | None) -> int:
    start = int(side.position)
    if available is None:
        return start
    return min(start if start < available else 0, available - min(side.size, available))


def _overhang(part: Part, known: Extent, source: Extent) -> str | None:
    """Why the part cannot be cut out of an image of which `source` is valid; None = it can."""
    for name, side, known_side, available in (
        ("width", part.x, known.width, source.width),
        ("height", part.y, known.height, source.height),
    ):
        assert available is not None
        start = _start(side, known_side)
        end = start + min(side.size, available)
        if start < available < end:
            return (
                f"the crop from {start} to {end} stands out of its {name} of {available} pixels, where rocAL would read"
                " other memory; resize to a fixed size before, or use the CPU engine"
            )
    return None


def _misfit(part_of: Callable[[Any], Part]) -> Callable[[Any, Extent, Extent], str | None]:
    return lambda operation, known, source: _overhang(part_of(operation), known, source)


def _crop_fixed_part(operation: CropFixed) -> Part:
    return Part(Side(operation.crop_pos_x, operation.crop_width), Side(operation.crop_pos_y, operation.crop_height))


def _crop_part(operation: Crop) -> Part:
    height, width = operation.crop[-2:] if any(operation.crop) else (operation.crop_h, operation.crop_w)
    return Part(Side(operation.crop_pos_x, width), Side(operation.crop_pos_y, height))


def _roi_resize_part(operation: RoiResize) -> Part:
    return Part(Side(operation.roi_pos_x, operation.roi_w), Side(operation.roi_pos_y, operation.roi_h))


def _slice_part(operation: Slice) -> Part:
    (top, left), (height, width) = operation.anchor, operation.shape
    return Part(Side(left, width), Side(top, height))


def _cutter(part_of: Callable[[Any], Part]) -> Callable[[Node, Any, Sequence[Tensor]], Tensor]:
    def make(node: Node, operation: Any, images: Sequence[Tensor]) -> Tensor:
        part = part_of(operation)
        return node.binding.functions.crop(
            images[0],
            crop=[part.y.size, part.x.size],
            crop_pos_x=float(_start(part.x, node.source.valid.width)),
            crop_pos_y=float(_start(part.y, node.source.valid.height)),
            **node.output,
        )

    return make


def _roi_resize(node: Node, operation: RoiResize, images: Sequence[Tensor]) -> Tensor:
    return node.binding.functions.roi_resize(
        images[0],
        resize_width=operation.resize_width,
        resize_height=operation.resize_height,
        roi_w=operation.roi_w,
        roi_h=operation.roi_h,
        roi_pos_x=float(_start(Side(operation.roi_pos_x, operation.roi_w), node.source.valid.width)),
        roi_pos_y=float(_start(Side(operation.roi_pos_y, operation.roi_h), node.source.valid.height)),
        interpolation_type=getattr(node.binding.types, f"{operation.interpolation_type}_INTERPOLATION"),
        **node.output,
    )


def _roi_resize_misfit(operation: RoiResize, known: Extent, source: Extent) -> str | None:
    assert source.height is not None and source.width is not None
    overhang = _overhang(_roi_resize_part(operation), known, source)
    width, height = min(operation.roi_w, source.width), min(operation.roi_h, source.height)
    return overhang or reads_beside(width, height, operation.resize_width)


def _slice_refusal(operation: Slice, source: ResultExtent) -> str | None:
    # fn.slice takes its anchor from another tensor only; a slice that stays in the image is a crop.
    if operation.out_of_bounds_policy == "ERROR":
        return None
    return (
        f'rocAL takes no written anchor; with "out_of_bounds_policy": "ERROR", not "{operation.out_of_bounds_policy}",'
        " it can be done as a crop"
    )


def _slice_misfit(operation: Slice, known: Extent, source: Extent) -> str | None:
    assert source.height is not None and source.width is not None
    (top, left), (height, width) = operation.anchor, operation.shape
    if top + height <= source.height and left + width <= source.width:
        return None
    return (
        f"slice from {[top, left]} of {[height, width]} stands out of the image's {[source.height, source.width]}"
        " (height, width)"
    )


def _crop_mirror_normalize(node: Node, operation: CropMirrorNormalize, images: Sequence[Tensor]) -> Tensor:
    return node.binding.functions.crop_mirror_normalize(
        images[0],
        crop=[operation.crop_height, operation.crop_width],
        crop_pos_x=operation.start_x,
        crop_pos_y=operation.start_y,
        mean=list(operation.mean),
        std=list(operation.std_dev),
        mirror=int(operation.mirror),
        **node.output,
    )


EXPRESSIONS: Mapping[str, Expression] = {
    CropFixed.name: Expression(_cutter(_crop_fixed_part), misfit=_misfit(_crop_fixed_part)),
    Crop.name: Expression(_cutter(_crop_part), misfit=_misfit(_crop_part)),
    Slice.name: Expression(_cutter(_slice_part), refusal=_slice_refusal, misfit=_slice_misfit),
    RoiResize.name: Expression(_roi_resize, gives_layouts=True, fills_result=True, misfit=_roi_resize_misfit),
    CropMirrorNormalize.name: Expression(_crop_mirror_normalize, gives_floats=True, gives_layouts=True),
}
