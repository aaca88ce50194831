"""A model written against Triton's Python interface: its life, its executions, and what it may answer."""

from __future__ import annotations

import asyncio
import logging
import threading
import traceback
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from rocserve.backends.python.pb_utils.calls import Caller
from rocserve.backends.python.pb_utils.errors import TritonModelException
from rocserve.backends.python.pb_utils.request import InferenceRequest, received_request
from rocserve.backends.python.pb_utils.response import InferenceResponse, RequestAnswers, answer_of
from rocserve.backends.python.pb_utils.tensor import Tensor, host_tensor, wrapper_of
from rocserve.backends.request_model import RESCHEDULED, Answer, ModelRequest, ModelResponse, RequestResponder, Result
from rocserve.core import tensors as core
from rocserve.core.device_references import DEVICE_PROPERTY
from rocserve.core.errors import ServeError, internal
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import Signature

if TYPE_CHECKING:
    from rocserve.backends.device_tensors import DeviceTensors, SharedTensor


class EventLoop:
    """A loop on a thread of its own, so that coroutines go on while `execute` takes further requests."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closing = False

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Start the coroutine; the loop starts with the first."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._run, args=(self._loop,), name="event loop", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Stop the loop; what has not ended is cancelled."""
        if self._loop is None or self._thread is None:
            return
        self._closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop = self._thread = None

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        self._run_until_closed(loop)
        pending = asyncio.all_tasks(loop)
        for task in pending:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    def _run_until_closed(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            try:
                loop.run_forever()
                return
            except (SystemExit, KeyboardInterrupt):
                # asyncio lets these end the loop, too; only then would their coroutine's future hear of them.
                if self._closing:
                    return


class AbandonedRequests:
    """Takes dropped requests from garbage collections and answers them on a thread of its own.

    A garbage collection may come while the same thread holds a lock that answering needs; SimpleQueue's `put` is made
    for that, and the thread is there to take from it.
    """

    def __init__(self, model_name: str, decoupled: bool) -> None:
        self._model_name = model_name
        self._decoupled = decoupled
        self._dropped: SimpleQueue[tuple[RequestResponder, bool] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def take(self, responder: RequestResponder, had_response: bool) -> None:
        """From a garbage collection."""
        self._dropped.put((responder, had_response))

    def watch(self) -> None:
        """Start the thread. Called once a request may be dropped: when `execute` has left one unanswered."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="abandoned requests", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Answer what has been dropped, and end the thread."""
        self.watch()
        assert self._thread is not None
        self._dropped.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (dropped := self._dropped.get()) is not None:
            self._end(*dropped)

    def _end(self, responder: RequestResponder, had_response: bool) -> None:
        error = None
        if self._decoupled or had_response:
            # A client of Triton does not notice that the final flag never came; here it need not wait either.
            _LOG.warning(
                "model '%s' let go of a request without TRITONSERVER_RESPONSE_COMPLETE_FINAL; it is ended",
                self._model_name,
            )
        else:
            error = internal(f"model '{self._model_name}' let go of a request without a response")
        # It may have been answered meanwhile, as when its worker gives up.
        with suppress(RuntimeError):
            responder.send(error, True)


_LOG = logging.getLogger(__name__)
_IS_CLOSED = attrgetter("is_closed")


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """Which model this is, and where it runs."""

    name: str
    version: int
    folder: Path
    instance_name: str
    instance_kind: str
    """CPU, GPU or MODEL."""


class _WrongAnswer(Exception):
    """What `execute` returned may not be; the text alone goes to the client, as in Triton."""


class PythonModel:
    """An instance of a model's TritonPythonModel."""

    def __init__(
        self,
        model_class: type[Any],
        request_class: type[InferenceRequest],
        signature: Signature,
        place: ModelPlace,
        caller: Caller,
        tensors: DeviceTensors | None = None,
    ) -> None:
        """`request_class`: what the model knows as pb_utils.InferenceRequest. `tensors`: of its GPU, where its inputs
        may be on that."""
        self._class = model_class
        self._request_class = request_class
        self._signature = signature
        self._place = place
        self._caller = caller
        self._tensors = caller.tensors = tensors
        self.properties = {DEVICE_PROPERTY: tensors.name} if tensors else {}
        self._loop = EventLoop()
        self._model: Any = None
        self._decoupled = False
        self._iterative = False
        self._outputs: tuple[str, ...] = ()
        self._batching = False
        self._abandoned = AbandonedRequests(place.name, False)

    @property
    def signature(self) -> Signature:
        return self._signature

    def initialize(self, config: ModelConfig, config_json: str) -> None:
        """Make the instance and call its `initialize`, where it has one. Raises: ServeError: INTERNAL; the model's code
        raised, and where."""
        self._decoupled = config.decoupled
        self._iterative = config.sequence_batching is not None and config.sequence_batching.iterative
        self._outputs = tuple(output.name for output in config.outputs)
        self._batching = config.max_batch_size > 0
        self._abandoned = AbandonedRequests(self._place.name, self._decoupled)
        try:
            self._model = self._class()
            if hasattr(self._model, "initialize"):
                self._model.initialize(self._arguments(config_json))
        except BaseException as error:
            raise internal(fault_text(error, self._place.folder)) from error
        finally:
            keep_server_log()
        self._caller.is_open = True

    def execute(self, requests: Sequence[ModelRequest]) -> Sequence[Result | None]:
        """Raises: ServeError: INTERNAL; the model's code raised, or returned what it may not."""
        answers: list[RequestAnswers] = []
        received: list[InferenceRequest] = []
        place = self._place
        wrap = wrapper_of(self._tensors)
        for request in requests:
            outputs = request.requested_outputs or self._outputs
            to_answer = partial(self._answer, outputs, request.may_stay)
            answering = RequestAnswers(request.responder, self._decoupled, to_answer, self._abandoned.take)
            answers.append(answering)
            received.append(
                received_request(
                    self._request_class, request, outputs, place.name, place.version, answering, self._iterative, wrap
                )
            )
        if self._tensors is not None:
            self._tensors.wait()
        try:
            returned = self._model.execute(received)
            if asyncio.iscoroutine(returned):
                running = self._loop.submit(returned)
                if self._decoupled:
                    running.add_done_callback(partial(self._background_ended, answers))
                    returned = None
                else:
                    returned = running.result()
            results = self._results(returned, received, answers)
        except BaseException as error:
            # SystemExit as well: sys.exit() in a model fails its batch and does not take the worker along.
            for each in answers:
                each.close()
            raise self._execute_fault(error) from None
        if not all(map(_IS_CLOSED, answers)):
            self._abandoned.watch()
        return results

    def close(self) -> None:
        """Stop the coroutines, call `finalize`, where the model has one, and end the requests that it still holds."""
        self._caller.is_open = False
        self._loop.close()
        if hasattr(self._model, "finalize"):
            try:
                self._model.finalize()
            except BaseException:
                _LOG.exception("model '%s' failed to finalize", self._place.name)
        self._model = None
        self._abandoned.close()

    def _arguments(self, config_json: str) -> dict[str, str]:
        place = self._place
        return {
            "model_config": config_json,
            "model_instance_kind": place.instance_kind,
            "model_instance_name": place.instance_name,
            # A worker is shown its own GPU only, which is the first that PyTorch and others find there.
            "model_instance_device_id": "0",
            "model_repository": str(place.folder),
            "model_version": str(place.version),
            "model_name": place.name,
        }

    def _results(
        self, returned: Any, received: Sequence[InferenceRequest], answers: Sequence[RequestAnswers]
    ) -> list[Result | None]:
        """Raises: _WrongAnswer: in Triton's words."""
        if returned is None:
            return [self._result(None, *each) for each in zip(received, answers, strict=True)]
        if self._decoupled:
            raise self._decoupled_fault()
        if not isinstance(returned, list):
            raise _WrongAnswer(f"Expected a list in the execute return, found type '{type(returned)}'.")
        if len(returned) != len(answers):
            raise _WrongAnswer(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects."
                f" InferenceRequest(s) size is:{len(answers)}, and InferenceResponse(s) size is:{len(returned)}"
            )
        return [self._result(*each) for each in zip(returned, received, answers, strict=True)]

    def _result(self, response: Any, request: InferenceRequest, answers: RequestAnswers) -> Result | None:
        if request._is_rescheduled:
            if response is not None:
                raise _WrongAnswer(
                    "Expected a None object in the execute function return list for reschduled request, found type"
                    f" '{type(response)}'."
                )
            # Whatever is still to be said is said to the request when it comes again; unless it has ended already.
            return RESCHEDULED if answers.close() else None
        if response is None:
            return None
        if not isinstance(response, InferenceResponse):
            raise _WrongAnswer(
                "Expected an 'InferenceResponse' object in the execute function return list, found type"
                f" '{type(response)}'."
            )
        try:
            return answers.returned(response)
        except TritonModelException as error:
            raise _WrongAnswer(str(error)) from None

    def _answer(self, wanted: tuple[str, ...], may_stay: tuple[str, ...], response: InferenceResponse) -> Answer:
        """A response as it is sent: of its tensors those that are wanted. Those on the GPU are left there where they
        may be. From any thread."""
        tensors = self._tensors
        if tensors is None or not may_stay:
            return answer_of(response, wanted)
        kept: list[SharedTensor] = []

        def sent(tensor: Tensor) -> core.Tensor:
            if tensor.is_cpu() or tensor.name() not in may_stay:
                return host_tensor(tensor)
            kept.append(tensors.share(tensor._on_device))
            return kept[-1].referring(tensor.name(), self._batching)

        answer = answer_of(response, wanted, sent)
        tensors.wait()
        return replace(answer, slot=kept) if kept and isinstance(answer, ModelResponse) else answer

    def _decoupled_fault(self) -> _WrongAnswer:
        return _WrongAnswer(
            f"Python model '{self._place.instance_name}' is using the decoupled mode and the execute function must"
            " return None."
        )

    def _background_ended(self, answers: Sequence[RequestAnswers], ended: Future[Any]) -> None:
        """A decoupled model's coroutine has ended; when by an exception, nobody else will end its requests."""
        if ended.cancelled():
            fault: BaseException | None = asyncio.CancelledError("the model was unloaded")
        else:
            fault = ended.exception()
            if fault is None and ended.result() is not None:
                fault = self._decoupled_fault()
        if fault is not None:
            error = self._execute_fault(fault)
            for each in answers:
                each.fail(error)

    def _execute_fault(self, error: BaseException) -> ServeError:
        name = self._place.instance_name
        _LOG.error("model '%s' failed to process its request(s)", name, exc_info=error)
        text = str(error) if isinstance(error, _WrongAnswer) else exception_text(error)
        return internal(f"Failed to process the request(s) for model '{name}', message: {text}")


def exception_text(error: BaseException) -> str:
    """As Python's last line of a traceback: the type and what it says."""
    if isinstance(error, ServeError):
        return error.text
    try:
        text = str(error).strip()
    except Exception:
        text = "<exception str() failed>"  # Python's words in a traceback.
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def fault_text(error: BaseException, model_folder: Path) -> str:
    """The exception's type and text and the last line of the model's own code that it came from."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({_relative(error.filename, model_folder)}, line {error.lineno})"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).is_relative_to(model_folder):
            place = f"{_relative(frame.filename, model_folder)}, line {frame.lineno}"
            return f"{exception_text(error)} ({place}, in {frame.name})"
    return exception_text(error)


def _relative(filename: str, model_folder: Path) -> str:
    path = Path(filename)
    return str(path.relative_to(model_folder)) if path.is_relative_to(model_folder) else filename


def keep_server_log() -> None:
    """Switch the server's own loggers on again.

    A model that configures logging for itself by dictConfig or fileConfig switches off every logger, unless it
    thinks of `disable_existing_loggers`. Its own lines by pb_utils.Logger would be lost as well.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "rocserve" and isinstance(logger, logging.Logger):
            logger.disabled = False
