"""Declares operations on levels: by a table, by hue and saturation, by a pixel's neighbours or place, by another image
or by all levels; and operations that copy or measure an image.

As in rocAL, the first channel counts as red, whatever the decoder's colour format is. Keys without a default are
required here, because rocAL uses random values instead.
"""

from __future__ import annotations

import math
from typing import Any, cast

import cv2
import numpy as np

from rocserve.backends.rocal import schema
from rocserve.backends.rocal.image import Extent, Image, Pixels, ResultExtent, cached_by_image_size, with_channels
from rocserve.backends.rocal.operations.base import (
    AmdForm,
    Measurement,
    Operation,
    Values,
    by_levels,
    in_place,
    same_extent,
)
from rocserve.backends.rocal.sampling import resize_nearest, resize_to_bytes
from rocserve.core.datatypes import DataType


def _fused(levels: Pixels, factor: float, summand: float) -> Pixels:
    """Return level * factor + summand, rounded to FP32 once, as by a fused multiply-add."""
    product = levels.astype(np.float64) * np.float64(np.float32(factor))
    return cast(Pixels, (product + np.float64(np.float32(summand))).astype(np.float32))


def _brightness(levels: Pixels, brightness: float, brightness_shift: float) -> Pixels:
    """level * brightness + brightness_shift (in levels of 0..255)."""
    return cast(Pixels, np.rint(_fused(levels, brightness, brightness_shift)))


def _gamma_correction(levels: Pixels, gamma: float) -> Pixels:
    """(level / 255) ** gamma * 255, truncated."""
    fractions = levels * np.float32(1 / 255)
    powers = (fractions.astype(np.float64) ** np.float64(np.float32(gamma))).astype(np.float32)
    return cast(Pixels, np.trunc(powers.astype(np.float64) * 255))


_ONE = np.float32(1)
_THIRD, _HALF, _TWO_THIRDS = np.float32(2 / 6), np.float32(3 / 6), np.float32(4 / 6)


class _Saturated:
    """Holds hue, saturation and value of an image as fractions, FP32, one plane each, computed as in RPP's older
    kernels."""

    def __init__(self, pixels: Pixels) -> None:
        # Constants are computed and applied as in RPP, because many results are in the middle between two integers.
        red, green, blue = (plane.astype(np.float32) * (_ONE / np.float32(255)) for plane in cv2.split(pixels))
        self.value = np.maximum(np.maximum(green, blue), red)
        chroma = self.value - np.minimum(np.minimum(green, blue), red)
        is_red, is_green = self.value == red, self.value == green
        difference = np.where(is_red, green - blue, np.where(is_green, blue - red, red - green))
        start = np.where(is_red, _ONE, np.where(is_green, _ONE - _TWO_THIRDS, _ONE + _TWO_THIRDS))
        is_grey = chroma == 0
        self.hue = difference / np.where(is_grey, _ONE, chroma * np.float32(6)) + start
        self.hue -= self.hue >= 1
        self.saturation = chroma / np.where(is_grey, _ONE, self.value)

    def pixels(self) -> Pixels:
        shares = (
            np.abs(self.hue - _HALF) * np.float32(6) - np.float32(2),
            _ONE - np.abs(self.hue - _THIRD) * np.float32(6),
            _ONE - np.abs(self.hue - _TWO_THIRDS) * np.float32(6),
        )
        for share in shares:
            np.clip(share, -1, 0, out=share)
            share *= self.saturation
            share *= self.value
            share += self.value
            share *= np.float32(255)
        return cv2.convertScaleAbs(cv2.merge(shares))


def _hue(pixels: Pixels, hue: float) -> Pixels:
    image = _Saturated(pixels)
    image.hue += np.float32(math.fmod(hue, 360) % 360 / 360)
    image.hue -= image.hue >= 1
    return image.pixels()


def _saturation(pixels: Pixels, saturation: float) -> Pixels:
    """Multiply the saturation (0..1), clipped to 1; 0 makes an image grey."""
    image = _Saturated(pixels)
    image.saturation *= np.float32(saturation)
    np.minimum(image.saturation, 1, out=image.saturation)
    return image.pixels()


