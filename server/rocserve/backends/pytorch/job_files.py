"""Keeps the files that child processes with PyTorch write, in folders of the cache."""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import NoneType
from typing import Any

from rocserve.backends.base import ModelSource
from rocserve.backends.parameters import read_compile_timeout
from rocserve.cache.digests import file_digest
from rocserve.cache.folders import FolderCache, cache_directory
from rocserve.jobs.compile_semaphore import machine_semaphore
from rocserve.jobs.messages import Job
from rocserve.jobs.runner import JobEngine, JobRunner

_LOG = logging.getLogger(__name__)


def machine_parts(device: Any) -> tuple[str, ...]:
    """Return the properties of PyTorch and of the machine on which files compiled for `device` depend."""
    import torch

    if device.type == "cpu":
        return torch.__version__, platform.machine(), torch.backends.cpu.get_cpu_capability()
    found = torch.cuda.get_device_properties(device)
    return torch.__version__, str(found.name), str(getattr(found, "gcnArchName", (found.major, found.minor)))


def written_folder(
    model: ModelSource, kind: str, parts: tuple[str, ...], job: Callable[[Path], Job], of_model: bool = True
) -> Path:
    """Return the folder with a job's files; the job runs if the cache has none. `kind` begins the folder's name.
    `parts`: everything that the files depend on, in addition to the model's file. `job` makes the job, which writes
    into a folder and returns nothing. `of_model`: False = the files do not depend on the model's file, and the job
    takes seconds and needs no compile slot: it runs within a compile that has one. Raises ServeError if the job fails
    or takes longer than the parameter `compile_timeout_secs`, or if the cache cannot be used."""

    def make(folder: Path) -> None:
        seconds = read_compile_timeout(model.config)
        with machine_semaphore().acquired(False, lambda: None) if of_model else nullcontext():
            JobRunner(JobEngine("PyTorch"), model.report, _LOG).run(job(folder), NoneType, timeout_seconds=seconds)

    parts = (file_digest(model.model_file), *parts) if of_model else parts
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    what = "compiles it" if of_model else "tries the compiler"
    cache = FolderCache(cache_directory(model.settings) / "pytorch", model.settings.cache_bytes, _LOG.warning)
    try:
        found = cache.find_or_make(
            f"{kind}-{digest}",
            make,
            lambda: model.report(f"model '{model.name}': waiting for another process that {what}"),
        )
        found.release()
        return found.path
    finally:
        model.report("")
