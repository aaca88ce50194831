"""The worker's end of a conversation: responses from any thread, calls of other models, cancellations."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from collections.abc import Callable

from rocserve.backends.request_model import Answer, ModelCall, Rescheduled, Result
from rocserve.core.errors import ServeError, internal, invalid_argument, unavailable
from rocserve.workers.conversation_wire import (
    ANSWER,
    CANCELLED,
    END,
    MessageReader,
    Parcel,
    pack_answer,
    pack_call,
)
from rocserve.workers.wire import MAXIMUM_DATAGRAM

_REMEMBERED_CANCELLATIONS = 1024


class ModelConversation:
    """Implements request_model.ModelCalls.

    It reads on a thread of its own: an answer to a call must arrive while the model's thread waits for it in `execute`.
    """

    def __init__(self, connection: socket.socket, log: logging.Logger) -> None:
        self._connection = connection
        self._log = log
        # Re-entrant: a request that its model has dropped may be answered from a garbage collection, anywhere.
        self._sending = threading.RLock()
        self._numbers = itertools.count(1)
        self._calls: dict[int, Callable[[Answer | None, bool], None]] = {}
        self._responders: dict[int, ConversationResponder] = {}
        self._left_early: dict[int, bool] = {}
        """Requests that were cancelled before they came up here, and some that had ended."""

    def start(self) -> None:
        threading.Thread(target=self._read, name="conversation", daemon=True).start()

    def call(self, call: ModelCall, on_answer: Callable[[Answer | None, bool], None]) -> None:
        """See request_model.ModelCalls.

        Raises:
            ServeError: INVALID_ARGUMENT, the call cannot be sent; UNAVAILABLE, the server is gone.
        """
        number = next(self._numbers)
        try:
            parcel = pack_call(number, call)
        except ValueError as error:
            raise invalid_argument(f"the call of model '{call.model_name}' cannot be sent: {error}") from None
        self._calls[number] = on_answer
        try:
            self._send(parcel)
        except BaseException:
            self._calls.pop(number, None)
            raise

    def open_request(self, number: int) -> ConversationResponder:
        """Answers the request that the server gave this number."""
        responder = self._responders[number] = ConversationResponder(self, number)
        if self._left_early.pop(number, False):
            responder.is_cancelled = True
        return responder

    def close_request(self, number: int) -> None:
        self._responders.pop(number, None)

    def send_answer(self, number: int, answer: Result | None, final: bool) -> None:
        """Waits while the server is slow to read. Raises: ValueError: it cannot be sent."""
        self._send(pack_answer(number, answer, final))

    def _send(self, parcel: Parcel) -> None:
        try:
            with self._sending:
                parcel.send(self._connection)
        except OSError as error:
            raise unavailable(f"the server cannot be reached: {error}") from error
        finally:
            parcel.close()

    def _read(self) -> None:
        reader = MessageReader(self._connection, memoryview(bytearray(MAXIMUM_DATAGRAM)))
        while True:
            try:
                message = reader.read()
            except (EOFError, OSError):
                break
            if message.kind in (ANSWER, END):
                calls, number = self._calls, message.number
                on_answer = calls.pop(number, None) if message.is_final else calls.get(number)
                if on_answer is not None and not isinstance(message.answer, Rescheduled):
                    self._tell(on_answer, message.answer, message.is_final)
            elif message.kind == CANCELLED:
                self._cancel(message.number)
        for on_answer in list(self._calls.values()):
            self._tell(on_answer, unavailable("the server is gone"), True)

    def _cancel(self, number: int) -> None:
        self._left_early[number] = True
        if len(self._left_early) > _REMEMBERED_CANCELLATIONS:
            del self._left_early[next(iter(self._left_early))]
        # Looked up only now: `open_request` does the two in the other order.
        responder = self._responders.get(number)
        if responder is not None:
            responder.is_cancelled = True

    def _tell(self, on_answer: Callable[[Answer | None, bool], None], answer: Answer | None, final: bool) -> None:
        try:
            on_answer(answer, final)
        except Exception:
            self._log.exception("the answer to a call could not be handled")


class ConversationResponder:
    """Implements request_model.RequestResponder; an answer that needs no conversation goes with the batch instead."""

    __slots__ = ("_conversation", "_ended", "_lock", "_number", "_spoken", "is_cancelled")

    def __init__(self, conversation: ModelConversation, number: int) -> None:
        self._conversation = conversation
        self._number = number
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
            try:
                # Under the lock: nothing may overtake what is the last.
                self._conversation.send_answer(self._number, answer, final)
            except ValueError as error:
                raise internal(f"the response cannot be sent: {error}") from None
            self._spoken = True
            if final:
                self._end()

    def claim(self) -> bool:
        """Take the request out of the conversation, for an answer that goes with its batch; False when something has
        been said to it there."""
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
        self._conversation.close_request(self._number)
