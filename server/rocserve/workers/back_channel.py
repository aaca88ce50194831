"""Carries an instance's messages outside of batches: calls of other models, single responses, cancellations."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from rocserve.backends.request_model import RESCHEDULED, Answer, ModelCall, ModelResponse, Result
from rocserve.core.device_references import join_references
from rocserve.core.errors import ServeError, invalid_argument, unavailable
from rocserve.core.exchange import Cancellable
from rocserve.core.plain import to_json
from rocserve.links import entries
from rocserve.links.entries import ENTRY
from rocserve.links.exchanges import Exchanges
from rocserve.links.tensors import TensorReader
from rocserve.plane.doorbell import SocketSleeper, drain_rings
from rocserve.workers.worker_end import WorkerEnd

OnAnswer = Callable[[Result | None, bool], None]


class BackChannel:
    """Implements request_model.ModelCalls. A separate thread reads the channel, because an answer to a call must arrive
    while the model's thread waits for it in `execute`."""

    def __init__(self, end: WorkerEnd, log: logging.Logger) -> None:
        self._end = end
        self._log = log
        self._layouts = TensorReader(end.inputs)
        self._exchanges = Exchanges[OnAnswer, BatchedResponder]()
        """The model's calls, and the server's requests."""
        self._reader = threading.Thread(target=self._read, name="back channel", daemon=True)

    def start(self) -> None:
        self._reader.start()

    def call(self, call: ModelCall, on_answer: OnAnswer) -> None:
        """See request_model.ModelCalls. Raises ServeError (INVALID_ARGUMENT) if the call cannot be sent."""
        try:
            layout, place, nbytes = self._end.sender.put(call.inputs, to_json(replace(call, inputs=())))
        except ServeError as error:
            raise invalid_argument(f"the call of model '{call.model_name}' cannot be sent: {error}") from None
        number = self._exchanges.open(on_answer)
        self._end.sender.post((entries.CALL, 0, 0, layout, number, place, nbytes))
        if self._exchanges.is_over:
            self._end_all()

    def open_request(self, number: int) -> BatchedResponder:
        """Return the responder for a request, by the server's number."""
        responder = BatchedResponder(self._end, number, self._exchanges.received)
        self._exchanges.receive(number, responder)
        return responder

    def _read(self) -> None:
        end = self._end
        connection = end.back_connection
        assert connection is not None, "the worker runs a LoadedModel, which has no back channel"
        sleeper = SocketSleeper(end.back_sleep_word, connection, drain_rings)
        is_open = True
        while is_open:
            self.take_mail()
            is_open = sleeper.sleep(None, end.back.has_mail)
        self._end_all()

    def take_mail(self) -> None:
        """Handle the received messages, on the reader's thread."""
        for kind, flags, count, text, number, place, nbytes in ENTRY.iter_unpack(self._end.back.take()):
            if kind in entries.ANSWERS:
                answer, final = self._layouts.answer(kind, flags, count, text, place, nbytes)
                self._handle_answer(number, answer, count, place, final)
            elif kind == entries.TEXT:
                self._layouts.define(text, place, nbytes)
                self._end.post(entries.return_entries([place]))
            elif kind == entries.CANCEL:
                self._exchanges.cancel(number)

    def _end_all(self) -> None:
        """Fail the calls and cancel the requests, because the server is gone."""
        calls, requests = self._exchanges.close()
        for on_answer in calls:
            self._deliver(on_answer, unavailable("the server is gone"), True)
        for responder in requests:
            responder.cancel()

    def _handle_answer(self, number: int, answer: Result | None, references: int, place: int, final: bool) -> None:
        """`references`: how many of a response's first tensors are references."""
        if isinstance(answer, ModelResponse):
            # Copied, because the model may keep the tensors and write to them.
            for tensor in answer.outputs:
                tensor.data = bytearray(tensor.data)
            answer.outputs = [*map(join_references, answer.outputs[:references]), *answer.outputs[references:]]
        on_answer = self._exchanges.take(number, final)
        if on_answer is not None:
            self._deliver(on_answer, answer, final)
        if answer is not None and answer is not RESCHEDULED:
            # Returned only now, because `on_answer` has read the tensors that the references lead to.
            self._end.post(entries.return_entries([place]))

    def _deliver(self, on_answer: OnAnswer, answer: Result | None, final: bool) -> None:
        try:
            on_answer(answer, final)
        except Exception:
            self._log.exception("the answer to a call could not be handled")


class BatchedResponder(Cancellable):
    """Implements request_model.RequestResponder. The final answer goes with the batch if nothing was sent before."""

    _is_ended = _has_responded = False

    def __init__(self, end: WorkerEnd, number: int, open_requests: dict[int, BatchedResponder]) -> None:
        """`open_requests`: has this responder until the request is answered."""
        self._end = end
        self.number = number
        self._open = open_requests
        self._lock = threading.Lock()

    def send(self, answer: Result | None, final: bool) -> None:
        """See request_model.RequestResponder."""
        with self._lock:
            if self._is_ended:
                raise RuntimeError("the final response to this request has already been sent")
            if answer is None and not final:
                return
            # Sent under the lock, because no response may overtake the final one.
            self._end.respond(self.number, answer, final)
            self._has_responded = True
            if final:
                self._end_it()

    def claim(self) -> bool:
        """Close the request, whose answer goes with its batch. Returns False if a response has been sent already."""
        with self._lock:
            if self._has_responded or self._is_ended:
                return False
            self._end_it()
            return True

    def abandon(self) -> None:
        """End the request, because its batch fails and with it all requests that have not ended."""
        with self._lock:
            self._end_it()

    def _end_it(self) -> None:
        self._is_ended = True
        self._open.pop(self.number, None)

    def batch_answer(self, answer: Result | None) -> Answer | None:
        """Return `execute`'s answer to the request if it goes with the batch; None = messages answer the request."""
        if answer is None:
            return None
        if answer is not RESCHEDULED and self.claim():
            return answer
        # Follows the responses that were sent as messages. Ignored if the final one was among them.
        with suppress(RuntimeError):
            try:
                self.send(answer, True)
            except ServeError as error:
                self.send(error, True)
        return None
