"""Compiles programs: takes a recipe's program from the cache, or compiles it into the cache in a child process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rocserve.backends.migraphx.compiling import problem_cache
from rocserve.backends.migraphx.compiling.check_jobs import ReferenceTrial
from rocserve.backends.migraphx.compiling.compile_job import CompileJob, CompileResult
from rocserve.backends.migraphx.compiling.plan import batch_dimension, read_graph
from rocserve.backends.migraphx.compiling.probe_jobs import original_size_recipe
from rocserve.backends.migraphx.compiling.program_cache import CachedProgram, ProgramAbout, ProgramCache
from rocserve.backends.migraphx.compiling.recipe import ProgramRecipe
from rocserve.backends.migraphx.options import Target
from rocserve.jobs.compile_semaphore import CompileSemaphore, machine_semaphore
from rocserve.jobs.runner import JobRunner
from rocserve.load_check.reference import ReferenceVerdict


class _NoSlotFree(Exception):
    """Ends a build that got no compile slot. Waiting inside the build would keep the key locked, so that a process that
    has a slot (for a load that clients await) could not compile the same program."""


def _give_up() -> None:
    raise _NoSlotFree


@dataclass(frozen=True, slots=True)
class ProgramCompiler:
    """Compiles one model's programs. `program` may run on several threads, and in many processes with one cache."""

    runner: JobRunner
    cache: ProgramCache
    model_name: str = field(kw_only=True)
    model_folder: Path = field(kw_only=True)
    semaphore: CompileSemaphore = field(default_factory=machine_semaphore, kw_only=True)
    remedy: str = field(default="compile it beforehand with `rocserve compile`", kw_only=True)
    """A remedy for the time limit, in addition to a higher limit; "" = none."""

    def program(
        self,
        recipe: ProgramRecipe,
        *,
        timeout_seconds: float,
        low_priority: bool = False,
        report: Callable[[str], None] | None = None,
        trial: ReferenceTrial | None = None,
        on_verdict: Callable[[ReferenceVerdict], None] = lambda verdict: None,
    ) -> CachedProgram:
        """Return the program, which stays in the cache as long as the result lives. `timeout_seconds` limits the
        compile, not the wait for other processes; 0 = no limit. `report` replaces the runner's `report`. A program that
        is compiled here is compared with `trial`, and `on_verdict` gets the verdict. Raises JobError if the compile
        fails, times out or is called off; ServeError if the cache cannot store the program."""

        variables = dict(recipe.environment.variables)
        if recipe.options.target is Target.GPU:
            # MIOpen, which MIGraphX uses for convolutions on a GPU, reads these variables.
            variables["MIOPEN_USER_DB_PATH"] = str(self.cache.tuning_folder)
            if recipe.options.miopen_tuning:
                # 3: search for the fastest kernels, even if MIOpen's database has some.
                variables["MIOPEN_FIND_ENFORCE"] = "3"

        def build(file: Path) -> ProgramAbout:
            with self.semaphore.acquired(low_priority, _give_up), self._original_size_program(recipe) as own:
                job = CompileJob(self.model_name, str(self.model_folder), recipe, str(file), own, trial)
                result = self.runner.run(
                    job,
                    CompileResult,
                    timeout_seconds=timeout_seconds,
                    low_priority=low_priority,
                    environment=variables,
                    remedy=self.remedy,
                    report=report,
                )
            if result.verdict is not None:
                on_verdict(result.verdict)
            return result.about

        def build_with_problems(file: Path) -> ProgramAbout:
            # MIGraphX itself uses a file that the operator names.
            if recipe.options.target is not Target.GPU or os.environ.get(problem_cache.VARIABLE):
                return build(file)
            copy = file.with_name("problems.json")
            variables[problem_cache.VARIABLE] = str(copy)
            environment = recipe.environment
            problems = self.cache.problems(environment, recipe.options.exhaustive_tune)
            with problems.copied(copy, measures=environment == environment.measuring):
                return build(file)

        wait_for_slot = self._waiting(recipe, "until other programs have been compiled on this machine", report)
        while True:
            wait_for_other = self._waiting(recipe, "for another process that compiles it", report)
            try:
                return self.cache.find_or_build(recipe.key, build_with_problems, wait_for_other)
            except _NoSlotFree:
                wait_for_slot()
                # Each attempt makes a folder in the cache and removes it, and fifty processes may wait for hours.
                time.sleep(0.5)

    def first_to_serve(self, recipe: ProgramRecipe) -> ProgramRecipe:
        """Return the recipe, or if its program is not cached, that of an untuned program, which is compiled sooner."""
        untuned = recipe.untuned
        return recipe if untuned is None or self.cache.holds(recipe.key) else untuned

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
    def _original_size_program(self, recipe: ProgramRecipe) -> Iterator[str]:
        """Yield the path of the cached program of the file's own batch size; "" = not cached, or not needed."""
        if not recipe.rebatched:
            yield ""
            return
        graph = read_graph(recipe.source.kind, Path(recipe.source.path), self.model_folder, recipe.output_names)
        found = self.cache.find(original_size_recipe(recipe, batch_dimension(graph) or 0).key)
        try:
            yield "" if found is None else str(found.path)
        finally:
            if found is not None:
                found.release()
