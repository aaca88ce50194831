"""The service of a model that sees each request for itself: one instance, all of it on the worker's main thread.

Users' models may load what works only on the thread that loaded it, or on the main thread, so initialize, execute and
finalize all run there. A second thread waits for the end on the control socket, a third reads the back channel.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rocserve.backends.base import Batch, model_properties
from rocserve.backends.request_model import Answer, ModelRequest, RequestModel, RequestModelSource, Result
from rocserve.core.custom_metrics import MetricChanges
from rocserve.core.errors import ServeError
from rocserve.core.requests import Signature
from rocserve.workers.back_channel import BackChannel
from rocserve.workers.batch_inputs import separate
from rocserve.workers.messages import Load, WarmUp
from rocserve.workers.model_service import model_source
from rocserve.workers.request_executor import RequestExecutor
from rocserve.workers.warmup import warm_up_batches
from rocserve.workers.worker_end import ServerGone, SharedWorkerEnd


class RequestService:
    """Implements model_service.ModelService."""

    def __init__(
        self,
        load: Load,
        connection: socket.socket,
        report: Callable[[str], None],
        send_metrics: Callable[[MetricChanges], None],
        log: logging.Logger,
    ) -> None:
        """`report`: see backends.base.ModelSource; `send_metrics`: see backends.request_model.RequestModelSource.

        Raises:
            ServeError or any exception: the model cannot be loaded.
        """
        self._end = SharedWorkerEnd(connection)
        self._log = log
        self._model_folder = Path(load.model_folder)
        self._back = BackChannel(self._end, log)
        self._back.start()
        source = RequestModelSource(
            model_source(load, report), load.config_json, self._back, load.instance_name, send_metrics
        )
        self._model: RequestModel = importlib.import_module(load.engine).load(source)

    @property
    def signature(self) -> Signature:
        return self._model.signature

    @property
    def properties(self) -> Mapping[str, str]:
        """See ModelService."""
        return model_properties(self._model)

    def warm_up(self, message: WarmUp) -> None:
        """See ModelService."""
        self._model.initialize(message.config, message.config_json)
        for batch in warm_up_batches(message.config, self._model_folder):
            for answer in self._run_sample(batch):
                if isinstance(answer, ServeError):
                    raise answer

    def serve(self, ready: Callable[[], None], wait_for_end: Callable[[], bool]) -> bool:
        """See ModelService."""
        executor = RequestExecutor(self._end, self._model, self._back, self._log)
        is_wanted = True

        def stop() -> None:
            nonlocal is_wanted
            is_wanted = wait_for_end()
            executor.stop(is_wanted)

        control = threading.Thread(target=stop, name="control", daemon=True)
        control.start()
        ready()
        try:
            executor.run()
        except ServerGone:
            pass
        except BaseException:
            # An instance that cannot go on must not look as if it could: the server restarts the worker.
            self._log.exception("an instance failed")
            os._exit(70)
        # Where the server is gone, the connection may have told of it first.
        control.join()
        return is_wanted

    def renew(self, instances: Sequence[socket.socket]) -> None:
        """See ModelService."""
        self._back.stop()
        self._end.close()
        self._end = SharedWorkerEnd(instances[0])
        self._back.renew(self._end)
        self._back.start()

    def close(self) -> None:
        self._model.close()

    def _run_sample(self, batch: Batch) -> Iterator[Result | None]:
        """The last answer to each request of a sample; one that is wanted again has run for once."""
        responders = [_SampleResponder() for _ in batch.request_sizes]
        requests = [
            ModelRequest(inputs, batch.requested_outputs, responder)
            for inputs, responder in zip(separate(batch), responders, strict=True)
        ]
        answers = self._model.execute(requests)
        for answer, responder in zip(answers, responders, strict=True):
            yield answer if answer is not None else responder.wait()


class _SampleResponder:
    """Takes the answers to one request of a warm-up sample."""

    is_cancelled = False

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._answer: Answer | None = None

    def send(self, answer: Answer | None, final: bool) -> None:
        if self._ended.is_set():
            raise RuntimeError("the final response to this request has been sent before")
        # An error is what counts, wherever it stands among the responses.
        if not isinstance(self._answer, ServeError):
            self._answer = answer
        if final:
            self._ended.set()

    def wait(self) -> Answer | None:
        self._ended.wait()
        return self._answer
