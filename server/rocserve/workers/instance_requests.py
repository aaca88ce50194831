"""The server's side of what passes beside the batches of an instance whose model sees each request for itself:
responses to requests that are open, calls of other models and their answers, cancellations.

All calls are made on the data plane's thread, unless said otherwise.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from rocserve.backends.request_model import RESCHEDULED, ModelCall, ModelResponse, Result
from rocserve.core.datatypes import DataType
from rocserve.core.device_references import of_one_row_each
from rocserve.core.errors import ServeError, internal, invalid_argument, unavailable
from rocserve.core.plain import from_json
from rocserve.core.requests import Answer, InferResponse
from rocserve.core.tensors import Tensor
from rocserve.core.trace import Trace
from rocserve.plane.heap import Slot
from rocserve.plane.link import RingWriter
from rocserve.plane.loop import TimerHandle
from rocserve.workers.answer_watch import Owed
from rocserve.workers.entries import AGAIN, CANCELLED, ENTRY, FINAL
from rocserve.workers.layouts import TensorSender

if TYPE_CHECKING:
    from rocserve.workers.instance import Instance

STALL_SECONDS = 60.0
"""A worker that takes nothing for this long is broken: its model holds Python's lock for good."""
MOST_WAITING = 16384
"""Messages that may wait for a worker to take them, beside one that its client has gone for each open request."""
MOST_CALLS = 4096
"""That a worker may have under way: they wait in the queues of other models, beside clients' requests."""
_RETRY_SECONDS = 0.002
"""After a ring was full."""

OnAnswer = Callable[[Result | None, bool], None]
"""Takes a response, an error or nothing, or that the request is to be sent again; and whether it is the last."""


class RequestLost(ServeError):
    """The worker has ended, and with it a request that its model had kept open."""


