"""Responses of a model that sees each request for itself, on their way to the server: with a batch or beside it."""

from __future__ import annotations

import math
import threading

from rocserve.backends.request_model import Answer, ModelResponse, Rescheduled, Result
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, internal
from rocserve.core.plain import to_json
from rocserve.core.tensor_places import aligned
from rocserve.core.tensors import Buffer, TensorHead, flat_octets
from rocserve.plane.heap import copy_bytes
from rocserve.workers.entries import (
    AGAIN,
    ENTRY,
    FINAL,
    NONE,
    OPEN,
    REMEMBERED_LAYOUTS,
    RESPONSE,
    numbers,
)
from rocserve.workers.messages import ResultLayout
from rocserve.workers.worker_end import OutgoingResult, SharedWorkerEnd, checked, error_result


class ResponseWriter:
    """One instance's. From any thread."""

    def __init__(self, end: SharedWorkerEnd) -> None:
        self._end = end
        self._texts: dict[tuple[TensorHead, ...], bytes] = {}

    def result(self, answer: Answer | None) -> OutgoingResult:
        """For a request of a batch that is done; None: it is answered beside the batch."""
        if answer is None:
            return OutgoingResult(OPEN)
        if isinstance(answer, ModelResponse):
            try:
                return self._response(answer)
            except ServeError as error:
                answer = error
        return error_result(answer)

    def send(self, number: int, answer: Result | None, final: bool) -> None:
        """Respond to the request of that number; waits while the server is slow to read.

        Raises:
            ServeError: INTERNAL, it cannot be sent.
        """
        flags = FINAL if final else 0
        if answer is None:
            self._end.post(ENTRY.pack(RESPONSE, flags | NONE, 0, 0, number, 0, 0))
        elif isinstance(answer, Rescheduled):
            self._end.post(ENTRY.pack(RESPONSE, AGAIN, 0, 0, number, 0, 0))
        else:
            self._end.post(self._entries(flags, number, answer))

    def _entries(self, flags: int, number: int, answer: Answer) -> bytes:
        """Of a response in a slot of its own. Raises: ServeError."""
        end = self._end
        result = self._response(answer) if isinstance(answer, ModelResponse) else error_result(answer)
        defined = end.layout_entry(result.layout_text) if result.layout_text else b""
        place, view = end.place(result.nbytes)
        for offset, content in result.contents:
            copy_bytes(view, offset, content)
        return defined + ENTRY.pack(
            RESPONSE, flags | result.flags, result.code, result.layout, number, place, result.count
        )

    def _response(self, answer: ModelResponse) -> OutgoingResult:
        """Raises: ServeError: INTERNAL, an output's bytes are not those of its shape."""
        contents: list[tuple[int, Buffer]] = [(0, b"")]
        heads: list[TensorHead] = []
        table: list[int] = []
        position = 16 * len(answer.outputs)
        for tensor in answer.outputs:
            content = flat_octets(tensor.data)
            name, datatype, shape, nbytes = tensor.name, tensor.datatype, tuple(tensor.shape), len(content)
            if datatype is not DataType.BYTES and nbytes != math.prod(shape) * datatype.itemsize:
                expected = math.prod(shape) * datatype.itemsize
                raise internal(f"output '{name}' of shape {list(shape)} needs {expected} bytes, got {nbytes}")
            heads.append(TensorHead(name, datatype, shape))
            start = aligned(position)
            table += (start, nbytes)
            contents.append((start, content))
            position = start + nbytes
        contents[0] = (0, numbers(len(table)).pack(*table))
        key = tuple(heads)
        if answer.parameters:
            return OutgoingResult(count=len(table), nbytes=position, contents=contents, layout_text=_text(key, answer))
        text = self._texts.get(key)
        if text is None:
            if len(self._texts) >= REMEMBERED_LAYOUTS:
                self._texts.clear()
            text = self._texts[key] = _text(key, answer)
        return OutgoingResult(0, 0, self._end.layout_number(text), len(table), position, contents)


def _text(heads: tuple[TensorHead, ...], answer: ModelResponse) -> bytes:
    return checked(to_json(ResultLayout(heads, parameters=answer.parameters)))


class BatchedResponder:
    """Implements request_model.RequestResponder; an answer that need not go beside its batch goes with it instead."""

    __slots__ = ("_ended", "_lock", "_on_end", "_spoken", "_writer", "is_cancelled", "number")

    def __init__(self, writer: ResponseWriter, number: int, requests: dict[int, BatchedResponder]) -> None:
        """`requests`: the open ones, by their numbers; it is among them until it has been answered."""
        self._writer = writer
        self.number = number
        self._on_end = requests
        self._lock = threading.Lock()
        self._ended = False
        self._spoken = False
        self.is_cancelled = False

    def send(self, answer: Result | None, final: bool) -> None:
        """See request_model.RequestResponder; and that the request is to come again."""
        with self._lock:
            if self._ended:
                raise RuntimeError("the final response to this request has been sent before")
            if answer is None and not final:
                return
            # Under the lock: nothing may overtake what is the last.
            self._writer.send(self.number, answer, final)
            self._spoken = True
            if final:
                self._end()

    def claim(self) -> bool:
        """Take the request back, for an answer that goes with its batch; False when it has been responded to beside
        it."""
        with self._lock:
            if self._spoken or self._ended:
                return False
            self._end()
            return True

    def end_with(self, answer: Result) -> bool:
        """Answer finally unless that has been done; whether it was done now."""
        try:
            self.send(answer, True)
        except RuntimeError:
            return False
        except ServeError as error:
            self.send(error, True)
        return True

    def _end(self) -> None:
        self._ended = True
        self._on_end.pop(self.number, None)
