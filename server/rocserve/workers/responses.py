"""Responses of a model on their way to the server, one for each request: with a batch or beside it."""

from __future__ import annotations

from collections.abc import Sequence

from rocserve.backends.request_model import Answer, Rescheduled, Result
from rocserve.core.errors import ServeError
from rocserve.core.requests import Parameters
from rocserve.core.tensor_places import padded
from rocserve.core.tensors import Tensor
from rocserve.workers.entries import AGAIN, ENTRY, ERROR, FINAL, NONE, OPEN, RESPONSE
from rocserve.workers.layouts import checked, parameters_text
from rocserve.workers.worker_end import OutgoingResult, WorkerEnd, error_bytes, error_result


class ResponseWriter:
    """One instance's. From any thread."""

    def __init__(self, end: WorkerEnd) -> None:
        self._end = end

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
                    self.add(results, answer.outputs, answer.parameters)
                except ServeError as error:
                    results.append(error_result(error))
        return results

    def add(self, results: list[OutgoingResult], outputs: Sequence[Tensor], parameters: Parameters) -> None:
        """The next request's result, with that of the request before where the two differ in nothing but their bytes.

        Raises:
            ServeError: INTERNAL, it cannot be sent.
        """
        layout, details = self._end.layouts.of(outputs), checked(parameters_text(parameters))
        pieces, nbytes = layout.places.pieces([each.data for each in outputs], "output")
        if details:
            pieces = [*pieces, *padded((details,))]
            nbytes = sum(map(len, pieces))
        elif results and results[-1].layout is layout and layout.places.sizes is not None:
            results[-1].add(nbytes, pieces)
            return
        result = OutgoingResult(0, 0, self._end.layout_number(layout), len(details), nbytes, [*pieces])
        result.layout = None if details else layout
        results.append(result)

    def send(self, number: int, answer: Result | None, final: bool) -> None:
        """Respond to the request of that number; waits while the server is slow to read.

        Raises:
            ServeError: INTERNAL, it cannot be sent.
        """
        end, flags = self._end, FINAL if final else 0
        code = layout = place = nbytes = 0
        if answer is None:
            flags |= NONE
        elif isinstance(answer, Rescheduled):
            flags = AGAIN
        elif isinstance(answer, ServeError):
            text = error_bytes(answer)
            flags, code, place, nbytes = flags | ERROR, int(answer.code), end.text_place(text), len(text)
        else:
            layout, place, nbytes = end.put(answer.outputs, parameters_text(answer.parameters))
        end.post(ENTRY.pack(RESPONSE, flags, code, layout, number, place, nbytes))
