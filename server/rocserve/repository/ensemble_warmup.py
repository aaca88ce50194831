"""Warms an ensemble up: its samples go through it and its members, as clients' requests will."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable
from pathlib import Path

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.model_config import ControlKind, ModelConfig
from rocserve.core.requests import Answer, InferRequest, InputHead, RequestHead
from rocserve.core.sequences import SequenceTag
from rocserve.core.serving import ServingTable
from rocserve.core.statistics import ModelStatistics
from rocserve.plane.loop import PlaneLoop
from rocserve.scheduling.ensemble.version import EnsembleVersion
from rocserve.workers.warmup import warm_up_samples

_FIRST_SEQUENCE = 0xFFFF_FFFF_0000_0000
"""Where no client's numbers are likely to be: members may be serving already."""
_DEEPEST = 32
"""Ensembles within ensembles."""


async def warm_up_ensemble(ensemble: EnsembleVersion, folder: Path, plane: PlaneLoop) -> None:
    """Run each sample of `model_warmup`, one after the other, beside the statistics of the ensemble itself.

    For members with sequences each run is a sequence of one request.

    Args:
        folder: the model's, which holds the samples' files.

    Raises:
        ServeError: what the first sample that failed was answered with.
    """
    config, number = ensemble.config, ensemble.version
    has_text_ids = _has_text_ids(config, ensemble.dispatcher.tables.table)
    numbers = itertools.count(_FIRST_SEQUENCE)
    for name, batch in warm_up_samples(config, folder):
        trial = EnsembleVersion(
            config, ensemble.config_message, number, ModelStatistics(), ensemble.dispatcher, ensemble.memory
        )
        heads = tuple(InputHead(entry.name, entry.datatype.value, entry.shape) for entry in batch.inputs.values())
        head = RequestHead(config.name, str(number), heads)
        identity = next(numbers)
        sequence = SequenceTag(f"warmup {identity}" if has_text_ids else identity, starts=True, ends=True)
        request = InferRequest(head, "", [entry.data for entry in batch.inputs.values()], sequence=sequence)
        try:
            waiter = _Waiter(asyncio.get_running_loop())
            plane.call_soon(functools.partial(trial.infer, request, waiter))
            await waiter.answered
        except ServeError as error:
            raise ServeError(error.code, f"failed to run warmup sample '{name}': {error.text}") from None


def _has_text_ids(config: ModelConfig, table: ServingTable, depth: int = 0) -> bool:
    """Whether a member, at any depth, takes the ids of sequences as texts."""
    if config.sequence_batching is not None:
        return any(
            control.kind is ControlKind.CORRELATION_ID and control.datatype is DataType.BYTES
            for entry in config.sequence_batching.control_inputs
            for control in entry.controls
        )
    if depth > _DEEPEST:
        return False
    models = (table.models.get(step.member) for step in config.ensemble_steps)
    members = [model.latest.config for model in models if model is not None and model.latest is not None]
    return any(_has_text_ids(member, table, depth + 1) for member in members)


class _Waiter:
    """Implements core.serving.Responder; `answered` is done, or has failed, at the request's end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.answered: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._error: ServeError | None = None

    def expect_many(self) -> None:
        """Each of them is welcome."""

    def send(self, answer: Answer, final: bool = True) -> None:
        if isinstance(answer, ServeError):
            self._error = self._error or answer
        if final:
            self._loop.call_soon_threadsafe(self._settle)

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        """Nobody goes away."""

    def _settle(self) -> None:
        if self.answered.done():
            return
        if self._error is None:
            self.answered.set_result(None)
        else:
            self.answered.set_exception(self._error)
