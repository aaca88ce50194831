"""Runs Python models in the test's own process: real model files, and a fake server around them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rocserve.backends.base import ModelSource
from rocserve.backends.python.engine import load
from rocserve.backends.registry import discover_backends
from rocserve.backends.request_model import (
    Answer,
    ModelCall,
    ModelRequest,
    ModelResponse,
    RequestModel,
    RequestModelSource,
    Result,
)
from rocserve.config.definition import FolderReading, complete_definition, find_model_file
from rocserve.core.model_config import InstanceKind
from rocserve.core.tensors import Tensor, tensor_from_numpy
from rocserve.repository.worker_options import config_json
from support.models import drop
from support.waiting import PATIENCE_SECONDS

MODELS = Path(__file__).parents[1] / "data" / "python-models"

OnAnswer = Callable[[Answer | None, bool], None]


class RecordingResponder:
    """Records what a model sends for a request."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self.sent: list[tuple[Result | None, bool]] = []
        self._ended = threading.Event()

    def send(self, answer: Result | None, final: bool) -> None:
        if self._ended.is_set():
            raise RuntimeError("the final response has been sent")
        self.sent.append((answer, final))
        if final:
            self._ended.set()

    def wait(self) -> list[tuple[Result | None, bool]]:
        """Wait for the last response; return all of them."""
        assert self._ended.wait(PATIENCE_SECONDS), f"no final response came, only {self.sent}"
        return self.sent


class FakeCalls:
    """Answers a model's calls with functions, on a separate thread as a worker does."""

    def __init__(self, **models: Callable[[ModelCall, OnAnswer], None]) -> None:
        self._models = models
        self.calls: list[ModelCall] = []

    def call(self, call: ModelCall, on_answer: OnAnswer) -> None:
        self.calls.append(call)
        threading.Thread(target=self._models[call.model_name], args=(call, on_answer)).start()


def request(
    *,
    responder: RecordingResponder | None = None,
    outputs: tuple[str, ...] = (),
    inputs: Sequence[Tensor] = (),
    details: dict[str, Any] | None = None,
    **arrays: np.ndarray[Any, Any],
) -> ModelRequest:
    """A request with these inputs."""
    tensors = {tensor.name: tensor for tensor in inputs}
    for name, array in arrays.items():
        tensor = tensor_from_numpy(name, array)
        tensors[name] = Tensor(name, tensor.datatype, tensor.shape, bytearray(tensor.data))
    return ModelRequest(tensors, outputs, responder or RecordingResponder(), **(details or {}))


def outputs(answer: Answer | None) -> dict[str, np.ndarray[Any, Any]]:
    assert isinstance(answer, ModelResponse), answer
    return {tensor.name: tensor.numpy() for tensor in answer.outputs}


@contextmanager
def loaded(
    folder: Path, calls: FakeCalls | None = None, kind: InstanceKind = InstanceKind.AUTO, device: int | None = None
) -> Iterator[RequestModel]:
    """A context with the folder's model, loaded as a worker loads it but not initialised. Restores Python's import
    state."""
    path, hooks, modules = list(sys.path), list(sys.path_hooks), set(sys.modules)
    (definition,) = FolderReading(folder, discover_backends()).definitions()
    version_folder = folder / "1"
    source = ModelSource(
        name=definition.name,
        version=1,
        model_folder=folder,
        version_folder=version_folder,
        model_file=find_model_file(definition, version_folder),
        config=definition.config,
        instance_kind=kind,
        device=device,
        instance_count=1,
    )
    try:
        yield load(
            RequestModelSource(source, config_json(definition.message), calls or FakeCalls(), f"{definition.name}_0_0")
        )
    finally:
        sys.path[:] = path
        sys.path_hooks[:] = hooks
        sys.path_importer_cache.clear()
        for name in set(sys.modules) - modules:
            del sys.modules[name]


@contextmanager
def serving(
    folder: Path, calls: FakeCalls | None = None, kind: InstanceKind = InstanceKind.AUTO, device: int | None = None
) -> Iterator[RequestModel]:
    """A context with the folder's model, ready to execute."""
    with loaded(folder, calls, kind, device) as model:
        (definition,) = FolderReading(folder, discover_backends()).definitions()
        complete = complete_definition(definition, model.signature)
        model.initialize(complete.config, config_json(complete.message))
        try:
            yield model
        finally:
            model.close()


@contextmanager
def serving_source(folder: Path, source: str, config: str, calls: FakeCalls | None = None) -> Iterator[RequestModel]:
    """A context with a model of this model.py and config.pbtxt, ready to execute."""
    drop(folder.parent, folder.name, source, config)
    with serving(folder, calls) as model:
        yield model
