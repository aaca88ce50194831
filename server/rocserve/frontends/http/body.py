"""Reads the bodies of requests, within bounds."""

from __future__ import annotations

import asyncio

from aiohttp import web

from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.tensors import Buffer
from rocserve.frontends.http.encodings import IDENTITY, decompressed
from rocserve.frontends.http.errors import HttpError

LARGEST_BODY = (1 << 31) - 1
"""Bytes; as gRPC's largest message."""
_PAUSE_SECONDS = 60.0
"""How long a client may send nothing in the middle of a body."""
_LONG_TO_DECOMPRESS = 64 << 10


class BodyReader:
    """Reads what a client sends."""

    def __init__(self, max_input_size: int) -> None:
        """`max_input_size`: bytes of JSON, and of what comes out of compressed bodies."""
        self.max_input_size = max_input_size

    async def json_body(self, request: web.BaseRequest) -> Buffer:
        """A body that is JSON as a whole.

        Raises:
            ServeError: INVALID_ARGUMENT, it is too large.
            HttpError: it did not come.
        """
        return await self._read(request, self.max_input_size)

    async def tensor_body(self, request: web.BaseRequest, encoding: str, is_json: bool) -> Buffer:
        """The body of an inference request, in plain form; raises as `json_body` does.

        Args:
            is_json: no tensor's bytes stand behind the JSON, so that the whole is bound as JSON is.
        """
        if encoding == IDENTITY:
            return await self._read(request, self.max_input_size if is_json else LARGEST_BODY)
        body = await self._read(request, self.max_input_size)
        if len(body) < _LONG_TO_DECOMPRESS:
            return decompressed(body, self.max_input_size)
        return await asyncio.to_thread(decompressed, body, self.max_input_size)

    def check_json_size(self, length: int) -> None:
        """Raises: ServeError: INVALID_ARGUMENT, so many bytes of JSON are too many."""
        if length > self.max_input_size:
            raise json_too_large(length, self.max_input_size)

    async def _read(self, request: web.BaseRequest, limit: int) -> Buffer:
        length = request.content_length
        if length is not None and length > limit:
            raise _too_large(length, limit)
        content = request.content
        if content.is_eof():
            return content.read_nowait()
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            return await _collect(request, length, limit)
        except TimeoutError:
            raise HttpError(408, f"nothing came of the request's body for {_PAUSE_SECONDS:g} s") from None
        except web.RequestPayloadError as error:
            raise HttpError(400, f"the request's body cannot be read: {error}") from None


async def _collect(request: web.BaseRequest, length: int | None, limit: int) -> bytearray:
    """The body as it comes in; what has a length is put where it belongs at once."""
    body = bytearray(length or 0)
    position = 0
    with memoryview(body) if length else memoryview(b"") as place:
        while True:
            async with asyncio.timeout(_PAUSE_SECONDS):
                part = await request.content.readany()
            if not part:
                break
            end = position + len(part)
            if end > limit:
                raise _too_large(end, limit)
            if length:
                place[position:end] = part
            else:
                body += part
            position = end
    return body


def _too_large(length: int, limit: int) -> ServeError | HttpError:
    if limit == LARGEST_BODY:
        return HttpError(413, f"request body of {length} bytes exceeds the maximum of {limit} bytes")
    return json_too_large(length, limit)


def json_too_large(length: int, limit: int) -> ServeError:
    return invalid_argument(
        f"request JSON size of {length} bytes exceeds the maximum allowed input size of {limit} bytes. Use"
        " --http-max-input-size to increase the limit."
    )
