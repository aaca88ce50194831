"""Reads the bodies of requests, within bounds and within the server's memory, and parses large JSON in separate
processes, because parsing would hold this process's interpreter lock for seconds.

Smaller bodies are parsed here: the transfer would take longer. A process starts when needed, parses one body at a time,
and ends when idle for a while. A failure there (no memory, say) concerns only its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import re
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocserve.core.errors import ServeError, StatusCode, invalid_argument, unavailable
from rocserve.core.exit_with_parent import exit_with_parent
from rocserve.core.request_memory import Holder, Holding, RequestMemory
from rocserve.core.tensors import Buffer
from rocserve.frontends.http.request import LARGEST_BODY, HttpError, Request
from rocserve.frontends.limits import LEAST_BYTES_PER_SECOND

HEADER_LENGTH = "Inference-Header-Content-Length"
IDENTITY = "identity"
_COMPRESSED = ("gzip", "deflate")


def request_encoding(header: str) -> str:
    """Return the encoding of a request's body. Raises HttpError (501) if it is not supported."""
    if header == IDENTITY or header in _COMPRESSED:
        return header
    raise HttpError(501, "Unsupported compression type", {"Accept-Encoding": "gzip, deflate"})


StatedLength = tuple[str, int]
"""HEADER_LENGTH as the client sent it, and as a number."""


def stated_length(header: str) -> StatedLength:
    """Raises HttpError if the header does not begin with a number."""
    found = re.match(r"\s*([+-]?\d{1,18})", header)
    if found is None:
        raise HttpError(400, f"Unable to parse {HEADER_LENGTH}, got: {header}")
    return header, int(found[1])


def response_encoding(accepted: str | None) -> str:
    """Return the encoding with the most weight in an Accept-Encoding header, the first of equals."""
    if not accepted:
        return IDENTITY
    best, most = IDENTITY, 0.0
    for entry in accepted.split(","):
        name, _, weight_text = (part.strip() for part in entry.partition(";"))
        try:
            weight = float(weight_text.removeprefix("q=") or 1)
        except ValueError:
            continue
        if weight > most and (name == IDENTITY or name in _COMPRESSED):
            best, most = name, weight
    return best


_ZIPPED_AT_ONCE = 1 << 20
"""Bytes in plain form. zlib releases the interpreter lock while it works, but not while it copies its results."""


def decompressed(data: Buffer, limit: int) -> bytearray:
    """Return the body in plain form. Raises ServeError (INVALID_ARGUMENT) if it is empty, damaged, cut off, neither
    gzip nor deflate, followed by other bytes, or more than `limit` bytes."""
    if not data:
        raise invalid_argument("nothing to be decompressed")
    # 32 = zlib detects which of the two formats it is.
    stream = zlib.decompressobj(zlib.MAX_WBITS | 32)
    plain = bytearray()
    view = memoryview(data)
    extra = "trailing data after the compressed stream (a second gzip member?); send a single member"
    # Compressed bytes. At each stop, zlib copies those it has not used yet.
    at_once = 64 << 10
    for start in range(0, len(view), at_once):
        if stream.eof:
            raise _not_compressed(extra)
        rest: Buffer = view[start : start + at_once]
        is_full = True
        while is_full and not stream.eof:
            try:
                piece = stream.decompress(rest, min(_ZIPPED_AT_ONCE, limit + 1 - len(plain)))
            except zlib.error as error:
                raise _not_compressed(str(error)) from None
            plain += piece
            if len(plain) > limit:
                raise invalid_argument(
                    f"Decompressed data size exceeds the maximum allowed value of {limit} bytes. Use"
                    " --http-max-input-size to increase the limit."
                )
            rest = stream.unconsumed_tail
            is_full = bool(rest) or len(piece) == _ZIPPED_AT_ONCE
    if stream.unused_data:
        raise _not_compressed(extra)
    if not stream.eof:
        raise _not_compressed("it is cut off")
    return plain


def _not_compressed(fault: str) -> ServeError:
    return invalid_argument(f"the request's body is not valid gzip or deflate data: {fault}")


def compressed(parts: Sequence[Buffer], encoding: str) -> list[Buffer]:
    """Return the body in compressed form. In pieces, because zlib holds the interpreter lock while it joins them."""
    stream = zlib.compressobj(wbits=zlib.MAX_WBITS | 16 if encoding == "gzip" else zlib.MAX_WBITS)
    pieces: list[Buffer] = []
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), _ZIPPED_AT_ONCE):
            if piece := stream.compress(view[start : start + _ZIPPED_AT_ONCE]):
                pieces.append(piece)
    return [*pieces, stream.flush()]


