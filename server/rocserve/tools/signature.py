"""Loads a model outside a server, in a worker of its own, to learn its signature."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Mapping

from rocserve.backends.request_model import ModelCall
from rocserve.config.definition import ModelDefinition
from rocserve.core.errors import ServeError, invalid_argument, unavailable
from rocserve.core.requests import Signature
from rocserve.repository.engine_plan import plan_engine
from rocserve.repository.machine import ThisMachine
from rocserve.repository.version_workers import load_message, worker_group
from rocserve.settings import EngineSettings, engine_settings
from rocserve.workers.channel import Channel
from rocserve.workers.completion import CompletionThread
from rocserve.workers.conversation import OpenCall
from rocserve.workers.launcher import WorkerLauncher


def describe(definition: ModelDefinition, version: int, settings: EngineSettings | None = None) -> Signature:
    """The signature that the engine reports of a version. `settings`: None = what holds without flags.

    Raises:
        ServeError: the version cannot be loaded.
    """
    return asyncio.run(_describe(definition, version, settings or engine_settings()))


async def _describe(definition: ModelDefinition, version: int, settings: EngineSettings) -> Signature:
    if definition.backend is None:
        raise invalid_argument(f"'{definition.name}' is an ensemble, which no engine loads")
    folder = definition.folder / str(version)
    log = logging.getLogger("rocserve.config")
    launcher = WorkerLauncher(preload=(), log=log)
    completion = CompletionThread(log)
    completion.start()
    try:
        plan = plan_engine(definition, ThisMachine(settings))
        group = worker_group(
            load_message(definition, version, folder, plan.engine, settings),
            definition,
            dataclasses.replace(plan, workers=plan.workers[:1]),
            launcher=launcher,
            completion=completion,
            events=_Unwatched(),
            start_call=_refuse_call,
            log=log,
        )
        try:
            return await group.load()
        finally:
            await group.stop(1.0)
    finally:
        await launcher.close()
        completion.stop()


def _refuse_call(call: ModelCall, opened: OpenCall) -> None:
    text = f"model '{call.model_name}' cannot be called while a model is only described: no server runs"
    opened.answer(unavailable(text), final=True)


class _Unwatched:
    """Nobody asks the worker anything after its load."""

    def channel_opened(self, channel: Channel) -> None: ...

    def channel_lost(self, channel: Channel, reason: ServeError) -> None: ...

    def restarting(self, reason: str, delay_seconds: float) -> None: ...

    def recovered(self) -> None: ...

    def progress(self, text: str) -> None: ...

    def described(self, properties: Mapping[str, str]) -> None: ...
