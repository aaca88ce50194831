"""Declares operations: name and keys, the function that makes the pixels, the form in amd.rocal."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import cv2
import numpy as np

from rocserve.backends.rocal.amd.binding import Binding
from rocserve.backends.rocal.image import (
    DecodedImage,
    Extent,
    Image,
    Part,
    Pixels,
    PixelsError,
    ResultExtent,
    with_channels,
)
from rocserve.backends.rocal.schema import Key
from rocserve.core.datatypes import DataType

Values = Mapping[str, Any]
"""Of an operation's keys, or the arguments made of them, by their names."""

_NAMES_IN_FN = {
    "dest_width": "resize_width",
    "dest_height": "resize_height",
    "area": "crop_area_factor",
    "aspect_ratio": "crop_aspect_ratio",
    "x_center_drift": "x_drift",
    "y_center_drift": "y_drift",
    "start_x": "crop_pos_x",
    "start_y": "crop_pos_y",
    "std_dev": "std",
    "roi_w": "crop_width",
    "roi_h": "crop_height",
    "roi_pos_x": "crop_pos_x",
    "roi_pos_y": "crop_pos_y",
}
"""The keys that amd.rocal's fn, or most of its functions, call otherwise: how arguments are called here."""

Tensor = Any
"""rocAL's handle on an image of the graph, or on a batch's result."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the graph that is to be made: its place, sources and result."""

    binding: Binding
    handle: Any
    """Of the rocAL pipeline."""
    layout: Any
    datatype: Any
    """Both of amd.rocal.types."""
    images: Sequence[Tensor]
    """Its sources."""
    source: ResultExtent
    """The (first) of them, as far as its size is the same for all images."""
    is_grey: bool
    """Grey images are planes in rocAL, colour ones are not."""
    batch_size: int

    def call(self, function_name: str, keywords: Values) -> Tensor:
        """Adds it by a function of `fn`."""
        function = getattr(self.binding.functions, function_name)
        formats = {"output_layout": self.layout, "output_dtype": self.datatype, "output_datatype": self.datatype}
        accepted = inspect.signature(function).parameters
        return function(
            *self.images,
            **{key: self._keyword(key, value) for key, value in keywords.items()},
            **{key: value for key, value in formats.items() if key in accepted},
        )

    def _keyword(self, key: str, value: Any) -> Any:
        """A key's value as fn takes it."""
        if isinstance(value, bool):
            return int(value)
        if isinstance(value, tuple):
            return [self._keyword(key, element) for element in value]
        if isinstance(value, str):
            name = f"SCALING_MODE_{value}" if key == "scaling_mode" else f"{value}_INTERPOLATION"
            return getattr(self.binding.types, name)
        return value


