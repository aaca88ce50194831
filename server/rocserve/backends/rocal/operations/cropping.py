"""Operations that cut a part out of an image: AMD Inference Server's, and those of amd.rocal's fn."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from rocserve.backends.rocal import schema
from rocserve.backends.rocal.image import Extent, Image, ResultExtent
from rocserve.backends.rocal.operations.base import Operation, PipelineOperation, limited
from rocserve.backends.rocal.operations.normalize import CropMirrorNormalize
from rocserve.backends.rocal.operations.resize import CropResizeFixed, ResizeCropMirrorFixed
from rocserve.backends.rocal.operations.scaling import INTERPOLATION, MIRROR_SWITCH, NORMALISATION_OF_FN, resized
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


_SIZE = {
    "crop": Key(schema.read_list(schema.read_size, (0, 2, 3), "sizes in pixels, [height, width]"), default=()),
    "crop_h": Key(schema.read_size, default=0),
    "crop_w": Key(schema.read_size, default=0),
}
_DEPTH = {"crop_d": Key(schema.read_positive_size, default=1)}
_DESTINATION = {"resize_width": Key(schema.read_positive_size), "resize_height": Key(schema.read_positive_size)}


class CroppingOperation(Operation):
    """An operation told the size of a crop by `crop`, [height, width] or [depth, height, width], or by its sides.

    A crop larger than the image becomes the image's full side.
    """

    crop: tuple[int, ...]
    crop_h: int
    crop_w: int

    def __post_init__(self) -> None:
        sides = (self.crop_h, self.crop_w)
        if any(self.crop) == any(sides) or not all(self._height_and_width):
            raise ValueError(
                "the size must be given in one way: by 'crop', [height, width], or by 'crop_h' and 'crop_w', not by"
                f" crop {list(self.crop)}, crop_h {self.crop_h} and crop_w {self.crop_w}"
            )

    @property
    def _height_and_width(self) -> tuple[int, int]:
        return (self.crop[-2], self.crop[-1]) if any(self.crop) else (self.crop_h, self.crop_w)


@dataclass(frozen=True)
class Crop(CroppingOperation):
    """Cut out a part at a position in whole pixels (fractions are cut off)."""

    crop: tuple[int, ...]
    crop_h: int
    crop_w: int
    crop_pos_x: float
    crop_pos_y: float

    name: ClassVar[str] = "crop"
    keys: ClassVar[dict[str, Key]] = {
        **_SIZE,
        "crop_pos_x": Key(schema.read_pixel_position, default=0.5),
        "crop_pos_y": Key(schema.read_pixel_position, default=0.5),
    }
    ignored_keys: ClassVar[dict[str, Key]] = {**_DEPTH, "crop_pos_z": Key(schema.read_number, default=0.5)}

    def run(self, image: Image, as_float: bool) -> Image:
        return self._operation.run(image, as_float)

    def extent(self, source: Extent) -> ResultExtent:
        return self._operation.extent(source)

    @cached_property
    def _operation(self) -> CropFixed:
        height, width = self._height_and_width
        return CropFixed(width, height, self.crop_pos_x, self.crop_pos_y)


@dataclass(frozen=True)
class CenterCrop(CroppingOperation):
    """Cut out the middle."""

    crop: tuple[int, ...]
    crop_h: int
    crop_w: int

    name: ClassVar[str] = "center_crop"
    keys: ClassVar[dict[str, Key]] = _SIZE
    ignored_keys: ClassVar[dict[str, Key]] = _DEPTH

    def run(self, image: Image, as_float: bool) -> Image:
        source = image.valid
        height, width = (min(*sides) for sides in zip(self._height_and_width, source.shape[:2], strict=True))
        # Half to even, as rocAL rounds.
        top, left = round((source.shape[0] - height) / 2), round((source.shape[1] - width) / 2)
        part = source[top : top + height, left : left + width]
        return Image.whole(part.astype(np.float32) if as_float else part)

    def extent(self, source: Extent) -> ResultExtent:
        height, width = self._height_and_width
        size = Extent(limited(height, source.height), limited(width, source.width))
        return ResultExtent(size, size)


@dataclass(frozen=True)
class CropMirrorNormalizeOfFn(CroppingOperation):
    """Crop, mirror left to right, then level / std - mean / std for each channel.

    `crop_pos_x` and `crop_pos_y` are fractions of the room that the crop leaves.
    """

    crop: tuple[int, ...]
    crop_h: int
    crop_w: int
    crop_pos_x: float
    crop_pos_y: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    mirror: bool

    name: ClassVar[str] = "crop_mirror_normalize"
    keys: ClassVar[dict[str, Key]] = {
        **_SIZE,
        "crop_pos_x": Key(schema.read_fraction, default=0.5),
        "crop_pos_y": Key(schema.read_fraction, default=0.5),
        **NORMALISATION_OF_FN,
        **MIRROR_SWITCH,
    }
    normalisation_keys: ClassVar[tuple[str, str] | None] = ("mean", "std")

    def run(self, image: Image, as_float: bool) -> Image:
        return self._operation.run(image, as_float)

    def extent(self, source: Extent) -> ResultExtent:
        return self._operation.extent(source)

    @cached_property
    def _operation(self) -> CropMirrorNormalize:
        height, width = self._height_and_width
        return CropMirrorNormalize(width, height, self.crop_pos_x, self.crop_pos_y, self.mean, self.std, self.mirror)


@dataclass(frozen=True)
class ResizeCrop(Operation):
    """Cut out a part by its share of the image's area and its aspect ratio, and stretch it: CropResizeFixed."""

    resize_width: int
    resize_height: int
    crop_area_factor: float
    crop_aspect_ratio: float
    x_drift: float
    y_drift: float

    name: ClassVar[str] = "resize_crop"
    keys: ClassVar[dict[str, Key]] = {
        **_DESTINATION,
        # rocAL draws what is left out at random.
        "crop_area_factor": Key(schema.read_area),
        "crop_aspect_ratio": Key(schema.read_positive_number),
        "x_drift": Key(schema.read_fraction),
        "y_drift": Key(schema.read_fraction),
    }

    def run(self, image: Image, as_float: bool) -> Image:
        return self._operation.run(image, as_float)

    def extent(self, source: Extent) -> ResultExtent:
        return self._operation.extent(source)

    @cached_property
    def _operation(self) -> CropResizeFixed:
        return CropResizeFixed(
            self.resize_width,
            self.resize_height,
            self.crop_area_factor,
            self.crop_aspect_ratio,
            self.x_drift,
            self.y_drift,
        )


