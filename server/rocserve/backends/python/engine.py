"""Runs Python models in a worker: loads a model, executes its requests, and checks its answers."""

from __future__ import annotations

import asyncio
import importlib
import importlib.machinery
import importlib.util
import logging
import os
import sys
import traceback
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from rocserve.backends.base import ModelSource
from rocserve.backends.python.abandoned_requests import AbandonedRequests
from rocserve.backends.python.event_loop import EventLoop
from rocserve.backends.python.pb_utils import MODULE_NAMES, make_module
from rocserve.backends.python.pb_utils.calls import Caller
from rocserve.backends.python.pb_utils.errors import TritonModelException
from rocserve.backends.python.pb_utils.metrics import ModelMetrics
from rocserve.backends.python.pb_utils.request import InferenceRequest, received_request
from rocserve.backends.python.pb_utils.response import InferenceResponse, InferenceResponseSender, answer_of
from rocserve.backends.python.pb_utils.tensor import Tensor, host_tensor, wrap_in_place, wrapper_of
from rocserve.backends.python.signature import read_signature
from rocserve.backends.request_model import (
    RESCHEDULED,
    Answer,
    ModelRequest,
    ModelResponse,
    RequestModel,
    RequestModelSource,
    Result,
)
from rocserve.core import tensors as core
from rocserve.core.device_references import DEVICE_PROPERTY
from rocserve.core.errors import ServeError, internal, invalid_argument
from rocserve.core.model_config import InstanceKind, ModelConfig
from rocserve.core.printable import names_hint
from rocserve.core.requests import Signature

if TYPE_CHECKING:
    from rocserve.backends.device_tensors import DeviceTensors, SharedTensor


_LOG = logging.getLogger(__name__)
_IS_CLOSED = attrgetter("_is_closed")


