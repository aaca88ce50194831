"""The six operations of a JSON pipeline, with rocAL's semantics.

An operation takes an image of UINT8 pixels and gives one of UINT8 or FP32. Sizes and positions are pixels unless said
otherwise. To add an operation, write its class and name it in OPERATIONS.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, cast

import cv2
import numpy as np

from rocserve.backends.rocal import schema
from rocserve.backends.rocal.image import Extent, Image, Pixels, ResultExtent
from rocserve.backends.rocal.sampling import (
    resize_for_bytes,
    resize_for_floats,
    scalar_columns,
    to_bytes,
    with_channels,
)
from rocserve.backends.rocal.schema import Key


class Operation(abc.ABC):
    """One step of a pipeline; safe to use on several threads at once."""

    keys: ClassVar[dict[str, Key]]
    """The JSON keys that it takes, beyond those that all take; also the fields that it is made of."""
    ignored_keys: ClassVar[dict[str, Key]] = {}
    """Keys that rocAL takes for volumes and that mean nothing for an image; checked and dropped."""

    @abc.abstractmethod
    def run(self, image: Image, as_float: bool) -> Image:
        """The result as UINT8, or as FP32 without rounding and clamping."""

    @abc.abstractmethod
    def extent(self, source: Extent) -> ResultExtent:
        """The size of the result for an image of which `source` is valid."""


class _Resizing(Operation):
    """An operation whose result is stretched to a fixed size; a side of 0 keeps that side of what is stretched."""

    dest_width: int
    dest_height: int

    def _stretch(self, pixels: Pixels, as_float: bool, mirror: bool = False) -> Pixels:
        levels = self._stretch_levels(pixels, as_float, mirror)
        return levels if as_float else to_bytes(levels)

    def _stretch_levels(self, pixels: Pixels, as_float: bool, mirror: bool) -> Pixels:
        """FP32 either way; `as_float` says as which of the two kernels reads the source."""
        width = self.dest_width or pixels.shape[1]
        height = self.dest_height or pixels.shape[0]
        levels = (resize_for_floats if as_float else resize_for_bytes)(pixels, width, height)
        return with_channels(cast(Pixels, cv2.flip(levels, 1))) if mirror else levels

    def _stretched_extent(self, source: Extent) -> Extent:
        return Extent(self.dest_height or source.height, self.dest_width or source.width)


_NARROWEST, _WIDEST = 0.75, 1.333
"""CropResizeFixed's bounds of the aspect ratio where the part that it is asked for does not fit."""

_DESTINATION = {"dest_width": Key(schema.read_size), "dest_height": Key(schema.read_size)}
_MIRROR = {"mirror": Key(schema.read_flag, default=False)}
_NORMALISATION = {"mean": Key(schema.read_channel_numbers), "std_dev": Key(schema.read_divisors)}


@dataclass(frozen=True)
class Resize(_Resizing):
    """Stretch to the destination."""

    dest_width: int
    dest_height: int

    keys: ClassVar[dict[str, Key]] = _DESTINATION

    def run(self, image: Image, as_float: bool) -> Image:
        return Image.whole(self._stretch(image.valid, as_float))

    def extent(self, source: Extent) -> ResultExtent:
        size = self._stretched_extent(source)
        return ResultExtent(size, size)


@dataclass(frozen=True)
class ResizeMirrorNormalize(_Resizing):
    """Stretch, mirror left to right, then (level - mean) / std_dev, of which there is one for each channel."""

    dest_width: int
    dest_height: int
    mean: tuple[float, ...]
    std_dev: tuple[float, ...]
    mirror: bool

    keys: ClassVar[dict[str, Key]] = {**_DESTINATION, **_NORMALISATION, **_MIRROR}

    def run(self, image: Image, as_float: bool) -> Image:
        levels = self._stretch_levels(image.valid, as_float, self.mirror)
        width = levels.shape[1]
        rows = levels.reshape(levels.shape[0], -1)
        # One long row of means instead of broadcasting over the channels: numpy is several times faster so.
        rows -= np.tile(np.asarray(self.mean, dtype=np.float32), width)
        rows *= self._divisor_row(width)
        return Image.whole(levels if as_float else to_bytes(levels))

    def extent(self, source: Extent) -> ResultExtent:
        size = self._stretched_extent(source)
        return ResultExtent(size, size)

    def _divisor_row(self, width: int) -> Pixels:
        """1 / std_dev for each channel of each pixel of a row.

        In the columns that RPP's scalar loop writes, it takes the first two channels' divisors for each other.
        """
        inverse = (1 / np.asarray(self.std_dev, dtype=np.float64)).astype(np.float32)
        row = np.tile(inverse, (width, 1))
        if len(inverse) == 3:
            row[scalar_columns(width), :2] = inverse[1::-1]
        return row.reshape(-1)


