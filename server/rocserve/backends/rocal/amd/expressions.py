"""How each operation of a pipeline is said in amd.rocal, and which cannot be.

Most have the name and the keywords of a function of amd.rocal's `fn`; for them nothing is written here but what else
is to be known. The others are in `resizing` and `cropping`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from rocserve.backends.rocal.amd import cropping, resizing
from rocserve.backends.rocal.amd.binding import Binding
from rocserve.backends.rocal.amd.node import Expression, Node, Tensor, needs_whole_source
from rocserve.backends.rocal.image import ResultExtent
from rocserve.backends.rocal.operations.arithmetic import Normalize
from rocserve.backends.rocal.operations.base import PipelineOperation
from rocserve.backends.rocal.operations.cropping import CropMirrorNormalizeOfFn, ResizeCropMirror
from rocserve.backends.rocal.operations.geometry import Rotate, Transpose, WarpAffine
from rocserve.backends.rocal.operations.scaling import ScaledResize, ScaledResizeMirrorNormalize

_PLANES = {0: 1, 1: 2, 2: 0}
"""Height, width and channels among the axes of an image that stands as planes."""


def expression_for(operation: PipelineOperation, source: ResultExtent, binding: Binding) -> Expression:
    """`source` is what is known of the (first) image that the operation reads.

    Raises:
        ValueError: this amd.rocal cannot do the operation; the text says why.
    """
    expression = _EXPRESSIONS.get(operation.name) or Expression(_by_name)
    if expression.make in (_by_name, _transpose, _normalize):
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


def _normalize(node: Node, operation: Normalize, images: Sequence[Tensor]) -> Tensor:
    axes = sorted(_PLANES[axis] for axis in operation.axes) if node.is_grey else list(operation.axes)
    arguments = {
        "axes": axes,
        "mean": list(operation.mean),
        "stddev": list(operation.stddev),
        "scale": operation.scale,
        "shift": operation.shift,
    }
    return _call(node, operation.name, images, arguments)


def _affine_refusal(operation: Rotate | WarpAffine, source: ResultExtent) -> str | None:
    sides = (operation.dest_width, operation.dest_height)
    if all(sides) and sides != (source.size.width, source.size.height):
        return "rocAL leaves a part of the result unwritten where dest_width and dest_height are not the source's"
    return needs_whole_source(operation, source)


_EXPRESSIONS: Mapping[str, Expression] = {
    **resizing.EXPRESSIONS,
    **cropping.EXPRESSIONS,
    ScaledResize.name: Expression(_by_name, gives_floats=True, gives_layouts=True, misfit=resizing.whole_misfit),
    ScaledResizeMirrorNormalize.name: Expression(
        _by_name, gives_floats=True, gives_layouts=True, only_planes=True, misfit=resizing.whole_misfit
    ),
    CropMirrorNormalizeOfFn.name: Expression(_by_name, gives_floats=True, gives_layouts=True),
    ResizeCropMirror.name: Expression(
        _by_name, gives_floats=True, gives_layouts=True, fills_result=True, misfit=resizing.corner_misfit_of_fn
    ),
    Normalize.name: Expression(_normalize, gives_floats=True),
    Transpose.name: Expression(_transpose, fills_result=True, refusal=needs_whole_source),
    Rotate.name: Expression(_by_name, fills_result=True, refusal=_affine_refusal),
    WarpAffine.name: Expression(_by_name, fills_result=True, refusal=_affine_refusal),
}
