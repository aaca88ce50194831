"""The worker's side of what became of a batch's requests, each for itself: to shared memory, and the tail that tells.

The tail's body is a RequestResults; its numbers are offset and nbytes of each output of each request, in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rocserve.backends.request_model import Answer, ModelResponse
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, internal
from rocserve.core.tensors import Tensor
from rocserve.workers.memory import Arena, aligned
from rocserve.workers.messages import RequestResult, RequestResults, TensorHead
from rocserve.workers.plain import to_json
from rocserve.workers.wire import REMEMBERED, pack_tail

_FAILURE_TEXTS = 64 * 1024
"""Characters that the texts of one batch's failures share."""

_OPEN = RequestResult(is_open=True)


class RequestResultWriter:
    """Writes the results of one slot's batches to its output memory."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._bodies: dict[object, bytes] = {}
        """By shapes; of batches in which all went well."""

    def write(self, answers: Sequence[Answer | None]) -> bytes:
        """Put the outputs where the server reads them; the tail of the message for it.

        Args:
            answers: of each request, with its requested outputs only; None where the conversation answers.
        """
        texts = max(_FAILURE_TEXTS // max(len(answers), 1), 1)
        tensors: list[Tensor] = []
        results: list[RequestResult] = []
        key: list[object] = []
        for answer in answers:
            if isinstance(answer, ModelResponse):
                try:
                    heads = tuple(_head(tensor) for tensor in answer.outputs)
                except ServeError as error:
                    answer = error
                else:
                    tensors += answer.outputs
                    results.append(RequestResult(heads, answer.parameters))
                    key.append(heads if not answer.parameters else None)
                    continue
            key.append(None)
            results.append(_OPEN if answer is None else RequestResult(code=int(answer.code), text=answer.text[:texts]))
        return pack_tail(self._lay_out(tensors), self._body(tuple(key), results))

    def _lay_out(self, tensors: Sequence[Tensor]) -> list[int]:
        numbers: list[int] = []
        end = 0
        for tensor in tensors:
            offset, nbytes = aligned(end), memoryview(tensor.data).nbytes
            numbers += (offset, nbytes)
            end = offset + nbytes
        self._arena.reserve(end)
        octets = self._arena.octets
        for index, tensor in enumerate(tensors):
            offset, nbytes = numbers[2 * index : 2 * index + 2]
            if nbytes:
                # numpy lets go of the GIL while it copies.
                octets[offset : offset + nbytes] = np.frombuffer(tensor.data, dtype=np.uint8)
        return numbers

    def _body(self, key: tuple[object, ...], results: Sequence[RequestResult]) -> bytes:
        body = self._bodies.get(key)
        if body is None:
            body = to_json(RequestResults(tuple(results)))
            if None not in key:
                if len(self._bodies) >= REMEMBERED:
                    self._bodies.clear()
                self._bodies[key] = body
        return body


def _head(tensor: Tensor) -> TensorHead:
    """Raises: ServeError: INTERNAL, the data is not what the shape says."""
    shape = tuple(tensor.shape)
    if tensor.datatype is not DataType.BYTES:
        expected, nbytes = tensor.element_count * tensor.datatype.itemsize, memoryview(tensor.data).nbytes
        if nbytes != expected:
            raise internal(f"output '{tensor.name}' of shape {list(shape)} needs {expected} bytes, got {nbytes}")
    return TensorHead(tensor.name, tensor.datatype, shape)
