"""The nodes of a graph: the native functions that add them, with the pixels of our CPU operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rocal_pybind import types
from rocal_pybind.context import GARBAGE, Context, RocalError, Tensor
from rocserve.backends.rocal.image import Extent, Image, ResultExtent
from rocserve.backends.rocal.operations import OPERATIONS
from rocserve.backends.rocal.operations.base import Operation


class FloatParameter:
    def __init__(self, value: float) -> None:
        self.value = float(value)


class IntParameter:
    def __init__(self, value: int) -> None:
        self.value = int(value)


NativeFunction = Callable[..., Tensor | None]


def _expect(kind: Any, *values: Any) -> None:
    """Raise pybind11's error for an argument of a wrong type."""
    for value in values:
        is_number = kind is float and isinstance(value, int | float)
        is_bool_for_number = isinstance(value, bool) and kind is not bool
        if is_bool_for_number or not (is_number or isinstance(value, kind)):
            raise TypeError(f"incompatible function arguments: expected {kind.__name__}, got {value!r}")


def _unsigned(*values: Any) -> None:
    _expect(int, *values)
    for value in values:
        if value < 0:
            raise TypeError(f"incompatible function arguments: expected unsigned, got {value}")


def _numbers(*lists: Any) -> None:
    for values in lists:
        if not isinstance(values, list | tuple):
            raise TypeError(f"incompatible function arguments: expected a list of floats, got {values!r}")
        _expect(float, *values)


def native(body: Callable[..., Tensor]) -> NativeFunction:
    """As rocAL does, keep an exception as the pipeline's error and return None."""

    def call(context: Context, *arguments: Any) -> Tensor | None:
        _expect(Context, context)
        try:
            for argument in arguments:
                if isinstance(argument, Tensor) and argument.datatype is not types.UINT8:
                    raise RocalError("the source of an operation must be UINT8 here")
            return body(context, *arguments)
        except RocalError as error:
            context.error = str(error)
            return None

    return call


def _add(
    name: str,
    values: dict[str, Any],
    sources: tuple[Any, ...],
    layout: Any = None,
    datatype: Any = None,
    size: tuple[int, int] | None = None,
) -> Tensor:
    """Add a node that runs our operation `name`. `size`: the largest result's height and width."""
    for source in sources:
        if source is None:
            raise RocalError("Null values passed as input")
        _expect(Tensor, source)
    first = sources[0]
    layout = first.layout if layout is None else layout
    datatype = first.datatype if datatype is None else datatype
    _expect(types.RocalTensorLayout, layout)
    _expect(types.RocalTensorOutputType, datatype)
    operation = OPERATIONS[name]
    assert isinstance(operation, Operation)
    try:
        call = operation(**values)
    except ValueError as error:
        raise RocalError(str(error)) from error
    if size is None:
        largest = call.extent(*(ResultExtent.whole(Extent(source.height, source.width)) for source in sources)).size
        size = largest.height, largest.width
    height, width = size
    floats = datatype is types.FLOAT
    is_written = name in _WRITES_FLOATS if floats else name != "nop"

    def compute(images: list[Image]) -> Image:
        result = call.run(*images, as_float=floats)
        return result if is_written else Image(np.full_like(result.padded, GARBAGE), result.extent)

    return Tensor(first.context, height, width, first.channels, layout, datatype, compute, sources)


_WRITES_FLOATS = ("resize_mirror_normalize", "CropMirrorNormalize")
"""RPP's kernels from UINT8 to FP32. Others silently leave the tensor unchanged."""


def _number(parameter: Any) -> float:
    if parameter is None:
        raise RocalError("a parameter that is left out is drawn at random, which the stand-in does not do")
    _expect(FloatParameter, parameter)
    return parameter.value


def _whole(parameter: Any) -> int:
    _expect(IntParameter, parameter)
    return parameter.value


def _plain(value: Any) -> float:
    _expect(float, value)
    return value


def _flag(parameter: Any) -> bool:
    return bool(_whole(parameter))


def _per_channel(values: Any, channels: int) -> tuple[float, ...]:
    _numbers(values)
    if len(values) < channels:
        raise RocalError(f"{len(values)} values for {channels} channels are read out of bounds")
    return tuple(float(value) for value in values)


def _deviations(values: Any, channels: int) -> tuple[float, ...]:
    numbers = _per_channel(values, channels)
    if 0 in numbers:
        raise RocalError("Standard deviation value cannot be 0")
    return numbers


def _scaling(width: int, height: int, mode: Any, max_size: Any, shorter: int, longer: int, kind: Any) -> dict[str, Any]:
    _unsigned(width, height, shorter, longer, *max_size)
    _expect(types.RocalResizeScalingMode, mode)
    _expect(types.RocalResizeInterpolationType, kind)
    return {
        "resize_width": width,
        "resize_height": height,
        "resize_longer": longer,
        "resize_shorter": shorter,
        "max_size": tuple(max_size),
        "scaling_mode": mode.name.removeprefix("SCALING_MODE_"),
    }


