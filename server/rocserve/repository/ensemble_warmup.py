"""Warms an ensemble up: its samples go through it and its members, as clients' requests will."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from rocserve.core.errors import ServeError, unavailable
from rocserve.core.requests import InferRequest, InferResponse, InputHead, RequestHead
from rocserve.core.serving import VersionEnding
from rocserve.core.statistics import ModelStatistics
from rocserve.scheduling.ensemble.version import EnsembleVersion
from rocserve.workers.warmup import warm_up_samples


async def warm_up_ensemble(ensemble: EnsembleVersion, folder: Path) -> None:
    """Run each sample of `model_warmup`, one after the other, beside the statistics of the ensemble itself.

    Args:
        folder: the model's, which holds the samples' files.

    Raises:
        ServeError: what the first sample that failed was answered with.
    """
    config, number = ensemble.config, ensemble.version
    for name, batch in warm_up_samples(config, folder):
        trial = EnsembleVersion(config, ensemble.config_message, number, ModelStatistics(), ensemble.tables)
        heads = tuple(InputHead(entry.name, entry.datatype.value, entry.shape) for entry in batch.inputs.values())
        head = RequestHead(config.name, str(number), heads)
        try:
            await _answered(trial, InferRequest(head, "", [entry.data for entry in batch.inputs.values()]))
        except ServeError as error:
            raise ServeError(error.code, f"failed to run warmup sample '{name}': {error.text}") from None


async def _answered(trial: EnsembleVersion, request: InferRequest) -> None:
    waiter = _Waiter(asyncio.get_running_loop())
    try:
        trial.infer(request, waiter)
    except VersionEnding:
        raise unavailable("a member is being unloaded") from None
    await waiter.answered


class _Waiter:
    """Implements core.serving.Responder; `answered` is done, or has failed, at the request's end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.answered: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._error: ServeError | None = None

    def expect_many(self) -> None:
        """Each of them is welcome."""

    def send(self, response: InferResponse, final: bool = True) -> None:
        if final:
            self.end()

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._settle)

    def fail(self, error: ServeError, final: bool = True) -> None:
        self._error = self._error or error
        if final:
            self.end()

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        """Nobody goes away."""

    def _settle(self) -> None:
        if self.answered.done():
            return
        if self._error is None:
            self.answered.set_result(None)
        else:
            self.answered.set_exception(self._error)