@dataclass(eq=False)
class PythonModel:
    """An instance of a model's TritonPythonModel."""

    _model_class: type[Any]
    _request_class: type[InferenceRequest]
    """The class that the model knows as pb_utils.InferenceRequest."""
    signature: Signature
    _request_source: RequestModelSource
    _instance_kind: str
    _tensors: DeviceTensors | None
    """Access to the model's GPU, if the model's inputs may be there; else None."""

    def __post_init__(self) -> None:
        self._source, self._instance_name = self._request_source.source, self._request_source.instance_name
        self._request_class._model_name = self._source.name
        self._request_class._model_version = self._source.version
        self.reads_in_place = self._tensors is None and getattr(self._model_class, "READS_INPUTS_IN_PLACE", False)
        """See request_model.reads_in_place."""
        self._wrap = wrap_in_place if self.reads_in_place else wrapper_of(self._tensors)
        self._caller = self._request_class._caller
        self._caller.tensors = self._tensors
        self.properties = {DEVICE_PROPERTY: self._tensors.name} if self._tensors else {}
        self._abandoned = AbandonedRequests(self._source.name)
        self._loop = EventLoop()
        self._model: Any = None
        self._unknown: set[str] = set()
        """The outputs of which the log says that the configuration lacks them."""

    def initialize(self, config: ModelConfig, config_json: str) -> None:
        """Make the instance and call its `initialize`. Raises ServeError: the model's own, else INTERNAL with the
        line of model code."""
        self._decoupled = config.decoupled
        sequences = config.sequence_batching
        self._request_class._may_reschedule = sequences is not None and sequences.iterative
        self._outputs = tuple(output.name for output in config.outputs)
        self._batching = config.max_batch_size > 0
        source = self._source
        try:
            self._model = self._model_class()
            if hasattr(self._model, "initialize"):
                arguments = {
                    "model_config": config_json,
                    "model_instance_kind": self._instance_kind,
                    "model_instance_name": self._instance_name,
                    # A worker sees only its own GPU, which is the first one to PyTorch and other libraries.
                    "model_instance_device_id": "0",
                    "model_repository": str(source.model_folder),
                    "model_version": str(source.version),
                    "model_name": source.name,
                }
                self._model.initialize(arguments)
        except BaseException as error:
            if isinstance(error, ServeError):
                raise
            fault = internal(fault_text(error, source.model_folder))
            raise (fault.lasting() if _is_of_text(error) else fault) from error
        finally:
            keep_server_log()
        self._caller.calls = self._request_source.calls

    def execute(self, requests: Sequence[ModelRequest]) -> Sequence[Result | None]:
        """Raises ServeError (INTERNAL) if the model's code raises or returns an invalid value."""
        senders: list[InferenceResponseSender] = []
        received: list[InferenceRequest] = []
        for request in requests:
            outputs = request.requested_outputs or self._outputs
            to_answer = partial(self._answer, outputs, request.reference_outputs)
            sender = InferenceResponseSender(request.responder, self._decoupled, to_answer, self._abandoned.take)
            senders.append(sender)
            received.append(received_request(self._request_class, request, outputs, sender, self._wrap))
        if self._tensors is not None:
            self._tensors.wait()
        try:
            # A copy, because the model may empty the list. asyncio.iscoroutine would take generators for coroutines.
            returned = self._model.execute([*received])
            if isinstance(returned, Coroutine):
                running = self._loop.submit(returned)
                if self._decoupled:
                    running.add_done_callback(partial(self._background_ended, senders))
                    self._abandoned.watch()
                    return [None] * len(senders)
                returned = running.result()
            results = self._results(returned, senders)
        except BaseException as error:
            # Also SystemExit: sys.exit() in a model fails its batch and does not end the worker.
            for one in senders:
                one._close()
            raise self._execute_fault(error) from None
        if not all(map(_IS_CLOSED, senders)):
            self._abandoned.watch()
        return results

    @property
    def readiness_check(self) -> Callable[[], bool] | None:
        """See request_model.readiness_check."""
        return self._is_ready if hasattr(self._model, "is_ready") else None

    def _is_ready(self) -> bool:
        ready = self._model.is_ready()
        if isinstance(ready, Coroutine):
            ready = self._loop.submit(ready).result()
        if not isinstance(ready, bool):
            kind = type(ready)
            # numpy's is also called bool.
            name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
            # Triton's words.
            raise TypeError(f"is_ready() must return a boolean value, got {name}")
        return ready

    def close(self) -> None:
        """Stop the coroutines, call the model's `finalize`, if it has one, and end the requests that it still holds."""
        self._caller.calls = None
        self._loop.close()
        if hasattr(self._model, "finalize"):
            try:
                self._model.finalize()
            except BaseException:
                _LOG.exception("model '%s' failed to finalize", self._source.name)
        self._model = None
        self._abandoned.close()

    def _results(self, returned: Any, senders: Sequence[InferenceResponseSender]) -> list[Result | None]:
        """Raises ServeError, in Triton's words, if `execute` returned an invalid value."""
        if returned is None:
            returned = [None] * len(senders)
        elif self._decoupled:
            raise self._decoupled_fault()
        elif not isinstance(returned, list):
            raise internal(f"Expected a list in the execute return, found type '{type(returned)}'.")
        elif len(returned) != len(senders):
            raise internal(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects."
                f" InferenceRequest(s) size is:{len(senders)}, and InferenceResponse(s) size is:{len(returned)}"
            )
        return [self._result(*one) for one in zip(returned, senders, strict=True)]

    def _result(self, response: Any, sender: InferenceResponseSender) -> Result | None:
        if sender._is_rescheduled:
            if response is not None:
                raise internal(
                    "Expected a None object in the execute function return list for reschduled request, found type"
                    f" '{type(response)}'."
                )
            # The request's next run gives its further responses. If it has ended already, there is no next run.
            return RESCHEDULED if sender._close() else None
        if response is None:
            return None
        if not isinstance(response, InferenceResponse):
            raise internal(
                "Expected an 'InferenceResponse' object in the execute function return list, found type"
                f" '{type(response)}'."
            )
        try:
            return sender._answer_returned(response)
        except TritonModelException as error:
            raise internal(str(error)) from None

    def _answer(
        self, wanted: tuple[str, ...], reference_outputs: tuple[str, ...], response: InferenceResponse
    ) -> Answer:
        """Return a response's wanted tensors; `reference_outputs` stay on the GPU. Safe on any thread."""
        tensors = self._tensors
        if tensors is None or not reference_outputs:
            return self._noted(response, answer_of(response, wanted))
        kept: list[SharedTensor] = []

        def sent(tensor: Tensor) -> core.Tensor:
            if tensor.is_cpu() or tensor.name() not in reference_outputs:
                return host_tensor(tensor)
            kept.append(tensors.share(tensor._on_device))
            return kept[-1].pack_references(tensor.name(), self._batching)

        answer = answer_of(response, wanted, sent)
        tensors.wait()
        answer = self._noted(response, answer)
        return replace(answer, slot=kept) if kept and isinstance(answer, ModelResponse) else answer

    def _noted(self, response: InferenceResponse, answer: Answer) -> Answer:
        """Return the answer. Warn once of each output that it lacks because the configuration does, but of the first 20
        only."""
        if not isinstance(answer, ModelResponse) or len(answer.outputs) == len(response._tensors):
            return answer
        for name in [tensor._tensor.name for tensor in response._tensors]:
            if name not in self._outputs and name not in self._unknown and len(self._unknown) < 20:
                self._unknown.add(name)
                text = "model '%s' returned the output '%s', which its configuration lacks, so no client gets it%s"
                _LOG.warning(text, self._source.name, name, names_hint("its outputs are", name, self._outputs))
        return answer

    def _decoupled_fault(self) -> ServeError:
        return internal(
            f"Python model '{self._instance_name}' is using the decoupled mode and the execute function must"
            " return None."
        )

    def _background_ended(self, senders: Sequence[InferenceResponseSender], ended: Future[Any]) -> None:
        """Let the requests of a coroutine run again that are to, or, if it ended by an exception, fail all of them:
        nothing else would end them."""
        fault = asyncio.CancelledError("the model was unloaded") if ended.cancelled() else ended.exception()
        if fault is None and ended.result() is not None:
            fault = self._decoupled_fault()
        error = None if fault is None else self._execute_fault(fault)
        for sender in senders:
            # Another thread may have ended the request meanwhile, or the server may be gone.
            with suppress(TritonModelException, ServeError, OSError):
                if error is not None:
                    sender._fail(error)
                elif sender._is_rescheduled:
                    sender._reschedule()

    def _execute_fault(self, error: BaseException) -> ServeError:
        name = self._instance_name
        _LOG.error("model '%s' failed to process its request(s)", name, exc_info=error)
        return internal(f"Failed to process the request(s) for model '{name}', message: {exception_text(error)}")


