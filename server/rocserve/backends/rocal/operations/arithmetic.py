"""Operations that mix, normalise, cut, pass on or measure images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import cv2
import numpy as np

from rocserve.backends.rocal import schema
from rocserve.backends.rocal.image import DecodedImage, Extent, Image, Pixels, PixelsError, ResultExtent
from rocserve.backends.rocal.operations.base import (
    KeptSizeOperation,
    Measurement,
    Operation,
    PairOperation,
    PipelineOperation,
    placed,
)
from rocserve.backends.rocal.sampling import with_channels
from rocserve.backends.rocal.schema import Key
from rocserve.core.datatypes import DataType


@dataclass(frozen=True)
class ImageSize(Measurement):
    """Height and width, in pixels, of the image before the decoder scaled it: what boxes are to be scaled back to.

    Not an operation of rocAL's.
    """

    name: ClassVar[str] = "ImageSize"
    keys: ClassVar[dict[str, Key]] = {}
    datatype: ClassVar[DataType] = DataType.INT32
    shape: ClassVar[tuple[int, ...]] = (2,)

    def measure(self, decoded: DecodedImage) -> np.ndarray[Any, Any]:
        return np.array((decoded.original_height, decoded.original_width), dtype=np.int32)


@dataclass(frozen=True)
class Blend(PairOperation):
    """first * ratio + second * (1 - ratio), for images of one size."""

    ratio: float

    name: ClassVar[str] = "blend"
    # rocAL draws a ratio that is left out at random.
    keys: ClassVar[dict[str, Key]] = {"ratio": Key(schema.read_fraction)}

    def run_pair(self, first: Image, second: Image, as_float: bool) -> Image:
        if first.valid.shape != second.valid.shape:
            raise PixelsError(_sizes_differ(*first.valid.shape[:2], *second.valid.shape[:2]))
        levels = first.valid.astype(np.float32)
        under = second.valid.astype(np.float32)
        levels -= under
        levels *= np.float32(self.ratio)
        levels += under
        blended = with_channels(cv2.convertScaleAbs(levels))
        return Image.whole(blended.astype(np.float32) if as_float else blended)

    def extent_of_pair(self, first: Extent, second: Extent) -> ResultExtent:
        for one, other in ((first.height, second.height), (first.width, second.width)):
            if one is not None and other is not None and one != other:
                raise ValueError(_sizes_differ(first.height, first.width, second.height, second.width))
        height = second.height if first.height is None else first.height
        width = second.width if first.width is None else first.width
        size = Extent(height, width)
        return ResultExtent(size, size)


def _sizes_differ(height: int | None, width: int | None, other_height: int | None, other_width: int | None) -> str:
    first, second = (f"{h or '?'}x{w or '?'}" for h, w in ((height, width), (other_height, other_width)))
    return f"it takes two images of one size, not {first} and {second} (height x width); resize them before"


@dataclass(frozen=True)
class Normalize(Operation):
    """(level - mean) * scale / stddev + shift.

    `axes` are those over which mean and deviation are found where they are not given: 0 = height, 1 = width, 2 =
    channels. Given ones are one value, or one a channel where `axes` are [0, 1]. Nothing but `shift` is left where all
    levels are the same. UINT8 has its fraction cut off.
    """

    axes: tuple[int, ...]
    mean: tuple[float, ...]
    stddev: tuple[float, ...]
    scale: float
    shift: float

    name: ClassVar[str] = "normalize"
    keys: ClassVar[dict[str, Key]] = {
        "axes": Key(schema.read_list(schema.read_axis, (1, 2, 3), "axes")),
        "mean": Key(schema.read_list(schema.read_number, (0, 1, 3), "numbers"), default=()),
        "stddev": Key(schema.read_list(schema.read_positive_number, (0, 1, 3), "numbers"), default=()),
        "scale": Key(schema.read_number, default=1.0),
        "shift": Key(schema.read_number, default=0.0),
    }
    default_datatype: ClassVar[DataType] = DataType.FP32

    def __post_init__(self) -> None:
        if bool(self.mean) != bool(self.stddev):
            raise ValueError("keys 'mean' and 'stddev' must be given both or neither; rocAL drops one that is alone")
        if max(len(self.mean), len(self.stddev)) > 1 and set(self.axes) != {0, 1}:
            raise ValueError("keys 'mean' and 'stddev' may have a value for each channel only where 'axes' is [0, 1]")

    def check_channels(self, channels: int) -> None:
        for key, values in (("mean", self.mean), ("stddev", self.stddev)):
            if len(values) not in (0, 1, channels):
                raise ValueError(
                    f"key '{key}' has {len(values)} values, but the images have {channels} channel (parameter"
                    " 'color_format')"
                )

    def run(self, image: Image, as_float: bool) -> Image:
        source = image.valid
        levels = self._normalised(source)
        if not as_float:
            levels = np.clip(levels, 0, 255).astype(np.uint8)
        return placed(levels, image)

    def extent(self, source: Extent) -> ResultExtent:
        return ResultExtent(source, source)

    def result_extent(self, source: ResultExtent) -> ResultExtent:
        return source

    def _normalised(self, source: Pixels) -> Pixels:
        mean, factor = self._given(source.shape[2]) if self.mean else self._found(source)
        if mean.shape[0] == mean.shape[1] == 1:
            levels = np.arange(256, dtype=np.float32)[np.newaxis, :, np.newaxis]
            return with_channels(cast(Pixels, cv2.LUT(source, self._of(levels, mean, factor))))
        return self._of(source.astype(np.float32), mean, factor)

    def _of(self, levels: Pixels, mean: Pixels, factor: Pixels) -> Pixels:
        normalised = levels - mean
        normalised = normalised * factor
        return cast(Pixels, normalised + np.float32(self.shift))

    def _given(self, channels: int) -> tuple[Pixels, Pixels]:
        mean = np.broadcast_to(np.array(self.mean, dtype=np.float32), (1, 1, channels))
        deviation = np.broadcast_to(np.array(self.stddev, dtype=np.float32), (1, 1, channels))
        return mean, np.float32(self.scale) / deviation

    def _found(self, source: Pixels) -> tuple[Pixels, Pixels]:
        mean = source.mean(axis=self.axes, keepdims=True, dtype=np.float64)
        deviation = np.sqrt(((source - mean) ** 2).mean(axis=self.axes, keepdims=True))
        factor = np.where(deviation > 0, self.scale / np.where(deviation > 0, deviation, 1), 0)
        if mean.size == 1:
            mean, factor = (np.broadcast_to(found, (1, 1, source.shape[2])) for found in (mean, factor))
        return mean.astype(np.float32), factor.astype(np.float32)


@dataclass(frozen=True)
class Slice(Operation):
    """Cut out `shape`, [height, width], from `anchor`, [top, left], in pixels.

    What stands out of the image is an error by `out_of_bounds_policy` ERROR, `fill_values` by PAD, and left away by
    TRIMTOSHAPE.
    """

    anchor: tuple[int, int]
    shape: tuple[int, int]
    fill_values: tuple[float, ...]
    out_of_bounds_policy: str

    name: ClassVar[str] = "slice"
    keys: ClassVar[dict[str, Key]] = {
        "anchor": Key(schema.read_list(schema.read_size, (2,), "places in pixels, [top, left]")),
        "shape": Key(schema.read_list(schema.read_positive_size, (2,), "sizes in pixels, [height, width]")),
        "fill_values": Key(schema.read_list(schema.read_number, (1,), "number"), default=(0.0,)),
        "out_of_bounds_policy": Key(schema.read_constant("ERROR", "PAD", "TRIMTOSHAPE"), default="ERROR"),
    }
    default_datatype: ClassVar[DataType] = DataType.FP32

    def run(self, image: Image, as_float: bool) -> Image:
        source = image.valid
        top, left = self.anchor
        part = source[top : top + self.shape[0], left : left + self.shape[1]]
        trims = self.out_of_bounds_policy == "TRIMTOSHAPE" and part.size
        if part.shape[:2] != self.shape and self.out_of_bounds_policy != "PAD" and not trims:
            raise PixelsError(
                f"slice from {list(self.anchor)} of {list(self.shape)} stands out of the image's"
                f' {list(source.shape[:2])} (height, width); "out_of_bounds_policy" may be PAD or TRIMTOSHAPE'
            )
        if as_float:
            part = part.astype(np.float32)
        if part.shape[:2] == self.shape or trims:
            return Image.whole(part)
        filling = self.fill_values[0] if as_float else np.clip(np.rint(self.fill_values[0]), 0, 255)
        pixels: Pixels = np.full((*self.shape, source.shape[2]), filling, dtype=part.dtype)
        pixels[: part.shape[0], : part.shape[1]] = part
        return Image.whole(pixels)

    def extent(self, source: Extent) -> ResultExtent:
        size = Extent(*self.shape)
        if self.out_of_bounds_policy == "TRIMTOSHAPE":
            sides = zip(self.anchor, self.shape, (source.height, source.width), strict=True)
            size = Extent(
                *(None if side is None else max(min(length, side - start), 0) for start, length, side in sides)
            )
        return ResultExtent(size, size)


@dataclass(frozen=True)
class Copy(KeptSizeOperation):
    """The image as it is."""

    name: ClassVar[str] = "copy"
    keys: ClassVar[dict[str, Key]] = {}

    def _process(self, pixels: Pixels) -> Pixels:
        return pixels


@dataclass(frozen=True)
class Nop(Copy):
    """The image as it is."""

    name: ClassVar[str] = "nop"


OPERATIONS: tuple[type[PipelineOperation], ...] = (Blend, Normalize, Slice, Copy, Nop, ImageSize)
