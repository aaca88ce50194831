"""Operations that cut a part out of an image."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, cast

import cv2
import numpy as np

from rocserve.backends.rocal import schema
from rocserve.backends.rocal.image import Extent, Image, Pixels, ResultExtent
from rocserve.backends.rocal.operations.base import MIRROR, NORMALISATION, Operation, limited
from rocserve.backends.rocal.sampling import with_channels
from rocserve.backends.rocal.schema import Key


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
        **NORMALISATION,
        **MIRROR,
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
        size = Extent(limited(self.crop_height, source.height), limited(self.crop_width, source.width))
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
        size = Extent(limited(self.crop_height, source.height), limited(self.crop_width, source.width))
        return ResultExtent(size, size)


def _fitted(position: float, size: int, available: int) -> tuple[int, int]:
    """Start and size of a crop along one side."""
    size = min(size, available)
    start = int(position)
    return min(start if start < available else 0, available - size), size