def _color_twist(pixels: Pixels, brightness: float, contrast: float, hue: float, saturation: float) -> Pixels:
    """Turn the hue by whole degrees, multiply the saturation, then compute level * brightness + contrast. Contrary
    to its name, rocAL adds `contrast`, in levels of 0..255."""
    red, green, blue = (plane.astype(np.float32) * np.float32(1 / 255) for plane in cv2.split(pixels))
    value = np.maximum(red, np.maximum(green, blue))
    chroma = value - np.minimum(red, np.minimum(green, blue))
    # In sixths of a circle, from 0 to 6.
    is_red, is_green = value == red, value == green
    difference = np.where(is_red, green - blue, np.where(is_green, blue - red, red - green))
    start = np.where(is_red, np.float32(0), np.where(is_green, np.float32(2), np.float32(4)))
    is_grey = chroma == 0
    start[is_grey] = 0
    turned = difference / np.where(is_grey, np.float32(1), chroma)
    turned += np.float32(math.fmod(int(hue), 360)) * np.float32(0.01666667) + start
    turned -= np.float32(6) * (turned >= 6)
    turned += np.float32(6) * (turned < 0)
    purity = chroma / np.maximum(value, np.float32(1e-9)) * np.float32(saturation)
    np.minimum(purity, 1, out=purity)
    strength = value * purity
    planes = []
    for share in (np.abs(turned - 3) - 1, 2 - np.abs(turned - 2), 2 - np.abs(turned - 4)):
        np.clip(share, 0, 1, out=share)
        share -= 1
        share *= strength
        share += value
        planes.append(share)
    levels = cast(Pixels, cv2.merge(planes))
    levels *= np.float32(brightness) * np.float32(255)
    levels += np.float32(contrast)
    np.clip(levels, 0, 255, out=levels)
    return cv2.convertScaleAbs(levels)


def _blur(pixels: Pixels) -> Pixels:
    """Return the mean of 3 x 3 pixels; border pixels are repeated. RPP's vector loop truncates the mean. Its scalar
    loop, for the first and the last columns, rounds it."""
    width, channels = pixels.shape[1], pixels.shape[2]
    box = cv2.boxFilter(pixels, cv2.CV_16U, (3, 3), normalize=False, borderType=cv2.BORDER_REPLICATE)
    sums = with_channels(cast(Pixels, box))
    # The vector loop processes 24 bytes at a time, after the first pixel and before the last.
    step = 24 // channels
    end = 1 + max(width - 2, 0) // step * step
    means = np.empty_like(pixels)
    means[:, 1:end] = sums[:, 1:end] // np.uint16(9)
    for columns in (slice(0, 1), slice(end, width)):
        means[:, columns] = (sums[:, columns] + np.uint16(4)) // np.uint16(9)
    return means


def _pixelate(pixels: Pixels, pixelate_percent: float) -> Pixels:
    """Shrink the image bilinearly by this percentage, and stretch it again by nearest pixels."""
    height, width = pixels.shape[:2]
    kept = np.float32(100) - np.float32(pixelate_percent)
    shrunk_height, shrunk_width = (max(int(np.float32(side) * kept / np.float32(100)), 1) for side in (height, width))
    return resize_nearest(resize_to_bytes(pixels, shrunk_width, shrunk_height), width, height)


def _vignette(pixels: Pixels, vignette: float) -> Pixels:
    """Darken towards the corners: level * exp(-vignette / 4 * (distance / radius) ** 2). The distance is from the
    middle, and the radius is half the longer side."""
    levels = pixels.astype(np.float32)
    levels *= _shades(pixels.shape[0], pixels.shape[1], vignette)
    return with_channels(cv2.convertScaleAbs(levels))


