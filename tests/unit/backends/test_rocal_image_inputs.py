"""Inputs of a decoder, and how it turns them: EXIF, raw pixels, options, files of other kinds, and the GIL during
decoding."""

from __future__ import annotations

import _thread
import io
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from support import pictures

from rocserve.backends.rocal.decoding.decoder import Decoder
from rocserve.backends.rocal.decoding.image_file import ImageError
from rocserve.backends.rocal.decoding.libturbojpeg import read_jpeg
from rocserve.backends.rocal.decoding.options import ColorFormat, DecoderOptions
from rocserve.backends.rocal.decoding.png import decode_png, read_png
from rocserve.backends.rocal.schema import PipelineError

UNSCALED = DecoderOptions(0, 0)
RAW = DecoderOptions(is_raw=True)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("color_format", list(ColorFormat))
def test_exif_turns_the_picture_where_it_is_asked_for(orientation: int, color_format: ColorFormat) -> None:
    encoded = pictures.turned_jpeg(orientation)
    stored = Decoder(color_format, UNSCALED).decode(encoded)
    assert stored.pixels.shape == (40, 60, color_format.channels)
    np.testing.assert_array_equal(stored.pixels, Decoder(color_format, UNSCALED).decode(pictures.jpeg()).pixels)

    shown = Decoder(color_format, DecoderOptions(0, 0, exif=True)).decode(encoded)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded)))
    assert (shown.original_width, shown.original_height) == upright.size
    if color_format is not ColorFormat.U8:
        order = slice(None, None, -1 if color_format is ColorFormat.BGR24 else 1)
        np.testing.assert_array_equal(shown.pixels, np.asarray(upright)[:, :, order])
    assert shown.pixels.shape == (upright.height, upright.width, color_format.channels)


def test_what_stands_beside_the_exif_segment_turns_nothing() -> None:
    xmp = b"http://ns.adobe.com/xap/1.0/\0<x:xmpmeta/>"
    other = b"\xff\xe1" + (len(xmp) + 2).to_bytes(2, "big") + xmp
    encoded = pictures.turned_jpeg(6)
    exif = encoded.index(b"\xff\xe1")
    end = exif + 2 + int.from_bytes(encoded[exif + 2 : exif + 4], "big")
    for place in (exif, end):
        header = read_jpeg(memoryview(encoded[:place] + other + encoded[place:]))
        assert header.orientation == 6


def test_limits_apply_to_the_stored_image() -> None:
    decoder = Decoder(ColorFormat.RGB24, DecoderOptions(30, 1000, exif=True))
    decoded = decoder.decode(pictures.turned_jpeg(6))
    assert decoded.pixels.shape == (30, 20, 3)
    assert (decoded.original_height, decoded.original_width) == (60, 40)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"II*\0",
        b"XX*\0\x08\0\0\0",
        b"II*\0\xff\xff\xff\xff",
        b"II*\0\x08\0\0\0\xff\xff",
        b"II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\x09\0\0\0",
        b"II*\0\x08\0\0\0\1\0\x12\1\2\0\1\0\0\0\6\0\0\0",
    ],
)
def test_exif_that_cannot_be_read_turns_nothing(body: bytes) -> None:
    encoded = pictures.jpeg()
    segment = b"Exif\0\0" + body
    encoded = encoded[:2] + b"\xff\xe1" + (len(segment) + 2).to_bytes(2, "big") + segment + encoded[2:]
    assert Decoder(ColorFormat.RGB24, DecoderOptions(0, 0, exif=True)).decode(encoded).pixels.shape == (40, 60, 3)


