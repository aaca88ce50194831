"""Responses of a model that sees each request for itself, on their way to the server: with a batch or beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from rocserve.backends.request_model import Answer, ModelResponse, Rescheduled, Result
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, internal
from rocserve.core.plain import to_json
from rocserve.core.requests import Parameters
from rocserve.core.tensor_places import TensorPlaces, aligned, lay_out, padded
from rocserve.core.tensors import Buffer, TensorHead
from rocserve.plane.heap import fill
from rocserve.workers.entries import AGAIN, ENTRY, FINAL, NONE, OPEN, REMEMBERED_LAYOUTS, RESPONSE, numbers
from rocserve.workers.messages import ResultLayout
from rocserve.workers.worker_end import OutgoingResult, WorkerEnd, checked, error_result


class _Form(NamedTuple):
    """What responses with the same outputs have in common."""

    heads: tuple[TensorHead, ...]
    text: bytes
    """Of the layout."""
    places: TensorPlaces
    """Of the outputs, from the end of the numbers on."""
    table: Sequence[Buffer]
    """The numbers, of outputs whose sizes follow from their heads."""
    nbytes: int
    """Of such a response."""


class ResponseWriter:
    """One instance's. From any thread."""

    def __init__(self, end: WorkerEnd) -> None:
        self._end = end
        self._forms: dict[tuple[tuple[str, DataType, tuple[int, ...]], ...], _Form] = {}

    def results(self, answers: Sequence[Answer | None]) -> list[OutgoingResult]:
        """For the requests of a batch that is done, one for those in a row that are alike; None: a request is answered
        beside the batch."""
        results: list[OutgoingResult] = []
        for answer in answers:
            if answer is None:
                results.append(OutgoingResult(OPEN))
            elif isinstance(answer, ServeError):
                results.append(error_result(answer))
            else:
                try:
                    form, data = self._form(answer), [each.data for each in answer.outputs]
                    packed = None if answer.parameters else form.places.packed(data)
                    if packed is None:
                        results.append(self._response(form, data, answer.parameters))
                    elif results and results[-1].form is form:
                        results[-1].add(form.nbytes, (*form.table, *packed))
                    else:
                        layout, contents = self._end.layout_number(form.text), [*form.table, *packed]
                        results.append(OutgoingResult(0, 0, layout, 2 * len(data), form.nbytes, contents, form=form))
                except ServeError as error:
                    results.append(error_result(error))
        return results

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
        if isinstance(answer, ServeError):
            result = error_result(answer)
        else:
            data = [each.data for each in answer.outputs]
            result = self._response(self._form(answer), data, answer.parameters)
        defined = end.layout_entry(result.layout_text) if result.layout_text else b""
        place, view = end.place(result.nbytes)
        fill(view, result.contents)
        return defined + ENTRY.pack(
            RESPONSE, flags | result.flags, result.code, result.layout, number, place, result.count
        )

    def _form(self, answer: ModelResponse) -> _Form:
        """Raises: ServeError: INTERNAL, its names and shapes are too long."""
        key = tuple([(each.name, each.datatype, each.shape) for each in answer.outputs])
        form = self._forms.get(key)
        if form is None:
            heads = tuple([TensorHead(*each) for each in key])
            text = checked(to_json(ResultLayout(heads)))
            places = TensorPlaces(heads)
            table, nbytes = _table(places.sizes or ())
            if len(self._forms) >= REMEMBERED_LAYOUTS:
                self._forms.clear()
            form = self._forms[key] = _Form(heads, text, places, padded((table,)), nbytes)
        return form

    def _response(self, form: _Form, data: Sequence[Buffer], parameters: Parameters) -> OutgoingResult:
        """Raises: ServeError: INTERNAL, an output's bytes are not those of its shape."""
        for head, each in zip(form.heads, data, strict=True):
            expected = math.prod(head.shape) * head.datatype.itemsize
            if head.datatype is not DataType.BYTES and len(each) != expected:
                shape = list(head.shape)
                raise internal(f"output '{head.name}' of shape {shape} needs {expected} bytes, got {len(each)}")
        table, nbytes = _table([*map(len, data)])
        result = OutgoingResult(0, 0, 0, 2 * len(data), nbytes, padded([table, *data]))
        if parameters:
            result.layout_text = checked(to_json(ResultLayout(form.heads, parameters=parameters)))
        else:
            result.layout = self._end.layout_number(form.text)
        return result


def _table(sizes: Sequence[int]) -> tuple[bytes, int]:
    """The numbers of a response with outputs of these sizes, and how many bytes it has."""
    offsets, end = lay_out(sizes, 16 * len(sizes))
    places = [number for place in zip(offsets, sizes, strict=True) for number in place]
    return numbers(len(places)).pack(*places), aligned(end)
