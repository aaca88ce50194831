"""What operations have in common whose result is as large as their source."""

from __future__ import annotations

import abc

import numpy as np

from rocserve.backends.rocal.image import Extent, Image, Pixels, ResultExtent
from rocserve.backends.rocal.operations.base import Operation


class KeptSizeOperation(Operation):
    """Changes the valid part of an image and leaves its size and that of the valid part as they are.

    rocAL has kernels from UINT8 to UINT8 alone for these operations, so that FP32 holds whole levels too.
    """

    @abc.abstractmethod
    def _process(self, pixels: Pixels) -> Pixels:
        """The result, UINT8, for the valid part of an image; `pixels` must be left as they are."""

    def run(self, image: Image, as_float: bool) -> Image:
        processed = self._process(image.valid)
        return placed(processed.astype(np.float32) if as_float else processed, image)

    def extent(self, source: Extent) -> ResultExtent:
        return ResultExtent(source, source)

    def result_extent(self, source: ResultExtent) -> ResultExtent:
        return source


def placed(processed: Pixels, image: Image) -> Image:
    """`processed` as the valid part of an image as large as `image`, with zeros around it."""
    if processed.shape[:2] == image.pixels.shape[:2]:
        return Image.whole(processed)
    return padded(processed, image.pixels.shape[0], image.pixels.shape[1])


def padded(valid: Pixels, height: int, width: int) -> Image:
    """An image of `height` x `width` pixels, zeros but for its valid part."""
    if valid.shape[:2] == (height, width):
        return Image.whole(valid)
    pixels: Pixels = np.zeros((height, width, valid.shape[2]), dtype=valid.dtype)
    pixels[: valid.shape[0], : valid.shape[1]] = valid
    return Image(pixels, valid.shape[0], valid.shape[1])