@dataclass(frozen=True, slots=True)
class AmdForm:
    """An operation's form in amd.rocal, and the cases that amd.rocal cannot do.

    Most operations have the name and the keywords of a function of amd.rocal's `fn`; of these nothing is declared but
    what else is to be known. `Values` are the operation's arguments.
    """

    function: str | None = None
    """Of `fn`, which takes the operation's keys as keywords; None = that of its name, or none where `make` is."""
    make: Callable[[Node, Call], Tensor] | None = None
    """Adds the node, where more is to be done than to call that function."""
    gives_floats: Callable[[Values], bool] = lambda arguments: False
    """Whether FP32 can be had. Where not, UINT8 is asked for and converted: RPP's kernels that write FP32 for UINT8 are
    those that normalise; of all other operations rocAL leaves an FP32 tensor unwritten, and says nothing."""
    gives_layouts: bool = False
    """Whether rocAL can hand out channels first or last as asked for. Where not, it keeps the source's layout."""
    only_planes: bool = False
    """Whether an output is to be asked for with its channels first, since rocAL's kernel for the other layout errs."""
    fills_result: bool = False
    """Whether all of the result is written, though rocAL calls less of it valid."""
    refusal: Callable[[Values, ResultExtent], str | None] = lambda arguments, source: None
    """Why it cannot be done, given the known extent of its source; None = it can."""
    misfit: Callable[[Values, Extent, int, int], str | None] = lambda arguments, known, height, width: None
    """Why an image cannot be worked on, where rocAL would read other memory; None = it can. The extent is what was
    known of the valid part of the source when the graph was made; height and width are this image's."""


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """An operation that a pipeline may name. Its functions are safe to call on several threads at once."""

    name: str
    """By which JSON's "operation" calls it."""
    keys: Mapping[str, Key]
    """The JSON keys that it takes, beyond those that all take."""
    run: Callable[..., Pixels | Callable[[Part], Pixels]]
    """Of the images that it reads, the result's extent, whether FP32 is wanted, and the arguments by their names: the
    result's pixels from the top left, as UINT8, or what makes them later, or, where that differs and is wanted, as FP32
    without rounding and clamping. Raises PixelsError where it cannot be done with these images."""
    extent: Callable[..., ResultExtent]
    """Of the extents of what it reads, and the arguments: the result's. Raises ValueError where there can be none."""
    arguments: Callable[..., Values] = dict
    """Of the keys' values by their names in fn: what `run` and `extent` take. Raises ValueError, with a text that names
    the keys, where values are wrong only together."""
    ignored_keys: Mapping[str, Key] = field(default_factory=dict)
    """Keys that rocAL takes and that mean nothing for an image; checked and dropped."""
    channel_keys: tuple[str, ...] = ()
    """Keys with a value for each channel."""
    normalises: bool = False
    """Whether `channel_keys` are a mean and a deviation that the pipeline brings to one value a channel, for levels of
    0..255; then the operation takes "mean_std_range"."""
    colour_only: bool = False
    """Whether it needs three channels."""
    default_datatype: DataType = DataType.UINT8
    """That of the output, where neither the pipeline nor the configuration says."""
    sources: int = 1
    """How many images it reads."""
    amd: AmdForm = AmdForm()

    def __call__(self, **values: Any) -> Call:
        """Raises: ValueError: values are wrong together."""
        return Call(
            self, values, self.arguments(**{_NAMES_IN_FN.get(key, key): value for key, value in values.items()})
        )


@dataclass(frozen=True, slots=True, eq=False)
class Measurement:
    """Measures the image that was sent; always an output, never read by another operation."""

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    """Of one image's result."""
    measure: Callable[[DecodedImage], np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class Call:
    """An operation with values for its keys."""

    operation: Operation
    values: Values
    arguments: Values

    def run(self, *images: Image, as_float: bool) -> Image:
        """Raises: PixelsError: the images do not fit, the result would be too large, or see Operation.run."""
        try:
            result = self.extent(*(image.extent for image in images))
            result.check()
        except ValueError as error:
            raise PixelsError(f"{self.operation.name}: {error}") from None
        pixels = self.operation.run(*images, result, as_float, **self.arguments)
        if as_float and isinstance(pixels, np.ndarray):
            pixels = pixels.astype(np.float32, copy=False)
        return Image(pixels, result)

    def extent(self, *sources: ResultExtent) -> ResultExtent:
        """See Operation.extent."""
        return self.operation.extent(*sources, **self.arguments)


def in_place(
    name: str, process: Callable[..., Pixels], keys: Mapping[str, Key] | None = None, **options: Any
) -> Operation:
    """Declares an operation that changes the valid part of an image and leaves all sizes as they are.

    `process` makes of the valid part, which it leaves as it is, one of the same size, UINT8. FP32 holds whole levels
    too: rocAL has kernels from UINT8 to UINT8 alone for these operations.
    """

    def run(image: Image, result: ResultExtent, as_float: bool, **arguments: Any) -> Pixels:
        return process(image.valid, **arguments)

    return Operation(name, keys or {}, run, same_extent, **options)


def by_levels(name: str, levels: Callable[..., Pixels], keys: Mapping[str, Key], **options: Any) -> Operation:
    """Declares an operation that gives each level another one, whatever its neighbours.

    `levels` makes of 0..255, FP32, the new levels, rounded but not clamped: one row, or one for each channel.
    """

    def process(pixels: Pixels, **arguments: Any) -> Pixels:
        return with_channels(cast(Pixels, cv2.LUT(pixels, _table(levels, tuple(arguments.items())))))

    return in_place(name, process, keys, **options)


@lru_cache
def _table(levels: Callable[..., Pixels], arguments: tuple[tuple[str, Any], ...]) -> Pixels:
    new: Pixels = levels(np.arange(256, dtype=np.float32), **dict(arguments))
    return np.clip(new, 0, 255).astype(np.uint8)


def same_extent(source: ResultExtent, **arguments: Any) -> ResultExtent:
    return source
