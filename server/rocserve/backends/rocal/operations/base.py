"""What an operation of a pipeline is, and the keys that several of them share."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

import numpy as np

from rocserve.backends.rocal import schema
from rocserve.backends.rocal.image import DecodedImage, Extent, Image, Pixels, ResultExtent
from rocserve.backends.rocal.schema import Key
from rocserve.core.datatypes import DataType

DESTINATION = {"dest_width": Key(schema.read_size), "dest_height": Key(schema.read_size)}
MIRROR = {"mirror": Key(schema.read_switch, default=False, input_datatype=DataType.BOOL)}
NORMALISATION = {"mean": Key(schema.read_channel_numbers), "std_dev": Key(schema.read_divisors)}


class PipelineOperation(abc.ABC):
    """What all kinds of operations have in common: a name and keys. Safe to use on several threads at once.

    Each is a frozen dataclass whose fields are `keys`. Where values are wrong only together, its `__post_init__` raises
    ValueError with a text that names the keys; the pipeline adds where it was.
    """

    name: ClassVar[str]
    """By which JSON's "operation" calls it."""
    keys: ClassVar[dict[str, Key]]
    """The JSON keys that it takes, beyond those that all take; also the fields that it is made of."""
    ignored_keys: ClassVar[dict[str, Key]] = {}
    """Keys that rocAL takes for volumes and that mean nothing for an image; checked and dropped."""
    normalisation_keys: ClassVar[tuple[str, str] | None] = None
    """The keys of a mean and of a deviation: the pipeline makes them one value a channel, for levels of 0..255, and
    the operation takes "mean_std_range"."""
    colour_only: ClassVar[bool] = False
    """Whether it needs three channels."""
    default_datatype: ClassVar[DataType] = DataType.UINT8
    """That of the output, where neither the pipeline nor the configuration says."""

    def check_channels(self, channels: int) -> None:  # noqa: B027
        """
        Raises:
            ValueError: its keys are for images of other channels.
        """


class Operation(PipelineOperation):
    """Makes an image of one other."""

    @abc.abstractmethod
    def run(self, image: Image, as_float: bool) -> Image:
        """The result as UINT8, or as FP32 without rounding and clamping."""

    @abc.abstractmethod
    def extent(self, source: Extent) -> ResultExtent:
        """The size of the result for an image of which `source` is valid."""

    def result_extent(self, source: ResultExtent) -> ResultExtent:
        """The same where the size of the whole image is known too; for operations whose result depends on it."""
        return self.extent(source.valid)


class PairOperation(PipelineOperation):
    """Makes an image of two others."""

    @abc.abstractmethod
    def run_pair(self, first: Image, second: Image, as_float: bool) -> Image:
        """The result as UINT8, or as FP32 without rounding and clamping.

        Raises:
            PixelsError: the two do not fit each other.
        """

    @abc.abstractmethod
    def extent_of_pair(self, first: Extent, second: Extent) -> ResultExtent:
        """The size of the result for images of which these parts are valid.

        Raises:
            ValueError: images of these sizes can never fit each other; the text says why.
        """


class Measurement(PipelineOperation):
    """Tells something of the image that was sent; always an output, never what another operation reads."""

    datatype: ClassVar[DataType]
    shape: ClassVar[tuple[int, ...]]
    """Of one image's result."""

    @abc.abstractmethod
    def measure(self, decoded: DecodedImage) -> np.ndarray[Any, Any]:
        """The result, in `datatype` and `shape`."""


def limited(wanted: int, available: int | None) -> int | None:
    """A side of a crop: what was asked for, at most what is there; None where that is not known."""
    return None if available is None else min(wanted, available)


class KeptSizeOperation(Operation):
    """Changes the valid part of an image and leaves its size and that of the valid part as they are.

    rocAL has kernels from UINT8 to UINT8 alone for these operations, so that FP32 holds whole levels too.
    """

    @abc.abstractmethod
    def _process(self, pixels: Pixels) -> Pixels:
        """The result, UINT8, for the valid part of an image; `pixels` must be left as they are."""

    def run(self, image: Image, as_float: bool) -> Image:
        processed = self._process(image.valid)
        return placed(processed.astype(np.float32) if as_float else processed, image)

    def extent(self, source: Extent) -> ResultExtent:
        return ResultExtent(source, source)

    def result_extent(self, source: ResultExtent) -> ResultExtent:
        return source


def placed(processed: Pixels, image: Image) -> Image:
    """`processed` as the valid part of an image as large as `image`, with zeros around it."""
    if processed.shape[:2] == image.pixels.shape[:2]:
        return Image.whole(processed)
    return padded(processed, image.pixels.shape[0], image.pixels.shape[1])


def padded(valid: Pixels, height: int, width: int) -> Image:
    """An image of `height` x `width` pixels, zeros but for its valid part."""
    if valid.shape[:2] == (height, width):
        return Image.whole(valid)
    pixels: Pixels = np.zeros((height, width, valid.shape[2]), dtype=valid.dtype)
    pixels[: valid.shape[0], : valid.shape[1]] = valid
    return Image(pixels, valid.shape[0], valid.shape[1])
