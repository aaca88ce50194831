"""Operations that resize an image: AMD Inference Server's by its JSON, and those of amd.rocal's fn.

Where the latter are given a longer or a shorter side, their result's size is the largest that any image could get, so
that it is the same for all; the rest is zeros and not seen by the next operation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rocserve.backends.rocal import schema
from rocserve.backends.rocal.image import Extent, Image, Part, Pixels, ResultExtent
from rocserve.backends.rocal.operations.base import AmdForm, Call, Node, Operation, Tensor, Values
from rocserve.backends.rocal.sampling import (
    Scaling,
    resize_by_weights,
    resize_nearest,
    resize_to_bytes,
    resize_to_floats,
)

_LARGEST_ASPECT_RATIO = 6
"""How much longer a side that is not given may become than the one that is."""

_FETCHED_COLUMNS = 8


def reads_beside(width: float, height: float, resized_width: int) -> str | None:
    """Why a part of an image cannot be resized by RPP's kernels; None = it can.

    They step back from the last row and column without looking whether there is one before, and fetch 8 columns at
    once.
    """
    if width < 2 or height < 2:
        return (
            f"rocAL reads other memory where it resizes less than two rows or columns, here {int(width)}x{int(height)}"
            " pixels (width x height)"
        )
    if width < resized_width and width <= _FETCHED_COLUMNS:
        return f"rocAL may read other memory where it resizes {int(width)} columns to {resized_width}"
    return None


def resized(
    pixels: Pixels,
    target: Extent,
    as_float: bool,
    interpolation_type: str = "LINEAR",
    mirror: bool = False,
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
    part: Part | None = None,
    **others: Any,
) -> Pixels:
    """UINT8, also a part of them, or FP32 neither rounded nor clamped.

    LINEAR is between pixels and without antialiasing; it alone may be mirrored left to right, with
    (level - mean) / std for each channel after that.
    """
    height, width = target.sides
    if interpolation_type == "LINEAR":
        scaling = Scaling.of(mean, std) if mean else None
        if as_float:
            return resize_to_floats(pixels, width, height, mirror, scaling)
        return resize_to_bytes(pixels, width, height, mirror, scaling, part)
    if interpolation_type == "NEAREST_NEIGHBOR":
        top, left, part_height, part_width = part or (0, 0, height, width)
        return resize_nearest(pixels, width, height)[top : top + part_height, left : left + part_width]
    return resize_by_weights(pixels, width, height, interpolation_type, as_float, part)


def _resize(image: Image, result: ResultExtent, as_float: bool, **arguments: Any) -> Pixels | Callable[[Part], Pixels]:
    if as_float:
        return resized(image.valid, result.valid, True, **arguments)
    # Where the next operation cuts a part out, only that is made.
    return lambda part: resized(image.valid, result.valid, False, part=part, **arguments)


def _stretched_extent(source: ResultExtent, resize_width: int, resize_height: int, **others: Any) -> ResultExtent:
    """A side of 0 keeps that side."""
    return ResultExtent.whole(Extent(resize_height or source.valid.height, resize_width or source.valid.width))


def _amd_resize(node: Node, keywords: Values) -> Tensor:
    if "mean" not in keywords:
        if node.datatype != node.binding.types.FLOAT:
            return node.call("resize", keywords)
        # To FP32, bilinear: fn.resize would leave the tensor unwritten.
        channels = 1 if node.is_grey else 3
        size = {key: value for key, value in keywords.items() if key != "interpolation_type"}
        keywords = {**size, "mean": (0.0,) * channels, "std": (1.0,) * channels, "mirror": False}
    return node.call("resize_mirror_normalize", keywords)


def _amd_stretch(node: Node, call: Call) -> Tensor:
    # What rocAL's C interface does by default, and AMD Inference Server with it; fn's default keeps proportions.
    return _amd_resize(node, {**call.arguments, "scaling_mode": "STRETCH"})


def _without_size(arguments: Values, source: ResultExtent) -> str | None:
    if arguments["resize_width"] or arguments["resize_height"]:
        return None
    return "rocAL does not resize to a dest_width and a dest_height that are both 0; give one of them"


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
        largest = self._largest(source.size)
        if source.valid.is_known:
            return ResultExtent(largest, Extent(*self.target(*source.valid.sides)))
        # Without a longest size the sides that are given are kept to the pixel.
        exact = self.mode == "DEFAULT" and self.width and self.height and not self.max_width and not self.max_height
        return ResultExtent(largest, Extent(self.height, self.width) if exact else Extent(None, None))

    def _largest(self, source: Extent) -> Extent:
        """The size of the result; a side that is None comes from a source of unknown size."""
        ratio = _LARGEST_ASPECT_RATIO
        if self.mode == "STRETCH":
            height, width = self.height or source.height, self.width or source.width
        elif self.mode == "NOT_SMALLER":
            height, width = (self.height or self.width) * ratio, (self.width or self.height) * ratio
        else:
            height, width = self.height or self.width * ratio, self.width or self.height * ratio
        return Extent(self.max_height or height, self.max_width or width)

    def target(self, source_height: int, source_width: int) -> tuple[int, int]:
        """Height and width for an image."""
        if self.mode == "STRETCH":
            height, width = self.height or source_height, self.width or source_width
        else:
            by_width, by_height = (
                np.float32(wanted) / np.float32(side)
                for wanted, side in ((self.width, source_width), (self.height, source_height))
            )
            fits = self.mode == "NOT_LARGER" and self.width and self.height
            scale = min(by_width, by_height) if fits else max(by_width, by_height)
            keeps_both = self.mode == "DEFAULT"
            for limit, side in ((self.max_width, source_width), (self.max_height, source_height)):
                if limit and not keeps_both:
                    scale = min(scale, np.float32(limit) / np.float32(side))
            height, width = (
                wanted
                if wanted and (keeps_both or by_side == scale)
                # Half rounded up.
                else int(np.floor(np.float64(np.float32(side) * scale) + 0.5))
                for wanted, by_side, side in (
                    (self.height, by_height, source_height),
                    (self.width, by_width, source_width),
                )
            )
        most_high, most_wide = self._largest(Extent(source_height, source_width)).sides
        return max(min(height, most_high), 1), max(min(width, most_wide), 1)


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


MIRROR = {"mirror": schema.switch(False, is_bindable=True)}
MIRROR_OF_FN = {"mirror": schema.switch(True, is_bindable=True)}
"""rocAL's fn mirrors by default."""
NORMALISATION = {"mean": schema.channel_numbers, "std_dev": schema.divisors}
NORMALISATION_OF_FN = {"mean": schema.channel_numbers((0.0,)), "std": schema.divisors((1.0,))}
INTERPOLATION = {
    "interpolation_type": schema.choice(
        "LINEAR", "NEAREST_NEIGHBOR", "CUBIC", "LANCZOS", "GAUSSIAN", "TRIANGULAR", suffix="_INTERPOLATION"
    )("LINEAR")
}
_OPEN_DESTINATION = {"dest_width": schema.size, "dest_height": schema.size}
_SIDES = ("resize_width", "resize_height", "resize_longer", "resize_shorter")
_SIZE = {
    **{side: schema.size(0) for side in _SIDES},
    "max_size": schema.list_of(schema.size, (0, 1, 2), "sizes in pixels, [width, height]")(()),
    "scaling_mode": schema.choice("DEFAULT", "STRETCH", "NOT_SMALLER", "NOT_LARGER", prefix="SCALING_MODE_")("DEFAULT"),
}

