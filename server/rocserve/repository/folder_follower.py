"""Reads the model folders whose changes have settled, and lets their models become what they say."""

from __future__ import annotations

import asyncio
import functools
import logging
from dataclasses import dataclass

from rocserve.core.errors import ServeError, internal
from rocserve.repository.background import BackgroundTasks
from rocserve.repository.catalogue import ModelCatalogue
from rocserve.repository.content import ContentReader
from rocserve.repository.retry import Failure, Retries, Retry, RetryPolicy, next_failure
from rocserve.repository.scan import ModelScan


@dataclass(slots=True)
class _Reading:
    """The last scan of a folder, and what became of it."""

    scan: ModelScan
    task: asyncio.Task[None] | None = None
    failure: Failure | None = None
    retry: Retry | None = None

    def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()
        if self.retry is not None:
            self.retry.cancel()
        self.task = self.retry = None


class FolderFollower:
    """All calls are made on the loop's thread. A folder that cannot be read is tried again, later and later."""

    def __init__(
        self,
        reader: ContentReader,
        catalogue: ModelCatalogue,
        retry: RetryPolicy,
        retries: Retries,
        background: BackgroundTasks,
        log: logging.Logger,
    ) -> None:
        self._reader = reader
        self._catalogue = catalogue
        self._retry = retry
        self._retries = retries
        self._background = background
        self._log = log
        self._readings: dict[str, _Reading] = {}

    def is_reading(self, folder: str) -> bool:
        reading = self._readings.get(folder)
        return reading is not None and reading.task is not None

    def follow(self, folder: str, scan: ModelScan | None) -> None:
        """The folder has settled as this; None: it is gone."""
        previous = self._readings.pop(folder, None)
        if previous is not None:
            previous.stop()
        for text in () if scan is None else scan.advice:
            self._log.warning("%s", text)
        if scan is None or (not scan.looks_like_model and not scan.refusal):
            self._catalogue.drop(folder)
            return
        reading = self._readings[folder] = _Reading(scan)
        self._start(folder, reading)

    async def wait(self) -> None:
        """Return when no folder is being read."""
        while tasks := [reading.task for reading in self._readings.values() if reading.task is not None]:
            await asyncio.wait(tasks)

    def stop(self) -> None:
        for reading in self._readings.values():
            reading.stop()

    def _start(self, folder: str, reading: _Reading) -> None:
        reading.task = self._background.start(self._read(folder, reading), f"reading of model folder {folder}")

    async def _read(self, folder: str, reading: _Reading) -> None:
        try:
            contents = await self._reader.read(reading.scan)
            self._catalogue.take(folder, contents)
        except ServeError as error:
            self._failed(folder, reading, error)
        except Exception as error:
            self._failed(folder, reading, internal(f"{type(error).__name__}: {error}"))
        reading.task = None

    def _failed(self, folder: str, reading: _Reading, error: ServeError) -> None:
        reading.failure = next_failure(error, "", reading.failure, self._retry)
        self._catalogue.reject(folder, reading.failure)
        pause = self._retry.pause(reading.failure.attempts)
        if pause is not None:
            reading.retry = self._retries.add(pause, functools.partial(self._start, folder, reading))
