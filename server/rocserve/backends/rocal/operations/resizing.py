"""Operations that resize all of an image: AMD Inference Server's by its JSON, and those of amd.rocal's fn.

The latter may be given a longer or a shorter side. Their result's size is the largest that any image could get, so that
it is the same for all; the rest is zeros and not seen by the next operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rocserve.backends.rocal import schema
from rocserve.backends.rocal.image import Extent, Image, Pixels, ResultExtent
from rocserve.backends.rocal.operations.base import (
    INTERPOLATION,
    MIRROR,
    MIRROR_OF_FN,
    NORMALISATION,
    NORMALISATION_OF_FN,
    AmdForm,
    Call,
    Node,
    Operation,
    Tensor,
    Values,
    always,
    reads_beside,
    renamed,
)
from rocserve.backends.rocal.sampling import (
    Scaling,
    resize_by_weights,
    resize_nearest,
    resize_to_bytes,
    resize_to_floats,
    to_bytes,
)

_LARGEST_ASPECT_RATIO = 6
"""How much longer a side that is not given may become than the one that is."""


def resized(
    pixels: Pixels,
    target: Extent,
    as_float: bool,
    interpolation_type: str = "LINEAR",
    mirror: bool = False,
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
    **others: Any,
) -> Pixels:
    """UINT8, or FP32 neither rounded nor clamped.

    LINEAR is between pixels and without antialiasing; it alone may be mirrored left to right, with
    (level - mean) / std for each channel after that.
    """
    height, width = target.sides
    if interpolation_type == "LINEAR":
        stretch = resize_to_floats if as_float else resize_to_bytes
        return stretch(pixels, width, height, mirror, Scaling.of(mean, std) if mean else None)
    if interpolation_type == "NEAREST_NEIGHBOR":
        return resize_nearest(pixels, width, height)
    levels = resize_by_weights(pixels, width, height, interpolation_type)
    return levels if as_float else to_bytes(levels)


def _stretched_extent(source: ResultExtent, dest_width: int, dest_height: int, **normalisation: Any) -> ResultExtent:
    """A side of 0 keeps that side."""
    return ResultExtent.whole(Extent(dest_height or source.valid.height, dest_width or source.valid.width))


@dataclass(frozen=True, slots=True)
class SizeRule:
    """The size of a result, as in amd.rocal's fn.

    DEFAULT and STRETCH take width and height as they are; of a side of 0 the first makes what keeps the aspect ratio,
    the second the source's side. NOT_LARGER keeps the aspect ratio and fits into the two, NOT_SMALLER covers them.
    """

    mode: str
    width: int
    height: int
    max_width: int
    """0 = any."""
    max_height: int

    def extent(self, source: ResultExtent) -> ResultExtent:
        largest = self.largest(source.size)
        if source.valid.is_known:
            return ResultExtent(largest, Extent(*self.target(*source.valid.sides, largest)))
        # Without a longest size the sides that are given are kept to the pixel.
        exact = self.mode == "DEFAULT" and self.width and self.height and not self.max_width and not self.max_height
        return ResultExtent(largest, Extent(self.height, self.width) if exact else Extent(None, None))

    def largest(self, source: Extent) -> Extent:
        """The size of the result; a side that is None comes from a source of unknown size."""
        width, height = self.width, self.height
        widest: int | None
        highest: int | None
        if self.mode == "STRETCH":
            widest, highest = width or source.width, height or source.height
        elif self.mode == "NOT_SMALLER":
            widest, highest = (width or height) * _LARGEST_ASPECT_RATIO, (height or width) * _LARGEST_ASPECT_RATIO
        else:
            widest, highest = width or height * _LARGEST_ASPECT_RATIO, height or width * _LARGEST_ASPECT_RATIO
        return Extent(self.max_height or highest, self.max_width or widest)

    def target(self, source_height: int, source_width: int, largest: Extent) -> tuple[int, int]:
        """Height and width for an image."""
        if self.mode == "STRETCH":
            width, height = self.width or source_width, self.height or source_height
        elif self.mode == "DEFAULT":
            width = self.width or _scaled(source_width, np.float32(self.height) / np.float32(source_height))
            height = self.height or _scaled(source_height, np.float32(self.width) / np.float32(source_width))
        else:
            width, height = self._proportional(source_height, source_width)
        most_high, most_wide = largest.sides
        return max(min(height, most_high), 1), max(min(width, most_wide), 1)

    def _proportional(self, source_height: int, source_width: int) -> tuple[int, int]:
        """Width and height with the source's aspect ratio."""
        by_width = np.float32(self.width) / np.float32(source_width)
        by_height = np.float32(self.height) / np.float32(source_height)
        scale = max(by_width, by_height)
        if self.mode == "NOT_LARGER" and self.width and self.height:
            scale = min(by_width, by_height)
        for limit, size in ((self.max_width, source_width), (self.max_height, source_height)):
            if limit:
                scale = min(scale, np.float32(limit) / np.float32(size))
        return (
            self.width if self.width and by_width == scale else _scaled(source_width, scale),
            self.height if self.height and by_height == scale else _scaled(source_height, scale),
        )


def _scaled(size: int, scale: np.float32) -> int:
    """Half rounded up."""
    return int(np.floor(np.float64(np.float32(size) * scale) + 0.5))


_SIDES = ("resize_width", "resize_height", "resize_longer", "resize_shorter")
_SIZE = {
    **{side: schema.size(0) for side in _SIDES},
    "max_size": schema.list_of(schema.size, (0, 1, 2), "sizes in pixels, [width, height]")(()),
    "scaling_mode": schema.choice("DEFAULT", "STRETCH", "NOT_SMALLER", "NOT_LARGER", prefix="SCALING_MODE_")("DEFAULT"),
}


