"""Holds the options of decoding, from a pipeline file's "decoder" object and the model's parameters."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rocserve.backends.rocal import schema
from rocserve.backends.rocal.decoding.image_file import ImageError
from rocserve.backends.rocal.schema import PipelineError

DEFAULT_MAX_PIXELS = 100_000_000

_LARGEST_FACTOR = 16
"""Factor in eighths, because libjpeg scales by whole eighths."""
_LOWEST_TERMS = tuple(Fraction(eighths, 8).as_integer_ratio() for eighths in range(_LARGEST_FACTOR + 1))
"""Number of eighths -> fraction in lowest terms, as libturbojpeg needs it."""


class ColorFormat(enum.Enum):
    """Channels and their order, by AMD Inference Server's names."""

    RGB24 = "RGB24"
    BGR24 = "BGR24"
    U8 = "U8"

    @property
    def channels(self) -> int:
        return 1 if self is ColorFormat.U8 else 3


@dataclass(frozen=True, slots=True)
class DecoderOptions:
    """How a pipeline's decoder treats images."""

    max_width: int = 1000
    """Limits of a decoded image in pixels, which is scaled to fit them; 0 = no limit."""
    max_height: int = 1000
    max_pixels: int = DEFAULT_MAX_PIXELS
    """Limit of width times height of the sent image, checked before decoding."""
    exif: bool = False
    """Whether the EXIF orientation is applied. rocAL ignores it."""
    is_raw: bool = False
    """Whether the client sends pixels, with the color format's channels, which are used unchanged as in rocAL's
    RAW_UNCOMPRESSED; otherwise the bytes of JPEG and PNG files."""

    def scaling_factor(self, width: int, height: int) -> tuple[int, int]:
        """Return numerator and denominator of libjpeg's largest factor for a JPEG that fits the limits; it may enlarge
        the image. Raises ImageError if not even an eighth fits."""
        if not self.max_width and not self.max_height:
            return 1, 1
        # Scaled sides are rounded up, so a limit holds exactly if it holds without rounding.
        eighths = _LARGEST_FACTOR
        if self.max_width:
            eighths = min(eighths, self.max_width * 8 // width)
        if self.max_height:
            eighths = min(eighths, self.max_height * 8 // height)
        if not eighths:
            raise ImageError(
                f"an eighth of its {width}x{height} pixels does not fit the decoder's"
                f" {self.max_width or 'any'}x{self.max_height or 'any'}; raise max_width and max_height of the"
                ' pipeline\'s "decoder" or set them to 0'
            )
        return _LOWEST_TERMS[eighths]

    def bounded(self, width: int, height: int) -> tuple[int, int]:
        """Return a PNG's size within the limits, in the same proportions, at least one pixel a side and never enlarged.
        libjpeg's factors do not apply to a PNG."""
        scale = min(Fraction(self.max_width or width, width), Fraction(self.max_height or height, height), Fraction(1))
        return max(1, int(width * scale)), max(1, int(height * scale))

    @staticmethod
    def read(table: dict[str, Any]) -> DecoderOptions:
        """Return the options in a pipeline file's "decoder" object. Raises PipelineError if a key is unknown, of the
        wrong kind, or meaningless for raw pixels."""
        keys = {
            "max_width": schema.size(1000),
            "max_height": schema.size(1000),
            "max_pixels": schema.key_if(
                "a number of pixels, a whole number of 1 or more", lambda value: type(value) is int and value >= 1
            )(DEFAULT_MAX_PIXELS),
            "exif": schema.flag(False),
            "input": schema.choice("encoded", "raw")("encoded"),
        }
        values = schema.read_keys("decoder", table, keys)
        is_raw = values.pop("input") == "raw"
        idle = [key for key in ("max_width", "max_height", "exif") if key in table]
        if is_raw and idle:
            raise PipelineError(
                f'decoder: key \'{idle[0]}\' has no meaning with "input": "raw", whose pixels are used unchanged'
            )
        return DecoderOptions(**values, is_raw=is_raw)

    def at_most(self, max_pixels: int) -> DecoderOptions:
        return dataclasses.replace(self, max_pixels=min(self.max_pixels, max_pixels))
