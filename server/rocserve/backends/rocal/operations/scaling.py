"""Resizing as amd.rocal's fn does it: to a size, a longer or a shorter side, with a choice of interpolations.

The result's size is the largest that any image could get, so that it is the same for all; what an image does not fill
is zeros and not seen by the next operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np

from rocserve.backends.rocal import schema
from rocserve.backends.rocal.image import Extent, Image, Pixels, ResultExtent
from rocserve.backends.rocal.operations.base import Operation, PipelineOperation, padded
from rocserve.backends.rocal.operations.normalize import ResizeMirrorNormalize
from rocserve.backends.rocal.resampling import resize_by_weights, resize_nearest
from rocserve.backends.rocal.sampling import resize_to_bytes, resize_to_floats, to_bytes
from rocserve.backends.rocal.schema import Key
from rocserve.core.datatypes import DataType

_LARGEST_ASPECT_RATIO = 6
"""How much longer a side that is not given may become than the one that is."""

INTERPOLATION = {
    "interpolation_type": Key(
        schema.read_constant(
            "LINEAR", "NEAREST_NEIGHBOR", "CUBIC", "LANCZOS", "GAUSSIAN", "TRIANGULAR", suffix="_INTERPOLATION"
        ),
        default="LINEAR",
    )
}
MIRROR_SWITCH = {"mirror": Key(schema.read_switch, default=True, input_datatype=DataType.BOOL)}
"""rocAL's fn mirrors unless it is told not to."""
NORMALISATION_OF_FN = {
    "mean": Key(schema.read_channel_numbers, default=(0.0,)),
    "std": Key(schema.read_divisors, default=(1.0,)),
}
_SIDES = ("resize_width", "resize_height", "resize_longer", "resize_shorter")
_SIZE = {
    **{side: Key(schema.read_size, default=0) for side in _SIDES},
    "max_size": Key(schema.read_list(schema.read_size, (0, 1, 2), "sizes in pixels, [width, height]"), default=()),
    "scaling_mode": Key(
        schema.read_constant("DEFAULT", "STRETCH", "NOT_SMALLER", "NOT_LARGER", prefix="SCALING_MODE_"),
        default="DEFAULT",
    ),
}


def resized(pixels: Pixels, width: int, height: int, interpolation: str, as_float: bool) -> Pixels:
    """UINT8, or FP32 neither rounded nor clamped."""
    if interpolation == "NEAREST_NEIGHBOR":
        nearest = resize_nearest(pixels, width, height)
        return nearest.astype(np.float32) if as_float else nearest
    if interpolation == "LINEAR":
        return (resize_to_floats if as_float else resize_to_bytes)(pixels, width, height)
    levels = resize_by_weights(pixels, width, height, interpolation)
    return levels if as_float else to_bytes(levels)


