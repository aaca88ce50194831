"""Runs an ensemble before it is served: its warm-up samples, and the recorded request of check.npz."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import time
from collections.abc import Sequence
from pathlib import Path

from rocserve.backends.warmup import warm_up_samples
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.exchange import Cancellable, Exchange
from rocserve.core.load_check import RECORDED_ANSWERS, RECORDED_FILE, LoadCheckFailed, LoadCheckReport
from rocserve.core.model_config import ControlKind, ModelConfig
from rocserve.core.requests import InferRequest, InputHead, RequestHead
from rocserve.core.responses import Answer
from rocserve.core.sequences import SequenceTag
from rocserve.core.serving import ServingTable
from rocserve.core.statistics import ModelStatistics
from rocserve.core.tensors import Tensor
from rocserve.load_check.recorded import compare_recorded, joined, read_recorded, recorded_request
from rocserve.plane.loop import PlaneLoop
from rocserve.repository.ensemble_members import members_of, reachable
from rocserve.scheduling.ensemble.version import EnsembleVersion


class EnsembleTrials:
    """Sends requests to an ensemble, one after the other, without counting them in its statistics. For members with
    sequences each request is a sequence of one request."""

    def __init__(self, ensemble: EnsembleVersion, plane: PlaneLoop) -> None:
        self._ensemble = ensemble
        self._plane = plane
        self._has_text_ids = _has_text_ids(ensemble.config, ensemble.dispatcher.tables.table)
        # Clients, who may use the members already, are unlikely to use such a number.
        self._next_sequence = 0xFFFF_FFFF_0000_0000

    async def warm_up(self, folder: Path) -> None:
        """Run each sample of `model_warmup`. `folder`: the model's folder with the samples' files. Raises ServeError at
        the first sample that fails."""
        config = self._ensemble.config
        for name, batch in warm_up_samples(config, folder):
            heads = tuple(InputHead(entry.name, entry.datatype.value, entry.shape) for entry in batch.inputs.values())
            head = RequestHead(config.name, str(self._ensemble.version), heads)
            try:
                await self._answer(InferRequest(head, "", [entry.data for entry in batch.inputs.values()]))
            except ServeError as error:
                # Members may be replaced while the ensemble's own files stay unchanged.
                raise error.with_text(f"failed to run warmup sample '{name}': {error.text}").passing() from None

    async def check_recorded_answers(self, file: Path) -> LoadCheckReport:
        """Compare the answer of all steps together. Raises LoadCheckFailed."""
        began = time.monotonic()
        config = self._ensemble.config
        recorded = await asyncio.to_thread(read_recorded, file)
        request = await asyncio.to_thread(recorded_request, recorded, config)
        try:
            responses = await self._answer(request)
        except ServeError as error:
            text = f"it fails on the inputs of {RECORDED_FILE}: {error.text}"
            raise LoadCheckFailed(RECORDED_ANSWERS, text).passing() from None
        try:
            found = await asyncio.to_thread(compare_recorded, recorded, joined(responses), config)
        except ServeError as error:
            # Another version of a member may answer as recorded.
            raise error.passing() from None
        return LoadCheckReport((found,), seconds=time.monotonic() - began)

    async def _answer(self, request: InferRequest) -> Sequence[Sequence[Tensor]]:
        """Return the outputs of each response. Raises ServeError."""
        ensemble = self._ensemble
        trial = EnsembleVersion(
            ensemble.config,
            ensemble.config_message,
            ensemble.version,
            ModelStatistics(),
            ensemble.dispatcher,
            ensemble.memory,
        )
        identity = f"warmup {self._next_sequence}" if self._has_text_ids else self._next_sequence
        self._next_sequence += 1
        request.sequence = SequenceTag(identity, starts=True, ends=True)
        waiter = _Waiter()
        self._plane.call_soon(functools.partial(trial.infer, request, Exchange(waiter)))
        return await asyncio.wrap_future(waiter.answered)


def _has_text_ids(ensemble: ModelConfig, table: ServingTable) -> bool:
    """Whether a member, at any depth, takes sequence ids as texts."""
    configs = {key: model.latest.config for key, model in table.models.items() if model.latest is not None}
    members = reachable(members_of(ensemble), lambda key: members_of(configs[key]) if key in configs else ())
    batchings = (configs[key].sequence_batching for key in members if key in configs)
    controls = (one for batching in batchings if batching for one in batching.controls)
    return any(one.kind is ControlKind.CORRELATION_ID and one.datatype is DataType.BYTES for one in controls)


class _Waiter(Cancellable):
    """Implements core.exchange.Responder; `answered` completes or fails with the request's end."""

    def __init__(self) -> None:
        self.answered: concurrent.futures.Future[Sequence[Sequence[Tensor]]] = concurrent.futures.Future()
        # A cancelled waiter must not make the answer fail.
        self.answered.set_running_or_notify_cancel()
        self._error: ServeError | None = None
        self._responses: list[Sequence[Tensor]] = []

    def expect_many(self) -> None:
        """Does nothing: any number of answers is accepted."""

    def send(self, answer: Answer, final: bool = True) -> None:
        if isinstance(answer, ServeError):
            self._error = self._error or answer
        elif answer is not None:
            # The tensors are valid during this call only.
            self._responses.append([tensor.copied() for tensor in answer.outputs])
        if final and self._error is not None:
            self.answered.set_exception(self._error)
        elif final:
            self.answered.set_result(self._responses)
