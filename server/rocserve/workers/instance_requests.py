"""Handles, in the server, an instance's messages outside of batches: responses to open requests, calls of other models
and their answers, cancellations. All calls come on the data plane's thread, unless a docstring says otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from rocserve.backends.request_model import RESCHEDULED, ModelCall, ModelResponse, Result
from rocserve.core.datatypes import DataType
from rocserve.core.device_references import as_single_row_batches
from rocserve.core.errors import ServeError, internal, invalid_argument, unavailable
from rocserve.core.plain import from_json
from rocserve.core.responses import Answer, InferResponse
from rocserve.core.tensors import Tensor
from rocserve.core.trace import Trace
from rocserve.links.entries import CANCEL, ENTRY
from rocserve.links.exchanges import Exchanges
from rocserve.links.outbox import Outbox
from rocserve.links.rings import RingWriter
from rocserve.links.tensors import TensorSender
from rocserve.plane.heap import Slot
from rocserve.workers.answer_watch import PendingAnswers

if TYPE_CHECKING:
    from rocserve.workers.instance import Instance

STALL_SECONDS = 60.0
"""A worker that reads nothing for this long is broken: its model never releases the GIL."""
MOST_WAITING = 16384
"""Messages that may wait until a worker reads them, in addition to one cancellation for each open request."""
MOST_CALLS = 4096
"""Calls that a worker may have in flight; they wait in other models' queues, among clients' requests."""

OnAnswer = Callable[[Result | None, bool], None]
"""Takes a response, an error, None (no further response) or RESCHEDULED, and whether this answer is the last."""


class RequestLost(ServeError):
    """The worker has ended, and with it a request that its model had kept open."""


class InstanceRequests:
    """Tracks the open requests of one instance, and its model's calls in flight."""

    def __init__(
        self, instance: Instance, start_call: CallStarter, writer: RingWriter, ring: Callable[[], None]
    ) -> None:
        """`writer`: posts to the worker. `ring`: wakes the ring's reader."""
        self.instance = instance
        self._start_call = start_call
        self._outbox = Outbox(instance.plane, lambda: instance.room(writer), writer.post, ring, self._on_full)
        self._open = Exchanges[OnAnswer]()
        self._calls: dict[int, OpenCall] = {}
        self.traces: dict[int, Trace] = {}
        """Traces of open requests by number; calls that a model makes for a request belong to its trace."""
        self.messages = 0
        self._sender = TensorSender(self._allocate, self._allocate, self._outbox.post, nullcontext())
        self._unread: dict[int, object] = {}
        """What must stay until the worker has read a slot, by place: the slot, and the tensors that it refers to."""

    def pending_answers(self, batch: int) -> PendingAnswers:
        return PendingAnswers(batch, len(self._open), len(self._calls), self.messages)

    @property
    def must_answer(self) -> bool:
        return bool(self._open or self._calls or self._unread)

    def open_request(self, on_answer: OnAnswer) -> int:
        """Number a request. Responses go to `on_answer` until the last, `close_requests` or the worker's end."""
        return self._open.open(on_answer)

    def close_requests(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._open.pop(number, None)
            if self.traces:
                self.traces.pop(number, None)

    def cancel(self, number: int) -> None:
        """Tell the model that nobody waits for a request."""
        if number in self._open:
            self._outbox.post(ENTRY.pack(CANCEL, 0, 0, 0, number, 0, 0))

    def answer_call(self, number: int, answer: Result | InferResponse | None, final: bool, references: int = 0) -> None:
        """Copy and send the answer to a call. `references`: how many of the first tensors are references."""
        if self.instance.has_ended:
            return
        if final and self._calls.pop(number, None) is None:
            return
        try:
            message, place = self._sender.answer(number, answer, final, references)
            if references and isinstance(answer, ModelResponse):
                self._unread[place] = (self._unread[place], answer.slot)
            self._sender.post(message)
        except ServeError as error:
            fault = internal(f"the answer to a call cannot be sent to the model: {error}")
            self._sender.post(self._sender.answer(number, fault, final)[0])

    def _allocate(self, nbytes: int) -> tuple[int, memoryview]:
        """Return a slot that stays until the worker has read it. Raises HeapFull."""
        slot, view = self.instance.inputs.place(nbytes)
        self._unread[slot.offset] = slot
        return slot.offset, view

    def _on_full(self, waiting: int, seconds: float) -> None:
        outbox = self._outbox
        if seconds > STALL_SECONDS or waiting > MOST_WAITING + len(self._open):
            self.instance.break_off(f"it has not taken its answers, {waiting} messages wait")
        if self.instance.has_ended:
            outbox.drop()

    # Messages from the worker

    def take_answer(self, kind: int, flags: int, count: int, text: int, request: int, place: int, nbytes: int) -> None:
        """Raises ValueError."""
        self.messages += 1
        on_answer = self._open.get(request)
        answer, final = self.instance.results.layouts.answer(kind, flags, count, text, place, nbytes)
        if isinstance(answer, ModelResponse):
            answer.slot = self.instance.slot(place)
        elif isinstance(answer, ServeError):
            self.instance.return_place(place)
        if final:
            self.close_requests((request,))
        if on_answer is not None:
            self.instance.call_guarded(on_answer, answer, final)

    def take_call(self, text: int, number: int, place: int, nbytes: int) -> None:
        """Raises ValueError."""
        if number in self._calls:
            raise ValueError(f"two calls of the number {number}")
        self.messages += 1
        inputs, details = self.instance.results.layouts.read(text, place, nbytes)
        call = replace(from_json(ModelCall, details), inputs=tuple(inputs))
        opened = self._calls[number] = OpenCall(self, number, self.instance.slot(place))
        if len(self._calls) > MOST_CALLS:
            opened.send(unavailable(f"the model has {MOST_CALLS} calls under way, and may have no more"))
            return
        try:
            self._start_call(call, opened)
        except Exception as error:
            # The model chooses the call's content, which may not even be a valid request.
            opened.send(invalid_argument(f"the call cannot be run: {error}"))

    def take_returns(self, places: tuple[int, ...]) -> None:
        for place in places:
            self._unread.pop(place, None)

    def end(self, error: ServeError) -> None:
        """Finish after the worker has ended: open requests get the error, calls are cancelled."""
        self._outbox.drop()
        lost = RequestLost(error.code, error.text)
        for on_answer in self._open.drain():
            self.instance.call_guarded(on_answer, lost, True)
        calls, self._calls = self._calls, {}
        for opened in calls.values():
            self.instance.call_guarded(opened.cancelled)
        self._unread.clear()
        # Both refer to this object and would keep it until a garbage collection.
        del self._sender, self._outbox


class OpenCall:
    """A model's call in the server. Implements core.exchange.Responder; answers after the worker's end are dropped."""

    def __init__(self, requests: InstanceRequests, number: int, slot: Slot) -> None:
        self.requests = requests
        self._number = number
        self.slot: Slot | None = slot
        self.reference_outputs: frozenset[str] = frozenset()
        """Outputs that may be References."""
        self.references_are_rows = False
        """The References have one element for each row."""
        self._is_cancelled = False
        self._on_cancel: list[Callable[[], None]] = []

    def send_again(self) -> None:
        self.requests.answer_call(self._number, RESCHEDULED, True)
        self.slot = None

    def expect_many(self) -> None:
        """See Responder."""

    def send(self, answer: Answer, final: bool = True) -> None:
        result: Result | InferResponse | None = answer
        staying: list[Tensor] = []
        if self.reference_outputs and isinstance(answer, InferResponse):
            others: list[Tensor] = []
            for tensor in answer.outputs:
                stays = tensor.name in self.reference_outputs and tensor.datatype is DataType.BYTES
                (staying if stays else others).append(
                    as_single_row_batches(tensor) if stays and self.references_are_rows else tensor
                )
            result = ModelResponse([*staying, *others], answer.parameters, answer.slot)
        self.requests.answer_call(self._number, result, final, len(staying))
        if final:
            self.slot = None

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        """See Responder. The callback runs when the worker has ended."""
        if self._is_cancelled:
            callback()
        else:
            self._on_cancel.append(callback)

    def cancelled(self) -> None:
        self._is_cancelled = True
        callbacks, self._on_cancel = self._on_cancel, []
        for callback in callbacks:
            callback()


CallStarter = Callable[[ModelCall, OpenCall], None]
"""Starts a model's call, whose answer comes now or later. Never blocks (rocserve.scheduling.model_calls)."""