def exception_text(error: BaseException) -> str:
    """Return the last line of Python's traceback: the exception's type and text. A ServeError has only its text."""
    if isinstance(error, ServeError):
        return error.text
    try:
        text = str(error).strip()
    except Exception:
        text = "<exception str() failed>"  # The words of Python's traceback.
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def fault_text(error: BaseException, model_folder: Path) -> str:
    """Return the exception's type and text, and the last line of the model's own code in its traceback."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({_relative(error.filename, model_folder)}, line {error.lineno})"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).is_relative_to(model_folder):
            place = f"{_relative(frame.filename, model_folder)}, line {frame.lineno}"
            return f"{exception_text(error)} ({place}, in {frame.name})"
    return exception_text(error)


def _is_of_text(error: BaseException) -> bool:
    """Return whether the model's code itself is wrong. Other errors may have any cause, such as a service that has not
    started yet, or a package that is installed later."""
    return isinstance(error, SyntaxError) or type(error) is NameError


def _relative(filename: str, model_folder: Path) -> str:
    path = Path(filename)
    return str(path.relative_to(model_folder)) if path.is_relative_to(model_folder) else filename


def keep_server_log() -> None:
    """Enable the server's own loggers again. If a model configures logging by dictConfig or fileConfig without
    `disable_existing_loggers`, all loggers are disabled, and the model's lines through pb_utils.Logger would be lost
    too."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "rocserve" and isinstance(logger, logging.Logger):
            logger.disabled = False