def _interpolation(kind: Any) -> str:
    _expect(types.RocalResizeInterpolationType, kind)
    return kind.name.removesuffix("_INTERPOLATION")


@native
def resize(context, source, width, height, is_output, mode, max_size, shorter, longer, kind, layout, datatype):
    values = _scaling(width, height, mode, max_size, shorter, longer, kind)
    return _add("resize", {**values, "interpolation_type": _interpolation(kind)}, (source,), layout, datatype)


@native
def resizeMirrorNormalize(  # noqa: N802
    context,
    source,
    width,
    height,
    mean,
    std,
    is_output,
    mode,
    max_size,
    shorter,
    longer,
    kind,
    mirror,
    layout,
    datatype,
):
    values = _scaling(width, height, mode, max_size, shorter, longer, kind)
    channels = source.channels
    values |= {"mean": _per_channel(mean, channels), "std": _deviations(std, channels), "mirror": _flag(mirror)}
    return _add("resize_mirror_normalize", values, (source,), layout, datatype)


@native
def cropResize(context, source, width, height, is_output, area, ratio, x, y, layout, datatype):  # noqa: N802
    _unsigned(width, height)
    if not width or not height:
        raise RocalError("CropResize node needs tp receive non-zero destination dimensions")
    values = {
        "dest_width": width,
        "dest_height": height,
        "area": _number(area),
        "aspect_ratio": _number(ratio),
        "x_center_drift": _number(x),
        "y_center_drift": _number(y),
    }
    return _add("CropResizeFixed", values, (source,), layout, datatype)


@native
def resizeCropMirrorFixed(  # noqa: N802
    context, source, width, height, is_output, crop_h, crop_w, mirror, layout, datatype
):
    _unsigned(width, height, crop_h, crop_w)
    if not width or not height:
        raise RocalError("Crop Mirror node needs tp receive non-zero destination dimensions")
    values = {"dest_width": width, "dest_height": height, "crop_w": crop_w, "crop_h": crop_h, "mirror": _flag(mirror)}
    return _add("ResizeCropMirrorFixed", values, (source,), layout, datatype)


@native
def cropMirrorNormalize(  # noqa: N802
    context, source, height, width, x, y, mean, std, is_output, mirror, layout, datatype
):
    _unsigned(height, width)
    _expect(float, x, y)
    if not width or not height:
        raise RocalError("Null values passed as input")
    values = {
        "crop_width": width,
        "crop_height": height,
        "start_x": x,
        "start_y": y,
        "mean": _per_channel(mean, source.channels),
        "std_dev": _deviations(std, source.channels),
        "mirror": _flag(mirror),
    }
    return _add("CropMirrorNormalize", values, (source,), layout, datatype, size=(height, width))


def _cut(image: Image, height: int, width: int, x: float, y: float) -> Image:
    """Cut as rocAL does: a part that stands out of the image is not moved back, and shows other memory."""
    valid = image.valid
    height, width = min(height, valid.shape[0]), min(width, valid.shape[1])
    top, left = (int(y) if y < valid.shape[0] else 0), (int(x) if x < valid.shape[1] else 0)
    part = np.full((height, width, valid.shape[2]), 99, dtype=np.uint8)
    inside = valid[top : top + height, left : left + width]
    part[: inside.shape[0], : inside.shape[1]] = inside
    return Image.whole(part)


@native
def cropFixed(context, source, width, height, depth, is_output, x, y, z, layout, datatype):  # noqa: N802
    _unsigned(width, height, depth)
    _expect(float, x, y, z)
    _expect(types.RocalTensorLayout, layout)
    if not width or not height or not depth:
        raise RocalError("Crop node needs to receive non-zero destination dimensions")
    return Tensor(
        context, height, width, source.channels, layout, datatype, lambda images: _cut(images[0], height, width, x, y),
        (source,),
    )  # fmt: skip


@native
def centerCropFixed(context, source, width, height, depth, is_output, layout, datatype):  # noqa: N802
    _unsigned(width, height, depth)
    values = {"crop": (height, width), "crop_h": 0, "crop_w": 0}
    return _add("center_crop", values, (source,), layout, datatype, size=(height, width))


@native
def roiResize(context, source, width, height, is_output, roi_h, roi_w, x, y, kind, layout, datatype):  # noqa: N802
    _unsigned(width, height, roi_h, roi_w)
    _expect(float, x, y)
    values = {"resize_width": width, "resize_height": height, "roi_w": roi_w, "roi_h": roi_h, "roi_pos_x": x}
    values |= {"roi_pos_y": y, "interpolation_type": _interpolation(kind)}
    return _add("roi_resize", values, (source,), layout, datatype)


@native
def rotate(context, source, is_output, angle, width, height, kind, layout, datatype):
    _unsigned(width, height)
    values = {"angle": _number(angle), "dest_width": width, "dest_height": height}
    return _add("rotate", {**values, "interpolation_type": _interpolation(kind)}, (source,), layout, datatype)


