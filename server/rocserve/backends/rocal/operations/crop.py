"""Operations that cut a part out of an image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rocserve.backends.rocal import schema
from rocserve.backends.rocal.image import Extent, Image, ResultExtent
from rocserve.backends.rocal.operations.base import Operation, PipelineOperation, limited
from rocserve.backends.rocal.schema import Key


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

    name: ClassVar[str] = "CropFixed"
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


OPERATIONS: tuple[type[PipelineOperation], ...] = (CropFixed,)
