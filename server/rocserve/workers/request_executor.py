"""The worker's end of an instance whose model sees each request for itself: requests come in, answers go out."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence

from rocserve.backends.request_model import (
    Answer,
    ModelRequest,
    ModelResponse,
    RequestModel,
    Rescheduled,
    Result,
)
from rocserve.core.errors import ServeError, StatusCode
from rocserve.workers.batch_loop import error_text, failure_tail, input_tensors, serve_batches, stop_serving
from rocserve.workers.current_requests import begin_requests, end_requests
from rocserve.workers.memory import Arena
from rocserve.workers.messages import REQUEST_DETAILS, BatchLayout
from rocserve.workers.model_conversation import ConversationResponder, ModelConversation
from rocserve.workers.request_details import DetailsReader
from rocserve.workers.request_inputs import NOT_RAGGED, separate
from rocserve.workers.request_results import RequestResultWriter
from rocserve.workers.wire import (
    EXECUTE_FAILED,
    EXECUTED,
    HEADER,
    MAXIMUM_DATAGRAM,
    LayoutReader,
    unpack_tail,
)


class RequestExecutor:
    """Serves one channel until the server closes it. One thread, no hand-over."""

    def __init__(
        self,
        channel: socket.socket,
        arenas: Sequence[Arena],
        model: RequestModel,
        conversation: ModelConversation,
        log: logging.Logger,
    ) -> None:
        self._socket = channel
        self._model = model
        self._conversation = conversation
        self._log = log
        self._input_arenas = arenas[0::2]
        self._writers = [RequestResultWriter(arena) for arena in arenas[1::2]]
        self._reader = LayoutReader(BatchLayout)
        self._details = DetailsReader()

    def run(self) -> None:
        """Until the server closes the channel, or `stop`."""
        serve_batches(self._socket, self._execute)

    def stop(self) -> None:
        """End `run` after the batches that were already sent. From any thread."""
        stop_serving(self._socket)

    def _execute(self, slot: int, batch_id: int, tail: bytes) -> bytes:
        """The answer to one batch."""
        input_end = output_start = time.monotonic_ns()
        responders: list[ConversationResponder] = []
        try:
            layout, requests = self._receive(slot, tail, responders)
            input_end = time.monotonic_ns()
            together = [[request] for request in requests] if layout.one_by_one else [requests]
            answers = [answer for batch in together for answer in self._run(batch)]
            output_start = time.monotonic_ns()
            settled = [
                _settled(answer, request.requested_outputs, responder)
                for answer, request, responder in zip(answers, requests, responders, strict=True)
            ]
            kind, answer = EXECUTED, self._writers[slot].write(settled)
            if len(answer) > MAXIMUM_DATAGRAM - HEADER.size:
                raise RuntimeError(f"the layout of the outputs takes {len(answer)} bytes, more than a message can hold")
        except BaseException as error:
            kind, answer = EXECUTE_FAILED, failure_tail(self._serve_error(error))
            output_start = max(output_start, input_end)
            for responder in responders:
                responder.claim()
        return HEADER.pack(kind, slot, batch_id, input_end, output_start, time.monotonic_ns()) + answer

    def _receive(
        self, slot: int, tail: bytes, responders: list[ConversationResponder]
    ) -> tuple[BatchLayout, list[ModelRequest]]:
        """The requests of a batch; what answers them is appended to `responders`, also where this fails."""
        numbers, body = unpack_tail(tail)
        layout = self._reader.read(body)
        inputs = input_tensors(layout, numbers, self._input_arenas[slot])
        written = self._details.read(bytes(inputs.pop(REQUEST_DETAILS).data))
        ragged = NOT_RAGGED if layout.ragged is None else layout.ragged.inputs
        requests: list[ModelRequest] = []
        for said, tensors in zip(written, separate(inputs, layout.request_sizes, ragged), strict=True):
            responder = self._conversation.open_request(said.number)
            details = said.details
            responders.append(responder)
            requests.append(
                ModelRequest(
                    tensors,
                    details.requested_outputs,
                    responder,
                    said.request_id,
                    said.correlation_id,
                    said.flags,
                    details.priority,
                    details.timeout_microseconds,
                    details.parameters,
                    said.number,
                    details.trace_context,
                )
            )
        return layout, requests

    def _run(self, requests: Sequence[ModelRequest]) -> Sequence[Result | None]:
        """What the model gives, an error for each request where it raises."""
        token = begin_requests(tuple([request.id for request in requests]))
        try:
            answers = self._model.execute(requests)
            if len(answers) != len(requests):
                raise RuntimeError(f"the model gave {len(answers)} answers to {len(requests)} requests")
        except BaseException as error:
            # SystemExit as well: a model that calls sys.exit() fails its batch, it does not take the worker along.
            told = self._serve_error(error)
            return [told] * len(requests)
        finally:
            end_requests(token)
        return answers

    def _serve_error(self, error: BaseException) -> ServeError:
        if isinstance(error, ServeError):
            return error
        self._log.error("the model failed to run a batch", exc_info=error)
        return ServeError(StatusCode.INTERNAL, error_text(error))


def _settled(
    answer: Result | None, requested_outputs: tuple[str, ...], responder: ConversationResponder
) -> Answer | None:
    """What goes with the batch: the answer, unless the request is answered over the conversation."""
    if answer is None:
        return None
    if isinstance(answer, Rescheduled):
        # Over the conversation, behind what the model may have said to the request there.
        responder.end_with(answer)
        return None
    if isinstance(answer, ModelResponse):
        outputs = [tensor for tensor in answer.outputs if tensor.name in requested_outputs]
        if len(outputs) < len(answer.outputs):
            answer = ModelResponse(outputs, answer.parameters)
    if responder.claim():
        return answer
    responder.end_with(answer)
    return None
