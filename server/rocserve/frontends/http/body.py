"""Reads the bodies of requests, within bounds and within the server's memory."""

from __future__ import annotations

import asyncio

from aiohttp import web

from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.request_memory import Holding, RequestMemory
from rocserve.core.tensors import Buffer
from rocserve.frontends.http.encodings import IDENTITY, decompressed
from rocserve.frontends.http.errors import HttpError

LARGEST_BODY = (1 << 31) - 1
"""Bytes; as gRPC's largest message."""
_BODY_SECONDS = 60.0
"""What a client has for a body, beside the time that what has come is granted."""
_LEAST_BYTES_PER_SECOND = 64 << 10
"""A client that sends slower than half a megabit a second may take no longer than `_BODY_SECONDS`."""
_LONG_TO_DECOMPRESS = 64 << 10


class BodyReader:
    """Reads what a client sends. The holding of a request counts the bytes as they come; whoever made it gives them
    back, also when nothing comes of the request."""

    def __init__(self, max_input_size: int, memory: RequestMemory, body_seconds: float = _BODY_SECONDS) -> None:
        """`max_input_size`: bytes of JSON, and of what comes out of compressed bodies. `body_seconds`: what a client
        has for a body; for each 64 KiB that have come, a second more."""
        self.max_input_size = max_input_size
        self._memory = memory
        self._body_seconds = body_seconds

    async def json_body(self, request: web.BaseRequest, holding: Holding) -> Buffer:
        """A body that is JSON as a whole.

        Raises:
            ServeError: INVALID_ARGUMENT, it is too large; RESOURCE_EXHAUSTED, there is no memory for it.
            HttpError: it did not come.
        """
        return await self._read(request, self.max_input_size, holding)

    async def tensor_body(self, request: web.BaseRequest, encoding: str, is_json: bool, holding: Holding) -> Buffer:
        """The body of an inference request, in plain form; raises as `json_body` does.

        Args:
            is_json: no tensor's bytes stand behind the JSON, so that the whole is bound as JSON is.
        """
        if encoding == IDENTITY:
            return await self._read(request, self.max_input_size if is_json else LARGEST_BODY, holding)
        body = await self._read(request, self.max_input_size, holding)
        if len(body) < _LONG_TO_DECOMPRESS:
            plain = decompressed(body, self.max_input_size)
        else:
            plain = await asyncio.to_thread(decompressed, body, self.max_input_size)
        self._memory.admit(holding, len(plain))
        return plain

    def check_size(self, body_length: int, json_length: int) -> None:
        """What stands behind the JSON is not bound here; a body without JSON is.

        Raises:
            ServeError: INVALID_ARGUMENT, so many bytes are too many.
        """
        limit = self.max_input_size
        if json_length > limit:
            raise _json_too_large(json_length, limit)
        if not json_length and body_length > limit:
            raise invalid_argument(
                f"Raw input has a byte_size ({body_length} bytes) that exceeds the maximum allowed value of {limit}"
                " bytes. Use --http-max-input-size to increase the limit."
            )

    async def _read(self, request: web.BaseRequest, limit: int, holding: Holding) -> Buffer:
        length = request.content_length
        if length is not None and length > limit:
            raise _too_large(length, limit)
        content = request.content
        if content.is_eof():
            whole = content.read_nowait()
            if len(whole) > limit:
                raise _too_large(len(whole), limit)
            self._memory.admit(holding, len(whole))
            return whole
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = bytearray()
        part = Holding()
        try:
            await self._collect(request, limit, part, body)
        except TimeoutError:
            raise HttpError(
                408,
                f"the request's body did not come in time: {len(body)} bytes within {self._granted(len(body)):.0f} s;"
                f" there are {self._body_seconds:g} s for a body, and one more for each 64 KiB that have come",
            ) from None
        except web.RequestPayloadError as error:
            raise HttpError(400, f"the request's body cannot be read: {error}") from None
        finally:
            self._memory.release_part(part)
        self._memory.admit(holding, len(body))
        return body

    async def _collect(self, request: web.BaseRequest, limit: int, holding: Holding, body: bytearray) -> None:
        """Puts the body together as it comes. It takes no more memory than has come, whatever length was promised.

        Raises:
            TimeoutError: it comes too slowly.
        """
        began = asyncio.get_running_loop().time()
        while True:
            async with asyncio.timeout_at(began + self._granted(len(body))):
                part = await request.content.readany()
            if not part:
                return
            if len(body) + len(part) > limit:
                raise _too_large(len(body) + len(part), limit)
            self._memory.admit_part(holding, len(part))
            body += part

    def _granted(self, nbytes: int) -> float:
        """Seconds for a body of which so much has come."""
        return self._body_seconds + nbytes / _LEAST_BYTES_PER_SECOND


def _too_large(length: int, limit: int) -> ServeError | HttpError:
    if limit == LARGEST_BODY:
        return HttpError(413, f"request body of {length} bytes exceeds the maximum of {limit} bytes")
    return _json_too_large(length, limit)


def _json_too_large(length: int, limit: int) -> ServeError:
    return invalid_argument(
        f"request JSON size of {length} bytes exceeds the maximum allowed input size of {limit} bytes. Use"
        " --http-max-input-size to increase the limit."
    )