@dataclass(frozen=True)
class CropMirrorNormalize(Operation):
    """Crop, mirror left to right, then level / std_dev - mean / std_dev for each channel.

    `start_x` and `start_y` are fractions of the room that the crop leaves: 0 = left or top, 0.5 = centre, 1 = right or
    bottom. A crop larger than the image becomes the image's full side.
    """

    crop_width: int
    crop_height: int
    start_x: float
    start_y: float
    mean: tuple[float, ...]
    std_dev: tuple[float, ...]
    mirror: bool

    keys: ClassVar[dict[str, Key]] = {
        "crop_width": Key(schema.read_positive_size),
        "crop_height": Key(schema.read_positive_size),
        "start_x": Key(schema.read_fraction, default=0.5),
        "start_y": Key(schema.read_fraction, default=0.5),
        **_NORMALISATION,
        **_MIRROR,
    }
    ignored_keys: ClassVar[dict[str, Key]] = {
        "crop_depth": Key(schema.read_size, default=1),
        "start_z": Key(schema.read_number, default=0),
    }

    def run(self, image: Image, as_float: bool) -> Image:
        source = image.valid
        height, width = min(self.crop_height, source.shape[0]), min(self.crop_width, source.shape[1])
        top = round(self.start_y * (source.shape[0] - height))
        left = round(self.start_x * (source.shape[1] - width))
        crop = source[top : top + height, left : left + width]
        if self.mirror:
            crop = with_channels(cast(Pixels, cv2.flip(crop, 1)))
        normalised = cv2.LUT(crop, self._float_table if as_float else self._byte_table)
        return Image.whole(with_channels(cast(Pixels, normalised)))

    def extent(self, source: Extent) -> ResultExtent:
        size = Extent(_limited(self.crop_height, source.height), _limited(self.crop_width, source.width))
        return ResultExtent(size, size)

    @cached_property
    def _float_table(self) -> Pixels:
        """The result for each of the 256 levels and each channel, 1 x 256 x channels."""
        mean, deviation = np.asarray(self.mean), np.asarray(self.std_dev)
        levels = np.arange(256, dtype=np.float64)[:, np.newaxis]
        table: Pixels = (levels / deviation - mean / deviation).astype(np.float32)
        return table[np.newaxis]

    @cached_property
    def _byte_table(self) -> Pixels:
        return cast(Pixels, np.clip(np.rint(self._float_table), 0, 255).astype(np.uint8))


@dataclass(frozen=True)
class CropFixed(Operation):
    """Crop at a position in whole pixels (fractions are cut off).

    A position at or beyond the image's side counts as 0, a crop wider than the image as the full side. Where the crop
    would stand out of the image it is moved back into it; rocAL reads other memory there.
    """

    crop_width: int
    crop_height: int
    crop_pos_x: float
    crop_pos_y: float

    keys: ClassVar[dict[str, Key]] = {
        "crop_width": Key(schema.read_positive_size),
        "crop_height": Key(schema.read_positive_size),
        "crop_pos_x": Key(schema.read_pixel_position),
        "crop_pos_y": Key(schema.read_pixel_position),
    }
    ignored_keys: ClassVar[dict[str, Key]] = {
        "crop_depth": Key(schema.read_positive_size, default=1),
        "crop_pos_z": Key(schema.read_number, default=0),
    }

    def run(self, image: Image, as_float: bool) -> Image:
        source = image.valid
        top, height = _fitted(self.crop_pos_y, self.crop_height, source.shape[0])
        left, width = _fitted(self.crop_pos_x, self.crop_width, source.shape[1])
        crop = source[top : top + height, left : left + width]
        return Image.whole(crop.astype(np.float32) if as_float else crop)

    def extent(self, source: Extent) -> ResultExtent:
        size = Extent(_limited(self.crop_height, source.height), _limited(self.crop_width, source.width))
        return ResultExtent(size, size)


