"""Files that child processes with PyTorch write, in folders of the cache."""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocserve.backends.base import ModelSource
from rocserve.backends.parameters import read_integer
from rocserve.cache.digests import file_digest
from rocserve.cache.folders import FolderCache, cache_directory
from rocserve.jobs.compile_semaphore import machine_semaphore
from rocserve.jobs.messages import Job
from rocserve.jobs.runner import JobEngine, JobRunner

_LOG = logging.getLogger(__name__)

_FOLDER = "pytorch"
_NAME_DIGITS = 32
_TIMEOUT = "compile_timeout_secs"
_TIMEOUT_SECONDS = 3600
_LONGEST_SECONDS = 7 * 24 * 3600


@dataclass(frozen=True, slots=True)
class Written:
    """The result of a job whose files are in its folder."""


def machine_parts(device: Any) -> tuple[str, ...]:
    """What files that are compiled for PyTorch's `device` depend on of PyTorch and of the machine."""
    import torch

    if device.type == "cpu":
        return torch.__version__, platform.machine(), torch.backends.cpu.get_cpu_capability()
    found = torch.cuda.get_device_properties(device)
    return torch.__version__, str(found.name), str(getattr(found, "gcnArchName", (found.major, found.minor)))


def written_folder(model: ModelSource, kind: str, parts: tuple[str, ...], job: Callable[[Path], Job]) -> Path:
    """The folder with a job's files; the job runs where the cache has none.

    Args:
        kind: begins the folder's name.
        parts: all that the files depend on beside the model's file.
        job: for a folder to write into; it returns Written.

    Raises:
        ServeError: the job fails or takes longer than parameter `compile_timeout_secs`, or the cache cannot be used.
    """

    def make(folder: Path) -> None:
        with machine_semaphore().acquired(False, lambda: None):
            _run(model, job(folder))

    waiting = f"model '{model.name}': waiting for another process that compiles it"
    return _folder(model, kind, (file_digest(model.model_file), *parts), make, waiting)


def machine_folder(model: ModelSource, kind: str, parts: tuple[str, ...], job: Callable[[Path], Job]) -> Path:
    """As `written_folder`, of files that depend on the parts alone. The job takes seconds, for one that has its turn to
    compile already, and runs in that one's turn."""
    waiting = f"model '{model.name}': waiting for another process that tries the compiler"
    return _folder(model, kind, parts, lambda folder: _run(model, job(folder)), waiting)


def _run(model: ModelSource, job: Job) -> None:
    seconds = read_integer(model.config, _TIMEOUT, _TIMEOUT_SECONDS, 0, _LONGEST_SECONDS)
    JobRunner(JobEngine("PyTorch"), model.report, _LOG).run(job, Written, timeout_seconds=seconds)


def _folder(model: ModelSource, kind: str, parts: tuple[str, ...], make: Callable[[Path], None], waiting: str) -> Path:
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    cache = FolderCache(cache_directory(model.settings) / _FOLDER, model.settings.cache_bytes, _LOG.warning)
    try:
        found = cache.find_or_make(f"{kind}-{digest[:_NAME_DIGITS]}", make, lambda: model.report(waiting))
        found.release()
        return found.path
    finally:
        model.report("")
