"""Opens MIGraphX, its cache and its compiler for one model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rocserve.backends.base import ModelSource
from rocserve.backends.migraphx.binding import Binding, MigraphxError, Program
from rocserve.backends.migraphx.compiling.child_process import migraphx_jobs, with_hint
from rocserve.backends.migraphx.compiling.compiler import ProgramCompiler
from rocserve.backends.migraphx.compiling.program_cache import open_cache
from rocserve.backends.migraphx.compiling.recipe import ProgramEnvironment, program_environment
from rocserve.backends.migraphx.installation import find_installation
from rocserve.backends.migraphx.options import (
    CompileOptions,
    ServingOptions,
    Target,
    compile_options,
    serving_options,
)
from rocserve.backends.migraphx.python_module import open_binding
from rocserve.core.errors import unavailable
from rocserve.jobs.runner import JobEngine, JobRunner


@dataclass(frozen=True, slots=True)
class CompileContext:
    model: ModelSource
    binding: Binding
    options: CompileOptions
    serving: ServingOptions
    environment: ProgramEnvironment
    compiler: ProgramCompiler
    onnxruntime: JobRunner
    """Runs ONNX Runtime, the reference."""
    log: logging.Logger

    @property
    def batching_is_written(self) -> bool:
        """Whether the configuration, not the server, says that the model batches."""
        return self.model.config.max_batch_size > 0 or bool(self.serving.batch_sizes)

    def properties(self, batch_sizes: str, of_program: Mapping[str, str]) -> Mapping[str, str]:
        """Return facts about the engine for the model's metadata. `batch_sizes`: the sizes in service. `of_program`:
        facts about the program, which override facts that follow from the parameters. Empty facts are left out."""
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
        """Load a program that a child has tried. Raises ServeError (UNAVAILABLE) if MIGraphX refuses it here."""
        try:
            return self.binding.load(path)
        except MigraphxError as error:
            raise unavailable(f"MIGraphX cannot load {path.name}: {with_hint(str(error))}") from None
        finally:
            for line in self.binding.take_messages():
                self.log.info("MIGraphX: %s", line)


def open_compile_context(model: ModelSource, log: logging.Logger) -> CompileContext:
    """Load MIGraphX, check its target, and open the cache and the compiler for a model. Raises ServeError (UNAVAILABLE)
    if MIGraphX or the target cannot be used here, ServeError (INVALID_ARGUMENT) if a parameter is wrong."""
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
    onnxruntime = JobRunner(JobEngine("ONNX Runtime"), model.report_check, log)
    return CompileContext(model, binding, options, serving, environment, compiler, onnxruntime, log)


def usable_targets(binding: Binding, has_gpu: bool) -> Sequence[Target]:
    """Return the targets that programs can be compiled for and run on here, preferred first."""
    targets = [Target.GPU] if has_gpu else []
    for target in (Target.CPU, Target.REF):
        try:
            binding.check_target(target.value)
        except MigraphxError:
            continue
        targets.append(target)
    return targets
