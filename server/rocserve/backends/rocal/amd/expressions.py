"""How each operation of a pipeline is said in amd.rocal, and which cannot be.

Most have the name and the keywords of a function of amd.rocal's `fn`; for them nothing is written here but what else
is to be known. Those that resize are in `resizing`.

rocAL cuts at one position for all images, and reads other memory where the part stands out of one. Where the image's
size is known the position is moved back so far that it does not, as the CPU engine moves it; else such an image is
refused.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rocserve.backends.rocal.amd import resizing
from rocserve.backends.rocal.amd.binding import Binding
from rocserve.backends.rocal.amd.node import Expression, Node, Tensor, needs_whole_source
from rocserve.backends.rocal.amd.resizing import reads_beside
from rocserve.backends.rocal.image import Extent, ResultExtent
from rocserve.backends.rocal.operations.arithmetic import Nop, Normalize, Slice
from rocserve.backends.rocal.operations.base import PipelineOperation
from rocserve.backends.rocal.operations.cropping import (
    Crop,
    CropFixed,
    CropMirrorNormalizeOfFn,
    ResizeCropMirror,
    RoiResize,
)
from rocserve.backends.rocal.operations.filters import Blur
from rocserve.backends.rocal.operations.geometry import LensCorrection, Rotate, Transpose, WarpAffine
from rocserve.backends.rocal.operations.levels import BrightnessFixed
from rocserve.backends.rocal.operations.normalize import CropMirrorNormalize
from rocserve.backends.rocal.operations.scaling import ScaledResize, ScaledResizeMirrorNormalize


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


_CROPPING: Mapping[str, Expression] = {
    CropFixed.name: Expression(_cutter(_crop_fixed_part), misfit=_misfit(_crop_fixed_part)),
    Crop.name: Expression(_cutter(_crop_part), misfit=_misfit(_crop_part)),
    Slice.name: Expression(_cutter(_slice_part), refusal=_slice_refusal, misfit=_slice_misfit),
    RoiResize.name: Expression(_roi_resize, gives_layouts=True, fills_result=True, misfit=_roi_resize_misfit),
    CropMirrorNormalize.name: Expression(_crop_mirror_normalize, gives_floats=True, gives_layouts=True),
}


def expression_for(operation: PipelineOperation, source: ResultExtent, binding: Binding) -> Expression:
    """`source` is what is known of the (first) image that the operation reads.

    Raises:
        ValueError: this amd.rocal cannot do the operation; the text says why.
    """
    expression = _EXPRESSIONS.get(operation.name) or Expression(_by_name)
    if isinstance(operation, ScaledResize) and not _is_as_when_normalising(operation):
        expression = dataclasses.replace(expression, gives_floats=False)
    if operation.name not in _IN_OTHER_WORDS:
        _check_function(operation, binding)
    refusal = expression.refusal(operation, source)
    if refusal is not None:
        raise ValueError(refusal)
    return expression


def _check_function(operation: PipelineOperation, binding: Binding) -> None:
    function = getattr(binding.functions, operation.name, None)
    if function is None:
        raise ValueError(f"amd.rocal (version {binding.version}) has no such operation; use the CPU engine")
    accepted = inspect.signature(function).parameters
    unknown = [key for key in type(operation).keys if key not in accepted]
    if unknown:
        raise ValueError(f"fn.{operation.name} of amd.rocal takes no '{unknown[0]}'; use the CPU engine")


def _by_name(node: Node, operation: PipelineOperation, images: Sequence[Tensor]) -> Tensor:
    keys = type(operation).keys
    return _call(node, operation.name, images, {key: _value(node, key, getattr(operation, key)) for key in keys})


def _call(node: Node, name: str, images: Sequence[Tensor], arguments: Mapping[str, Any]) -> Tensor:
    function = getattr(node.binding.functions, name)
    accepted = inspect.signature(function).parameters
    formats = {**node.output, "output_datatype": node.datatype}
    return function(*images, **arguments, **{key: value for key, value in formats.items() if key in accepted})


def _value(node: Node, key: str, value: Any) -> Any:
    """A key's value as fn takes it."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, tuple):
        return [_value(node, key, element) for element in value]
    if isinstance(value, str):
        name = f"SCALING_MODE_{value}" if key == "scaling_mode" else f"{value}_INTERPOLATION"
        return getattr(node.binding.types, name)
    return value


