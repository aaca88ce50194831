"""Reads multipart/form-data, as browsers and curl send files."""

from __future__ import annotations

import re

from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.request_parameters import check_entries
from rocserve.core.tensors import Buffer
from rocserve.frontends.http.protocol import LARGEST_HEAD_LINE

_KIND = "multipart/form-data"
_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
"""RFC 2046 has no longer ones."""
_NAME = re.compile(rb';\s*name=(?:"([^"]*)"|([^\s;"]+))', re.IGNORECASE)


def form_boundary(content_type: str) -> bytes | None:
    """What stands between the parts of a form; None = the body is no form.

    Raises:
        ServeError: INVALID_ARGUMENT, the header does not tell it.
    """
    if not content_type.lower().startswith(_KIND):
        return None
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise invalid_argument(f"the Content-Type {_KIND} has no boundary of at most 70 characters")
    return (found[1] or found[2]).encode("utf-8", "surrogateescape")


def form_parts(body: Buffer, boundary: bytes) -> list[tuple[str, Buffer]]:
    """The parts' names, and views of what they hold.

    Raises:
        ServeError: INVALID_ARGUMENT, the body is no form with this boundary, or has too many parts.
    """
    data = bytes(body) if isinstance(body, memoryview) else body
    view = memoryview(data)
    delimiter = b"\r\n--" + boundary
    parts: list[tuple[str, Buffer]] = []
    # The first one stands at the beginning, without the line's end.
    position = len(delimiter) - 2 if data.startswith(delimiter[2:]) else _behind(data, delimiter, 0)
    while data[position : position + 2] != b"--":
        head_end = data.find(b"\r\n\r\n", position, position + LARGEST_HEAD_LINE)
        if head_end < 0:
            raise _broken(f"part {len(parts) + 1} has no head of at most {LARGEST_HEAD_LINE} bytes")
        name = _NAME.search(data, position, head_end)
        if name is None:
            raise _broken(f"part {len(parts) + 1} has no name")
        position = _behind(data, delimiter, head_end + 4)
        text = str(name[1] or name[2] or b"", "utf-8", "replace")
        parts.append((text, view[head_end + 4 : position - len(delimiter)]))
        check_entries(len(parts))
    return parts


def _behind(data: bytes | bytearray, delimiter: bytes, start: int) -> int:
    found = data.find(delimiter, start)
    if found < 0:
        raise _broken("it ends within a part")
    return found + len(delimiter)


def _broken(why: str) -> ServeError:
    return invalid_argument(f"the request's body is no {_KIND} with the boundary that its Content-Type tells: {why}")
