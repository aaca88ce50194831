"""Operations that move pixels to other places as lenses do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar, cast

import numpy as np

from rocserve.backends.rocal import schema
from rocserve.backends.rocal.image import Pixels
from rocserve.backends.rocal.operations.base import PipelineOperation
from rocserve.backends.rocal.operations.kept_size import KeptSizeOperation
from rocserve.backends.rocal.remapping import BilinearPlaces
from rocserve.backends.rocal.schema import Key

_SIZES = 4
"""Sizes of images that places are kept ready for."""


@dataclass(frozen=True)
class FishEye(KeptSizeOperation):
    """What a fish-eye lens shows: an ellipse that fills the image, black outside.

    With x and y from -1 to 1 and their distance d from the middle, a pixel is read at (d + 1 - sqrt(1 - d * d)) / 2 in
    the same direction.
    """

    name: ClassVar[str] = "fish_eye"
    keys: ClassVar[dict[str, Key]] = {}
    ignored_keys: ClassVar[dict[str, Key]] = {"fill_value": Key(schema.read_number, default=0)}

    def _process(self, pixels: Pixels) -> Pixels:
        height, width, channels = pixels.shape
        places, outside = self._places(height, width)
        seen: Pixels = np.take(pixels.reshape(height * width, channels), places, axis=0)
        seen[outside] = 0
        return seen.reshape(height, width, channels)

    @cached_property
    def _places(self) -> Callable[[int, int], tuple[Pixels, Pixels]]:
        return lru_cache(_SIZES)(_fish_eye_places)


def _fish_eye_places(height: int, width: int) -> tuple[Pixels, Pixels]:
    """For each pixel the one to read, counted along the rows, and whether there is none."""
    y = (np.arange(0, 2 * height, 2, dtype=np.float32) / np.float32(height) - np.float32(1))[:, np.newaxis]
    x = (np.arange(width, dtype=np.float32) * np.float32(2 / width) - np.float32(1))[np.newaxis]
    distance = np.sqrt(y * y + x * x)
    outside = distance > 1
    seen = (distance + np.float32(1) - np.sqrt(np.maximum(np.float32(1) - distance * distance, 0))) / np.float32(2)
    scale = seen / np.maximum(distance, np.float32(1e-9))
    # The middle reads itself, by whatever direction.
    middle_y, middle_x = scale * y + np.float32(1), np.where(distance > 0, scale * x, seen) + np.float32(1)
    # RPP's vector loop halves an odd side with its fraction cut off. It takes four pixels that all lie in the ellipse.
    by_four = _blocks_inside(outside)
    half_height = np.where(by_four, np.float32(height // 2), np.float32(height / 2))
    half_width = np.where(by_four, np.float32(width // 2), np.float32(width / 2))
    rows = np.floor(middle_y * half_height).astype(np.intp)
    columns = np.floor(middle_x * half_width).astype(np.intp)
    places = rows * width + columns
    outside = outside | (places < 0) | (places >= height * width)
    return np.where(outside, 0, places).reshape(-1), outside.reshape(-1)


def _blocks_inside(outside: Pixels) -> Pixels:
    """Which pixels stand in a block of four, counted from the left, of which none is outside."""
    height, width = outside.shape
    inside = np.zeros((height, width), dtype=np.bool_)
    whole = width - width % 4
    blocks = ~outside[:, :whole].reshape(height, whole // 4, 4).any(axis=2)
    inside[:, :whole] = np.repeat(blocks, 4, axis=1)
    return inside


@dataclass(frozen=True)
class LensCorrection(KeptSizeOperation):
    """Takes a lens's distortion away, by Brown and Conrady's model.

    `camera_matrix` is [fx, cx, fy, cy], in pixels of the image that the operation sees; `distortion_coeffs` is
    [k1, k2, p1, p2, k3].
    """

    camera_matrix: tuple[float, ...]
    distortion_coeffs: tuple[float, ...]

    name: ClassVar[str] = "lens_correction"
    keys: ClassVar[dict[str, Key]] = {
        "camera_matrix": Key(schema.read_list(schema.read_number, (4,), "numbers [fx, cx, fy, cy]")),
        "distortion_coeffs": Key(schema.read_list(schema.read_number, (5,), "numbers [k1, k2, p1, p2, k3]")),
    }

    def __post_init__(self) -> None:
        if not self.camera_matrix[0] or not self.camera_matrix[2]:
            raise ValueError("fx and fy, the first and the third number of key 'camera_matrix', must not be 0")

    def _process(self, pixels: Pixels) -> Pixels:
        return self._places(pixels.shape[0], pixels.shape[1]).read(pixels)

    @cached_property
    def _places(self) -> Callable[[int, int], BilinearPlaces]:
        return lru_cache(_SIZES)(self._places_for)

    def _places_for(self, height: int, width: int) -> BilinearPlaces:
        focal_x, centre_x, focal_y, centre_y = (np.float32(number) for number in self.camera_matrix)
        k1, k2, p1, p2, k3 = (np.float32(number) for number in self.distortion_coeffs)
        determinant = np.float32(1) / (focal_x * focal_y)
        depth = (focal_x * focal_y) * determinant
        x = np.arange(width, dtype=np.float32) * (focal_y * determinant) - focal_y * centre_x * determinant
        y = np.arange(height, dtype=np.float32) * (focal_x * determinant) - focal_x * centre_y * determinant
        x, y = (x / depth)[np.newaxis], (y / depth)[:, np.newaxis]
        squares = x * x + y * y
        radial = _fma(_fma(_fma(k3, squares, k2), squares, k1), squares, np.float32(1))
        twice = np.float32(2) * x * y
        tangential_x = _fma(p2, _fma(np.float32(2), x * x, squares), _fma(x, radial, p1 * twice))
        tangential_y = _fma(p1, _fma(np.float32(2), y * y, squares), _fma(y, radial, p2 * twice))
        columns, rows = _fma(focal_x, tangential_x, centre_x), _fma(focal_y, tangential_y, centre_y)
        return BilinearPlaces(rows, columns, height, width)


def _fma(factor: Pixels | np.float32, other: Pixels | np.float32, summand: Pixels | np.float32) -> Pixels:
    """factor * other + summand, rounded to FP32 once."""
    return cast(Pixels, (np.float64(1) * factor * other + summand).astype(np.float32))


OPERATIONS: tuple[type[PipelineOperation], ...] = (FishEye, LensCorrection)
