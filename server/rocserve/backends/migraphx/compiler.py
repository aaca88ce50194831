"""Programs for recipes: from the cache, or compiled into it by a child process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rocserve.backends.migraphx.configuration.options import Target
from rocserve.backends.migraphx.jobs.compile import CompileJob
from rocserve.backends.migraphx.jobs.probe import own_recipe
from rocserve.backends.migraphx.planning.plan import batch_dimension, read_graph
from rocserve.backends.migraphx.planning.recipe import ProgramRecipe
from rocserve.backends.migraphx.program_cache import CachedProgram, ProgramAbout, ProgramCache
from rocserve.jobs.compile_semaphore import CompileSemaphore, machine_semaphore
from rocserve.jobs.runner import JobRunner

BEFOREHAND = "compile it beforehand with `rocserve compile`"
"""The remedy for a compile beyond the time limit, beside raising it."""
_SEARCH = "3"
"""Of MIOPEN_FIND_ENFORCE: search for the fastest kernels, also where the database has some."""
_SECONDS_BETWEEN_ATTEMPTS = 0.5
"""Each makes a folder in the cache and removes it; while some compile for hours, fifty others may wait."""


class _NoSlotFree(Exception):
    """Waiting with the key locked would keep it from a process that has a slot, such as a load that clients await."""


def _give_up() -> None:
    raise _NoSlotFree


@dataclass(frozen=True, slots=True)
class ProgramCompiler:
    """Compiles the programs of one model. `program` may be called on several threads, and by many processes that share
    a cache."""

    runner: JobRunner
    cache: ProgramCache
    model_name: str = field(kw_only=True)
    model_folder: Path = field(kw_only=True)
    semaphore: CompileSemaphore = field(default_factory=machine_semaphore, kw_only=True)
    remedy: str = field(default=BEFOREHAND, kw_only=True)
    """What else helps against the time limit; "" = nothing."""

    def program(
        self,
        recipe: ProgramRecipe,
        *,
        timeout_seconds: float,
        low_priority: bool = False,
        report: Callable[[str], None] | None = None,
    ) -> CachedProgram:
        """The program, which stays in the cache as long as the result lives. `timeout_seconds`: of compiling, without
        the wait for other processes that compile; 0 = none. `report`: instead of the runner's. Raises: JobError: it
        cannot be compiled, or that took too long or was called off. ServeError: the cache cannot take it."""

        variables = {}
        if recipe.options.target is Target.GPU:
            # What MIOpen reads, which MIGraphX uses for convolutions on a GPU.
            variables["MIOPEN_USER_DB_PATH"] = str(self.cache.tuning_folder)
            if recipe.options.miopen_tuning:
                variables["MIOPEN_FIND_ENFORCE"] = _SEARCH

        def build(file: Path) -> ProgramAbout:
            with self.semaphore.acquired(low_priority, _give_up), self._own_program(recipe) as own:
                job = CompileJob(self.model_name, str(self.model_folder), recipe, str(file), own)
                return self.runner.run(
                    job,
                    ProgramAbout,
                    timeout_seconds=timeout_seconds,
                    low_priority=low_priority,
                    environment=variables,
                    remedy=self.remedy,
                    report=report,
                )

        wait_for_slot = self._waiting(recipe, "until other programs have been compiled on this machine", report)
        while True:
            wait_for_other = self._waiting(recipe, "for another process that compiles it", report)
            try:
                return self.cache.find_or_build(recipe.key, build, wait_for_other)
            except _NoSlotFree:
                wait_for_slot()
                time.sleep(_SECONDS_BETWEEN_ATTEMPTS)

    def _waiting(self, recipe: ProgramRecipe, what: str, report: Callable[[str], None] | None) -> Callable[[], None]:
        title = f"{recipe.title} of model '{self.model_name}'"
        reported = False

        def wait() -> None:
            nonlocal reported
            self.runner.check_called_off(f"waiting for {title}")
            if not reported:
                (report or self.runner.report)(f"{title}: waiting {what}")
                reported = True

        return wait

    @contextmanager
    def _own_program(self, recipe: ProgramRecipe) -> Iterator[str]:
        """Where the program of the file's own batch size lies, for a re-batched one; "" where there is none yet."""
        if not recipe.rebatched:
            yield ""
            return
        graph = read_graph(recipe.source.kind, Path(recipe.source.path), self.model_folder, recipe.output_names)
        found = self.cache.find(own_recipe(recipe, batch_dimension(graph) or 0).key)
        try:
            yield "" if found is None else str(found.path)
        finally:
            if found is not None:
                found.release()
