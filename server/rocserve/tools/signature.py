"""Loads a model outside a server, in a worker of its own, to learn its signature."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import shutil
import sys
from collections.abc import Mapping
from typing import TextIO

from rocserve.backends.request_model import ModelCall
from rocserve.config.definition import ModelDefinition
from rocserve.core.custom_metrics import MetricChanges
from rocserve.core.errors import ServeError, invalid_argument, unavailable
from rocserve.core.requests import Signature
from rocserve.plane.loop import PlaneLoop
from rocserve.repository.engine_plan import EngineFailure, EnginePlan, plan_engine
from rocserve.repository.machine import ThisMachine
from rocserve.repository.version_workers import load_message, worker_group
from rocserve.settings import EngineSettings, engine_settings
from rocserve.workers.instance import Instance
from rocserve.workers.instance_mail import InstanceMail
from rocserve.workers.instance_requests import OpenCall
from rocserve.workers.launcher import WorkerLauncher

_LOG = logging.getLogger("rocserve.config")


def describe(definition: ModelDefinition, version: int, settings: EngineSettings | None = None) -> Signature:
    """The signature that the engine reports of a version; what takes long is told on standard error.

    Args:
        settings: None = what holds without flags.

    Raises:
        ServeError: the version cannot be loaded.
    """
    return asyncio.run(_describe(definition, version, settings or engine_settings()))


async def _describe(definition: ModelDefinition, version: int, settings: EngineSettings) -> Signature:
    if definition.backend is None:
        raise invalid_argument(f"'{definition.name}' is an ensemble, which no engine loads")
    machine = ThisMachine(settings)
    plan = plan_engine(definition, definition.folder / str(version), machine)
    launcher = WorkerLauncher(preload=(), log=_LOG)
    plane = PlaneLoop(_LOG)
    mail = InstanceMail(plane)
    plane.add_source(mail)
    plane.start()
    loads = _Loads(definition, version, settings, launcher, mail)
    try:
        try:
            return await loads.signature(plan)
        except ServeError as error:
            failure = EngineFailure(plan, error)
        instead = failure.plan_in_its_place(definition, machine)
        _LOG.warning("%s; engine %s takes its place", failure.text, instead.engine.name)
        try:
            return await loads.signature(instead)
        except ServeError as error:
            raise failure.and_then(instead.engine, error) from None
    finally:
        await launcher.close()
        plane.stop()


@dataclasses.dataclass(frozen=True, slots=True)
class _Loads:
    """Loads of one version, one after the other."""

    definition: ModelDefinition
    version: int
    settings: EngineSettings
    launcher: WorkerLauncher
    mail: InstanceMail

    async def signature(self, plan: EnginePlan) -> Signature:
        """What the engine of this plan reports, on the first of its workers. Raises: ServeError."""
        folder = self.definition.folder / str(self.version)
        group = worker_group(
            load_message(self.definition, self.version, folder, plan.engine, self.settings),
            self.definition,
            dataclasses.replace(plan, workers=plan.workers[:1]),
            launcher=self.launcher,
            mail=self.mail,
            events=_ShownProgress(sys.stderr),
            start_call=_refuse_call,
            log=_LOG,
        )
        try:
            return await group.load()
        finally:
            await group.stop(1.0)


def _refuse_call(call: ModelCall, opened: OpenCall) -> None:
    text = f"model '{call.model_name}' cannot be called while a model is only described: no server runs"
    opened.send(unavailable(text))


class _ShownProgress:
    """Shows on a terminal what the load is at. Nobody asks the worker anything afterwards."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def progress(self, text: str) -> None:
        if self._stream.isatty():
            # Each line in the place of the last.
            shown = text[: shutil.get_terminal_size().columns - 1]
            print(f"\r\033[K{shown}", end="", file=self._stream, flush=True)

    def silent(self, text: str) -> None: ...

    def measured(self, changes: MetricChanges) -> None: ...

    def described(self, properties: Mapping[str, str]) -> None: ...

    def instance_opened(self, instance: Instance) -> None: ...

    def instance_lost(self, instance: Instance, reason: ServeError) -> None: ...

    def restarting(self, reason: str, delay_seconds: float) -> None: ...

    def recovered(self) -> None: ...
