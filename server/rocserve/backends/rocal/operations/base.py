"""What an operation of a pipeline is, and the keys that several of them share."""

from __future__ import annotations

import abc
from typing import ClassVar

from rocserve.backends.rocal import schema
from rocserve.backends.rocal.image import Extent, Image, ResultExtent
from rocserve.backends.rocal.schema import Key

DESTINATION = {"dest_width": Key(schema.read_size), "dest_height": Key(schema.read_size)}
MIRROR = {"mirror": Key(schema.read_flag, default=False)}
NORMALISATION = {"mean": Key(schema.read_channel_numbers), "std_dev": Key(schema.read_divisors)}


class Operation(abc.ABC):
    """One step of a pipeline; safe to use on several threads at once."""

    keys: ClassVar[dict[str, Key]]
    """The JSON keys that it takes, beyond those that all take; also the fields that it is made of."""
    ignored_keys: ClassVar[dict[str, Key]] = {}
    """Keys that rocAL takes for volumes and that mean nothing for an image; checked and dropped."""

    @abc.abstractmethod
    def run(self, image: Image, as_float: bool) -> Image:
        """The result as UINT8, or as FP32 without rounding and clamping."""

    @abc.abstractmethod
    def extent(self, source: Extent) -> ResultExtent:
        """The size of the result for an image of which `source` is valid."""


def limited(wanted: int, available: int | None) -> int | None:
    """A side of a crop: what was asked for, at most what is there; None where that is not known."""
    return None if available is None else min(wanted, available)