class ScalingOperation(Operation):
    """An operation that is told the size of its result in one of rocAL's ways.

    DEFAULT and STRETCH take `resize_width` and `resize_height` as they are; of a side of 0 the first makes what keeps
    the aspect ratio, the second the source's side. NOT_LARGER keeps the aspect ratio and fits into the two,
    NOT_SMALLER covers them. `resize_longer` and `resize_shorter` are NOT_LARGER and NOT_SMALLER for a square.
    """

    resize_width: int
    resize_height: int
    resize_longer: int
    resize_shorter: int
    max_size: tuple[int, ...]
    scaling_mode: str

    def __post_init__(self) -> None:
        by_sides = bool(self.resize_width or self.resize_height)
        ways = [by_sides, bool(self.resize_longer), bool(self.resize_shorter)]
        if ways.count(True) != 1:
            given = [key for key in _SIDES if getattr(self, key)]
            raise ValueError(
                "the size must be given in one way: by 'resize_width', 'resize_height' or both, by 'resize_longer', or"
                f" by 'resize_shorter', not by {' and '.join(given) or 'none of these'}"
            )

    def extent(self, source: Extent) -> ResultExtent:
        return self.result_extent(ResultExtent(source, source))

    def result_extent(self, source: ResultExtent) -> ResultExtent:
        largest = self._largest(source.size)
        if source.valid.height is None or source.valid.width is None:
            exact = self._wanted if self._mode == "DEFAULT" and all(self._wanted) else (0, 0)
            # Without a longest size the sides that are given are kept to the pixel.
            known = exact if not any(self._limits) else (0, 0)
            return ResultExtent(largest, Extent(known[1] or None, known[0] or None))
        return ResultExtent(largest, Extent(*self._target(source.valid.height, source.valid.width, largest)))

    def _size_for(self, image: Image) -> tuple[Extent, int, int]:
        """The largest size, and the height and width for this image."""
        largest = self._largest(Extent(image.pixels.shape[0], image.pixels.shape[1]))
        return largest, *self._target(image.valid_height, image.valid_width, largest)

    @property
    def _mode(self) -> str:
        return "NOT_SMALLER" if self.resize_shorter else "NOT_LARGER" if self.resize_longer else self.scaling_mode

    @property
    def _wanted(self) -> tuple[int, int]:
        """Width and height, 0 = not given."""
        side = self.resize_shorter or self.resize_longer
        return (side, side) if side else (self.resize_width, self.resize_height)

    @property
    def _limits(self) -> tuple[int, int]:
        """The longest width and height, 0 = none."""
        return (self.max_size[0], self.max_size[-1]) if self.max_size else (0, 0)

    def _largest(self, source: Extent) -> Extent:
        """The size of the result; a side that is None comes from a source of unknown size."""
        width, height = self._wanted
        widest: int | None
        highest: int | None
        if self._mode == "STRETCH":
            widest, highest = width or source.width, height or source.height
        elif self._mode == "NOT_SMALLER":
            widest, highest = (width or height) * _LARGEST_ASPECT_RATIO, (height or width) * _LARGEST_ASPECT_RATIO
        else:
            widest, highest = width or height * _LARGEST_ASPECT_RATIO, height or width * _LARGEST_ASPECT_RATIO
        return Extent(self._limits[1] or highest, self._limits[0] or widest)

    def _target(self, source_height: int, source_width: int, largest: Extent) -> tuple[int, int]:
        """Height and width for an image."""
        width, height = self._wanted
        if self._mode == "STRETCH":
            width, height = width or source_width, height or source_height
        elif self._mode == "DEFAULT":
            width, height = (
                width or _scaled(source_width, np.float32(height) / np.float32(source_height)),
                height or _scaled(source_height, np.float32(width) / np.float32(source_width)),
            )
        else:
            width, height = self._proportional(source_height, source_width)
        return _at_most(height, largest.height), _at_most(width, largest.width)

    def _proportional(self, source_height: int, source_width: int) -> tuple[int, int]:
        """Width and height with the source's aspect ratio."""
        width, height = self._wanted
        by_width = np.float32(width) / np.float32(source_width)
        by_height = np.float32(height) / np.float32(source_height)
        scale = max(by_width, by_height)
        if self._mode == "NOT_LARGER" and width and height:
            scale = min(by_width, by_height)
        for limit, size in zip(self._limits, (source_width, source_height), strict=True):
            if limit:
                scale = min(scale, np.float32(limit) / np.float32(size))
        return (
            width if width and by_width == scale else _scaled(source_width, scale),
            height if height and by_height == scale else _scaled(source_height, scale),
        )


def _scaled(size: int, scale: np.float32) -> int:
    """Half rounded up."""
    return int(np.floor(np.float64(np.float32(size) * scale) + 0.5))


def _at_most(size: int, limit: int | None) -> int:
    return max(min(size, cast(int, limit)), 1)


@dataclass(frozen=True)
class ScaledResize(ScalingOperation):
    """Resizes, by default between pixels and without antialiasing."""

    resize_width: int
    resize_height: int
    resize_longer: int
    resize_shorter: int
    max_size: tuple[int, ...]
    scaling_mode: str
    interpolation_type: str

    name: ClassVar[str] = "resize"
    keys: ClassVar[dict[str, Key]] = {**_SIZE, **INTERPOLATION}
    # rocAL takes it and does nothing with it.
    ignored_keys: ClassVar[dict[str, Key]] = {"antialias": Key(schema.read_switch, default=True)}

    def run(self, image: Image, as_float: bool) -> Image:
        largest, height, width = self._size_for(image)
        pixels = resized(image.valid, width, height, self.interpolation_type, as_float)
        return padded(pixels, cast(int, largest.height), cast(int, largest.width))


@dataclass(frozen=True)
class ScaledResizeMirrorNormalize(ScalingOperation):
    """Resizes between pixels, mirrors left to right, then (level - mean) / std, of which there is one a channel."""

    resize_width: int
    resize_height: int
    resize_longer: int
    resize_shorter: int
    max_size: tuple[int, ...]
    scaling_mode: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    mirror: bool

    name: ClassVar[str] = "resize_mirror_normalize"
    keys: ClassVar[dict[str, Key]] = {**_SIZE, **NORMALISATION_OF_FN, **MIRROR_SWITCH}
    # On the way to RPP's kernel every interpolation becomes LINEAR.
    ignored_keys: ClassVar[dict[str, Key]] = INTERPOLATION
    normalisation_keys: ClassVar[tuple[str, str] | None] = ("mean", "std")

    def run(self, image: Image, as_float: bool) -> Image:
        largest, height, width = self._size_for(image)
        operation = ResizeMirrorNormalize(width, height, self.mean, self.std, self.mirror)
        return padded(operation.run(image, as_float).pixels, cast(int, largest.height), cast(int, largest.width))


OPERATIONS: tuple[type[PipelineOperation], ...] = (ScaledResize, ScaledResizeMirrorNormalize)