def _transpose(node: Node, operation: Transpose, images: Sequence[Tensor]) -> Tensor:
    swaps = operation.perm == (1, 0, 2)
    planes = [0, 2, 1] if swaps else [0, 1, 2]
    return _call(node, operation.name, images, {"perm": planes if node.is_grey else list(operation.perm)})


def _is_as_when_normalising(operation: ScaledResize) -> bool:
    """Whether resize_mirror_normalize, which can write FP32, resizes in this way too."""
    return operation.interpolation_type == "LINEAR" and operation.scaling_mode != "MIN_MAX"


def _scaled_resize(node: Node, operation: ScaledResize, images: Sequence[Tensor]) -> Tensor:
    if not node.is_float:
        return _by_name(node, operation, images)
    keys = [key for key in type(operation).keys if key != "interpolation_type"]
    return resizing.unnormalised(node, images, {key: _value(node, key, getattr(operation, key)) for key in keys})


def _brightness_fixed(node: Node, operation: BrightnessFixed, images: Sequence[Tensor]) -> Tensor:
    # fn.brightness_fixed hands its arguments on in the wrong order, and the image comes out black.
    return node.binding.functions.brightness(
        images[0],
        brightness=float(operation.brightness),
        brightness_shift=float(operation.brightness_shift),
        **node.output,
    )


def _lens_correction(node: Node, operation: LensCorrection, images: Sequence[Tensor]) -> Tensor:
    # fn.lens_correction hands on one camera, where rocAL wants a list with one for each image.
    native = node.binding.native
    camera, distortion = native.CameraMatrix(), native.DistortionCoeffs()
    camera.fx, camera.cx, camera.fy, camera.cy = operation.camera_matrix
    distortion.k1, distortion.k2, distortion.p1, distortion.p2, distortion.k3 = operation.distortion_coeffs
    cameras, distortions = [camera] * node.batch_size, [distortion] * node.batch_size
    return native.lensCorrection(node.handle, images[0], cameras, distortions, False, node.layout, node.datatype)


def _nop(node: Node, operation: Nop, images: Sequence[Tensor]) -> Tensor:
    # fn.nop writes nothing at all.
    return node.binding.functions.copy(images[0])


def _refused(reason: str) -> Callable[[Any, ResultExtent], str]:
    return lambda operation, source: reason


def _affine_refusal(operation: Rotate | WarpAffine, source: ResultExtent) -> str | None:
    sides = (operation.dest_width, operation.dest_height)
    if all(sides) and sides != (source.size.width, source.size.height):
        return "rocAL leaves a part of the result unwritten where dest_width and dest_height are not the source's"
    return needs_whole_source(operation, source)


_IN_OTHER_WORDS: Mapping[str, Expression] = {
    **resizing.EXPRESSIONS,
    **_CROPPING,
    BrightnessFixed.name: Expression(_brightness_fixed),
    Nop.name: Expression(_nop),
    Blur.name: Expression(
        _by_name,
        refusal=_refused("rocAL moves the picture four pixels to the left and reads beside it; use the CPU engine"),
    ),
    Normalize.name: Expression(
        _by_name,
        refusal=_refused(
            "rocAL writes no FP32 here, and UINT8 that runs over below 0; use crop_mirror_normalize or"
            " resize_mirror_normalize with a mean and a std, or the CPU engine"
        ),
    ),
}
"""Operations that are not, or not only, the functions of `fn` with their names and keywords."""

_EXPRESSIONS: Mapping[str, Expression] = {
    **_IN_OTHER_WORDS,
    LensCorrection.name: Expression(_lens_correction),
    ScaledResize.name: Expression(_scaled_resize, gives_floats=True, gives_layouts=True, misfit=resizing.whole_misfit),
    ScaledResizeMirrorNormalize.name: Expression(
        _by_name, gives_floats=True, gives_layouts=True, only_planes=True, misfit=resizing.whole_misfit
    ),
    CropMirrorNormalizeOfFn.name: Expression(_by_name, gives_floats=True, gives_layouts=True),
    ResizeCropMirror.name: Expression(
        _by_name, gives_layouts=True, fills_result=True, misfit=resizing.corner_misfit_of_fn
    ),
    Transpose.name: Expression(_transpose, fills_result=True, refusal=needs_whole_source),
    Rotate.name: Expression(_by_name, fills_result=True, refusal=_affine_refusal),
    WarpAffine.name: Expression(_by_name, fills_result=True, refusal=_affine_refusal),
}
