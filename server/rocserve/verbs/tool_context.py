"""Prepares MIGraphX for the tools: finds its library, plans a model's programs, and compiles them in child processes.

The tool's own process never loads MIGraphX.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from rocserve.backends.host import Host
from rocserve.backends.migraphx.compiling.child_process import migraphx_jobs
from rocserve.backends.migraphx.compiling.compiler import ProgramCompiler
from rocserve.backends.migraphx.compiling.plan import ProgramPlan, plan_programs
from rocserve.backends.migraphx.compiling.probe_jobs import LibraryJob, LibraryResult
from rocserve.backends.migraphx.compiling.program_cache import CachedProgram, open_cache
from rocserve.backends.migraphx.compiling.recipe import ProgramRecipe, program_environment
from rocserve.backends.migraphx.default_sizes import with_default_sizes
from rocserve.backends.migraphx.engine_choice import MIGRAPHX
from rocserve.backends.migraphx.installation import find_installation
from rocserve.backends.migraphx.mxr_file import sibling_model
from rocserve.backends.migraphx.options import Target, compile_options, serving_options
from rocserve.backends.onnx.checked_sizes import equal_dimensions
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.model_config import InstanceKind
from rocserve.jobs.runner import JobEngine, JobRunner
from rocserve.verbs.model_choice import ToolModel
from rocserve.verbs.verb import tool_log


def usable_targets(library: LibraryResult, device: int | None) -> frozenset[Target]:
    """Return the targets that can be used here. The target gpu needs a GPU, although its library loads without one."""
    targets = frozenset(Target(name) for name, fault in library.targets.items() if not fault)
    return targets if device is not None else targets - {Target.GPU}


class ToolContext:
    """Holds the library, the options and the program cache for one model."""

    def __init__(self, model: ToolModel, report: Callable[[str], None], library: LibraryResult | None = None) -> None:
        """Find MIGraphX and read the model's options. `report` takes one line of progress at a time. `library` is the
        result that another context got; None = ask MIGraphX. Raises ServeError: UNAVAILABLE if MIGraphX or the target
        cannot be used here, INVALID_ARGUMENT if a parameter is wrong."""
        source, log = model.source, tool_log()
        if MIGRAPHX not in model.backend.engines:
            raise invalid_argument(
                f"is of backend '{model.backend.name}', whose models have no compiled programs; this is for ONNX,"
                " TensorFlow and .mxr models"
            )
        gpus = () if source.instance_kind is InstanceKind.CPU else Host().gpus
        self.device = source.device if source.device is not None else next(iter(gpus), None)
        self.model = model
        self.serving = serving_options(source.config)
        installation = find_installation(source.settings)
        self.runner = JobRunner(migraphx_jobs(installation, self.serving.binding), report, log)
        self._onnxruntime = JobRunner(JobEngine("ONNX Runtime"), report, log)
        # The first load of ROCm after a boot may take long.
        self.library = library or self.runner.run(LibraryJob(), LibraryResult, timeout_seconds=120.0)
        targets = usable_targets(self.library, self.device)
        self.options = compile_options(source.config, source.instance_kind, targets)
        if self.options.target is not Target.GPU:
            self.device = None
        if self.device is not None:
            # All children must see only this GPU, as a worker of the server does.
            os.environ["HIP_VISIBLE_DEVICES"] = str(self.device)
        self.environment = program_environment(self.options.target, self.device, self.library.version)
        # No remedy in error texts: the remedy that a server names is this very tool.
        self._compiler = ProgramCompiler(
            self.runner,
            open_cache(source.settings, log.warning),
            model_name=source.name,
            model_folder=source.model_folder,
            remedy="",
        )

    def plan(self) -> ProgramPlan:
        """Return the programs of the model. Raises ServeError if the file or the configuration is wrong."""
        source = self.model.source
        original = file = source.model_file
        if file.suffix == ".mxr":
            file = sibling_model(file) or file
        if file.suffix == ".mxr":
            raise invalid_argument(
                f"{file.name} is compiled already, and its ONNX file is not next to it as"
                f" {file.with_suffix('.onnx').name}"
            )
        try:
            plan, _ = with_default_sizes(
                source,
                self._onnxruntime,
                lambda default: plan_programs(
                    source,
                    self.options,
                    self.serving,
                    self.environment,
                    model_file=file,
                    default=default,
                    equal=partial(equal_dimensions, source, self._onnxruntime),
                ),
            )
        except ServeError as error:
            if original == file:
                raise
            reason = f"{original.name} is compiled already, so {file.name} next to it is compiled"
            raise ServeError(error.code, f"{reason}: {error.text}") from None
        if not plan.batches and "batch_sizes" in source.config.parameters:
            raise invalid_argument("does not batch, so there is one program; remove --batch-sizes")
        return plan

    def program(self, recipe: ProgramRecipe) -> tuple[CachedProgram, bool]:
        """Return the compiled program, and whether it came from the cache. A missing program is compiled into the
        cache. Raises ServeError if it cannot be compiled."""
        found = self._compiler.cache.find(recipe.key)
        if found is not None:
            return found, True
        return self._compiler.program(recipe, timeout_seconds=self.serving.compile_timeout_seconds), False

    @property
    def place(self) -> str:
        """The target as text for users: "target gpu (gfx90a)"."""
        architecture = self.environment.gpu_architecture
        return f"target {self.options.target.value}" + (f" ({architecture})" if architecture else "")
