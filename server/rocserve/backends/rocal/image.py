"""Holds an image between two operations, and its size as far as it is known before an image arrives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

Pixels = np.ndarray[Any, Any]
"""Height x width x channels, UINT8 or FP32."""

MAX_RESULT_PIXELS = 100_000_000
"""Limit of an operation's result. A larger size is a mistake in the pipeline and would exhaust the worker's memory."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A height and a width in pixels; None = unknown before the image is decoded."""

    height: int | None
    width: int | None

    @property
    def is_known(self) -> bool:
        return self.height is not None and self.width is not None

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width, which must be known."""
        assert self.height is not None and self.width is not None
        return self.height, self.width


@dataclass(frozen=True, slots=True)
class ResultExtent:
    """The size of an operation's result, and the part of it, from the top left, that the next operation sees."""

    size: Extent
    valid: Extent

    @staticmethod
    def whole(size: Extent) -> ResultExtent:
        return ResultExtent(size, size)

    def check(self) -> None:
        """Raises ValueError if the result would be too large."""
        height, width = self.size.height, self.size.width
        if height is not None and width is not None and height * width > MAX_RESULT_PIXELS:
            raise ValueError(
                f"its result would have {width}x{height} pixels; {MAX_RESULT_PIXELS} are allowed, so ask for less"
            )


UNKNOWN = ResultExtent.whole(Extent(None, None))


class PixelsError(ValueError):
    """Reports that an operation cannot process this image; the text has the reason."""


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """An image from the decoder."""

    pixels: Pixels
    original_height: int
    """Height before the decoder scaled the image; of the upright image if the decoder applies EXIF."""
    original_width: int


Part = tuple[int, int, int, int]
"""Top, left, height and width."""


@dataclass(slots=True)
class Image:
    """An image between two steps of a pipeline."""

    content: Pixels | Callable[[Part], Pixels]
    """The pixels from the top left, zeros if they end early; or a function that makes a part of them on first use."""
    extent: ResultExtent
    _part_was_made: bool = False

    @staticmethod
    def whole(pixels: Pixels) -> Image:
        return Image(pixels, ResultExtent.whole(Extent(*pixels.shape[:2])))

    @property
    def pixels(self) -> Pixels:
        if not isinstance(self.content, np.ndarray):
            self.content = self.content((0, 0, *self.extent.valid.sides))
        return self.content

    @property
    def valid(self) -> Pixels:
        """The part, from the top left, that the next operation sees (rocAL's region of interest)."""
        return _filled(self.pixels, self.extent.valid)

    def part(self, top: int, left: int, height: int, width: int) -> Pixels:
        """Return a part of the valid pixels. The first part is made alone. For a second part the whole image is made,
        because each part of a resized image takes as long as the whole."""
        if not isinstance(self.content, np.ndarray) and not self._part_was_made:
            self._part_was_made = True
            return self.content((top, left, height, width))
        return self.valid[top : top + height, left : left + width]

    @property
    def padded(self) -> Pixels:
        return _filled(self.pixels, self.extent.size)


def _filled(pixels: Pixels, extent: Extent) -> Pixels:
    height, width = extent.sides
    part = pixels[:height, :width]
    if part.shape[:2] == (height, width):
        return part
    filled: Pixels = np.zeros((height, width, pixels.shape[2]), dtype=pixels.dtype)
    filled[: part.shape[0], : part.shape[1]] = part
    return filled


def with_channels(pixels: Pixels) -> Pixels:
    """Add the channel axis that OpenCV drops from images of one channel."""
    return pixels[:, :, np.newaxis] if pixels.ndim == 2 else pixels


_Made = TypeVar("_Made")


def cached_by_size(
    count: int, count_of_large: int, is_large: Callable[..., bool]
) -> Callable[[Callable[..., _Made]], Callable[..., _Made]]:
    """Return a decorator that caches results by size, because a model gets few different sizes. Fewer large results are
    kept, so that images of many sizes do not fill the memory."""

    def keep(make: Callable[..., _Made]) -> Callable[..., _Made]:
        small, large = lru_cache(count)(make), lru_cache(count_of_large)(make)
        return lambda *sizes: (large if is_large(*sizes) else small)(*sizes)

    return keep


cached_by_image_size = cached_by_size(8, 1, lambda height, width, *others: height * width > 2_000_000)
"""Caches results that take as much memory as a few images. The arguments begin with height and width."""
