"""Operations that stretch an image to a fixed size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from rocserve.backends.rocal import schema
from rocserve.backends.rocal.image import Extent, Image, Pixels, ResultExtent
from rocserve.backends.rocal.operations.base import DESTINATION, MIRROR, Operation, PipelineOperation, limited
from rocserve.backends.rocal.sampling import resize_to_bytes, resize_to_floats
from rocserve.backends.rocal.schema import Key

_NARROWEST, _WIDEST = 0.75, 1.333
"""CropResizeFixed's bounds of the aspect ratio where the part that it is asked for does not fit."""


class Resizing(Operation):
    """An operation whose result is stretched to a fixed size; a side of 0 keeps that side of what is stretched."""

    dest_width: int
    dest_height: int

    def _stretch(self, pixels: Pixels, as_float: bool, mirror: bool = False) -> Pixels:
        width, height = self._stretched_size(pixels)
        return (resize_to_floats if as_float else resize_to_bytes)(pixels, width, height, mirror)

    def _stretched_size(self, pixels: Pixels) -> tuple[int, int]:
        """Width and height."""
        return self.dest_width or pixels.shape[1], self.dest_height or pixels.shape[0]

    def _stretched_extent(self, source: Extent) -> Extent:
        return Extent(self.dest_height or source.height, self.dest_width or source.width)


@dataclass(frozen=True)
class Resize(Resizing):
    """Stretch to the destination."""

    dest_width: int
    dest_height: int

    name: ClassVar[str] = "Resize"
    keys: ClassVar[dict[str, Key]] = DESTINATION

    def run(self, image: Image, as_float: bool) -> Image:
        return Image.whole(self._stretch(image.valid, as_float))

    def extent(self, source: Extent) -> ResultExtent:
        size = self._stretched_extent(source)
        return ResultExtent(size, size)


@dataclass(frozen=True)
class CropResizeFixed(Resizing):
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

    name: ClassVar[str] = "CropResizeFixed"
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
class ResizeCropMirrorFixed(Resizing):
    """Take the top left `crop_w` x `crop_h` (0 or too large: the full side), stretch it, mirror it left to right.

    The name says otherwise, but rocAL crops first. Of the result the next operation sees as much as the crop had.
    """

    dest_width: int
    dest_height: int
    crop_w: int
    crop_h: int
    mirror: bool

    name: ClassVar[str] = "ResizeCropMirrorFixed"
    keys: ClassVar[dict[str, Key]] = {
        "dest_width": Key(schema.read_positive_size),
        "dest_height": Key(schema.read_positive_size),
        "crop_w": Key(schema.read_size),
        "crop_h": Key(schema.read_size),
        **MIRROR,
    }

    def run(self, image: Image, as_float: bool) -> Image:
        source = image.valid[: self.crop_h or None, : self.crop_w or None]
        pixels = self._stretch(source, as_float, self.mirror)
        return Image(pixels, min(source.shape[0], self.dest_height), min(source.shape[1], self.dest_width))

    def extent(self, source: Extent) -> ResultExtent:
        height = limited(self.crop_h, source.height) if self.crop_h else source.height
        width = limited(self.crop_w, source.width) if self.crop_w else source.width
        valid = Extent(limited(self.dest_height, height), limited(self.dest_width, width))
        return ResultExtent(Extent(self.dest_height, self.dest_width), valid)


OPERATIONS: tuple[type[PipelineOperation], ...] = (Resize, CropResizeFixed, ResizeCropMirrorFixed)
