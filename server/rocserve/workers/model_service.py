"""What a worker does with its model, once it is told to load it: the service of models that compute on tensors."""

from __future__ import annotations

import importlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rocserve.backends.base import LoadedModel, ModelSource, model_properties
from rocserve.core.requests import Signature
from rocserve.workers.messages import Load, WarmUp
from rocserve.workers.tensor_executor import TensorExecutor
from rocserve.workers.warmup import warm_up_batches, with_ragged_shapes
from rocserve.workers.worker_end import ServerGone, WorkerEnd


class ModelService(Protocol):
    """A loaded model and what serves it. All calls come on the worker's main thread."""

    @property
    def signature(self) -> Signature: ...
    @property
    def properties(self) -> Mapping[str, str]:
        """See backends.base.model_properties; read from any thread."""

    def warm_up(self, message: WarmUp) -> None:
        """Raises: ServeError or any exception: the model cannot be served."""

    def serve(self, ready: Callable[[], None], wait_for_end: Callable[[], bool]) -> bool:
        """Say `ready` once batches are taken, and take them until `wait_for_end` returns; then end those in hand, or,
        where it returns False, drop them. Returns what it returned."""

    def renew(self, instances: Sequence[socket.socket]) -> None:
        """Serve on other sockets from now on; before `serve`."""

    def close(self) -> None: ...


class TensorService:
    """Each instance has a thread; they share the model."""

    def __init__(
        self, load: Load, instances: Sequence[socket.socket], report: Callable[[str], None], log: logging.Logger
    ) -> None:
        """`report`: see backends.base.ModelSource.

        Raises:
            ServeError or any exception: the model cannot be loaded.
        """
        self._instances = instances
        self._log = log
        self._model_folder = Path(load.model_folder)
        self._model: LoadedModel = importlib.import_module(load.engine).load(model_source(load, report))
        self._config = load.config

    @property
    def signature(self) -> Signature:
        return self._model.signature

    @property
    def properties(self) -> Mapping[str, str]:
        """See ModelService."""
        return model_properties(self._model)

    def warm_up(self, message: WarmUp) -> None:
        """See ModelService."""
        samples = warm_up_batches(message.config, self._model_folder)
        self._model.warm_up([with_ragged_shapes(sample, message.config) for sample in samples])
        self._config = message.config

    def serve(self, ready: Callable[[], None], wait_for_end: Callable[[], bool]) -> bool:
        """See ModelService."""
        threads = self._start_executors()
        ready()
        is_wanted = wait_for_end()
        for executor, _ in threads:
            executor.stop(is_wanted)
        for _, thread in threads:
            thread.join()
        return is_wanted

    def renew(self, instances: Sequence[socket.socket]) -> None:
        """See ModelService."""
        self._instances = instances

    def close(self) -> None:
        self._model.close()

    def _start_executors(self) -> list[tuple[TensorExecutor, threading.Thread]]:
        started = []
        for index, connection in enumerate(self._instances):
            executor = TensorExecutor(
                WorkerEnd(connection, len(self._instances) == 1), self._model, self._config, self._log
            )
            thread = threading.Thread(target=self._execute, args=(executor,), name=f"instance {index}", daemon=True)
            thread.start()
            started.append((executor, thread))
        return started

    def _execute(self, executor: TensorExecutor) -> None:
        try:
            executor.run()
        except ServerGone:
            pass
        except BaseException:
            # An instance that cannot go on must not look as if it could: the server restarts the worker.
            self._log.exception("an instance failed")
            os._exit(70)
        finally:
            executor.close()


def model_source(load: Load, report: Callable[[str], None]) -> ModelSource:
    """What an engine is told of the model that it is to load."""
    return ModelSource(
        name=load.model_name,
        version=load.version,
        model_folder=Path(load.model_folder),
        version_folder=Path(load.version_folder),
        model_file=Path(load.model_file),
        config=load.config,
        instance_kind=load.instance_kind,
        device=load.device,
        instance_count=load.instance_count,
        memory_bytes=load.memory_bytes,
        settings=load.settings,
        report=report,
    )