_STRETCHING = AmdForm(
    make=_amd_stretch,
    gives_floats=lambda arguments: True,
    gives_layouts=True,
    refusal=_without_size,
    misfit=lambda arguments, known, height, width: reads_beside(width, height, arguments["resize_width"]),
)
_SCALING = AmdForm(
    gives_floats=lambda arguments: True,
    gives_layouts=True,
    misfit=lambda arguments, known, height, width: reads_beside(
        width, height, arguments["size"].target(height, width)[1]
    ),
)

OPERATIONS = (
    Operation("Resize", _OPEN_DESTINATION, _resize, _stretched_extent, amd=_STRETCHING),
    Operation(
        "ResizeMirrorNormalize",
        {**_OPEN_DESTINATION, **NORMALISATION, **MIRROR},
        _resize,
        _stretched_extent,
        channel_keys=("mean", "std_dev"),
        normalises=True,
        amd=replace(_STRETCHING, only_planes=True),
    ),
    Operation(
        "resize",
        {**_SIZE, **INTERPOLATION},
        _resize,
        lambda source, size, **others: size.extent(source),
        _by_rule,
        # rocAL takes it and does nothing with it.
        ignored_keys={"antialias": schema.switch(True)},
        amd=replace(
            _SCALING,
            function="resize",
            make=lambda node, call: _amd_resize(node, call.values),
            # Through resize_mirror_normalize, which knows no other.
            gives_floats=lambda arguments: arguments["interpolation_type"] == "LINEAR",
        ),
    ),
    Operation(
        "resize_mirror_normalize",
        {**_SIZE, **NORMALISATION_OF_FN, **MIRROR_OF_FN},
        _resize,
        lambda source, size, **others: size.extent(source),
        _by_rule,
        # On the way to RPP's kernel every interpolation becomes LINEAR.
        ignored_keys=INTERPOLATION,
        channel_keys=("mean", "std"),
        normalises=True,
        amd=replace(_SCALING, only_planes=True),
    ),
)