@cached_by_image_size
def _shades(height: int, width: int, vignette: float) -> Pixels:
    half_height, half_width = height // 2, width // 2
    radius = np.float32(max(half_height, half_width, 1))
    factor = -(np.float32(0.25) * np.float32(vignette)) / (radius * radius)
    rows = (np.arange(height, dtype=np.float32) - np.float32(half_height))[:, np.newaxis]
    columns = (np.arange(width, dtype=np.float32) - np.float32(half_width))[np.newaxis]
    return cast(Pixels, np.exp((columns * columns + rows * rows) * factor)[:, :, np.newaxis])


def _blend(first: Image, second: Image, result: ResultExtent, as_float: bool, ratio: float) -> Pixels:
    """Return first * ratio + second * (1 - ratio), for images of one size."""
    levels = first.valid.astype(np.float32)
    under = second.valid.astype(np.float32)
    levels -= under
    levels *= np.float32(ratio)
    levels += under
    return with_channels(cv2.convertScaleAbs(levels))


def _blended_extent(first: ResultExtent, second: ResultExtent, ratio: float) -> ResultExtent:
    one, other = first.valid, second.valid
    for side, other_side in ((one.height, other.height), (one.width, other.width)):
        if side is not None and other_side is not None and side != other_side:
            first_size, second_size = (f"{extent.height or '?'}x{extent.width or '?'}" for extent in (one, other))
            raise ValueError(
                f"it takes two images of one size, not {first_size} and {second_size} (height x width); resize them"
                " before"
            )
    return ResultExtent.whole(
        Extent(
            other.height if one.height is None else one.height,
            other.width if one.width is None else one.width,
        )
    )


def _normalize(
    image: Image,
    result: ResultExtent,
    as_float: bool,
    axes: tuple[int, ...],
    mean: tuple[float, ...],
    stddev: tuple[float, ...],
    scale: float,
    shift: float,
) -> Pixels:
    """Return (level - mean) * scale / stddev + shift. If no mean and deviation are given, they are computed over `axes`
    (0 = height, 1 = width, 2 = channels), and equal levels give `shift`. If they are given, each is one value, or one
    per channel if `axes` is [0, 1]. UINT8 is truncated."""
    source = image.valid
    channels = source.shape[2]
    if mean:
        means, deviations = (
            np.broadcast_to(np.array(values, dtype=np.float32), (1, 1, channels)) for values in (mean, stddev)
        )
        factors = np.float32(scale) / deviations
    else:
        found = source.mean(axis=axes, keepdims=True, dtype=np.float64)
        deviation = np.sqrt(((source - found) ** 2).mean(axis=axes, keepdims=True))
        factor = np.where(deviation > 0, scale / np.where(deviation > 0, deviation, 1), 0)
        if found.size == 1:
            found, factor = (np.broadcast_to(number, (1, 1, channels)) for number in (found, factor))
        means, factors = found.astype(np.float32), factor.astype(np.float32)
    if means.shape[0] == means.shape[1] == 1:
        table = _normalised(np.arange(256, dtype=np.float32)[np.newaxis, :, np.newaxis], means, factors, shift)
        levels = with_channels(cast(Pixels, cv2.LUT(source, table)))
    else:
        levels = _normalised(source.astype(np.float32), means, factors, shift)
    return levels if as_float else np.clip(levels, 0, 255).astype(np.uint8)


def _normalised(levels: Pixels, means: Pixels, factors: Pixels, shift: float) -> Pixels:
    return cast(Pixels, (levels - means) * factors + np.float32(shift))


def _refused(reason: str) -> AmdForm:
    return AmdForm(refusal=lambda arguments, source: reason)


def _both_or_neither(
    axes: tuple[int, ...], mean: tuple[float, ...], stddev: tuple[float, ...], **others: Any
) -> Values:
    if len(set(axes)) < len(axes):
        raise ValueError(f"key 'axes' must name each axis once, not {list(axes)}")
    if bool(mean) != bool(stddev):
        raise ValueError("keys 'mean' and 'stddev' must be given both or neither; rocAL drops one that is alone")
    if max(len(mean), len(stddev)) > 1 and set(axes) != {0, 1}:
        raise ValueError("keys 'mean' and 'stddev' may have a value for each channel only where 'axes' is [0, 1]")
    return {"axes": axes, "mean": mean, "stddev": stddev, **others}