def _by_rule(
    resize_width: int,
    resize_height: int,
    resize_longer: int,
    resize_shorter: int,
    max_size: tuple[int, ...],
    scaling_mode: str,
    **others: Any,
) -> Values:
    """`resize_longer` and `resize_shorter` are NOT_LARGER and NOT_SMALLER for a square."""
    if [bool(resize_width or resize_height), bool(resize_longer), bool(resize_shorter)].count(True) != 1:
        sides = zip(_SIDES, (resize_width, resize_height, resize_longer, resize_shorter), strict=True)
        given = [key for key, side in sides if side]
        raise ValueError(
            "the size must be given in one way: by 'resize_width', 'resize_height' or both, by 'resize_longer', or"
            f" by 'resize_shorter', not by {' and '.join(given) or 'none of these'}"
        )
    mode = "NOT_SMALLER" if resize_shorter else "NOT_LARGER" if resize_longer else scaling_mode
    square = resize_shorter or resize_longer
    limits = (max_size[0], max_size[-1]) if max_size else (0, 0)
    return {"size": SizeRule(mode, square or resize_width, square or resize_height, *limits), **others}


def _resize(image: Image, result: ResultExtent, as_float: bool, **arguments: Any) -> Pixels:
    return resized(image.valid, result.valid, as_float, **arguments)


def _scaled_extent(source: ResultExtent, size: SizeRule, **others: Any) -> ResultExtent:
    return size.extent(source)


def _amd_resize(node: Node, call: Call) -> Tensor:
    size = _stretching(call.arguments)
    return _unnormalised(node, size) if node.is_float else node.call("resize", size)


def _amd_resize_mirror_normalize(node: Node, call: Call) -> Tensor:
    normalisation = {key: call.arguments[key] for key in ("mean", "std", "mirror")}
    return node.call("resize_mirror_normalize", {**_stretching(call.arguments), **normalisation})


def _stretching(arguments: Values) -> Values:
    """What rocAL's C interface does by default, and AMD Inference Server with it; fn's default keeps proportions."""
    width, height = arguments["dest_width"], arguments["dest_height"]
    return {"resize_width": width, "resize_height": height, "scaling_mode": "STRETCH"}


def _amd_scale(node: Node, call: Call) -> Tensor:
    if not node.is_float:
        return node.call("resize", call.values)
    return _unnormalised(node, {key: value for key, value in call.values.items() if key != "interpolation_type"})


def _unnormalised(node: Node, size: Values) -> Tensor:
    """Resizing to FP32, bilinear: fn.resize would leave the tensor unwritten."""
    ones = (1.0,) * (1 if node.is_grey else 3)
    plain = {"mean": tuple(0.0 for _ in ones), "std": ones, "mirror": False}
    return node.call("resize_mirror_normalize", {**size, **plain})


def _without_size(arguments: Values, source: ResultExtent) -> str | None:
    if arguments["dest_width"] or arguments["dest_height"]:
        return None
    return "rocAL does not resize to a dest_width and a dest_height that are both 0; give one of them"


def _stretched_misfit(arguments: Values, known: Extent, height: int, width: int) -> str | None:
    return reads_beside(width, height, arguments["dest_width"])


def _scaled_misfit(arguments: Values, known: Extent, height: int, width: int) -> str | None:
    rule = arguments["size"]
    return reads_beside(width, height, rule.target(height, width, rule.largest(Extent(height, width)))[1])


_DESTINATION = {"dest_width": schema.size, "dest_height": schema.size}

OPERATIONS = (
    Operation(
        "Resize",
        _DESTINATION,
        _resize,
        _stretched_extent,
        amd=AmdForm(
            make=_amd_resize, gives_floats=always, gives_layouts=True, refusal=_without_size, misfit=_stretched_misfit
        ),
    ),
    Operation(
        "ResizeMirrorNormalize",
        {**_DESTINATION, **NORMALISATION, **MIRROR},
        _resize,
        _stretched_extent,
        renamed(std_dev="std"),
        channel_keys=("mean", "std_dev"),
        normalises=True,
        amd=AmdForm(
            make=_amd_resize_mirror_normalize,
            gives_floats=always,
            gives_layouts=True,
            only_planes=True,
            refusal=_without_size,
            misfit=_stretched_misfit,
        ),
    ),
    Operation(
        "resize",
        {**_SIZE, **INTERPOLATION},
        _resize,
        _scaled_extent,
        _by_rule,
        # rocAL takes it and does nothing with it.
        ignored_keys={"antialias": schema.switch(True)},
        amd=AmdForm(
            "resize",
            _amd_scale,
            # Through resize_mirror_normalize, which knows no other.
            gives_floats=lambda arguments: arguments["interpolation_type"] == "LINEAR",
            gives_layouts=True,
            misfit=_scaled_misfit,
        ),
    ),
    Operation(
        "resize_mirror_normalize",
        {**_SIZE, **NORMALISATION_OF_FN, **MIRROR_OF_FN},
        _resize,
        _scaled_extent,
        _by_rule,
        # On the way to RPP's kernel every interpolation becomes LINEAR.
        ignored_keys=INTERPOLATION,
        channel_keys=("mean", "std"),
        normalises=True,
        amd=AmdForm(gives_floats=always, gives_layouts=True, only_planes=True, misfit=_scaled_misfit),
    ),
)
