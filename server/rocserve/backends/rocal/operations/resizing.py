"""Declares operations that resize an image.

If an operation gets only a longer or a shorter side, the result has the largest size that any image could need, so
that it is the same for all. The rest of it is zeros and invisible to the next operation.
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


def resize_refusal(width: float, height: float, resized_width: int) -> str | None:
    """Return the reason why RPP's kernels cannot resize a part of an image; None = they can. They step back from the
    last row and column without checking that there is a previous one, and read 8 columns at a time."""
    if width < 2 or height < 2:
        return (
            f"rocAL reads other memory where it resizes less than two rows or columns, here {int(width)}x{int(height)}"
            " pixels (width x height)"
        )
    if width < resized_width and width <= 8:
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
    """Resize to UINT8, or a part of it, or to FP32 without rounding and clipping. LINEAR is bilinear without
    antialiasing. Only LINEAR supports mirroring left to right, and then (level - mean) / std per channel."""
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
    # If the next operation crops the result, only that part is made.
    return lambda part: resized(image.valid, result.valid, False, part=part, **arguments)


def _amd_resize(node: Node, call: Call) -> Tensor:
    keywords = call.keywords
    if "mean" not in keywords:
        if node.datatype != node.binding.types.FLOAT:
            return node.call("resize", keywords)
        # For FP32 bilinear resizing fn.resize would leave the tensor unwritten.
        channels = 1 if node.is_grey else 3
        size = {key: value for key, value in keywords.items() if key != "interpolation_type"}
        keywords = {**size, "mean": (0.0,) * channels, "std": (1.0,) * channels, "mirror": False}
    return node.call("resize_mirror_normalize", keywords)


def _without_size(arguments: Values, source: ResultExtent) -> str | None:
    if arguments["size"].width or arguments["size"].height:
        return None
    return "rocAL does not resize to a dest_width and a dest_height that are both 0; give one of them"


@dataclass(frozen=True, slots=True)
class SizeRule:
    """Computes the size of a result as amd.rocal's fn does. DEFAULT and STRETCH use the given width and height. For
    a side of 0, DEFAULT keeps the aspect ratio and STRETCH uses the source's side. NOT_LARGER keeps the aspect ratio
    and fits into both sides, NOT_SMALLER covers them."""

    mode: str
    width: int
    height: int
    max_width: int = 0
    """0 = no limit."""
    max_height: int = 0

    def extent(self, source: ResultExtent) -> ResultExtent:
        largest = self._largest(source.size)
        if source.valid.is_known:
            return ResultExtent(largest, Extent(*self.target(*source.valid.sides)))
        # Without a maximum size, the valid part has exactly the given sides.
        exact = self.mode == "STRETCH" or (self.mode == "DEFAULT" and self.width and self.height)
        if not exact or self.max_width or self.max_height:
            return ResultExtent(largest, Extent(None, None))
        valid = Extent(self.height or source.valid.height, self.width or source.valid.width)
        return ResultExtent(largest, valid)

    def _largest(self, source: Extent) -> Extent:
        """Return the size of the result; None = the side is the source's, which is unknown."""
        ratio = 6  # The most that a missing side may be longer than the given one.
        if self.mode == "STRETCH":
            height, width = self.height or source.height, self.width or source.width
        elif self.mode == "NOT_SMALLER":
            height, width = (self.height or self.width) * ratio, (self.width or self.height) * ratio
        else:
            height, width = self.height or self.width * ratio, self.width or self.height * ratio
        return Extent(self.max_height or height, self.max_width or width)

    def target(self, source_height: int, source_width: int) -> tuple[int, int]:
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
                # Half is rounded up.
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
    """Return the size rule. `resize_longer` and `resize_shorter` are NOT_LARGER and NOT_SMALLER for a square."""
    if [bool(resize_width or resize_height), bool(resize_longer), bool(resize_shorter)].count(True) != 1:
        sides = zip(_SIDES, (resize_width, resize_height, resize_longer, resize_shorter), strict=True)
        named = [key for key, side in sides if side]
        raise ValueError(
            "the size must be given in one way: by 'resize_width', 'resize_height' or both, by 'resize_longer', or"
            f" by 'resize_shorter', not by {' and '.join(named) or 'none of these'}"
        )
    mode = "NOT_SMALLER" if resize_shorter else "NOT_LARGER" if resize_longer else scaling_mode
    square = resize_shorter or resize_longer
    limits = (max_size[0], max_size[-1]) if max_size else (0, 0)
    return {"size": SizeRule(mode, square or resize_width, square or resize_height, *limits), **others}


