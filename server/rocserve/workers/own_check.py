"""Asks a model itself, in each of its workers, whether it is ready."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rocserve.workers.process import WorkerSession


@dataclass(eq=False)
class OwnCheck:
    """Implements core.serving.ReadinessCheck. On the asyncio loop."""

    _model: str
    """The model and its version, for the log."""
    _workers: Callable[[], Sequence[WorkerSession]]
    _log: logging.Logger
    _reason: str = field(default="", init=False)
    """Why the model was not ready at the last check; "" = it was."""

    async def __call__(self) -> bool:
        """Return whether the model is ready in all workers. Logs each change."""
        asked = [worker.check_readiness() for worker in self._workers() if worker.checks_readiness]
        answers = [answer for answer in await asyncio.gather(*asked) if not answer.is_ready]
        fault = next((answer.fault for answer in answers if answer.fault), "")
        reason = fault or ("is_ready() returned False" if answers else "")
        if reason != self._reason:
            self._reason = reason
            if reason:
                self._log.log(logging.WARNING if fault else logging.INFO, "%s is not ready: %s", self._model, reason)
            else:
                self._log.info("%s is ready again", self._model)
        return not reason
