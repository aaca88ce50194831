"""Declares operations: name, keys, the function that computes the pixels, and the form in amd.rocal."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from rocserve.backends.rocal.schema import REQUIRED, Key
from rocserve.core.datatypes import DataType

Values = Mapping[str, Any]
"""Name -> value: of an operation's keys, or of the arguments made of them."""

Tensor = Any
"""rocAL's handle of an image in the graph, or of a batch's result."""


@dataclass(frozen=True, slots=True)
class Node:
    """Describes a node that is added to rocAL's graph."""

    binding: Binding
    handle: Any
    layout: Any
    datatype: Any
    """Layout and datatype are constants of amd.rocal.types."""
    images: Sequence[Tensor]
    source: ResultExtent
    """Extent of the first source, as far as it is the same for all images."""
    is_grey: bool
    """In rocAL grey images are planes, and colour images are not."""
    batch_size: int

    def call(self, function_name: str, keywords: Values) -> Tensor:
        function = getattr(self.binding.functions, function_name)
        formats = {"output_layout": self.layout, "output_dtype": self.datatype, "output_datatype": self.datatype}
        accepted = inspect.signature(function).parameters
        return function(
            *self.images,
            **{key: self._keyword(key, value) for key, value in keywords.items()},
            **{key: value for key, value in formats.items() if key in accepted},
        )

    def _keyword(self, key: str, value: Any) -> Any:
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
    """Describes an operation in amd.rocal, and the cases that amd.rocal cannot process. Most operations are a call of
    a function in amd.rocal's `fn` and need few of these fields. The argument `Values` of the functions are the
    operation's arguments."""

    function: str | None = None
    """Function of `fn` that takes the keys; None = the one with the operation's name, or none if `make` is given."""
    make: Callable[[Node, Call], Tensor] | None = None
    """Adds the node if a call of the function is not enough."""
    gives_floats: Callable[[Values], bool] = lambda arguments: False
    """Whether rocAL can return FP32; otherwise UINT8 is requested and converted. Only RPP's normalising kernels convert
    UINT8 to FP32; for all other operations rocAL silently leaves an FP32 tensor unwritten."""
    gives_layouts: bool = False
    """Whether rocAL can return either layout; otherwise it keeps the source's layout."""
    only_planes: bool = False
    """Whether an output must be requested as NCHW, because rocAL's kernel for NHWC is wrong."""
    fills_result: bool = False
    """Whether the whole result is written, although rocAL reports a smaller valid part."""
    refusal: Callable[[Values, ResultExtent], str | None] = lambda arguments, source: None
    """Returns the reason why rocAL cannot run the operation, given its source's known extent; None = it can."""
    image_refusal: Callable[[Values, Extent, int, int], str | None] = lambda arguments, known, height, width: None
    """Returns the reason why an image cannot be processed, because rocAL would read other memory; None = it can. The
    extent is the source's valid part, as known when the graph was built; height and width are this image's."""


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """Describes an operation. Its functions can be called from several threads at a time."""

    name: str
    keys: Mapping[str, Key]
    """The operation's JSON keys, in addition to the keys that all operations have."""
    run: Callable[..., Pixels | Callable[[Part], Pixels]]
    """Takes the images, the result's extent, whether FP32 is wanted, and the arguments by name. Returns the result's
    pixels from the top left as UINT8, or a function that makes them later; or, if FP32 is wanted and differs, FP32
    without rounding and clipping. Raises PixelsError if it cannot process these images."""
    extent: Callable[..., ResultExtent]
    """Returns the result's extent from the sources' extents and the arguments; raises ValueError if there is none."""
    arguments: Callable[..., Values] = dict
    """Takes the values of fn's keys, and returns the arguments of `run` and `extent`. Raises ValueError, with the names
    of the keys, if values contradict each other."""
    ignored_keys: Mapping[str, Key] = field(default_factory=dict)
    """Keys of rocAL without a meaning for an image; checked and dropped."""
    channel_keys: tuple[str, ...] = ()
    normalises: bool = False
    """Whether `channel_keys` are a mean and a deviation. The pipeline expands them to one value per channel for levels
    of 0..255, and the operation gets the key "mean_std_range"."""
    colour_only: bool = False
    default_datatype: DataType = DataType.UINT8
    """The output's datatype, if neither the pipeline nor the configuration has one."""
    sources: int = 1
    amd: AmdForm = AmdForm()

    keys_of_fn: Mapping[str, str] = field(default_factory=dict)
    """An alias's key -> fn's key."""
    constants: Values = field(default_factory=dict)
    """Values of the keys of fn that an alias lacks."""

    def __call__(self, **values: Any) -> Call:
        """Raises ValueError if the values contradict each other."""
        return Call(self, values, self.arguments(**self.keywords(values)))

    def keywords(self, values: Values) -> Values:
        """Return the values of fn's keys."""
        return {**self.constants, **{self.keys_of_fn.get(key, key): value for key, value in values.items()}}

    def alias(
        self, name: str, keys: Mapping[str, tuple[str, Key]], constants: Values | None = None, **changes: Any
    ) -> Operation:
        """Declare the same operation by AMD Inference Server's name and keys. `keys`: key -> fn's key, and its kind of
        value. Of fn's other keys, `constants` or else the defaults are used."""
        keys_of_fn = {key: own for key, (own, _) in keys.items()}
        defaults = {key: own.default for key, own in self.keys.items() if own.default is not REQUIRED}
        return replace(
            self,
            name=name,
            keys={key: kind for key, (_, kind) in keys.items()},
            keys_of_fn=keys_of_fn,
            constants={**defaults, **(constants or {})},
            channel_keys=tuple(key for key, own in keys_of_fn.items() if own in self.channel_keys),
            amd=replace(self.amd, function=self.amd.function or (self.name if self.amd.make is None else None)),
            **{"ignored_keys": {}, **changes},
        )


