"""The worker's side of what became of a batch's requests, each for itself: to shared memory, and the tail that tells.

The tail's body is a RequestResults; its numbers are offset and nbytes of each output of each request, in order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rocserve.backends.request_model import Answer, ModelResponse
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, internal
from rocserve.core.plain import to_json
from rocserve.core.requests import Parameters
from rocserve.core.tensors import Tensor
from rocserve.workers.memory import Arena, aligned
from rocserve.workers.messages import RequestResult, RequestResults, TensorHead
from rocserve.workers.wire import REMEMBERED, pack_tail

_FAILURE_TEXTS = 64 * 1024
"""Characters that the texts of one batch's failures share."""

_Head = tuple[str, DataType, tuple[int, ...]]
"""The fields of a TensorHead; made for each output of each request, and compared, in a fraction of its time."""

_Outcome = tuple[tuple[_Head, ...], Parameters] | ServeError | None


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
        tensors: list[Tensor] = []
        outcomes: list[_Outcome] = []
        key: list[object] = []
        for answer in answers:
            if isinstance(answer, ModelResponse):
                try:
                    heads = tuple([_head(tensor) for tensor in answer.outputs])
                except ServeError as error:
                    answer = error
                else:
                    tensors += answer.outputs
                    outcomes.append((heads, answer.parameters))
                    key.append(heads if not answer.parameters else None)
                    continue
            key.append(None)
            outcomes.append(answer)
        return pack_tail(self._lay_out(tensors), self._body(tuple(key), outcomes))

    def _lay_out(self, tensors: Sequence[Tensor]) -> list[int]:
        arena = self._arena
        numbers: list[int] = []
        offset = 0
        for tensor in tensors:
            data = tensor.data
            nbytes = len(data)
            end = offset + nbytes
            if end > arena.peak:
                arena.reserve(end)
            arena.write(offset, data)
            numbers += (offset, nbytes)
            offset = aligned(end)
        return numbers

    def _body(self, key: tuple[object, ...], outcomes: Sequence[_Outcome]) -> bytes:
        body = self._bodies.get(key)
        if body is None:
            texts = max(_FAILURE_TEXTS // max(len(outcomes), 1), 1)
            body = to_json(RequestResults(tuple(_result(outcome, texts) for outcome in outcomes)))
            if None not in key:
                if len(self._bodies) >= REMEMBERED:
                    self._bodies.clear()
                self._bodies[key] = body
        return body


def _head(tensor: Tensor) -> _Head:
    """Raises: ServeError: INTERNAL, the data is not what the shape says."""
    name, datatype, shape, nbytes = tensor.name, tensor.datatype, tuple(tensor.shape), len(tensor.data)
    if datatype is not DataType.BYTES and nbytes != math.prod(shape) * datatype.itemsize:
        expected = math.prod(shape) * datatype.itemsize
        raise internal(f"output '{name}' of shape {list(shape)} needs {expected} bytes, got {nbytes}")
    return name, datatype, shape


def _result(outcome: _Outcome, texts: int) -> RequestResult:
    """`texts`: how many characters a failure's text may have."""
    if outcome is None:
        return RequestResult(is_open=True)
    if isinstance(outcome, ServeError):
        return RequestResult(code=int(outcome.code), text=outcome.text[:texts])
    heads, parameters = outcome
    return RequestResult(tuple(TensorHead(*head) for head in heads), parameters)