@dataclass(frozen=True)
class CropResizeFixed(_Resizing):
    """Cut out a part of `area` (a fraction of the image's) and `aspect_ratio` (width over height), and stretch it.

    The drifts are fractions of the room that the part leaves. Where the part does not fit, the largest central part
    with an aspect ratio from 0.75 to 1.333 is taken. Of the result the next operation sees as much as the part had.
    """

    dest_width: int
    dest_height: int
    area: float
    aspect_ratio: float
    x_center_drift: float
    y_center_drift: float

    keys: ClassVar[dict[str, Key]] = {
        "dest_width": Key(schema.read_positive_size),
        "dest_height": Key(schema.read_positive_size),
        "area": Key(schema.read_area),
        "aspect_ratio": Key(schema.read_positive_number),
        "x_center_drift": Key(schema.read_fraction),
        "y_center_drift": Key(schema.read_fraction),
    }

    def run(self, image: Image, as_float: bool) -> Image:
        source = image.valid
        top, left, height, width = self._part(source.shape[0], source.shape[1])
        pixels = self._stretch(source[top : top + height, left : left + width], as_float)
        return Image(pixels, min(height, self.dest_height), min(width, self.dest_width))

    def extent(self, source: Extent) -> ResultExtent:
        size = Extent(self.dest_height, self.dest_width)
        if source.height is None or source.width is None:
            return ResultExtent(size, Extent(None, None))
        _, _, height, width = self._part(source.height, source.width)
        return ResultExtent(size, Extent(min(height, self.dest_height), min(width, self.dest_width)))

    def _part(self, image_height: int, image_width: int) -> tuple[int, int, int, int]:
        """Top, left, height and width of what is cut out."""
        target = self.area * image_height * image_width
        width = int(math.sqrt(target * self.aspect_ratio))
        height = int(math.sqrt(target / self.aspect_ratio))
        if 0 < width < image_width and 0 < height < image_height:
            top = int(self.y_center_drift * (image_height - height))
            left = int(self.x_center_drift * (image_width - width))
            return top, left, height, width
        aspect_ratio = image_width / image_height
        width, height = image_width, image_height
        if aspect_ratio < _NARROWEST:
            height = int(image_width / _NARROWEST)
        elif aspect_ratio > _WIDEST:
            width = int(image_height * _WIDEST)
        return (image_height - height) // 2, (image_width - width) // 2, height, width


@dataclass(frozen=True)
class ResizeCropMirrorFixed(_Resizing):
    """Take the top left `crop_w` x `crop_h` (0 or too large: the full side), stretch it, mirror it left to right.

    The name says otherwise, but rocAL crops first. Of the result the next operation sees as much as the crop had.
    """

    dest_width: int
    dest_height: int
    crop_w: int
    crop_h: int
    mirror: bool

    keys: ClassVar[dict[str, Key]] = {
        "dest_width": Key(schema.read_positive_size),
        "dest_height": Key(schema.read_positive_size),
        "crop_w": Key(schema.read_size),
        "crop_h": Key(schema.read_size),
        **_MIRROR,
    }

    def run(self, image: Image, as_float: bool) -> Image:
        source = image.valid[: self.crop_h or None, : self.crop_w or None]
        pixels = self._stretch(source, as_float, self.mirror)
        return Image(pixels, min(source.shape[0], self.dest_height), min(source.shape[1], self.dest_width))

    def extent(self, source: Extent) -> ResultExtent:
        height = _limited(self.crop_h, source.height) if self.crop_h else source.height
        width = _limited(self.crop_w, source.width) if self.crop_w else source.width
        valid = Extent(_limited(self.dest_height, height), _limited(self.dest_width, width))
        return ResultExtent(Extent(self.dest_height, self.dest_width), valid)


OPERATIONS: dict[str, type[Operation]] = {
    operation.__name__: operation
    for operation in (
        Resize,
        ResizeMirrorNormalize,
        CropMirrorNormalize,
        CropFixed,
        CropResizeFixed,
        ResizeCropMirrorFixed,
    )
}
"""By the name in the JSON key `operation`."""


def make_operation(name: str, values: dict[str, Any]) -> Operation:
    return OPERATIONS[name](**values)


def _limited(wanted: int, available: int | None) -> int | None:
    return None if available is None else min(wanted, available)


def _fitted(position: float, size: int, available: int) -> tuple[int, int]:
    """Start and size of a crop along one side."""
    size = min(size, available)
    start = int(position)
    return min(start if start < available else 0, available - size), size