@dataclass(frozen=True, slots=True, eq=False)
class Measurement:
    """Measures the sent image. It is always an output, and no operation reads it."""

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    measure: Callable[[DecodedImage], np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class Call:
    """An operation with the values of its arguments."""

    operation: Operation
    values: Values
    arguments: Values

    @property
    def keywords(self) -> Values:
        """The values of fn's keys."""
        return self.operation.keywords(self.values)

    def run(self, *images: Image, as_float: bool) -> Image:
        """Raises PixelsError if the images do not fit or the result would be too large; see Operation.run."""
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
        return self.operation.extent(*sources, **self.arguments)


def in_place(
    name: str, process: Callable[..., Pixels], keys: Mapping[str, Key] | None = None, **options: Any
) -> Operation:
    """Declare an operation that changes the valid part of an image and keeps all sizes. `process` takes the valid
    part, without changing it, and returns UINT8 of the same size. An FP32 output has integer levels too, because
    rocAL's kernels for these operations only write UINT8."""

    def run(image: Image, result: ResultExtent, as_float: bool, **arguments: Any) -> Pixels:
        return process(image.valid, **arguments)

    return Operation(name, keys or {}, run, same_extent, **options)


def by_levels(name: str, levels: Callable[..., Pixels], keys: Mapping[str, Key], **options: Any) -> Operation:
    """Declare an operation that replaces each level independently of its neighbours. `levels` takes the levels
    0..255 as FP32 and returns the new ones, rounded but not clipped: one row, or one per channel."""

    def process(pixels: Pixels, **arguments: Any) -> Pixels:
        return with_channels(cast(Pixels, cv2.LUT(pixels, _table(levels, tuple(arguments.items())))))

    return in_place(name, process, keys, **options)


@lru_cache
def _table(levels: Callable[..., Pixels], arguments: tuple[tuple[str, Any], ...]) -> Pixels:
    new: Pixels = levels(np.arange(256, dtype=np.float32), **dict(arguments))
    return np.clip(new, 0, 255).astype(np.uint8)


def same_extent(source: ResultExtent, **arguments: Any) -> ResultExtent:
    return source
