"""Operations that subtract a mean and divide by a deviation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, cast

import cv2
import numpy as np

from rocserve.backends.rocal import schema
from rocserve.backends.rocal.image import Extent, Image, Pixels, ResultExtent
from rocserve.backends.rocal.operations.base import (
    DESTINATION,
    MIRROR,
    NORMALISATION,
    Operation,
    PipelineOperation,
    limited,
)
from rocserve.backends.rocal.operations.resize import Resizing
from rocserve.backends.rocal.sampling import Scaling, resize_to_bytes, resize_to_floats, with_channels
from rocserve.backends.rocal.schema import Key


@dataclass(frozen=True)
class ResizeMirrorNormalize(Resizing):
    """Stretch, mirror left to right, then (level - mean) / std_dev, of which there is one for each channel."""

    dest_width: int
    dest_height: int
    mean: tuple[float, ...]
    std_dev: tuple[float, ...]
    mirror: bool

    name: ClassVar[str] = "ResizeMirrorNormalize"
    keys: ClassVar[dict[str, Key]] = {**DESTINATION, **NORMALISATION, **MIRROR}
    normalisation_keys: ClassVar[tuple[str, str] | None] = ("mean", "std_dev")

    def run(self, image: Image, as_float: bool) -> Image:
        source = image.valid
        width, height = self._stretched_size(source)
        stretch = resize_to_floats if as_float else resize_to_bytes
        return Image.whole(stretch(source, width, height, self.mirror, self._scaling))

    def extent(self, source: Extent) -> ResultExtent:
        size = self._stretched_extent(source)
        return ResultExtent(size, size)

    @cached_property
    def _scaling(self) -> Scaling:
        return Scaling.of(self.mean, self.std_dev)


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

    name: ClassVar[str] = "CropMirrorNormalize"
    keys: ClassVar[dict[str, Key]] = {
        "crop_width": Key(schema.read_positive_size),
        "crop_height": Key(schema.read_positive_size),
        "start_x": Key(schema.read_fraction, default=0.5),
        "start_y": Key(schema.read_fraction, default=0.5),
        **NORMALISATION,
        **MIRROR,
    }
    ignored_keys: ClassVar[dict[str, Key]] = {
        "crop_depth": Key(schema.read_size, default=1),
        "start_z": Key(schema.read_number, default=0),
    }
    normalisation_keys: ClassVar[tuple[str, str] | None] = ("mean", "std_dev")

    def run(self, image: Image, as_float: bool) -> Image:
        source = image.valid
        height, width = min(self.crop_height, source.shape[0]), min(self.crop_width, source.shape[1])
        top = _start(self.start_y, source.shape[0] - height)
        left = _start(self.start_x, source.shape[1] - width)
        crop = source[top : top + height, left : left + width]
        if self.mirror:
            crop = with_channels(cast(Pixels, cv2.flip(crop, 1)))
        normalised = cv2.LUT(crop, self._float_table if as_float else self._byte_table)
        return Image.whole(with_channels(cast(Pixels, normalised)))

    def extent(self, source: Extent) -> ResultExtent:
        size = Extent(limited(self.crop_height, source.height), limited(self.crop_width, source.width))
        return ResultExtent(size, size)

    @cached_property
    def _float_table(self) -> Pixels:
        """The result for each of the 256 levels and each channel, 1 x 256 x channels."""
        # In 32 bits with one fused multiplication and addition, as RPP has it: the product is exact in 64 bits.
        factor = np.float32(1) / np.asarray(self.std_dev, dtype=np.float32)
        offset = -(np.asarray(self.mean, dtype=np.float32) * factor)
        levels = np.arange(256, dtype=np.float64)[:, np.newaxis]
        table: Pixels = (levels * factor + offset).astype(np.float32)
        return table[np.newaxis]

    @cached_property
    def _byte_table(self) -> Pixels:
        return cast(Pixels, np.clip(np.rint(self._float_table), 0, 255).astype(np.uint8))


def _start(fraction: float, room: int) -> int:
    """Half to even, of a product in 32 bits."""
    return int(np.rint(np.float32(fraction) * np.float32(room)))


OPERATIONS: tuple[type[PipelineOperation], ...] = (ResizeMirrorNormalize, CropMirrorNormalize)
