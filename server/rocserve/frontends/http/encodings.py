"""Compressed bodies, both ways: gzip and deflate."""

from __future__ import annotations

import zlib

from rocserve.core.errors import invalid_argument
from rocserve.core.tensors import Buffer
from rocserve.frontends.http.errors import HttpError

IDENTITY = "identity"
_COMPRESSED = ("gzip", "deflate")
_EITHER_FORMAT = zlib.MAX_WBITS | 32
"""zlib sees by itself which of the two it is."""
_GZIP = zlib.MAX_WBITS | 16


def request_encoding(header: str | None) -> str:
    """How a request's body is encoded.

    Raises:
        HttpError: 501, in a way that is not served.
    """
    if not header or header == IDENTITY:
        return IDENTITY
    if header in _COMPRESSED:
        return header
    raise HttpError(501, "Unsupported compression type", headers={"Accept-Encoding": "gzip, deflate"})


def response_encoding(accepted: str | None) -> str:
    """The encoding that an Accept-Encoding header weighs most, the first of equals."""
    if not accepted:
        return IDENTITY
    best, most = IDENTITY, 0.0
    for entry in accepted.split(","):
        name, _, weight_text = entry.strip(" ").partition(";q=")
        try:
            weight = float(weight_text) if weight_text else 1.0
        except ValueError:
            continue
        if weight > most and (name == IDENTITY or name in _COMPRESSED):
            best, most = name, weight
    return best


def decompressed(data: Buffer, limit: int) -> bytes:
    """The body in plain form. What is broken off is taken as far as it goes.

    Raises:
        ServeError: INVALID_ARGUMENT when there is nothing, it is damaged or neither gzip nor deflate, or it is more
            than `limit` bytes.
    """
    if not data:
        raise invalid_argument("nothing to be decompressed")
    stream = zlib.decompressobj(_EITHER_FORMAT)
    try:
        plain = stream.decompress(data, limit + 1)
    except zlib.error as error:
        raise invalid_argument(f"the request's body is not valid gzip or deflate data: {error}") from None
    if len(plain) > limit:
        raise invalid_argument(
            f"Decompressed data size exceeds the maximum allowed value of {limit} bytes. Use --http-max-input-size to"
            " increase the limit."
        )
    return plain


def compressed(parts: list[Buffer], encoding: str) -> bytes:
    """The parts as one compressed body."""
    stream = zlib.compressobj(wbits=_GZIP if encoding == "gzip" else zlib.MAX_WBITS)
    return b"".join([*(stream.compress(part) for part in parts), stream.flush()])
