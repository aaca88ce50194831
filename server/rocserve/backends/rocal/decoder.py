"""JPEG decoding with rocAL's rules, on libturbojpeg.

Accurate DCT, smooth ("fancy") upsampling of chroma, grey replicated to the colour channels, EXIF orientation ignored.
The image is scaled while it is decoded, also up, to the largest of libjpeg's sizes that the decoder's limits allow.
rocAL answers a bad image with another image's pixels; here it is an error that names the fault.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import turbojpeg

from rocserve.backends.rocal import schema
from rocserve.backends.rocal.image import DecodedImage
from rocserve.backends.rocal.schema import Key
from rocserve.core.tensors import Buffer

DEFAULT_MAX_PIXELS = 100_000_000

_SCALING_FACTORS = tuple(Fraction(eighths, 8).as_integer_ratio() for eighths in range(16, 0, -1))
"""Largest first, as rocAL tries them; numerator and denominator in lowest terms, as libturbojpeg lists them."""

_LIBRARY = "libturbojpeg.so.0"

_HARMLESS_WARNINGS = (
    # Bytes between the last scan and the end-of-image marker: every pixel has been decoded by then.
    "extraneous bytes before marker 0xd9",
    # Header fields that some cameras write wrongly and that no decoder uses.
    "Unknown Adobe color transform code",
    "Invalid SOS parameters for sequential JPEG",
)


class ImageError(ValueError):
    """An image that cannot be decoded; the text names its fault."""


class ColorFormat(enum.Enum):
    """The channels and their order; the names are AMD Inference Server's."""

    RGB24 = "RGB24"
    BGR24 = "BGR24"
    U8 = "U8"

    @property
    def channels(self) -> int:
        return 1 if self is ColorFormat.U8 else 3


_PIXEL_FORMATS = {
    ColorFormat.RGB24: turbojpeg.TJPF_RGB,
    ColorFormat.BGR24: turbojpeg.TJPF_BGR,
    ColorFormat.U8: turbojpeg.TJPF_GRAY,
}


@dataclass(frozen=True, slots=True)
class DecoderLimits:
    """The box, in pixels, that a decoded image is scaled to fit; 0 = as large as it is."""

    max_width: int = 1000
    max_height: int = 1000

    def scaling_factor(self, width: int, height: int) -> tuple[int, int]:
        """Numerator and denominator of the first libjpeg factor that fits.

        Raises:
            ImageError: not even an eighth fits.
        """
        if not self.max_width and not self.max_height:
            return 1, 1
        for numerator, denominator in _SCALING_FACTORS:
            scaled_width, scaled_height = (-(-side * numerator // denominator) for side in (width, height))
            if (not self.max_width or scaled_width <= self.max_width) and (
                not self.max_height or scaled_height <= self.max_height
            ):
                return numerator, denominator
        raise ImageError(
            f"an eighth of its {width}x{height} pixels does not fit the decoder's"
            f" {self.max_width or 'any'}x{self.max_height or 'any'}; raise max_width and max_height of the pipeline's"
            ' "decoder" or set them to 0'
        )


@dataclass(frozen=True, slots=True)
class DecoderOptions:
    """The pipeline file's "decoder" object."""

    limits: DecoderLimits

    @staticmethod
    def read(table: dict[str, Any]) -> DecoderOptions:
        """
        Raises:
            PipelineError: a key that is unknown or of the wrong kind.
        """
        return DecoderOptions(DecoderLimits(**schema.read_keys("decoder", table, _OPTION_KEYS)))


_OPTION_KEYS = {"max_width": Key(schema.read_size, default=1000), "max_height": Key(schema.read_size, default=1000)}


class Decoder:
    """Decodes JPEGs; safe to use on several threads at once."""

    def __init__(self, color_format: ColorFormat, limits: DecoderLimits, max_pixels: int = DEFAULT_MAX_PIXELS) -> None:
        """
        Raises:
            RuntimeError: libturbojpeg is not installed.
        """
        self._pixel_format = _PIXEL_FORMATS[color_format]
        self._limits = limits
        self._max_pixels = max_pixels
        self._library = _load_library()

    def decode(self, encoded: Buffer | np.ndarray[Any, Any]) -> DecodedImage:
        """The image as UINT8, height x width x channels, and its size before it was scaled.

        Raises:
            ImageError: not a JPEG, damaged or truncated, in CMYK, or above the limits.
        """
        if not len(encoded):
            raise ImageError("it is empty")
        try:
            width, height, _, color_space = self._library.decode_header(encoded)
            self._check(width, height, color_space)
            factor = self._limits.scaling_factor(width, height)
            pixels = self._library.decode(
                encoded, self._pixel_format, factor, turbojpeg.TJFLAG_ACCURATEDCT | turbojpeg.TJFLAG_LIMITSCANS
            )
        except OSError as error:
            raise ImageError(str(error)) from None
        return DecodedImage(pixels, height, width)

    def _check(self, width: int, height: int, color_space: int) -> None:
        if width * height > self._max_pixels:
            raise ImageError(
                f"its {width}x{height} pixels are more than the {self._max_pixels} that parameter 'max_pixels' allows"
            )
        if color_space in (turbojpeg.TJCS_CMYK, turbojpeg.TJCS_YCCK):
            raise ImageError("it is a CMYK JPEG; convert it to RGB or grey")


class _StrictTurboJPEG(turbojpeg.TurboJPEG):  # type: ignore[misc]
    """PyTurboJPEG with libjpeg's warnings about damaged data as errors.

    PyTurboJPEG hands such warnings to the `warnings` module and returns the part that could be decoded. Turning them
    into errors there would be process-wide and depend on filters that others set, so its one reporting method is
    replaced instead; `_load_library` makes sure that it is there.
    """

    def _TurboJPEG__report_error(self, handle: int) -> None:  # noqa: N802
        text = self._TurboJPEG__get_error_string(handle)
        if not text.endswith(_HARMLESS_WARNINGS[0]) and not text.startswith(_HARMLESS_WARNINGS[1:]):
            raise OSError(text)


def _load_library() -> Any:
    for method in ("_TurboJPEG__report_error", "_TurboJPEG__get_error_string"):
        if not hasattr(turbojpeg.TurboJPEG, method):
            raise RuntimeError(
                f"PyTurboJPEG {turbojpeg.__version__} cannot tell damaged images apart; install PyTurboJPEG 1.8"
            )
    try:
        return _StrictTurboJPEG(_LIBRARY)
    except OSError:
        # Not where the dynamic linker looks: let PyTurboJPEG search (it starts processes for that, hence second).
        return _find_library()


def _find_library() -> Any:
    try:
        return _StrictTurboJPEG()
    except (OSError, RuntimeError):
        raise RuntimeError(
            "libturbojpeg was not found; it decodes JPEGs (Debian and Ubuntu: apt-get install libturbojpeg0)"
        ) from None
