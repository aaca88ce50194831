"""Decoding: sizes, colours, and images that must be refused."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from rocserve.backends.rocal.decoder import ColorFormat, Decoder, DecoderLimits, ImageError

JpegMaker = Callable[..., bytes]
UNSCALED = DecoderLimits(0, 0)


def with_size(jpeg: bytes, width: int, height: int) -> bytes:
    """The same JPEG with another size in its frame header."""
    header = jpeg.index(b"\xff\xc0")
    return jpeg[: header + 5] + struct.pack(">HH", height, width) + jpeg[header + 9 :]


@pytest.mark.parametrize(
    ("size", "limits", "expected"),
    [
        ((500, 375), (1000, 1000), (2, 1)),
        ((1200, 800), (1000, 1000), (3, 4)),
        ((501, 10), (1000, 1000), (15, 8)),
        ((1000, 1000), (1000, 1000), (1, 1)),
        ((1001, 1), (1000, 1000), (7, 8)),
        ((8000, 8000), (1000, 1000), (1, 8)),
        ((300, 4000), (0, 1000), (1, 4)),
        ((300, 4000), (0, 0), (1, 1)),
    ],
)
def test_scaling_factor_is_the_largest_that_fits(
    size: tuple[int, int], limits: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert DecoderLimits(*limits).scaling_factor(*size) == expected


def test_sizes_are_rounded_up(jpeg: JpegMaker) -> None:
    decoder = Decoder(ColorFormat.RGB24, DecoderLimits(50, 50))
    # 7/8 of 57 and 33 is 49.875 and 28.875.
    assert decoder.decode(jpeg(57, 33)).shape == (29, 50, 3)


def test_an_image_that_not_even_an_eighth_fits_is_refused(jpeg: JpegMaker) -> None:
    with pytest.raises(ImageError, match="does not fit the decoder's 10x10"):
        Decoder(ColorFormat.RGB24, DecoderLimits(10, 10)).decode(jpeg(100, 100))


def test_unscaled_decoding_equals_pillow(jpeg: JpegMaker) -> None:
    encoded = jpeg(61, 43)
    decoded = Decoder(ColorFormat.RGB24, UNSCALED).decode(encoded)
    np.testing.assert_array_equal(decoded, np.asarray(Image.open(io.BytesIO(encoded))))


def test_color_formats(jpeg: JpegMaker) -> None:
    encoded = jpeg()
    rgb = Decoder(ColorFormat.RGB24, UNSCALED).decode(encoded)
    bgr = Decoder(ColorFormat.BGR24, UNSCALED).decode(encoded)
    grey = Decoder(ColorFormat.U8, UNSCALED).decode(encoded)
    np.testing.assert_array_equal(rgb[:, :, ::-1], bgr)
    assert grey.shape == (40, 60, 1)
    luma = rgb @ np.array([0.299, 0.587, 0.114])
    assert np.abs(grey[:, :, 0] - luma).mean() < 1.5


def test_grey_is_replicated_to_the_colour_channels(jpeg: JpegMaker) -> None:
    pixels = Decoder(ColorFormat.RGB24, UNSCALED).decode(jpeg(mode="L"))
    assert pixels.shape == (40, 60, 3)
    np.testing.assert_array_equal(pixels[:, :, 0], pixels[:, :, 2])


def test_exif_orientation_is_ignored(jpeg: JpegMaker) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = jpeg(exif=exif)
    np.testing.assert_array_equal(
        Decoder(ColorFormat.RGB24, UNSCALED).decode(turned), Decoder(ColorFormat.RGB24, UNSCALED).decode(jpeg())
    )


@pytest.mark.parametrize("options", [{"progressive": True}, {"subsampling": 0}, {"restart_marker_rows": 1}])
def test_kinds_of_jpeg_that_must_work(jpeg: JpegMaker, options: dict[str, object]) -> None:
    pixels = Decoder(ColorFormat.RGB24, UNSCALED).decode(jpeg(**options))
    plain = Decoder(ColorFormat.RGB24, UNSCALED).decode(jpeg())
    assert np.abs(pixels.astype(int) - plain).mean() < 2


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)])
def test_any_buffer_is_taken(jpeg: JpegMaker, wrap: Callable[[bytes], object]) -> None:
    assert Decoder(ColorFormat.RGB24, UNSCALED).decode(wrap(jpeg())).shape == (40, 60, 3)


def test_zeros_and_stray_bytes_around_the_end_are_harmless(jpeg: JpegMaker) -> None:
    encoded = jpeg()
    decoder = Decoder(ColorFormat.RGB24, UNSCALED)
    expected = decoder.decode(encoded)
    np.testing.assert_array_equal(decoder.decode(encoded + bytes(500)), expected)
    np.testing.assert_array_equal(decoder.decode(encoded[:-2] + b"\x12\x34" + encoded[-2:]), expected)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda data: b"", "it is empty"),
        (lambda data: b"hello, world", "Not a JPEG file: starts with 0x68 0x65"),
        (lambda data: b"\x89PNG\r\n\x1a\n" + bytes(50), "Not a JPEG file: starts with 0x89 0x50"),
        (lambda data: bytes(100), "Not a JPEG file"),
        (lambda data: b"\xff\xd8", "no image"),
        (lambda data: data[:300], "JPEG"),
        (lambda data: data[: len(data) * 3 // 4], "[Pp]remature end"),
        (lambda data: data[: len(data) * 3 // 4] + bytes(30), "[Pp]remature end"),
        (lambda data: data[:-1], "[Pp]remature end"),
        (lambda data: with_size(data, 240, 4000), "[Pp]remature end"),
        (lambda data: with_size(data, 0, 40), "Empty JPEG image"),
        (lambda data: with_size(data, 65000, 65000), "65000x65000 pixels are more than the 100000000"),
    ],
)
def test_a_bad_image_is_refused_with_its_fault(jpeg: JpegMaker, damage: Callable[[bytes], bytes], fault: str) -> None:
    with pytest.raises(ImageError, match=fault):
        Decoder(ColorFormat.RGB24, UNSCALED).decode(damage(jpeg(240, 160)))


def test_a_truncated_progressive_image_is_refused(jpeg: JpegMaker) -> None:
    encoded = jpeg(progressive=True)
    with pytest.raises(ImageError, match=r"[Pp]remature end"):
        Decoder(ColorFormat.RGB24, UNSCALED).decode(encoded[: len(encoded) * 2 // 3])


def test_cmyk_is_refused(jpeg: JpegMaker) -> None:
    with pytest.raises(ImageError, match="CMYK JPEG; convert it"):
        Decoder(ColorFormat.RGB24, UNSCALED).decode(jpeg(mode="CMYK"))


def test_pixel_limit_is_inclusive(jpeg: JpegMaker) -> None:
    encoded = jpeg(60, 40)
    assert Decoder(ColorFormat.RGB24, UNSCALED, max_pixels=2400).decode(encoded).shape == (40, 60, 3)
    with pytest.raises(ImageError, match="60x40 pixels are more than the 2399"):
        Decoder(ColorFormat.RGB24, UNSCALED, max_pixels=2399).decode(encoded)