class InstanceRequests:
    """The requests of one instance that are open, and the calls that its model has under way."""

    def __init__(
        self, instance: Instance, start_call: CallStarter, writer: RingWriter, ring: Callable[[], None]
    ) -> None:
        """`start_call`: runs what the model calls. `writer`: of the ring to the worker; `ring` wakes its reader."""
        self._instance = instance
        self._start_call = start_call
        self._writer = writer
        self._ring = ring
        self._numbers = itertools.count(1)
        self._open: dict[int, OnAnswer] = {}
        self._calls: dict[int, OpenCall] = {}
        self.traces: dict[int, Trace] = {}
        """Of the open requests that are traced, by their numbers: calls that a model makes for them belong to them."""
        self.said = 0
        """How many messages there were."""
        self._sender = TensorSender(self._allocate, self._send)
        """Of the answers to calls."""
        self._unread: dict[int, object] = {}
        """By place, what the worker has not read yet: answers and layouts, and what references in them lead to."""
        self._waiting: deque[bytes] = deque()
        """Messages that are still to be posted."""
        self._waiting_since = 0.0
        self._retry: TimerHandle | None = None

    def owed(self, batch: int) -> Owed:
        """See Instance. `batch`: as of Owed."""
        return Owed(batch, len(self._open), len(self._calls), self.said)

    @property
    def is_expected(self) -> bool:
        """The worker has something to say."""
        return bool(self._open or self._calls or self._unread)

    def open_request(self, on_answer: OnAnswer) -> int:
        """The number of a request that is about to be sent to the worker; what the model responds to it comes to
        `on_answer`, until a last answer, `close_requests`, or the worker's end."""
        number = next(self._numbers)
        self._open[number] = on_answer
        return number

    def close_requests(self, numbers: Iterable[int]) -> None:
        """They have been answered."""
        for number in numbers:
            self._open.pop(number, None)
            if self.traces:
                self.traces.pop(number, None)

    def cancel(self, number: int) -> None:
        """Let the model know that nobody waits for a request any more."""
        if number in self._open:
            self._send(ENTRY.pack(CANCELLED, 0, 0, 0, number, 0, 0))

    def answer_call(self, number: int, answer: Result | InferResponse | None, final: bool, references: int = 0) -> None:
        """Tensors are copied before it returns. `references`: how many of the first ones are references."""
        if self._instance.has_ended:
            return
        if final and self._calls.pop(number, None) is None:
            return
        try:
            entry = self._sender.response(number, answer, final, references)
            if references and isinstance(answer, ModelResponse):
                place = ENTRY.unpack(entry)[5]
                self._unread[place] = (self._unread[place], answer.slot)
        except ServeError as error:
            fault = internal(f"the answer to a call cannot be sent to the model: {error}")
            entry = self._sender.response(number, fault, final)
        self._send(entry)

    def _allocate(self, nbytes: int) -> tuple[int, memoryview]:
        """A slot that is the worker's until it has read it. Raises: HeapFull."""
        slot, view = self._instance.inputs.place(nbytes)
        self._unread[slot.offset] = slot
        return slot.offset, view

    def _send(self, entry: bytes) -> None:
        if self._instance.has_ended:
            return
        if not self._waiting:
            self._waiting_since = time.monotonic()
        self._waiting.append(entry)
        if self._retry is None:
            self._send_waiting()

    def _send_waiting(self) -> None:
        """Post as many messages as find room; the others are tried again."""
        self._retry = None
        waiting, now = self._waiting, time.monotonic()
        count = min(len(waiting), self._instance.room(self._writer))
        if self._instance.has_ended:
            return
        if count:
            self._writer.post(b"".join([waiting.popleft() for _ in range(count)]))
            self._ring()
            self._waiting_since = now
        if now - self._waiting_since > STALL_SECONDS or len(waiting) > MOST_WAITING + len(self._open):
            self._instance.break_off(f"it has not taken its answers, {len(waiting)} messages wait")
        elif waiting:
            self._retry = self._instance.plane.call_at(now + _RETRY_SECONDS, self._send_waiting)

    # What the worker says

    def take_response(self, flags: int, code: int, layout: int, request: int, place: int, nbytes: int) -> None:
        """RESPONSE. Raises: ValueError."""
        self.said += 1
        final = bool(flags & (FINAL | AGAIN))
        on_answer = self._open.get(request)
        answer = self._instance.results.layouts.response(flags, code, layout, place, nbytes)
        if isinstance(answer, ModelResponse):
            answer.slot = self._instance.slot(place)
        elif isinstance(answer, ServeError):
            self._instance.give_place(place)
        if final:
            self.close_requests((request,))
        if on_answer is not None:
            self._instance.guarded(on_answer, answer, final)

    def take_call(self, layout: int, number: int, place: int, nbytes: int) -> None:
        """CALL. Raises: ValueError."""
        if number in self._calls:
            raise ValueError(f"two calls of the number {number}")
        self.said += 1
        inputs, text = self._instance.results.layouts.read(layout, place, nbytes)
        call = replace(from_json(ModelCall, text), inputs=tuple(inputs))
        opened = self._calls[number] = OpenCall(self, number, self._instance.slot(place))
        if len(self._calls) > MOST_CALLS:
            opened.send(unavailable(f"the model has {MOST_CALLS} calls under way, and may have no more"))
            return
        try:
            self._start_call(call, opened)
        except Exception as error:
            # A call says what its model likes; what it asks for may not even be a request.
            opened.send(invalid_argument(f"the call cannot be run: {error}"))

    def take_returns(self, places: tuple[int, ...]) -> None:
        """RETURN: the worker has read these answers."""
        for place in places:
            self._unread.pop(place, None)

    def end(self, error: ServeError) -> None:
        """The worker has ended: open requests get the error, calls are cancelled."""
        if self._retry is not None:
            self._retry.cancel()
        lost = RequestLost(error.code, error.text)
        requests, self._open = self._open, {}
        for on_answer in requests.values():
            self._instance.guarded(on_answer, lost, True)
        calls, self._calls = self._calls, {}
        for opened in calls.values():
            self._instance.guarded(opened.cancelled)
        self._unread.clear()
        # It knows these requests, and would keep them until the garbage collector comes by.
        del self._sender


class OpenCall:
    """A call that a model has made, as its server sees it. Implements core.serving.Responder: after the worker's end
    answers are dropped."""

    def __init__(self, requests: InstanceRequests, number: int, slot: Slot) -> None:
        """`slot`: of the call's tensors."""
        self.requests = requests
        self._number = number
        self.slot: Slot | None = slot
        self.may_stay: frozenset[str] = frozenset()
        """The outputs that may be References."""
        self.in_rows = False
        """Each of these is one to a row."""
        self._is_cancelled = False
        self._on_cancel: list[Callable[[], None]] = []

    def send_again(self) -> None:
        """Have the caller send it once more, without references."""
        self.requests.answer_call(self._number, RESCHEDULED, True)
        self.slot = None

    def expect_many(self) -> None:
        """See Responder."""

    def send(self, answer: Answer, final: bool = True) -> None:
        result: Result | InferResponse | None = answer
        staying: list[Tensor] = []
        if self.may_stay and isinstance(answer, InferResponse):
            others: list[Tensor] = []
            for tensor in answer.outputs:
                stays = tensor.name in self.may_stay and tensor.datatype is DataType.BYTES
                (staying if stays else others).append(of_one_row_each(tensor) if stays and self.in_rows else tensor)
            result = ModelResponse([*staying, *others], answer.parameters, answer.slot)
        self.requests.answer_call(self._number, result, final, len(staying))
        if final:
            self.slot = None

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        """See Responder: called back when the worker has ended."""
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
"""Starts a call of a model, which is answered now or later; never blocks (rocserve.scheduling.model_calls)."""
