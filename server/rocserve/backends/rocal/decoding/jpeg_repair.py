"""Repairs a JPEG whose faults are harmless.

libjpeg tells of the first fault that it meets and is silent about all that follow. Where the first one is harmless, the
image is decoded again without it: only so does it show whether it was the only one.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from rocserve.backends.rocal.decoding.jpeg_header import END, read_jpeg_header

_EXTRANEOUS = re.compile(r"(\d+) extraneous bytes before marker 0xd9\Z")

_VERSION = re.compile(rb"(\xff\xe0..JFIF\0).", re.DOTALL)
"""JFIF's segment, up to the first byte of its version."""

_COLOR_TRANSFORM = re.compile(rb"(\xff\xee..Adobe.{6}).", re.DOTALL)
"""Adobe's segment, up to its last byte."""

_YCC, _YCCK = b"\x01", b"\x02"

_SCAN_PARAMETERS = re.compile(rb"(\xff\xda\0(?:\x08\x01.{2}|\x0a\x02.{4}|\x0c\x03.{6}|\x0e\x04.{8}))...", re.DOTALL)
"""A start-of-scan segment for one to four components; its last three bytes are for progressive images only."""

_ALL_COEFFICIENTS = b"\0\x3f\0"


def repaired(encoded: memoryview, fault: str, is_cmyk: bool) -> memoryview | None:
    """The JPEG without what libjpeg's text tells of; None where that is not harmless.

    Raises:
        ImageError: it is truncated, which had not shown before.
    """
    if found := _EXTRANEOUS.search(fault):
        # Every pixel of the scan has been decoded by then, unless a restart marker is missing.
        end = read_jpeg_header(encoded, trusts_last_bytes=False).length - len(END)
        return memoryview(bytes(encoded[: max(end - int(found[1]), 0)]) + END)
    if fault.startswith("Warning: unknown JFIF revision number"):
        return _replaced(_VERSION, encoded, lambda match: match[1] + b"\x01")
    if fault.startswith("Unknown Adobe color transform code"):
        # What libjpeg takes an unknown one for.
        return _replaced(_COLOR_TRANSFORM, encoded, lambda match: match[1] + (_YCCK if is_cmyk else _YCC))
    if fault.startswith("Invalid SOS parameters for sequential JPEG"):
        # Some cameras write them wrongly, and no decoder uses them.
        return _replaced(_SCAN_PARAMETERS, encoded, lambda match: match[1] + _ALL_COEFFICIENTS)
    return None


def _replaced(
    pattern: re.Pattern[bytes], encoded: memoryview, replacement: Callable[[re.Match[bytes]], bytes]
) -> memoryview:
    return memoryview(pattern.sub(replacement, encoded))
