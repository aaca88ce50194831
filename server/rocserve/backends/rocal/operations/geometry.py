"""Operations that move pixels to other places, by straight lines or as lenses do."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar, cast

import cv2
import numpy as np

from rocserve.backends.rocal import schema
from rocserve.backends.rocal.image import Extent, Image, Pixels, ResultExtent
from rocserve.backends.rocal.operations.base import KeptSizeOperation, Operation, PipelineOperation, padded
from rocserve.backends.rocal.sampling import BilinearPlaces, NearestPlaces, with_channels
from rocserve.backends.rocal.schema import Key
from rocserve.core.datatypes import DataType

_LENS_SIZES = 4
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
        return lru_cache(_LENS_SIZES)(_fish_eye_places)


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
        return lru_cache(_LENS_SIZES)(self._places_for)

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


_SIZES = 4
"""Sizes of images that places are kept ready for."""

_INTERPOLATIONS = schema.read_constant("LINEAR", "NEAREST_NEIGHBOR", suffix="_INTERPOLATION")


@dataclass(frozen=True)
class Flip(KeptSizeOperation):
    """Mirrors left to right where `horizontal`, top to bottom where `vertical`."""

    horizontal: bool
    vertical: bool

    name: ClassVar[str] = "flip"
    keys: ClassVar[dict[str, Key]] = {
        "horizontal": Key(schema.read_switch, default=False, input_datatype=DataType.BOOL),
        "vertical": Key(schema.read_switch, default=False, input_datatype=DataType.BOOL),
    }

    def _process(self, pixels: Pixels) -> Pixels:
        if not self.horizontal and not self.vertical:
            return pixels
        # OpenCV's 1 mirrors left to right, 0 top to bottom, -1 both.
        code = 1 if not self.vertical else -1 if self.horizontal else 0
        return with_channels(cast(Pixels, cv2.flip(pixels, code)))


@dataclass(frozen=True)
class Transpose(Operation):
    """Exchanges height and width where `perm` is [1, 0, 2]; [0, 1, 2] changes nothing.

    Other orders would move the channels; for these an output has "layout".
    """

    perm: tuple[int, int, int]

    name: ClassVar[str] = "transpose"
    keys: ClassVar[dict[str, Key]] = {"perm": Key(schema.read_list(schema.read_size, (3,), "axes"))}

    def __post_init__(self) -> None:
        if self.perm not in ((0, 1, 2), (1, 0, 2)):
            raise ValueError(
                f"key 'perm' must be [1, 0, 2] or [0, 1, 2], not {list(self.perm)}: channels stay the last axis; give"
                ' the output "layout": "NCHW" to have them first'
            )

    def run(self, image: Image, as_float: bool) -> Image:
        pixels = image.pixels.astype(np.float32) if as_float else image.pixels
        if self.perm == (0, 1, 2):
            return Image(pixels, image.valid_height, image.valid_width)
        transposed = with_channels(cast(Pixels, cv2.transpose(pixels)))
        return Image(transposed, image.valid_width, image.valid_height)

    def extent(self, source: Extent) -> ResultExtent:
        turned = self._turned(source)
        return ResultExtent(turned, turned)

    def result_extent(self, source: ResultExtent) -> ResultExtent:
        return ResultExtent(self._turned(source.size), self._turned(source.valid))

    def _turned(self, extent: Extent) -> Extent:
        return extent if self.perm == (0, 1, 2) else Extent(extent.width, extent.height)


class AffineOperation(Operation):
    """Reads each pixel of the result at a place that is found by a matrix.

    The middle of the valid part (its half sizes, rounded down) is where places are counted from, on both sides. As many
    rows and columns are made as the source has; they stand in the top left of the result.
    """

    dest_width: int
    dest_height: int
    interpolation_type: str

    @property
    @abc.abstractmethod
    def _matrix(self) -> tuple[float, ...]:
        """a, b, c, d, e, f of column = a x + b y + c, row = d x + e y + f."""

    def run(self, image: Image, as_float: bool) -> Image:
        source = image.valid
        moved = self._places(source.shape[0], source.shape[1]).read(source)
        height, width = self._height_and_width(Extent(image.pixels.shape[0], image.pixels.shape[1]))
        shown = moved[:height, :width]
        result = padded(shown.astype(np.float32) if as_float else shown, cast(int, height), cast(int, width))
        return Image.whole(result.pixels)

    def extent(self, source: Extent) -> ResultExtent:
        size = Extent(*self._height_and_width(source))
        return ResultExtent(size, size)

    def result_extent(self, source: ResultExtent) -> ResultExtent:
        return self.extent(source.size)

    def _height_and_width(self, source: Extent) -> tuple[int | None, int | None]:
        if not self.dest_width or not self.dest_height:
            return source.height, source.width
        return self.dest_height, self.dest_width

    @cached_property
    def _places(self) -> Callable[[int, int], BilinearPlaces | NearestPlaces]:
        return lru_cache(_SIZES)(self._places_for)

    def _places_for(self, height: int, width: int) -> BilinearPlaces | NearestPlaces:
        matrix = tuple(float(np.float32(number)) for number in self._matrix)
        if self.interpolation_type == "LINEAR":
            return BilinearPlaces(*_affine_places(matrix, height, width, lanes=8), height, width)
        rows, columns = _affine_places(matrix, height, width, lanes=4)
        return NearestPlaces(_nearest(rows), _nearest(columns), height, width)


def _affine_places(matrix: tuple[float, ...], height: int, width: int, lanes: int) -> tuple[Pixels, Pixels]:
    """Rows and columns, FP32, added up along a row in steps of `lanes` as RPP does it.

    Where a picture is turned by right angles, what falls just outside of it depends on such roundings.
    """
    places = []
    for step, by_row, offset, half in (
        (matrix[3], matrix[4], matrix[5], height // 2),
        (matrix[0], matrix[1], matrix[2], width // 2),
    ):
        # The first column's places are found in 64 bits.
        from_middle = np.arange(height, dtype=np.float64) - height // 2
        start = (by_row * from_middle + offset - step * (width // 2) + half).astype(np.float32)
        places.append(_row_sums(start, np.float32(step), width, lanes))
    return places[0], places[1]


def _row_sums(start: Pixels, step: np.float32, width: int, lanes: int) -> Pixels:
    """start + step * column for each row: by whole blocks of `lanes` columns, and one by one in the rest."""
    blocks = width // lanes
    terms = np.empty((len(start), blocks, lanes), dtype=np.float32)
    if blocks:
        terms[:] = step * np.float32(lanes)
        terms[:, 0] = start[:, np.newaxis] + step * np.arange(lanes, dtype=np.float32)
    rest = np.full((len(start), width - blocks * lanes), step, dtype=np.float32)
    if rest.size:
        rest[:, 0] = start + step * np.float32(blocks * lanes)
    whole = np.add.accumulate(terms, axis=1).reshape(len(start), blocks * lanes)
    return np.concatenate((whole, np.add.accumulate(rest, axis=1)), axis=1)


def _nearest(places: Pixels) -> Pixels:
    """Half to even, except in the last (width modulo 4) columns: half away from zero."""
    nearest: Pixels = np.rint(places)
    rest = places[:, places.shape[1] - places.shape[1] % 4 :]
    nearest[:, places.shape[1] - places.shape[1] % 4 :] = np.copysign(np.floor(np.abs(rest) + np.float32(0.5)), rest)
    return nearest


_DESTINATION = {
    "dest_width": Key(schema.read_size, default=0),
    "dest_height": Key(schema.read_size, default=0),
    "interpolation_type": Key(_INTERPOLATIONS, default="LINEAR"),
}


@dataclass(frozen=True)
class Rotate(AffineOperation):
    """Turns the picture by `angle` degrees, counter-clockwise; the corners that come free are black."""

    angle: float
    dest_width: int
    dest_height: int
    interpolation_type: str

    name: ClassVar[str] = "rotate"
    # rocAL draws an angle that is left out at random.
    keys: ClassVar[dict[str, Key]] = {"angle": Key(schema.read_number), **_DESTINATION}

    @property
    def _matrix(self) -> tuple[float, ...]:
        radians = float(np.float32(self.angle * 0.0174532925))
        cosine, sine = math.cos(radians), math.sin(radians)
        return (cosine, -sine, 0.0, sine, cosine, 0.0)


@dataclass(frozen=True)
class WarpAffine(AffineOperation):
    """Reads each pixel (x, y) of the result at (m0 x + m2 y + m1, m3 x + m4 y + m5), `matrix` being [m0, ..., m5].

    The odd order is rocAL's: on the way to the kernel the second number and the third change places.
    """

    matrix: tuple[float, ...]
    dest_width: int
    dest_height: int
    interpolation_type: str

    name: ClassVar[str] = "warp_affine"
    # rocAL's default is a matrix of zeros, which shows the middle pixel everywhere.
    keys: ClassVar[dict[str, Key]] = {
        "matrix": Key(schema.read_list(schema.read_number, (6,), "numbers")),
        **_DESTINATION,
    }

    @property
    def _matrix(self) -> tuple[float, ...]:
        first, second, third, *others = self.matrix
        return (first, third, second, *others)


OPERATIONS: tuple[type[PipelineOperation], ...] = (Flip, Transpose, Rotate, WarpAffine, FishEye, LensCorrection)