@pytest.mark.parametrize(
    ("encoded", "kind"),
    [
        (pictures.saved(pictures.colours(), "GIF"), "a GIF image"),
        (pictures.saved(pictures.colours(), "WEBP"), "a WebP image"),
        (pictures.saved(pictures.colours(), "TIFF"), "a TIFF image"),
        (pictures.saved(pictures.colours(), "BMP"), "a BMP image"),
        (pictures.saved(pictures.colours(), "PPM"), "a PNM image"),
        (pictures.saved(pictures.colours(), "ICO"), "a Windows icon"),
        (pictures.saved(pictures.colours(), "JPEG2000"), "a JPEG 2000 image"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "a HEIF image"),
        (b"\0\0\0\x1cftypavif\0\0\0\0", "an AVIF image"),
        (b"\0\0\0\x1cftypisom\0\0\0\0", "an MP4 or QuickTime video"),
        (b"\xff\x0a\x01\x02", "a JPEG XL image"),
        (b"%PDF-1.7\n", "a PDF document"),
        (b"<!DOCTYPE html><html><body>404", "an HTML page"),
        (b"\n<HTML>", "an HTML page"),
        (b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg">', "an SVG image"),
        (b'<?xml version="1.0"?><!DOCTYPE svg PUBLIC ""> <!-- a --><!-- b -->\n<svg>', "an SVG image"),
        # These are comments in as many ways as there are combinations; the reader must not try any.
        (b"<!---->" * 80, "text, perhaps a path or an address"),
        (b'<?xml version="1.0"?>\n<note/>', "XML text"),
        (b'{"error": "not found"}', "JSON text"),
        (b"/9j/4AAQSkZJRgABAQ", "a JPEG as base64 text; send its bytes"),
        (b"iVBORw0KGgoAAAANSUhEUg", "a PNG as base64 text; send its bytes"),
        (b"data:image/jpeg;base64,/9j/", "a data: URL; send the bytes that it holds"),
        (bytes(40), "nothing but zeros"),
        (b"404 page not found\n", "text, perhaps a path or an address; send the bytes of the file"),
        (b"\x96\x04\0\0" + pictures.jpeg(), "a JPEG after four other bytes, perhaps its length; send only the file"),
        (b"\x96\x04\0\0\x89PNG\r\n", "a PNG after four other bytes, perhaps its length; send only the file"),
    ],
)
def test_what_is_neither_jpeg_nor_png_is_named(encoded: bytes, kind: str) -> None:
    with pytest.raises(ImageError) as caught:
        Decoder(ColorFormat.RGB24, DecoderOptions()).decode(encoded)
    assert str(caught.value).startswith(f"it seems to be {kind}")
    assert str(caught.value).endswith("; a JPEG or a PNG is expected")


def test_raw_pixels_are_taken_as_they_are() -> None:
    pixels = pictures.colours(1500, 20)
    for color_format in (ColorFormat.RGB24, ColorFormat.BGR24):
        decoder = Decoder(color_format, RAW)
        decoded = decoder.decode(pixels)
        np.testing.assert_array_equal(decoded.pixels, pixels)
        assert (decoded.original_height, decoded.original_width) == (20, 1500)
    grey = pixels[:, :, 0]
    for form in (grey, grey[:, :, np.newaxis]):
        np.testing.assert_array_equal(Decoder(ColorFormat.U8, RAW).decode(form).pixels[:, :, 0], grey)


@pytest.mark.parametrize(
    ("shape", "color_format", "fault"),
    [
        ((0, 5, 3), ColorFormat.RGB24, "it has no pixels"),
        ((40, 50, 3), ColorFormat.RGB24, "50x40 pixels are more than the 1999"),
    ],
)
def test_raw_pixels_that_do_not_fit(shape: tuple[int, ...], color_format: ColorFormat, fault: str) -> None:
    decoder = Decoder(color_format, RAW.at_most(1999))
    with pytest.raises(ImageError, match=fault):
        decoder.decode(np.zeros(shape, np.uint8))


def test_options() -> None:
    assert DecoderOptions.read({}) == DecoderOptions(1000, 1000, 100_000_000, False, False)
    table = {"max_width": 0, "max_height": 640, "max_pixels": 5000, "exif": True, "input": "encoded"}
    assert DecoderOptions.read(table) == DecoderOptions(0, 640, 5000, True, False)
    assert DecoderOptions.read({"input": "raw", "max_pixels": 10}) == DecoderOptions(max_pixels=10, is_raw=True)
    assert RAW.at_most(7).max_pixels == 7
    assert RAW.at_most(7).at_most(9).max_pixels == 7


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"max_pixels": 0}, "decoder: key 'max_pixels' must be a number of pixels, a whole number of 1 or more, not 0"),
        ({"exif": 1}, "decoder: key 'exif' must be true or false, not 1"),
        ({"input": "jpeg"}, 'decoder: key \'input\' must be one of "encoded", "raw", not "jpeg"'),
        ({"scale": 1}, "decoder: unknown key 'scale'; allowed are exif, input, max_height, max_pixels, max_width"),
        ({"input": "raw", "max_width": 0}, 'key \'max_width\' has no meaning with "input": "raw"'),
        ({"input": "raw", "exif": False}, "key 'exif' has no meaning"),
    ],
)
def test_wrong_options(table: dict[str, Any], text: str) -> None:
    with pytest.raises(PipelineError, match=text):
        DecoderOptions.read(table)


def ready_to_decode(kind: str) -> Callable[[], object]:
    """Everything up to the decoding of the pixels."""
    if kind == "png":
        file = read_png(memoryview(pictures.saved(pictures.colours(2000, 1500), "PNG")))
        return lambda: decode_png(file, ColorFormat.RGB24, UNSCALED)
    encoded = memoryview(pictures.jpeg(2000, 1500, mode=kind))
    decoder = Decoder(ColorFormat.RGB24, UNSCALED)
    return lambda: decoder.decode(encoded)


@pytest.mark.parametrize("kind", ["RGB", "L", "CMYK", "png"])
def test_other_threads_run_while_pixels_are_decoded(kind: str) -> None:
    decode = ready_to_decode(kind)
    seen = threading.Event()
    interval = sys.getswitchinterval()
    try:
        # From here on other threads run only if the GIL is released.
        sys.setswitchinterval(1000)
        _thread.start_new_thread(seen.set, ())
        assert not seen.is_set()
        # On a busy machine the thread may get no CPU during some of them.
        while not seen.is_set():
            decode()
    finally:
        sys.setswitchinterval(interval)