@dataclass(eq=False)
class BodyReader:
    """Reads a request's body. The request's holder counts the bytes as they arrive. The maker of the holder must
    release it, even if the body does not become a request."""

    max_input_size: int
    """The limit in bytes for JSON, and for the plain form of compressed bodies."""
    _memory: RequestMemory
    body_seconds: float = 60.0
    """Time for a body; each 64 KiB received grant one second more."""

    async def read_compressed(self, request: Request, holder: Holder) -> Buffer:
        """Return the body of an inference request in plain form. Raises ServeError and HttpError as `read` does."""
        body = await self.read(request, holder)
        # A thread decompresses more: the bytes may become a thousand times as many.
        if len(body) < 1 << 10:
            plain = decompressed(body, self.max_input_size)
        else:
            plain = await asyncio.to_thread(decompressed, body, self.max_input_size)
        self._memory.requests.admit(holder, len(plain))
        return plain

    def json_length(self, stated: StatedLength | None, body_length: int) -> int:
        """Return the bytes of JSON in an inference request's body. A body without JSON is bounded here, but not tensors
        after JSON. `stated`: None = the whole body is JSON. Raises ServeError if there are too many bytes."""
        length, limit = body_length, self.max_input_size
        if stated is not None:
            header, length = stated
            if not 0 <= length <= body_length:
                raise invalid_argument(f"inference header size should be in range (0, {body_length}), got: {header}")
        if length > limit:
            raise _json_too_large(length, limit)
        if not length and body_length > limit:
            raise invalid_argument(
                f"Raw input has a byte_size ({body_length} bytes) that exceeds the maximum allowed value of {limit}"
                " bytes. Use --http-max-input-size to increase the limit."
            )
        return length

    async def read(self, request: Request, holder: Holder, limit: int | None = None) -> Buffer:
        """Return a body of at most `limit` bytes; None = the limit for JSON.

        Raises ServeError: INVALID_ARGUMENT if the body is too large, RESOURCE_EXHAUSTED if there is no memory for it.
        Raises HttpError if it does not arrive in full or in time.
        """
        limit = self.max_input_size if limit is None else limit
        if request.is_complete:
            return self.complete_body(request, holder, limit)
        promised = request.head.headers.get("content-length")
        if promised is not None and int(promised) > limit:
            raise _too_large(int(promised), limit)
        request.send_continue()
        part, began = Holding(), asyncio.get_running_loop().time()
        try:
            while not request.is_complete:
                async with asyncio.timeout_at(began + self._seconds(len(request.data))):
                    await request.wait_for_more()
                if request.fault is not None:
                    raise HttpError(400, f"the request's body cannot be read: {request.fault}")
                if len(request.data) > limit:
                    raise _too_large(len(request.data), limit)
                # Only received bytes count, whatever length was promised.
                self._memory.unfinished.admit(part, len(request.data) - part.held_bytes)
        except TimeoutError:
            received = len(request.data)
            raise HttpError(
                408,
                f"request body not fully received: {received} bytes within {self._seconds(received):.0f} s; a body has"
                f" {self.body_seconds:g} s, and one more for each 64 KiB received",
            ) from None
        finally:
            self._memory.unfinished.release(part)
        return self.complete_body(request, holder, limit)

    def complete_body(self, request: Request, holder: Holder, limit: int) -> Buffer:
        """Return the body of a request that is complete. Raises ServeError and HttpError as `read` does."""
        body = request.data
        if len(body) > limit:
            raise _too_large(len(body), limit)
        self._memory.requests.admit(holder, len(body))
        return body

    def _seconds(self, nbytes: int) -> float:
        """Return the time for a body of which `nbytes` have been received."""
        return self.body_seconds + nbytes / LEAST_BYTES_PER_SECOND


def _too_large(length: int, limit: int) -> ServeError | HttpError:
    if limit == LARGEST_BODY:
        return HttpError(413, f"request body of {length} bytes exceeds the maximum of {limit} bytes")
    return _json_too_large(length, limit)


def _json_too_large(length: int, limit: int) -> ServeError:
    return invalid_argument(
        f"request JSON size of {length} bytes exceeds the maximum allowed input size of {limit} bytes. Use"
        " --http-max-input-size to increase the limit."
    )


LARGE_JSON = 256 << 10
"""More bytes are parsed in a process; the slowest JSON of this size takes 30 ms."""