def load(model: RequestModelSource) -> RequestModel:
    """Import the model's file and read the model's configuration, without initialising it. Raises ServeError
    (INVALID_ARGUMENT), with the line, if the file cannot be imported, has no TritonPythonModel with an `execute`, or
    its auto_complete_config fails."""
    source = model.source
    utilities = make_module(source.version_folder, Caller(), ModelMetrics(model.send_metrics))
    try:
        try:
            module = import_model(source.model_file, source.model_folder, utilities)
        finally:
            keep_server_log()
        model_class: type[Any] | None = getattr(module, "TritonPythonModel", None)
        if model_class is None:
            raise invalid_argument(
                f"{source.model_file.name} of model '{source.name}' defines no class TritonPythonModel"
            )
        if not callable(getattr(model_class, "execute", None)):
            raise invalid_argument(f"Python model {source.model_file} does not implement `execute` method.")
        if type(in_place := getattr(model_class, "READS_INPUTS_IN_PLACE", False)) is not bool:
            raise invalid_argument(
                f"model '{source.name}' has READS_INPUTS_IN_PLACE {in_place!r}; expected True or False"
            )
        signature = read_signature(model_class, model.config_json, source.name)
    except ServeError:
        raise
    except BaseException as error:
        # Also SystemExit: sys.exit() in a model's file is the model's fault, too.
        fault = invalid_argument(fault_text(error, source.model_folder))
        raise (fault if _is_of_text(error) else fault.passing()) from error
    kind = source.instance_kind
    if kind is InstanceKind.AUTO:
        kind = InstanceKind.CPU if source.device is None else InstanceKind.GPU
    wanted = source.config.parameters.get("FORCE_CPU_ONLY_INPUT_TENSORS", "yes").strip().lower() == "no"
    tensors = _device_tensors(source) if wanted and kind is InstanceKind.GPU else None
    kind_name = kind.value.removeprefix("KIND_")
    return PythonModel(model_class, utilities.InferenceRequest, signature, model, kind_name, tensors)


def _device_tensors(source: ModelSource) -> DeviceTensors | None:
    """Return access to tensors on the model's GPU; None if the model has no PyTorch for it."""
    try:
        shared = importlib.import_module("rocserve.backends.device_tensors")
        device = shared.instance_gpu(source.device)
    except (ImportError, RuntimeError) as error:
        _LOG.warning("model '%s' gets its inputs in CPU memory: %s", source.name, error)
        return None
    tensors: DeviceTensors = shared.DeviceTensors(device)
    return tensors


class SourceLoader(importlib.machinery.SourceFileLoader):
    """Compiles on each import: no bytecode is written into the repository, and no old bytecode is used. Python compares
    the times of bytecode and source in whole seconds, but a model may change twice in a second."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def import_model(model_file: Path, model_folder: Path, utilities: ModuleType) -> ModuleType:
    """Import a model as the module `<version>.<file's name>`, as in Triton. `utilities` becomes the module
    `triton_python_backend_utils`. The version's and the model's folders are appended to sys.path, and the version's
    folder is a package, so a file next to model.py can be imported by its name or relatively. Children spawned by
    multiprocessing inherit the path, and find a separate `triton_python_backend_utils` in it. Only for a process that
    has one model."""
    version_folder = model_file.parent
    sys.modules.update(dict.fromkeys(MODULE_NAMES, utilities))
    # As in Triton, models see no arguments. A model that parses a command line must not find the worker's.
    sys.argv = [""]
    environment = Path(sys.prefix)
    details = (
        (importlib.machinery.ExtensionFileLoader, importlib.machinery.EXTENSION_SUFFIXES),
        (SourceLoader, importlib.machinery.SOURCE_SUFFIXES),
        (importlib.machinery.SourcelessFileLoader, importlib.machinery.BYTECODE_SUFFIXES),
    )

    def find_in(path: str | os.PathLike[str]) -> importlib.machinery.FileFinder:
        folder = Path(path)
        if not folder.is_relative_to(model_folder) or folder.is_relative_to(environment):
            raise ImportError("not a folder of the model", path=str(path))
        return importlib.machinery.FileFinder(str(path), *details)

    sys.path_hooks.insert(0, find_in)
    for folder in (version_folder, model_folder, Path(__file__).with_name("spawned")):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    package = ModuleType(version_folder.name)
    package.__path__ = [str(version_folder)]
    sys.modules[package.__name__] = package
    name = f"{package.__name__}.{model_file.stem}"
    loader = SourceLoader(name, str(model_file))
    spec = importlib.util.spec_from_file_location(name, model_file, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader.exec_module(module)
    return module
