"""Operations on hue and saturation.

The first channel counts as red, whatever the decoder's colour format is, as in rocAL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, cast

import cv2
import numpy as np

from rocserve.backends.rocal import schema
from rocserve.backends.rocal.image import Pixels
from rocserve.backends.rocal.operations.base import KeptSizeOperation, PipelineOperation
from rocserve.backends.rocal.schema import Key

_ONE = np.float32(1)
_THIRD, _HALF, _TWO_THIRDS = np.float32(2 / 6), np.float32(3 / 6), np.float32(4 / 6)


class _Saturated:
    """The hue and saturation of an image as RPP's older kernels find them: fractions, FP32, one plane each."""

    def __init__(self, pixels: Pixels) -> None:
        # Constants are built and applied as there: the levels of many results lie in the middle between two whole ones.
        red, green, blue = (plane.astype(np.float32) * (_ONE / np.float32(255)) for plane in cv2.split(pixels))
        self.value = np.maximum(np.maximum(green, blue), red)
        chroma = self.value - np.minimum(np.minimum(green, blue), red)
        is_red, is_green = self.value == red, self.value == green
        difference = np.where(is_red, green - blue, np.where(is_green, blue - red, red - green))
        start = np.where(is_red, _ONE, np.where(is_green, _ONE - _TWO_THIRDS, _ONE + _TWO_THIRDS))
        is_grey = chroma == 0
        self.hue = difference / np.where(is_grey, _ONE, chroma * np.float32(6)) + start
        self.hue -= self.hue >= 1
        self.saturation = chroma / np.where(is_grey, _ONE, self.value)

    def pixels(self) -> Pixels:
        """Back to red, green and blue."""
        shares = (
            np.abs(self.hue - _HALF) * np.float32(6) - np.float32(2),
            _ONE - np.abs(self.hue - _THIRD) * np.float32(6),
            _ONE - np.abs(self.hue - _TWO_THIRDS) * np.float32(6),
        )
        for share in shares:
            np.clip(share, -1, 0, out=share)
            share *= self.saturation
            share *= self.value
            share += self.value
            share *= np.float32(255)
        return cv2.convertScaleAbs(cv2.merge(shares))


@dataclass(frozen=True)
class Hue(KeptSizeOperation):
    """Turns the hue by `hue` degrees."""

    hue: float

    name: ClassVar[str] = "hue"
    # rocAL draws what is left out at random.
    keys: ClassVar[dict[str, Key]] = {"hue": Key(schema.read_number)}
    colour_only: ClassVar[bool] = True

    def _process(self, pixels: Pixels) -> Pixels:
        image = _Saturated(pixels)
        image.hue += np.float32(math.fmod(self.hue, 360) % 360 / 360)
        image.hue -= image.hue >= 1
        return image.pixels()


@dataclass(frozen=True)
class Saturation(KeptSizeOperation):
    """Multiplies the saturation (0..1) by `saturation`, up to 1: 0 makes an image grey."""

    saturation: float

    name: ClassVar[str] = "saturation"
    keys: ClassVar[dict[str, Key]] = {"saturation": Key(schema.read_not_negative, default=1.0)}
    colour_only: ClassVar[bool] = True

    def _process(self, pixels: Pixels) -> Pixels:
        image = _Saturated(pixels)
        image.saturation *= np.float32(self.saturation)
        np.minimum(image.saturation, 1, out=image.saturation)
        return image.pixels()


@dataclass(frozen=True)
class ColorTwist(KeptSizeOperation):
    """Turns the hue by whole degrees, multiplies the saturation, then level * brightness + contrast.

    The name says otherwise, but rocAL adds `contrast`, in levels of 0..255.
    """

    brightness: float
    contrast: float
    hue: float
    saturation: float

    name: ClassVar[str] = "color_twist"
    keys: ClassVar[dict[str, Key]] = {
        "brightness": Key(schema.read_number, default=1.0),
        "contrast": Key(schema.read_number, default=1.0),
        "hue": Key(schema.read_number, default=0.0),
        "saturation": Key(schema.read_not_negative, default=1.0),
    }
    colour_only: ClassVar[bool] = True

    def _process(self, pixels: Pixels) -> Pixels:
        red, green, blue = (plane.astype(np.float32) * np.float32(1 / 255) for plane in cv2.split(pixels))
        value = np.maximum(red, np.maximum(green, blue))
        chroma = value - np.minimum(red, np.minimum(green, blue))
        hue = self._turned_hue(red, green, blue, value, chroma)
        saturation = chroma / np.maximum(value, np.float32(1e-9)) * np.float32(self.saturation)
        np.minimum(saturation, 1, out=saturation)
        strength = value * saturation
        planes = []
        for share in (np.abs(hue - 3) - 1, 2 - np.abs(hue - 2), 2 - np.abs(hue - 4)):
            np.clip(share, 0, 1, out=share)
            share -= 1
            share *= strength
            share += value
            planes.append(share)
        levels = cast(Pixels, cv2.merge(planes))
        levels *= np.float32(self.brightness) * np.float32(255)
        levels += np.float32(self.contrast)
        np.clip(levels, 0, 255, out=levels)
        return cv2.convertScaleAbs(levels)

    def _turned_hue(self, red: Pixels, green: Pixels, blue: Pixels, value: Pixels, chroma: Pixels) -> Pixels:
        """The hue after turning, in sixths of a circle: from 0 to 6."""
        is_red, is_green = value == red, value == green
        difference = np.where(is_red, green - blue, np.where(is_green, blue - red, red - green))
        start = np.where(is_red, np.float32(0), np.where(is_green, np.float32(2), np.float32(4)))
        is_grey = chroma == 0
        start[is_grey] = 0
        hue = difference / np.where(is_grey, np.float32(1), chroma)
        hue += np.float32(math.fmod(int(self.hue), 360)) * np.float32(0.01666667) + start
        hue -= np.float32(6) * (hue >= 6)
        hue += np.float32(6) * (hue < 0)
        return hue


OPERATIONS: tuple[type[PipelineOperation], ...] = (Hue, Saturation, ColorTwist)