OPERATIONS = (
    by_levels("brightness", _brightness, {"brightness": schema.number, "brightness_shift": schema.number}),
    by_levels(
        "brightness_fixed",
        _brightness,
        {"brightness": schema.number(1.0), "brightness_shift": schema.number(0.0)},
        # fn.brightness_fixed passes its arguments in the wrong order, which makes the image black.
        amd=AmdForm("brightness"),
    ),
    by_levels(
        "contrast",
        # (level - contrast_center) * contrast + contrast_center.
        lambda levels, contrast, contrast_center: np.rint(
            _fused(levels - np.float32(contrast_center), contrast, contrast_center)
        ),
        {"contrast": schema.number, "contrast_center": schema.number},
    ),
    by_levels(
        "exposure",
        lambda levels, exposure: np.rint(levels * np.float32(2**exposure)),
        {"exposure": schema.exponent(0.5)},
    ),
    by_levels("gamma_correction", _gamma_correction, {"gamma": schema.not_negative(0.5)}),
    by_levels(
        "color_temp",
        # Adds levels to the first channel and subtracts them from the third; an RGB image becomes warmer.
        lambda levels, adjustment_value: (
            levels[:, np.newaxis] + np.array([adjustment_value, 0, -adjustment_value], dtype=np.float32)
        )[np.newaxis],
        {"adjustment_value": schema.signed_integer(50)},
        colour_only=True,
    ),
    in_place("hue", _hue, {"hue": schema.number}, colour_only=True),
    in_place("saturation", _saturation, {"saturation": schema.not_negative(1.0)}, colour_only=True),
    in_place(
        "color_twist",
        _color_twist,
        {
            "brightness": schema.number(1.0),
            "contrast": schema.number(1.0),
            "hue": schema.number(0.0),
            "saturation": schema.not_negative(1.0),
        },
        colour_only=True,
    ),
    in_place(
        "blur",
        _blur,
        # rocAL accepts both keys but ignores them.
        ignored_keys={"window_size": schema.size(3), "sigma": schema.number(0)},
        amd=_refused("rocAL moves the picture four pixels to the left and reads memory next to it; use the CPU engine"),
    ),
    in_place("pixelate", _pixelate, {"pixelate_percent": schema.percentage(50.0)}),
    in_place("vignette", _vignette, {"vignette": schema.not_negative(0.5)}),
    Operation(
        "blend",
        # The ratio is required, because rocAL uses a random one as its default.
        {"ratio": schema.fraction},
        _blend,
        _blended_extent,
        sources=2,
    ),
    Operation(
        "normalize",
        {
            "axes": schema.list_of(schema.axis, (1, 2, 3), "axes"),
            "mean": schema.list_of(schema.number, (0, 1, 3), "numbers")(()),
            "stddev": schema.list_of(schema.positive_number, (0, 1, 3), "numbers")(()),
            "scale": schema.number(1.0),
            "shift": schema.number(0.0),
        },
        _normalize,
        same_extent,
        _both_or_neither,
        channel_keys=("mean", "stddev"),
        default_datatype=DataType.FP32,
        amd=_refused(
            "rocAL writes no FP32 here, and UINT8 that runs over below 0; use crop_mirror_normalize or"
            " resize_mirror_normalize with a mean and a std, or the CPU engine"
        ),
    ),
    in_place("copy", lambda pixels: pixels),
    # fn.nop writes nothing.
    in_place("nop", lambda pixels: pixels, amd=AmdForm("copy")),
    Measurement(
        "ImageSize",
        DataType.INT32,
        (2,),
        # The size before the decoder scaled the image, to which clients scale boxes back.
        lambda decoded: np.array((decoded.original_height, decoded.original_width), dtype=np.int32),
    ),
)
