"""What a worker does with its model, once it is told to load it."""

from __future__ import annotations

import logging
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rocserve.backends.base import LoadedModel, ModelSource, model_properties
from rocserve.backends.request_model import RequestModel
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.requests import Signature
from rocserve.workers.messages import Load, WarmUp
from rocserve.workers.worker_end import ServerGone, error_text


class ModelService(ABC):
    """A loaded model and what serves it. All calls come on the worker's main thread."""

    batches_at_once = 1
    """See Loaded."""

    def __init__(self, model: LoadedModel | RequestModel, load: Load, log: logging.Logger) -> None:
        self._loaded = model
        self._model_folder = Path(load.model_folder)
        self._log = log

    @property
    def signature(self) -> Signature:
        return self._loaded.signature

    @property
    def properties(self) -> Mapping[str, str]:
        """See backends.base.model_properties; read from any thread."""
        return model_properties(self._loaded)

    @abstractmethod
    def warm_up(self, message: WarmUp) -> None:
        """Raises: ServeError or any exception: the model cannot be served."""

    @abstractmethod
    def serve(self, ready: Callable[[], None], wait_for_end: Callable[[], bool]) -> bool:
        """Say `ready` once batches are taken, and take them until `wait_for_end` returns; then end those in hand, or,
        where it returns False, drop them. Returns what it returned."""

    @abstractmethod
    def renew(self, instances: Sequence[socket.socket]) -> None:
        """Serve on other sockets from now on; before `serve`."""

    def close(self) -> None:
        self._loaded.close()

    def _run_instance(self, run: Callable[[], None]) -> None:
        """Take batches until the server closes the connection, or the end is stopped."""
        try:
            run()
        except ServerGone:
            pass
        except BaseException:
            # An instance that cannot go on must not look as if it could: the server restarts the worker.
            self._log.exception("an instance failed")
            os._exit(70)


def serve_error(error: BaseException, log: logging.Logger) -> ServeError:
    """What is told of a batch that failed. SystemExit is such an error as well: a model that calls sys.exit() fails its
    batch, it does not take the worker along."""
    if isinstance(error, ServeError):
        return error
    log.error("the model failed to run a batch", exc_info=error)
    return ServeError(StatusCode.INTERNAL, error_text(error))


def model_source(load: Load, report: Callable[[str], None]) -> ModelSource:
    """What an engine is told of the model that it is to load."""
    return ModelSource(
        name=load.model_name,
        version=load.version,
        model_folder=Path(load.model_folder),
        version_folder=Path(load.version_folder),
        model_file=Path(load.model_file),
        config=load.config,
        instance_kind=load.plan.kind,
        device=load.plan.device,
        instance_count=load.plan.instance_count,
        memory_bytes=load.memory_bytes,
        shares_process=load.shares_process,
        settings=load.settings,
        report=report,
    )