def _stretched(resize_width: int, resize_height: int, **others: Any) -> Values:
    return {"size": SizeRule("STRETCH", resize_width, resize_height), **others}


MIRROR = {"mirror": ("mirror", schema.switch(False, is_bindable=True))}
MIRROR_OF_FN = {"mirror": schema.switch(True, is_bindable=True)}
"""rocAL's fn mirrors by default."""
NORMALISATION = {"mean": ("mean", schema.channel_numbers), "std_dev": ("std", schema.divisors)}
NORMALISATION_OF_FN = {"mean": schema.channel_numbers((0.0,)), "std": schema.divisors((1.0,))}
INTERPOLATION = {
    "interpolation_type": schema.choice(
        "LINEAR", "NEAREST_NEIGHBOR", "CUBIC", "LANCZOS", "GAUSSIAN", "TRIANGULAR", suffix="_INTERPOLATION"
    )("LINEAR")
}
_OPEN_DESTINATION = {"dest_width": ("resize_width", schema.size), "dest_height": ("resize_height", schema.size)}
_SIDES = ("resize_width", "resize_height", "resize_longer", "resize_shorter")
_SIZE = {
    **{side: schema.size(0) for side in _SIDES},
    "max_size": schema.list_of(schema.size, (0, 1, 2), "sizes in pixels, [width, height]")(()),
    "scaling_mode": schema.choice("DEFAULT", "STRETCH", "NOT_SMALLER", "NOT_LARGER", prefix="SCALING_MODE_")("DEFAULT"),
}

_RESIZE = Operation(
    "resize",
    {**_SIZE, **INTERPOLATION},
    _resize,
    lambda source, size, **others: size.extent(source),
    _by_rule,
    # rocAL accepts the key but ignores it.
    ignored_keys={"antialias": schema.switch(True)},
    amd=AmdForm(
        "resize",
        _amd_resize,
        # FP32 is made by resize_mirror_normalize, which only supports LINEAR.
        gives_floats=lambda arguments: arguments.get("interpolation_type", "LINEAR") == "LINEAR",
        gives_layouts=True,
        refusal=_without_size,
        image_refusal=lambda arguments, known, height, width: resize_refusal(
            width, height, arguments["size"].target(height, width)[1]
        ),
    ),
)
_RESIZE_AND_NORMALISE = replace(
    _RESIZE,
    name="resize_mirror_normalize",
    keys={**_SIZE, **NORMALISATION_OF_FN, **MIRROR_OF_FN},
    # rocAL uses LINEAR for every value.
    ignored_keys=INTERPOLATION,
    channel_keys=("mean", "std"),
    normalises=True,
    amd=replace(_RESIZE.amd, function="resize_mirror_normalize", only_planes=True),
)
# STRETCH is the default of rocAL's C interface and AMD Inference Server. fn's default keeps proportions.
_STRETCH: dict[str, Any] = {"constants": {"scaling_mode": "STRETCH"}, "arguments": _stretched}

OPERATIONS = (
    _RESIZE.alias("Resize", _OPEN_DESTINATION, **_STRETCH),
    _RESIZE_AND_NORMALISE.alias("ResizeMirrorNormalize", {**_OPEN_DESTINATION, **NORMALISATION, **MIRROR}, **_STRETCH),
    _RESIZE,
    _RESIZE_AND_NORMALISE,
)
