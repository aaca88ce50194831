"""Connects the server to an instance whose model sees each request separately: requests may be open after their batch,
and the model may call others. All calls come on the data plane's thread, unless a docstring says otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import ClassVar

from rocserve.backends.request_model import RESCHEDULED, ModelCall, ModelResponse, Result
from rocserve.core.datatypes import DataType
from rocserve.core.device_references import as_single_row_batches
from rocserve.core.errors import ServeError, internal, invalid_argument, unavailable
from rocserve.core.exchange import Cancellable
from rocserve.core.plain import from_json
from rocserve.core.responses import Answer, InferResponse
from rocserve.core.tensors import Tensor
from rocserve.core.trace import Trace
from rocserve.links.entries import ANSWERS, CALL, CANCEL, ENTRY, RETURN
from rocserve.links.exchanges import Exchanges
from rocserve.links.opening import BACK
from rocserve.links.outbox import Outbox
from rocserve.links.tensors import TensorSender
from rocserve.plane.doorbell import SocketRinger
from rocserve.plane.heap import Slot
from rocserve.workers.instance import Instance, PendingAnswers

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


@dataclass(eq=False, repr=False)
class RequestInstance(Instance):
    """An instance whose model sees each request separately."""

    sees_requests: ClassVar[bool] = True
    start_call: CallStarter = field(kw_only=True)
    """Runs the model's calls."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.exchanges = Exchanges[tuple[OnAnswer, Trace | None], OpenCall]()
        """Its open requests, and its model's calls in flight."""
        self._messages = 0
        (back,) = self._back_sockets
        writer = self._link.writers[BACK]
        ring = SocketRinger(self._link.other_sleep_word(1), back).ring
        self._outbox = Outbox(self.plane, lambda: self.room(writer), writer.post, ring, self._on_full)
        self._sender = TensorSender(self._allocate, self._allocate, self._outbox.post, nullcontext())
        self._unread: dict[int, object] = {}
        """The slots that the worker has not read, by place, with the tensors that they refer to."""
        # The model may call others during its warm-up.
        self.open()
        self.plane.call_soon(self._listen)

    def _listen(self) -> None:
        if self._is_listening:
            self._mail.listen(self)

    def pending_answers(self) -> PendingAnswers:
        open_requests, open_calls = len(self.exchanges.asked), len(self.exchanges.received)
        return replace(
            super().pending_answers(), open_requests=open_requests, open_calls=open_calls, messages=self._messages
        )

    @property
    def must_answer(self) -> bool:
        return bool(self._sent or self.exchanges.asked or self.exchanges.received or self._unread)

    def open_request(self, on_answer: OnAnswer, trace: Trace | None = None) -> int:
        """Number a request. Responses go to `on_answer` until the last, `close_requests` or the worker's end. `trace`:
        calls that the model makes for the request belong to it."""
        return self.exchanges.open((on_answer, trace))

    def close_requests(self, numbers: Iterable[int]) -> None:
        asked = self.exchanges.asked
        for number in numbers:
            asked.pop(number, None)

    def trace(self, number: int) -> Trace | None:
        """Return the trace of an open request."""
        asked = self.exchanges.take(number, False)
        return None if asked is None else asked[1]

    def cancel(self, number: int) -> None:
        """Tell the model that nobody waits for a request."""
        if number in self.exchanges.asked:
            self._outbox.post(ENTRY.pack(CANCEL, 0, 0, 0, number, 0, 0))

    def answer_call(self, number: int, answer: Result | InferResponse | None, final: bool, references: int = 0) -> None:
        """Copy and send the answer to a call. `references`: how many of the first tensors are references."""
        if self.has_ended:
            return
        if final and not self.exchanges.end(number):
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
        slot, view = self.inputs.place(nbytes)
        self._unread[slot.offset] = slot
        return slot.offset, view

    def _on_full(self, waiting: int, seconds: float) -> None:
        if seconds > STALL_SECONDS or waiting > MOST_WAITING + len(self.exchanges.asked):
            self.break_off(f"it does not read its answers: {waiting} messages wait")
        if self.has_ended:
            self._outbox.drop()

    # Messages from the worker

    def _take_other(self, kind: int, flags: int, count: int, text: int, number: int, place: int, nbytes: int) -> None:
        if kind in ANSWERS:
            self._messages += 1
            answer, final = self.results.layouts.answer(kind, flags, count, text, place, nbytes)
            if isinstance(answer, ModelResponse):
                answer.slot = self.slot(place)
            elif isinstance(answer, ServeError):
                self.return_place(place)
            asked = self.exchanges.take(number, final)
            if asked is not None:
                self.call_guarded(asked[0], answer, final)
        elif kind == CALL:
            self._take_call(text, number, place, nbytes)
        elif kind == RETURN:
            for one in (number, place, nbytes)[:count]:
                self._unread.pop(one, None)
            self._mail.trimmer.trim_later(self.inputs)
        else:
            super()._take_other(kind, flags, count, text, number, place, nbytes)

    def _take_call(self, text: int, number: int, place: int, nbytes: int) -> None:
        if number in self.exchanges.received:
            raise ValueError(f"call {number} is already open")
        self._messages += 1
        inputs, details = self.results.layouts.read(text, place, nbytes)
        call = replace(from_json(ModelCall, details), inputs=tuple(inputs))
        opened = OpenCall(self, number, self.slot(place))
        self.exchanges.receive(number, opened)
        if len(self.exchanges.received) > MOST_CALLS:
            opened.send(unavailable(f"the model has {MOST_CALLS} calls in flight; wait for answers before more calls"))
            return
        try:
            self.start_call(call, opened)
        except Exception as error:
            # The model chooses the call's content, which may not even be a valid request.
            opened.send(invalid_argument(f"the call cannot be run: {error}"))

    def _end_exchanges(self, error: ServeError) -> None:
        """Fail open requests with the error, and cancel calls."""
        if self.exchanges.is_over:
            return
        self._outbox.drop()
        lost = RequestLost(error.code, error.text)
        requests, calls = self.exchanges.close()
        for on_answer, _ in requests:
            self.call_guarded(on_answer, lost, True)
        for opened in calls:
            self.call_guarded(opened.cancel)
        self._unread.clear()
        # These refer to this object and would keep it until a garbage collection.
        del self._sender, self._outbox, self.start_call


class OpenCall(Cancellable):
    """A model's call in the server. Implements core.exchange.Responder, cancelled when the worker has ended; answers
    after that are dropped."""

    def __init__(self, instance: RequestInstance, number: int, slot: Slot) -> None:
        self.instance = instance
        self._number = number
        self.slot: Slot | None = slot
        self.reference_outputs: frozenset[str] = frozenset()
        """Outputs that may be References."""
        self.references_are_rows = False
        """The References have one element for each row."""

    def send_again(self) -> None:
        self.instance.answer_call(self._number, RESCHEDULED, True)
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
        self.instance.answer_call(self._number, result, final, len(staying))
        if final:
            self.slot = None


CallStarter = Callable[[ModelCall, OpenCall], None]
"""Starts a model's call, whose answer comes now or later. Never blocks (rocserve.scheduling.model_calls)."""