class LargeBodies:
    """Parses large bodies in processes. On the event loop."""

    def __init__(self, most_processes: int = 2) -> None:
        """Each process may take about 30 times the memory of the largest body."""
        self._slots = asyncio.Semaphore(most_processes)
        self._idle: dict[_Process, asyncio.TimerHandle] = {}

    async def parse(self, function: Callable[[Buffer], Any], body: Buffer) -> Any:
        """Return the function's result for the body; both must be picklable. Raises the function's ServeErrors, and
        ServeError (UNAVAILABLE) if the process has ended or cannot be started."""
        async with self._slots:
            try:
                process = self._idle_process() or _Process()
            except OSError as error:
                raise unavailable(f"cannot start a process to parse a large body: {error.strerror}") from None
            try:
                result, refusal = await asyncio.to_thread(process.call, function, body)
            except (OSError, EOFError, pickle.UnpicklingError):
                process.end()
                raise ServeError(
                    StatusCode.UNAVAILABLE,
                    "the process that parses large bodies has ended, perhaps for lack of memory for"
                    f" {len(body)} bytes of JSON; send less at once, or send tensors in binary form",
                ) from None
            except BaseException:
                process.end()  # The process may be in the middle of this body.
                raise
            self._idle[process] = asyncio.get_running_loop().call_later(60.0, self._end, process)
        if refusal is not None:
            raise ServeError(*refusal)
        return result

    def _idle_process(self) -> _Process | None:
        while self._idle:
            process, ending = self._idle.popitem()
            ending.cancel()
            if not process.has_ended:
                return process
            process.end()  # The system may have ended the process for lack of memory.
        return None

    def _end(self, process: _Process) -> None:
        del self._idle[process]
        process.end()


_Outcome = tuple[Any, tuple[StatusCode, str] | None]
"""The function's result, or the code and text of its ServeError."""


class _Process:
    def __init__(self) -> None:
        """Raises OSError if the process cannot be started."""
        parent_pipe, self._parent_pipe = os.pipe2(os.O_CLOEXEC)
        try:
            # In a separate process group, so that Ctrl-C reaches only the server.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from {__name__} import serve; serve({parent_pipe})"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(parent_pipe,),
                process_group=0,
            )
        except OSError:
            os.close(self._parent_pipe)
            raise
        finally:
            os.close(parent_pipe)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def call(self, function: Callable[[Buffer], Any], body: Buffer) -> _Outcome:
        """Return what `serve` answers. Blocks. Raises OSError, EOFError or UnpicklingError if the process has ended."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None and answers is not None
        pickle.dump((function, pickle.PickleBuffer(body)), requests, pickle.HIGHEST_PROTOCOL)
        requests.flush()
        outcome: _Outcome = pickle.load(answers)
        return outcome

    def end(self) -> None:
        self._process.kill()
        os.close(self._parent_pipe)
        # Closes the pipes and waits in a thread, because a large process takes a while to end.
        asyncio.get_running_loop().run_in_executor(None, self._process.communicate)


def serve(parent_pipe: int) -> None:
    """Parse bodies, in the process, until the server has ended, and answer each with its result or with the code and
    text of its ServeError. Exceptions themselves would lose their arguments in pickle."""
    exit_with_parent(parent_pipe)
    # Small requests come first.
    os.nice(10)
    with contextlib.suppress(OSError):
        # If memory is short, the system should end this process first.
        Path("/proc/self/oom_score_adj").write_text("1000")
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.suppress(OSError, EOFError):
        while True:
            function, body = pickle.load(requests)
            outcome: _Outcome
            try:
                outcome = function(body), None
            except ServeError as error:
                outcome = None, (error.code, error.text)
            pickle.dump(outcome, answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()


EVENTS, LINES = "text/event-stream", "application/x-ndjson"
_PLAIN = ("application/json", "application/*", "*/*")
"""What accepts JSON; the first that a client names decides."""


def accepted_stream(accept: str) -> tuple[str, bool]:
    """Return the form of stream to which the header `Accept` gives the highest weight, of equal ones the first, "" =
    none, and whether it accepts JSON too. What has the weight 0 is not accepted."""
    weight = re.compile(r"\s*q\s*=\s*([01](?:\.[0-9]*)?)\s*", re.IGNORECASE)
    weights: dict[str, float] = {}
    for entry in accept.split(","):
        kind, *parameters = entry.split(";")
        found = next(filter(None, map(weight.fullmatch, parameters)), None)
        weights.setdefault(kind.strip().lower(), float(found[1]) if found else 1.0)
    streams = {kind: weight for kind, weight in weights.items() if kind in (EVENTS, LINES) and weight}
    takes_json = next((weights[kind] for kind in _PLAIN if kind in weights), 0.0) > 0
    return max(streams, key=streams.__getitem__, default=""), takes_json
