"""Operations that mix, normalise, pass on or measure images."""

from __future__ import annotations

from typing import Any, cast

import cv2
import numpy as np

from rocserve.backends.rocal import schema
from rocserve.backends.rocal.image import DecodedImage, Extent, Image, Pixels, ResultExtent, with_channels
from rocserve.backends.rocal.operations.base import (
    AmdForm,
    Measurement,
    Operation,
    Values,
    in_place,
    refused,
    same_extent,
)
from rocserve.core.datatypes import DataType


def _image_size(decoded: DecodedImage) -> np.ndarray[Any, Any]:
    """Height and width, in pixels, before the decoder scaled it: what boxes are to be scaled back to."""
    return np.array((decoded.original_height, decoded.original_width), dtype=np.int32)


def _blend(first: Image, second: Image, result: ResultExtent, as_float: bool, ratio: float) -> Pixels:
    """first * ratio + second * (1 - ratio), for images of one size."""
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
    """(level - mean) * scale / stddev + shift.

    `axes` are those over which mean and deviation are found where they are not given: 0 = height, 1 = width, 2 =
    channels. Given ones are one value, or one a channel where `axes` are [0, 1]. Nothing but `shift` is left where all
    levels are the same. UINT8 has its fraction cut off.
    """
    source = image.valid
    means, factors = _given(source.shape[2], mean, stddev, scale) if mean else _found(source, axes, scale)
    if means.shape[0] == means.shape[1] == 1:
        table = _normalised(np.arange(256, dtype=np.float32)[np.newaxis, :, np.newaxis], means, factors, shift)
        levels = with_channels(cast(Pixels, cv2.LUT(source, table)))
    else:
        levels = _normalised(source.astype(np.float32), means, factors, shift)
    return levels if as_float else np.clip(levels, 0, 255).astype(np.uint8)


def _normalised(levels: Pixels, means: Pixels, factors: Pixels, shift: float) -> Pixels:
    return cast(Pixels, (levels - means) * factors + np.float32(shift))


def _given(channels: int, mean: tuple[float, ...], stddev: tuple[float, ...], scale: float) -> tuple[Pixels, Pixels]:
    means, deviations = (
        np.broadcast_to(np.array(values, dtype=np.float32), (1, 1, channels)) for values in (mean, stddev)
    )
    return means, np.float32(scale) / deviations


def _found(source: Pixels, axes: tuple[int, ...], scale: float) -> tuple[Pixels, Pixels]:
    mean = source.mean(axis=axes, keepdims=True, dtype=np.float64)
    deviation = np.sqrt(((source - mean) ** 2).mean(axis=axes, keepdims=True))
    factor = np.where(deviation > 0, scale / np.where(deviation > 0, deviation, 1), 0)
    if mean.size == 1:
        mean, factor = (np.broadcast_to(found, (1, 1, source.shape[2])) for found in (mean, factor))
    return mean.astype(np.float32), factor.astype(np.float32)


def _both_or_neither(
    axes: tuple[int, ...], mean: tuple[float, ...], stddev: tuple[float, ...], **others: Any
) -> Values:
    if bool(mean) != bool(stddev):
        raise ValueError("keys 'mean' and 'stddev' must be given both or neither; rocAL drops one that is alone")
    if max(len(mean), len(stddev)) > 1 and set(axes) != {0, 1}:
        raise ValueError("keys 'mean' and 'stddev' may have a value for each channel only where 'axes' is [0, 1]")
    return {"axes": axes, "mean": mean, "stddev": stddev, **others}


def _copy(pixels: Pixels) -> Pixels:
    return pixels


OPERATIONS = (
    Operation(
        "blend",
        # rocAL draws a ratio that is left out at random.
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
        amd=refused(
            "rocAL writes no FP32 here, and UINT8 that runs over below 0; use crop_mirror_normalize or"
            " resize_mirror_normalize with a mean and a std, or the CPU engine"
        ),
    ),
    in_place("copy", _copy),
    # fn.nop writes nothing at all.
    in_place("nop", _copy, amd=AmdForm("copy")),
    Measurement("ImageSize", DataType.INT32, (2,), _image_size),
)
