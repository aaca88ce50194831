"""Chooses the sizes to which open dimensions without written sizes are padded: those that a check allows, within the
limits of compile time and memory; and finds which outputs follow padded dimensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from rocserve.backends.base import ModelSource
from rocserve.backends.host import Host
from rocserve.backends.migraphx.binding import ProgramTensor
from rocserve.backends.migraphx.compiling.context import CompileContext
from rocserve.backends.migraphx.compiling.memory import compiled_memory, free_memory
from rocserve.backends.migraphx.compiling.plan import ProgramPlan
from rocserve.backends.migraphx.compiling.probe_jobs import InspectJob, InspectResult
from rocserve.backends.migraphx.compiling.program_cache import CachedProgram
from rocserve.backends.migraphx.compiling.recipe import ProgramRecipe, SourceKind
from rocserve.backends.migraphx.compiling.wanted_sizes import SizesMissing
from rocserve.backends.migraphx.tensors import client_tensor
from rocserve.backends.onnx.checked_sizes import default_sizes
from rocserve.backends.written_sizes import with_measured_outputs
from rocserve.core.load_check import LoadCheckReport
from rocserve.core.padding import NO_PADDING, Lengths, Padding, Shape
from rocserve.core.printable import readable_size
from rocserve.jobs.runner import JobRunner
from rocserve.load_check.padding_verdict import PaddingState


def with_default_sizes(
    model: ModelSource, onnxruntime: JobRunner, plan: Callable[[Padding], ProgramPlan]
) -> tuple[ProgramPlan, LoadCheckReport | None]:
    """Return the plan, with default sizes if it lacks numbers and padding is right, and the outcome of their check;
    None = no dimension needs them. `plan`: plans with these default sizes. Raises as `plan`; SizesMissing says why if
    padding is wrong, or was not confirmed."""
    try:
        return plan(NO_PADDING), None
    except SizesMissing as missing:
        if (wanted := missing.wanted) is None:
            raise
        found, took = default_sizes(model, onnxruntime, wanted)
        refused = [one for one in found.verdict.dimensions if one.state is not PaddingState.ALLOWED]
        if refused:
            raise missing.because(refused[0].reason) from None
        parts = tuple(dict.fromkeys(one.reason for one in found.verdict.dimensions))
        return plan(found.padding), LoadCheckReport(parts, seconds=took)


def with_padded_outputs(context: CompileContext, plan: ProgramPlan) -> ProgramPlan:
    """Return the plan with the outputs that are cut back: those whose shapes follow a padded dimension, by MIGraphX's
    own shapes at two sizes. Raises ServeError (INVALID_ARGUMENT) if one cannot be cut back, JobError if MIGraphX cannot
    read the model."""

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


def planned_sizes(context: CompileContext, plan: ProgramPlan, first: CachedProgram) -> ProgramPlan:
    """Return the affordable part of the plan, estimated by its first program, and log it."""
    model, about, cache = context.model, first.about, context.compiler.cache
    groups = [group for group in model.config.instance_groups if not group.passive]
    # Each instance has its own programs.
    program_bytes = compiled_memory(first).total_bytes * (sum(max(group.count, 1) for group in groups) or 1)
    memory = free_memory(context.options.target, model.device, Host())
    free = None if memory is None else memory.free_bytes
    found = affordable(plan, program_bytes, free, about.compile_seconds, lambda recipe: cache.holds(recipe.key))
    rows = sorted({recipe.batch_size for recipe in found.recipes} - {0})
    context.log.info(
        "model '%s': no sizes are written, so it is padded to %s%s: %d programs, about %s of memory (%s are free), and"
        " %.2g s to compile each",
        model.name,
        "; ".join(found.padding.properties.values()),
        f" in batches of {', '.join(map(str, rows))}" if rows else "",
        len(found.recipes),
        readable_size(program_bytes * len(found.recipes)),
        "unknown" if free is None else readable_size(free),
        about.compile_seconds,
    )
    return found


def affordable(
    plan: ProgramPlan,
    program_bytes: int,
    free_bytes: int | None,
    compile_seconds: float,
    is_cached: Callable[[ProgramRecipe], bool],
) -> ProgramPlan:
    """Return the plan, reduced until its programs fit into the limits of compile time and memory. Programs in the cache
    take no time. `free_bytes`: None = not known."""

    def fits(fewer: ProgramPlan) -> bool:
        # Other models need some of the free memory, too.
        is_small = free_bytes is None or program_bytes * len(fewer.recipes) <= 0.5 * free_bytes
        # An hour at most: the user has not asked for these programs, and each takes a compile slot.
        return is_small and compile_seconds * sum(not is_cached(one) for one in fewer.recipes) <= 3600.0

    fewest = plan
    for fewest in plan.fewer():
        if fits(fewest):
            break
    return fewest