@dataclass(frozen=True)
class ResizeCropMirror(Operation):
    """Cut out the top left, stretch it, mirror it left to right: ResizeCropMirrorFixed.

    `crop_w` is the crop's height and `crop_h` its width: rocAL's Python module hands them on in the wrong order.
    """

    resize_width: int
    resize_height: int
    crop_w: int
    crop_h: int
    mirror: bool

    name: ClassVar[str] = "resize_crop_mirror"
    keys: ClassVar[dict[str, Key]] = {
        **_DESTINATION,
        "crop_w": Key(schema.read_size, default=0),
        "crop_h": Key(schema.read_size, default=0),
        **MIRROR_SWITCH,
    }

    def run(self, image: Image, as_float: bool) -> Image:
        return self._operation.run(image, as_float)

    def extent(self, source: Extent) -> ResultExtent:
        return self._operation.extent(source)

    @cached_property
    def _operation(self) -> ResizeCropMirrorFixed:
        return ResizeCropMirrorFixed(
            self.resize_width, self.resize_height, crop_w=self.crop_h, crop_h=self.crop_w, mirror=self.mirror
        )


@dataclass(frozen=True)
class RoiResize(Operation):
    """Cut out a part at a position in whole pixels and stretch it.

    Of the result the next operation sees as much as the part had.
    """

    resize_width: int
    resize_height: int
    roi_w: int
    roi_h: int
    roi_pos_x: float
    roi_pos_y: float
    interpolation_type: str

    name: ClassVar[str] = "roi_resize"
    keys: ClassVar[dict[str, Key]] = {
        **_DESTINATION,
        "roi_w": Key(schema.read_positive_size),
        "roi_h": Key(schema.read_positive_size),
        "roi_pos_x": Key(schema.read_pixel_position),
        "roi_pos_y": Key(schema.read_pixel_position),
        **INTERPOLATION,
    }

    def run(self, image: Image, as_float: bool) -> Image:
        part = self._crop.run(image, as_float=False).pixels
        pixels = resized(part, self.resize_width, self.resize_height, self.interpolation_type, as_float)
        return Image(pixels, min(part.shape[0], self.resize_height), min(part.shape[1], self.resize_width))

    def extent(self, source: Extent) -> ResultExtent:
        part = self._crop.extent(source).size
        valid = Extent(limited(self.resize_height, part.height), limited(self.resize_width, part.width))
        return ResultExtent(Extent(self.resize_height, self.resize_width), valid)

    @cached_property
    def _crop(self) -> CropFixed:
        return CropFixed(self.roi_w, self.roi_h, self.roi_pos_x, self.roi_pos_y)


OPERATIONS: tuple[type[PipelineOperation], ...] = (
    Crop,
    CenterCrop,
    CropMirrorNormalizeOfFn,
    ResizeCrop,
    ResizeCropMirror,
    RoiResize,
    CropFixed,
)
