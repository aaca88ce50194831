"""How each operation of a pipeline is said in amd.rocal, and which cannot be.

Most have the name and the keywords of a function of amd.rocal's `fn`; for them nothing is written here but what else
is to be known. The others are in `resizing` and `cropping`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rocserve.backends.rocal.amd import cropping, resizing
from rocserve.backends.rocal.amd.binding import Binding
from rocserve.backends.rocal.amd.node import Expression, Node, Tensor, needs_whole_source
from rocserve.backends.rocal.image import ResultExtent
from rocserve.backends.rocal.operations.arithmetic import Nop, Normalize
from rocserve.backends.rocal.operations.base import PipelineOperation
from rocserve.backends.rocal.operations.cropping import CropMirrorNormalizeOfFn, ResizeCropMirror
from rocserve.backends.rocal.operations.filters import Blur
from rocserve.backends.rocal.operations.geometry import Rotate, Transpose, WarpAffine
from rocserve.backends.rocal.operations.lenses import LensCorrection
from rocserve.backends.rocal.operations.levels import BrightnessFixed
from rocserve.backends.rocal.operations.scaling import ScaledResize, ScaledResizeMirrorNormalize


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
    **cropping.EXPRESSIONS,
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
