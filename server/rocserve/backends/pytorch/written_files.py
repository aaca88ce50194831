"""Files that child processes with PyTorch write, in folders of the cache."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

from rocserve.backends.base import ModelSource
from rocserve.backends.parameters import read_integer
from rocserve.backends.pytorch.compile_job import InductorJob, OnnxJob, Written
from rocserve.cache.digests import file_digest
from rocserve.cache.folders import cached_folder
from rocserve.cache.private_folder import cache_directory
from rocserve.jobs.compile_semaphore import machine_semaphore
from rocserve.jobs.runner import JobEngine, JobRunner

_LOG = logging.getLogger(__name__)

_FOLDER = "pytorch"
_NAME_DIGITS = 32
_TIMEOUT = "compile_timeout_secs"
_TIMEOUT_SECONDS = 3600
_LONGEST_SECONDS = 7 * 24 * 3600


def written_folder(
    model: ModelSource, kind: str, parts: tuple[str, ...], job: Callable[[Path], InductorJob | OnnxJob]
) -> Path:
    """The folder with the files of a job, done where no equal one has been.

    Args:
        kind: begins the folder's name.
        parts: what the files depend on beside the model's file.
        job: for a folder to write into.

    Raises:
        ServeError: the job fails, takes longer than parameter `compile_timeout_secs` says, or the cache cannot be used.
    """
    runner = JobRunner(JobEngine("PyTorch"), model.report, _LOG)
    seconds = read_integer(model.config, _TIMEOUT, _TIMEOUT_SECONDS, 0, _LONGEST_SECONDS)

    def make(folder: Path) -> None:
        with machine_semaphore().acquired(False, lambda: None):
            runner.run(job(folder), Written, timeout_seconds=seconds)

    digest = hashlib.sha256("\0".join((file_digest(model.model_file), *parts)).encode()).hexdigest()
    place = cache_directory(model.settings) / _FOLDER
    waiting = f"model '{model.name}': waiting for another process that compiles it"
    try:
        return cached_folder(
            place,
            f"{kind}-{digest[:_NAME_DIGITS]}",
            model.settings.cache_bytes,
            make,
            lambda: model.report(waiting),
            _LOG.warning,
        )
    finally:
        model.report("")
