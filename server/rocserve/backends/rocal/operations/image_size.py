"""The size of the image that was sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rocserve.backends.rocal.image import DecodedImage
from rocserve.backends.rocal.operations.base import Measurement, PipelineOperation
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


OPERATIONS: tuple[type[PipelineOperation], ...] = (ImageSize,)