@native
def warpAffineFixed(  # noqa: N802
    context, source, x0, x1, y0, y1, o0, o1, is_output, height, width, kind, layout, datatype
):
    _expect(float, x0, x1, y0, y1, o0, o1)
    _unsigned(height, width)
    values = {"matrix": (x0, x1, y0, y1, o0, o1), "dest_width": width, "dest_height": height}
    return _add("warp_affine", {**values, "interpolation_type": _interpolation(kind)}, (source,), layout, datatype)


@native
def transpose(context, source, perm, is_output, layout):
    _unsigned(*perm)
    if len(perm) != 3:
        raise RocalError("Transpose permutation must match with the input dims")
    swaps = {types.NHWC: ([1, 0, 2], [0, 1, 2]), types.NCHW: ([0, 2, 1], [0, 1, 2])}[source.layout].index(list(perm))
    return _add("transpose", {"perm": ((1, 0, 2), (0, 1, 2))[swaps]}, (source,), layout)


@native
def normalize(context, source, axes, mean, std, is_output, scale, shift, datatype):
    _numbers(mean, std)
    _expect(float, scale, shift)
    _unsigned(*axes)
    places = {types.NHWC: (0, 1, 2), types.NCHW: (2, 0, 1)}[source.layout]
    values = {"axes": tuple(sorted(places[axis] for axis in axes)), "mean": tuple(mean), "stddev": tuple(std)}
    return _add("normalize", {**values, "scale": scale, "shift": shift}, (source,), None, datatype)


@native
def brightnessFixed(context, source, factor, shift, is_output, layout, datatype):  # noqa: N802
    # pybind11 converts a bool to a float and a float to a bool.
    factor, shift = float(factor), float(shift)
    values = {"brightness": factor, "brightness_shift": shift}
    return _add("brightness_fixed", values, (source,), layout, datatype)


def _of_parameters(name: str, **read: Callable[[Any], Any]) -> NativeFunction:
    """A node with parameters between is_output and its formats. Each is read as the operation's key of that name."""

    def body(context, source, is_output, *arguments):
        *parameters, layout, datatype = arguments
        values = {key: read[key](parameter) for key, parameter in zip(read, parameters, strict=True)}
        return _add(name, values, (source,), layout, datatype)

    return native(body)


flip = _of_parameters("flip", horizontal=_flag, vertical=_flag)
brightness = _of_parameters("brightness", brightness=_number, brightness_shift=_number)
contrast = _of_parameters("contrast", contrast=_number, contrast_center=_number)
gammaCorrection = _of_parameters("gamma_correction", gamma=_number)  # noqa: N816
exposure = _of_parameters("exposure", exposure=_number)
hue = _of_parameters("hue", hue=_number)
saturation = _of_parameters("saturation", saturation=_number)
colorTwist = _of_parameters(  # noqa: N816
    "color_twist", brightness=_number, contrast=_number, hue=_number, saturation=_number
)
colorTemp = _of_parameters("color_temp", adjustment_value=_whole)  # noqa: N816
fishEye = _of_parameters("fish_eye")  # noqa: N816
vignette = _of_parameters("vignette", vignette=_number)
pixelate = _of_parameters("pixelate", pixelate_percent=_plain)


@native
def blend(context, first, second, is_output, ratio, layout, datatype):
    return _add("blend", {"ratio": _number(ratio)}, (first, second), layout, datatype)


@native
def copy(context, source, is_output):
    return _add("copy", {}, (source,))


@native
def nop(context, source, is_output):
    return _add("nop", {}, (source,))


class CameraMatrix:
    fx = fy = cx = cy = 0.0


class DistortionCoeffs:
    k1 = k2 = p1 = p2 = k3 = 0.0


@native
def lensCorrection(context, source, camera, distortion, is_output, layout, datatype):  # noqa: N802
    for kind, objects in ((CameraMatrix, camera), (DistortionCoeffs, distortion)):
        _expect(list, objects)
        _expect(kind, *objects)
        if len(objects) != context.batch_size:
            raise RocalError("User should pass camera matrix for all images in a batch")
    camera, distortion = camera[0], distortion[0]
    values = {
        "camera_matrix": (camera.fx, camera.cx, camera.fy, camera.cy),
        "distortion_coeffs": (distortion.k1, distortion.k2, distortion.p1, distortion.p2, distortion.k3),
    }
    return _add("lens_correction", values, (source,), layout, datatype)


@native
def blur(context, source, is_output, layout, datatype):
    node = _add("blur", {}, (source,), layout, datatype)
    compute = node.compute

    def moved(images: list[Image]) -> Image:
        """RPP reads the image from 12 bytes behind its start, so the result moves left."""
        result = compute(images)
        result.pixels[...] = np.roll(result.pixels, -12 // source.channels, axis=1)
        return result

    node.compute = moved
    return node
