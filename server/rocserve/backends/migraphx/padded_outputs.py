"""Finds which places of the outputs follow a padded dimension: from MIGraphX's own shapes at two sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rocserve.backends.migraphx.binding import ProgramTensor
from rocserve.backends.migraphx.compiling.context import CompileContext
from rocserve.backends.migraphx.compiling.plan import ProgramPlan
from rocserve.backends.migraphx.compiling.probe_jobs import InspectJob, InspectResult
from rocserve.backends.migraphx.compiling.recipe import ProgramRecipe, SourceKind
from rocserve.backends.migraphx.tensors import client_tensor
from rocserve.backends.written_sizes import with_measured_outputs
from rocserve.core.padding import Lengths, Shape


def with_padded_outputs(context: CompileContext, plan: ProgramPlan) -> ProgramPlan:
    """Return the plan with the outputs that are cut back. Raises ServeError (INVALID_ARGUMENT) if one cannot be cut
    back, JobError if MIGraphX cannot read the model."""

    def shapes(lengths: Lengths) -> Mapping[str, Shape]:
        recipe = plan.at(lengths)
        pairs = zip(plan.outputs, _outputs(context, recipe), strict=True)
        is_nhwc = recipe.source.kind is SourceKind.TENSORFLOW
        return {planned.name: client_tensor(planned.name, "output", found, is_nhwc).shape for planned, found in pairs}

    return replace(plan, padding=with_measured_outputs(plan.padding, context.model.config, shapes))


def _outputs(context: CompileContext, recipe: ProgramRecipe) -> tuple[ProgramTensor, ...]:
    """Return the outputs of a program: of the cached one, else as MIGraphX reads the model, which is not compiled."""
    cached = context.compiler.cache.find(recipe.key)
    if cached is not None:
        cached.release()
        return cached.about.outputs
    job = InspectJob(f"{recipe.title} of model '{context.model.name}'", recipe)
    timeout = context.serving.compile_timeout_seconds
    return context.compiler.runner.run(job, InspectResult, timeout_seconds=timeout).outputs
