"""Opens MIGraphX for a model of any format: the library, its targets, the cache and the compiler."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rocserve.backends.base import ModelSource
from rocserve.backends.migraphx.binding.choice import open_binding
from rocserve.backends.migraphx.binding.interface import Binding, MigraphxError, Program
from rocserve.backends.migraphx.compiler import ProgramCompiler
from rocserve.backends.migraphx.configuration.options import (
    CompileOptions,
    ServingOptions,
    Target,
    compile_options,
    serving_options,
)
from rocserve.backends.migraphx.installation import find_installation
from rocserve.backends.migraphx.jobs.child import migraphx_jobs, with_hint
from rocserve.backends.migraphx.planning.recipe import ProgramEnvironment, program_environment
from rocserve.backends.migraphx.program_cache import ProgramCache, open_cache
from rocserve.core.errors import unavailable
from rocserve.jobs.runner import JobRunner


@dataclass(frozen=True, slots=True)
class CompileContext:
    model: ModelSource
    binding: Binding
    options: CompileOptions
    serving: ServingOptions
    environment: ProgramEnvironment
    cache: ProgramCache
    runner: JobRunner
    compiler: ProgramCompiler
    log: logging.Logger

    def properties(self, batch_sizes: str, of_program: Mapping[str, str]) -> Mapping[str, str]:
        """Facts about the engine, for a model's metadata, with the batch sizes in service and what is to be said of the
        program, also in the place of what follows from the parameters; those that do not apply ("") are left out."""
        facts = {
            "migraphx_version": self.binding.migraphx_version,
            "migraphx_binding": self.binding.name,
            "migraphx_library": self.binding.library,
            "rocm_version": self.environment.rocm_version,
            "gpu_architecture": self.environment.gpu_architecture,
            "target": self.options.target.value,
            "precision": self.options.precision.value,
            "batch_sizes": batch_sizes,
            **of_program,
        }
        return {name: value for name, value in facts.items() if value}

    def open_program(self, path: Path) -> Program:
        """A program that a child has tried before. Raises: ServeError: UNAVAILABLE, MIGraphX refuses it in this
        process."""
        try:
            return self.binding.load(path)
        except MigraphxError as error:
            raise unavailable(f"MIGraphX cannot load {path.name}: {with_hint(str(error))}") from None
        finally:
            for line in self.binding.take_messages():
                self.log.info("MIGraphX: %s", line)


def open_compile_context(model: ModelSource, log: logging.Logger) -> CompileContext:
    """Raises: ServeError: UNAVAILABLE, MIGraphX or the target cannot be used here; INVALID_ARGUMENT, a parameter is
    wrong."""
    installation = find_installation(model.settings)
    serving = serving_options(model.config)
    try:
        binding = open_binding(installation, serving.binding)
    except MigraphxError as error:
        raise unavailable(f"MIGraphX cannot be loaded: {with_hint(str(error))}") from None
    targets = usable_targets(binding, has_gpu=model.device is not None)
    options = compile_options(model.config, model.instance_kind, targets)
    try:
        binding.check_target(options.target.value)
    except MigraphxError as error:
        raise unavailable(f"MIGraphX's target {options.target.value} cannot be used: {with_hint(str(error))}") from None
    device = model.device if options.target is Target.GPU else None
    environment = program_environment(options.target, device, binding.migraphx_version)
    cache = open_cache(model.settings, log.warning)
    runner = JobRunner(migraphx_jobs(installation, serving.binding), model.report, log)
    compiler = ProgramCompiler(runner, cache, model_name=model.name, model_folder=model.model_folder)
    return CompileContext(model, binding, options, serving, environment, cache, runner, compiler, log)


def usable_targets(binding: Binding, has_gpu: bool) -> Sequence[Target]:
    """Those that programs can be compiled for and run on here, the best first."""
    targets = [Target.GPU] if has_gpu else []
    for target in (Target.CPU, Target.REF):
        try:
            binding.check_target(target.value)
        except MigraphxError:
            continue
        targets.append(target)
    return targets
