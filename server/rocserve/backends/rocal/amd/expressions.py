"""How each operation of a pipeline is said in amd.rocal, and which cannot be.

Names and keywords are those of amd.rocal's `fn`. `rocal_pybind` is called directly where `fn` gets its arguments wrong.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rocserve.backends.rocal.amd.binding import Binding
from rocserve.backends.rocal.image import Extent
from rocserve.backends.rocal.operations.base import PipelineOperation
from rocserve.backends.rocal.operations.crop import CropFixed
from rocserve.backends.rocal.operations.normalize import CropMirrorNormalize, ResizeMirrorNormalize
from rocserve.backends.rocal.operations.resize import CropResizeFixed, Resize, ResizeCropMirrorFixed

Tensor = Any
"""rocAL's handle on an image of the graph, or on a batch's result."""


@dataclass(frozen=True, slots=True)
class Node:
    """Where a node of the graph is made and what it is to give."""

    binding: Binding
    handle: Any
    """Of the rocAL pipeline."""
    layout: Any
    datatype: Any
    """Both of amd.rocal.types."""
    source: Extent
    """The valid part of the (first) image that it reads, as far as it is the same for all images."""

    @property
    def output(self) -> dict[str, Any]:
        return {"output_layout": self.layout, "output_dtype": self.datatype}


def _none(operation: Any) -> str | None:
    return None


def _fits_all(operation: Any, known: Extent, source: Extent) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Expression:
    """An operation in amd.rocal."""

    make: Callable[[Node, Any, Sequence[Tensor]], Tensor]
    """Adds the node that makes an image of others."""
    refusal: Callable[[Any], str | None] = _none
    """Why no image can be worked on with the operation's values; None = it can."""
    misfit: Callable[[Any, Extent, Extent], str | None] = _fits_all
    """Why an image cannot be, where rocAL would read other memory; None = it can. Of the two extents the first is what
    was known of the source when the graph was made, the second this image's."""


def expression_for(operation: PipelineOperation, binding: Binding) -> Expression:
    """
    Raises:
        ValueError: this amd.rocal cannot do the operation; the text says why.
    """
    expression = _EXPRESSIONS.get(operation.name) or _by_its_own_name(operation, binding)
    refusal = expression.refusal(operation)
    if refusal is not None:
        raise ValueError(refusal)
    return expression


def _resize(node: Node, operation: Resize, images: Sequence[Tensor]) -> Tensor:
    return node.binding.functions.resize(
        images[0],
        resize_width=operation.dest_width,
        resize_height=operation.dest_height,
        # What rocAL's C interface takes by default, and AMD Inference Server with it; fn's default keeps proportions.
        scaling_mode=node.binding.types.SCALING_MODE_STRETCH,
        **node.output,
    )


def _resize_refusal(operation: Resize | ResizeMirrorNormalize) -> str | None:
    if operation.dest_width or operation.dest_height:
        return None
    return "rocAL does not resize to a dest_width and a dest_height that are both 0; give one of them"


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


def _crop_fixed(node: Node, operation: CropFixed, images: Sequence[Tensor]) -> Tensor:
    return node.binding.functions.crop(
        images[0],
        crop=[operation.crop_height, operation.crop_width],
        crop_pos_x=_within(operation.crop_pos_x, operation.crop_width, node.source.width),
        crop_pos_y=_within(operation.crop_pos_y, operation.crop_height, node.source.height),
        **node.output,
    )


def _within(position: float, size: int, available: int | None) -> float:
    """The position moved back so far that the crop stays in the image, where the image's side is known."""
    start = int(position)
    if available is None:
        return float(start)
    return float(min(start if start < available else 0, available - min(size, available)))


def _crop_misfit(operation: CropFixed, known: Extent, source: Extent) -> str | None:
    return _misfit_along(
        "width", operation.crop_pos_x, operation.crop_width, known.width, source.width
    ) or _misfit_along("height", operation.crop_pos_y, operation.crop_height, known.height, source.height)


def _misfit_along(side: str, position: float, size: int, known: int | None, available: int | None) -> str | None:
    assert available is not None
    start = int(_within(position, size, known))
    end = start + min(size, available)
    if start >= available or end <= available:
        return None
    return (
        f"CropFixed's crop from {start} to {end} stands out of the image's {side} of {available}, where rocAL"
        " reads other memory; resize to a fixed size before, or use the CPU engine"
    )


def _crop_resize_fixed(node: Node, operation: CropResizeFixed, images: Sequence[Tensor]) -> Tensor:
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


def _crop_resize_misfit(operation: CropResizeFixed, known: Extent, source: Extent) -> str | None:
    assert source.height is not None and source.width is not None
    target = operation.area * source.height * source.width
    if math.sqrt(target * operation.aspect_ratio) < 1 or math.sqrt(target / operation.aspect_ratio) < 1:
        return (
            f"CropResizeFixed's part of {operation.area} of {source.width}x{source.height} pixels is less than a pixel"
            " wide or high, which rocAL cannot resize"
        )
    return None


def _resize_crop_mirror_fixed(node: Node, operation: ResizeCropMirrorFixed, images: Sequence[Tensor]) -> Tensor:
    # fn.resize_crop_mirror hands the crop's sides on in the wrong order.
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


_EXPRESSIONS: Mapping[str, Expression] = {
    Resize.name: Expression(_resize, _resize_refusal),
    ResizeMirrorNormalize.name: Expression(_resize_mirror_normalize, _resize_refusal),
    CropMirrorNormalize.name: Expression(_crop_mirror_normalize),
    CropFixed.name: Expression(_crop_fixed, misfit=_crop_misfit),
    CropResizeFixed.name: Expression(_crop_resize_fixed, misfit=_crop_resize_misfit),
    ResizeCropMirrorFixed.name: Expression(_resize_crop_mirror_fixed),
}


def _by_its_own_name(operation: PipelineOperation, binding: Binding) -> Expression:
    """For operations that have the names and keywords of amd.rocal's fn."""
    function = getattr(binding.functions, operation.name, None)
    if function is None:
        raise ValueError(f"amd.rocal (version {binding.version}) has no such operation; use the CPU engine")
    accepted = inspect.signature(function).parameters
    unknown = [key for key in type(operation).keys if key not in accepted]
    if unknown:
        raise ValueError(f"fn.{operation.name} of amd.rocal takes no '{unknown[0]}'; use the CPU engine")
    return Expression(_make_by_name)


def _make_by_name(node: Node, operation: PipelineOperation, images: Sequence[Tensor]) -> Tensor:
    function = getattr(node.binding.functions, operation.name)
    accepted = inspect.signature(function).parameters
    arguments = {key: _in_rocal(key, getattr(operation, key), node.binding) for key in type(operation).keys}
    formats = {**node.output, "output_datatype": node.datatype}
    return function(*images, **arguments, **{key: value for key, value in formats.items() if key in accepted})


def _in_rocal(key: str, value: Any, binding: Binding) -> Any:
    """A key's value as fn takes it."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, tuple):
        return [_in_rocal(key, element, binding) for element in value]
    if isinstance(value, str):
        name = f"SCALING_MODE_{value}" if key == "scaling_mode" else f"{value}_INTERPOLATION"
        return getattr(binding.types, name)
    return value
