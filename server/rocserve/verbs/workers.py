"""Runs models in workers, started as a server starts them, without a server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Self

from rocserve.backends.request_model import ModelCall
from rocserve.core.errors import ServeError, unavailable
from rocserve.core.requests import Member, RequestForm, RequestLayout, Signature
from rocserve.core.tensors import Tensor, heads_of, tensor_from_numpy
from rocserve.load_check.tensors import Array, Feed
from rocserve.plane.loop import PlaneLoop
from rocserve.repository.engine_plan import EnginePlan
from rocserve.repository.load_order import LoadOrder
from rocserve.repository.worker_options import plan_version_workers
from rocserve.settings import EngineSettings
from rocserve.workers.instance import Instance, InstanceMail
from rocserve.workers.instance_requests import OpenCall
from rocserve.workers.launcher import WorkerLauncher
from rocserve.workers.results import BatchOutcome
from rocserve.workers.version_workers import VersionWorkers

Report = Callable[[str], None]
"""Takes one line of progress; "" = nothing to report."""


class ToolWorkers:
    """Holds workers, which end with the asynchronous context."""

    def __init__(
        self,
        settings: EngineSettings,
        report: Report = lambda _: None,
        log: logging.Logger | None = None,
        grace_seconds: float = 0.0,
    ) -> None:
        """`log`: gets the workers' output; None = the output is dropped. `grace_seconds`: the time for models to
        end."""
        self._grace_seconds = grace_seconds
        self._settings = settings
        self._report = report
        self._log = log = log or logging.Logger("rocserve.verbs", logging.CRITICAL + 1)
        self._launcher = WorkerLauncher(preload=(), log=log)
        self._plane = PlaneLoop(log)
        self._mail = InstanceMail(self._plane)
        self._plane.add_source(self._mail)
        self._loaded: list[LoadedWorkers] = []

    async def __aenter__(self) -> Self:
        self._plane.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for loaded in self._loaded:
            await loaded.stop(self._grace_seconds)
        await self._launcher.close()
        self._plane.stop()

    async def load(self, order: LoadOrder, plan: EnginePlan) -> LoadedWorkers:
        """Start a version's workers, and load the model in them. Raises ServeError."""
        backend = order.definition.backend
        assert backend is not None, "an ensemble has no workers"
        workers = LoadedWorkers(
            plan_version_workers(order, plan, self._settings, self._launcher.settings),
            launcher=self._launcher,
            mail=self._mail,
            start_call=_refuse_call if backend.answers_requests else None,
            log=self._log,
            reported=order.reported_warnings,
        )
        workers.report = self._report
        self._loaded.append(workers)
        workers.signature = await workers.load()
        return workers

    async def open(self, order: LoadOrder, plan: EnginePlan, title: str) -> LoadedWorkers:
        """Load the model in workers, and warm it up. `title`: prefix of error texts. Raises ServeError."""
        # The batches are the engine's: a worker joins none, and makes nothing of their rows.
        config = replace(
            order.definition.config, max_batch_size=0, is_batch_size_written=False, model_warmup=(), batch_inputs=(),
            scattered_outputs={}, sequence_batching=None,
        )  # fmt: skip
        with titled(title):
            loaded = await self.load(order, plan)
            await loaded.warm_up(config)
        loaded.title = title
        return loaded


@contextmanager
def titled(title: str) -> Iterator[None]:
    """Begin the texts of errors raised in the block with the title."""
    try:
        yield
    except ServeError as error:
        raise ServeError(error.code, f"{title}: {error.text}") from None


def _refuse_call(call: ModelCall, opened: OpenCall) -> None:
    text = f"model '{call.model_name}' cannot be called: no server runs, only the models that this command reads"
    opened.send(unavailable(text))


class LoadedWorkers(VersionWorkers):
    """A version's workers, which have loaded the model."""

    signature: Signature
    report: Report
    properties: Mapping[str, str] = MappingProxyType({})
    """See backends.base.model_properties."""
    title = ""

    def progress(self, text: str, is_check: bool) -> None:
        self.report(text)

    def described(self, properties: Mapping[str, str]) -> None:
        self.properties = properties

    async def answer(self, inputs: Feed) -> Mapping[str, Array]:
        """Run the model once, and return its outputs. Raises ServeError if the run fails."""
        with titled(self.title):
            return await self.run_on(self.open_instances()[0], inputs, [spec.name for spec in self.signature.outputs])

    def open_instances(self) -> Sequence[Instance]:
        """Raises ServeError (UNAVAILABLE) if the worker has ended."""
        if not (instances := self.instances):
            raise unavailable("its worker has ended")
        return instances

    async def run_on(self, instance: Instance, inputs: Feed, outputs: Sequence[str]) -> Mapping[str, Array]:
        """Run the model once on one of its instances. `outputs`: the wanted ones; none = all. Raises ServeError if the
        run fails."""
        member = self._member(inputs, outputs)
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Mapping[str, Array]] = loop.create_future()

        def on_outcome(outcome: BatchOutcome) -> None:
            error = outcome.error or outcome.failures.get(0)
            arrays = {} if error else _arrays(outcome)
            loop.call_soon_threadsafe(_set, result, arrays, error)

        def execute() -> None:
            try:
                instance.execute(False, (member,), on_outcome)
            except ServeError as error:
                loop.call_soon_threadsafe(_set, result, {}, error)

        self.mail.plane.call_soon(execute)
        return await result

    def _member(self, inputs: Feed, outputs: Sequence[str]) -> Member:
        datatypes = {spec.name: spec.datatype for spec in self.signature.inputs}
        tensors = [tensor_from_numpy(name, array, datatypes.get(name)) for name, array in inputs.items()]
        form = RequestForm(RequestLayout(heads_of(tensors), tuple(outputs), 1))
        return form, [tensor.data for tensor in tensors], 0, b""


def _set(result: asyncio.Future[Mapping[str, Array]], arrays: Mapping[str, Array], error: ServeError | None) -> None:
    if not result.done():
        result.set_result(arrays) if error is None else result.set_exception(error)


def _arrays(outcome: BatchOutcome) -> dict[str, Array]:
    heads, parts = outcome.outputs_of(0)
    return {head.name: Tensor(*head, bytes(part)).numpy() for head, part in zip(heads, parts, strict=True)}
