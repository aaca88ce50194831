"""Tells what a file is that is neither a JPEG nor a PNG."""

from __future__ import annotations

import re

_INSPECTED_BYTES = 512
"""As many bytes as are inspected; text that is longer is known by its start."""

_SIGNATURES: tuple[tuple[re.Pattern[bytes], str], ...] = tuple(
    (re.compile(pattern, re.DOTALL | re.IGNORECASE if b"<" in pattern else re.DOTALL), name)
    for pattern, name in (
        (rb"GIF8[79]a", "a GIF image"),
        (rb"RIFF....WEBP", "a WebP image"),
        (rb"RIFF....AVI ", "an AVI video"),
        (rb"II[*+]\0|MM\0[*+]", "a TIFF image, or a camera's raw file"),
        (rb"BM.{4}\0\0\0\0", "a BMP image"),
        (rb"....ftyp(avif|avis)", "an AVIF image"),
        (rb"....ftyp(heic|heix|heim|heis|hevc|hevx|mif1|msf1)", "a HEIF image"),
        (rb"....ftyp", "an MP4 or QuickTime video"),
        (rb"\xff\x0a|\0\0\0\x0cJXL \r\n\x87\n", "a JPEG XL image"),
        (rb"\xff\x4f\xff\x51|\0\0\0\x0cjP  \r\n\x87\n", "a JPEG 2000 image"),
        (rb"\0\0[\x01\x02]\0[^\0]", "a Windows icon"),
        (rb"8BPS", "a Photoshop document"),
        (rb"P[1-7]\s", "a PNM image"),
        (rb"\x93NUMPY", "a NumPy array file"),
        (rb"%PDF", "a PDF document"),
        (rb"\x1f\x8b", "data compressed by gzip"),
        (rb"PK\x03\x04", "a ZIP archive"),
        (rb"data:image/", "a data: URL; send the bytes that it holds"),
        (rb"/9j/", "a JPEG as base64 text; send its bytes"),
        (rb"iVBORw0KGgo", "a PNG as base64 text; send its bytes"),
        (rb"\s*(<!doctype html|<html|<head|<body)", "an HTML page"),
        (rb"\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*|<!doctype svg[^>]*>\s*)*<svg", "an SVG image"),
        (rb"\s*<\?xml", "XML text"),
        (rb"\s*[{\[]\s*[\"{\[\]}\d-]", "JSON text"),
        (rb".{4}\xff\xd8\xff", "a JPEG behind four other bytes, perhaps its length; send the file alone"),
        (rb".{4}\x89PNG", "a PNG behind four other bytes, perhaps its length; send the file alone"),
        (rb"\0+\Z", "nothing but zeros"),
        (rb"[\t\n\r\x20-\x7e]+\Z", "text, perhaps a path or an address; send the bytes of the file"),
    )
)


def seeming_kind(data: memoryview) -> str | None:
    """As it goes on after "it seems to be"; None where nothing is known that begins so."""
    start = bytes(data[:_INSPECTED_BYTES])
    return next((name for pattern, name in _SIGNATURES if pattern.match(start)), None)
