"""Operations that give each level another one, whatever stands around it."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, cast

import cv2
import numpy as np

from rocserve.backends.rocal import schema
from rocserve.backends.rocal.image import Pixels
from rocserve.backends.rocal.operations.base import KeptSizeOperation, PipelineOperation
from rocserve.backends.rocal.sampling import with_channels
from rocserve.backends.rocal.schema import Key


class LevelOperation(KeptSizeOperation):
    """An operation that is a table of 256 levels."""

    @abc.abstractmethod
    def _levels(self, levels: Pixels) -> Pixels:
        """New levels, FP32, rounded but not clamped, for `levels`: 0..255 in FP32."""

    def _process(self, pixels: Pixels) -> Pixels:
        return with_channels(cast(Pixels, cv2.LUT(pixels, self._table)))

    @cached_property
    def _table(self) -> Pixels:
        levels = self._levels(np.arange(256, dtype=np.float32))
        return cast(Pixels, np.clip(levels, 0, 255).astype(np.uint8))


def fused(levels: Pixels, factor: float, summand: float) -> Pixels:
    """level * factor + summand, rounded to FP32 once, as a processor's fused multiply-add does it."""
    product = levels.astype(np.float64) * np.float64(np.float32(factor))
    return cast(Pixels, (product + np.float64(np.float32(summand))).astype(np.float32))


@dataclass(frozen=True)
class Brightness(LevelOperation):
    """level * brightness + brightness_shift (in levels of 0..255)."""

    brightness: float
    brightness_shift: float

    name: ClassVar[str] = "brightness"
    keys: ClassVar[dict[str, Key]] = {
        # rocAL draws what is left out at random.
        "brightness": Key(schema.read_number),
        "brightness_shift": Key(schema.read_number),
    }

    def _levels(self, levels: Pixels) -> Pixels:
        return cast(Pixels, np.rint(fused(levels, self.brightness, self.brightness_shift)))


@dataclass(frozen=True)
class BrightnessFixed(Brightness):
    """`brightness` with defaults that change nothing."""

    name: ClassVar[str] = "brightness_fixed"
    keys: ClassVar[dict[str, Key]] = {
        "brightness": Key(schema.read_number, default=1.0),
        "brightness_shift": Key(schema.read_number, default=0.0),
    }


@dataclass(frozen=True)
class Contrast(LevelOperation):
    """(level - contrast_center) * contrast + contrast_center."""

    contrast: float
    contrast_center: float

    name: ClassVar[str] = "contrast"
    keys: ClassVar[dict[str, Key]] = {
        "contrast": Key(schema.read_number),
        "contrast_center": Key(schema.read_number),
    }

    def _levels(self, levels: Pixels) -> Pixels:
        centred = levels - np.float32(self.contrast_center)
        return cast(Pixels, np.rint(fused(centred, self.contrast, self.contrast_center)))


@dataclass(frozen=True)
class Exposure(LevelOperation):
    """level * 2 ** exposure."""

    exposure: float

    name: ClassVar[str] = "exposure"
    keys: ClassVar[dict[str, Key]] = {"exposure": Key(schema.read_exponent, default=0.5)}

    def _levels(self, levels: Pixels) -> Pixels:
        return cast(Pixels, np.rint(levels * np.float32(2**self.exposure)))


@dataclass(frozen=True)
class GammaCorrection(LevelOperation):
    """(level / 255) ** gamma * 255, cut off rather than rounded."""

    gamma: float

    name: ClassVar[str] = "gamma_correction"
    keys: ClassVar[dict[str, Key]] = {"gamma": Key(schema.read_not_negative, default=0.5)}

    def _levels(self, levels: Pixels) -> Pixels:
        fractions = levels * np.float32(1 / 255)
        powers = (fractions.astype(np.float64) ** np.float64(np.float32(self.gamma))).astype(np.float32)
        return cast(Pixels, np.trunc(powers.astype(np.float64) * 255))


@dataclass(frozen=True)
class ColorTemp(LevelOperation):
    """Adds `adjustment_value` levels to the first channel and takes them from the third: warmer where RGB."""

    adjustment_value: int

    name: ClassVar[str] = "color_temp"
    keys: ClassVar[dict[str, Key]] = {"adjustment_value": Key(schema.read_signed_integer, default=50)}
    colour_only: ClassVar[bool] = True

    def _levels(self, levels: Pixels) -> Pixels:
        # A table for each channel: 1 x 256 x 3.
        shifts = np.array([self.adjustment_value, 0, -self.adjustment_value], dtype=np.float32)
        return cast(Pixels, (levels[:, np.newaxis] + shifts)[np.newaxis])


OPERATIONS: tuple[type[PipelineOperation], ...] = (
    Brightness,
    BrightnessFixed,
    Contrast,
    Exposure,
    GammaCorrection,
    ColorTemp,
)
