"""Tests which of the processor's instruction sets the C++ compiler supports.

Inductor runs these trials before it compiles. They take longer than compiling a small program, so they run once per
machine and stay in the cache.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rocserve.backends.base import ModelSource
from rocserve.backends.pytorch.job_files import Written, machine_folder
from rocserve.core.errors import ServeError
from rocserve.jobs.messages import Report

_INDUCTOR_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
_LOCKS = "locks"


def trials_folder(model: ModelSource, compiler: Path, parts: Sequence[str]) -> Path | None:
    """Return the folder with the trials, and run them if the cache has none. `parts` identify the machine. None = the
    folder cannot be made; a compile then runs the trials itself, and reports the error."""
    found = compiler.resolve().stat()
    of_compiler = (str(compiler.resolve()), str(found.st_size), str(found.st_mtime_ns))
    with suppress(ServeError):
        return machine_folder(model, "instruction-sets", (*of_compiler, *parts), lambda to: TrialsJob(str(to)))
    return None


def use_trials(trials: str, work: Path) -> None:
    """Make Inductor work in the folder `work`, and find the trials there. `trials`: "" = none."""
    os.environ[_INDUCTOR_FOLDER] = str(work)
    # The folder may have been removed to free space. A partial copy does no harm: each trial is found or run
    # separately.
    with suppress(OSError):
        if trials:
            shutil.copytree(trials, work, ignore=shutil.ignore_patterns(".*"))


@dataclass(frozen=True, slots=True)
class TrialsJob:
    folder: str

    @property
    def title(self) -> str:
        return "trying the C++ compiler with this processor's instruction sets"

    def perform(self, report: Report) -> Written:
        os.environ[_INDUCTOR_FOLDER] = self.folder
        report("compiling")
        from torch._inductor.cpu_vec_isa import valid_vec_isa_list

        valid_vec_isa_list()
        shutil.rmtree(Path(self.folder) / _LOCKS, ignore_errors=True)
        return Written()
