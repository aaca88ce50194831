"""Chooses the sizes to which open dimensions without written sizes are padded: those that a check allows, within the
limits of compile time and memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rocserve.backends.base import ModelSource
from rocserve.backends.host import Host
from rocserve.backends.installed import is_installed
from rocserve.backends.migraphx.compiling.context import CompileContext
from rocserve.backends.migraphx.compiling.memory import compiled_memory
from rocserve.backends.migraphx.compiling.plan import ProgramPlan
from rocserve.backends.migraphx.compiling.program_cache import CachedProgram, ProgramCache
from rocserve.backends.migraphx.compiling.recipe import ProgramRecipe
from rocserve.backends.migraphx.compiling.wanted_sizes import USUAL, SizesMissing, WantedSizes
from rocserve.backends.migraphx.options import Target
from rocserve.backends.onnx.padding_job import (
    DefaultSizes,
    EqualDimensions,
    OnnxDefaultSizesJob,
    OnnxEqualDimensionsJob,
    OnnxPaddingJob,
)
from rocserve.backends.written_sizes import written_values
from rocserve.cache.folders import cache_directory
from rocserve.core.load_check import LoadCheckReport
from rocserve.core.padding import NO_PADDING, Padding
from rocserve.core.printable import readable_size
from rocserve.jobs.messages import Job, JobError
from rocserve.jobs.runner import JobRunner
from rocserve.load_check.padding_verdict import PaddingState, undecided
from rocserve.load_check.verdict_cache import Known, Verdict, VerdictCache, verdict_key

_START_SECONDS = 60.0
"""The time that the check's process may take beyond its budget: to start, and to open the model."""
_MOST_SECONDS = 3600.0
"""The limit of the estimated time of all compiles. The user has not asked for these programs, and each takes a compile
slot."""
_MOST_OF_FREE_MEMORY = 0.5
"""The share of the free memory that all programs together may take: other models need some, too."""


@dataclass(frozen=True, slots=True)
class DefaultPlan:
    plan: ProgramPlan
    report: LoadCheckReport | None = None
    """The outcome for default sizes; None = no dimension needs them."""


def with_default_sizes(
    model: ModelSource, onnxruntime: JobRunner, plan: Callable[[Padding], ProgramPlan]
) -> DefaultPlan:
    """Return the plan, with default sizes if it lacks numbers and padding is right. `plan`: plans with these default
    sizes. Raises as `plan`; SizesMissing says why if padding is wrong, or was not confirmed."""
    try:
        return DefaultPlan(plan(NO_PADDING))
    except SizesMissing as missing:
        if missing.wanted is None:
            raise
        started = time.monotonic()
        found, is_from_cache = _checked(model, onnxruntime, missing)
        refused = [one for one in found.verdict.dimensions if one.state is not PaddingState.ALLOWED]
        if refused:
            raise missing.because(refused[0].reason) from None
        took = 0.0 if is_from_cache else time.monotonic() - started
        parts = tuple(dict.fromkeys(one.reason for one in found.verdict.dimensions))
        return DefaultPlan(plan(found.padding), LoadCheckReport(parts, seconds=took))


def _checked(model: ModelSource, onnxruntime: JobRunner, missing: SizesMissing) -> tuple[DefaultSizes, bool]:
    """Return the sizes that the model takes, with the verdict on them, and whether it was in the cache."""
    wanted = missing.wanted
    assert wanted is not None, "the caller has seen to it"
    known = _found(
        model,
        onnxruntime,
        wanted,
        "padding short inputs",
        lambda check: OnnxDefaultSizesJob(check, USUAL),
        DefaultSizes,
        lambda why: DefaultSizes(wanted.padding, undecided(wanted.padding, why)),
        lambda sizes: sizes.verdict.is_lasting,
    )
    return known.verdict, known.is_from_cache


def equal_dimensions(model: ModelSource, onnxruntime: JobRunner, wanted: WantedSizes) -> Sequence[Sequence[int]]:
    """Return the dimensions by their indices, in groups: the lengths of those of a group must be equal. Each is alone
    if nothing can be found out."""
    alone = EqualDimensions(tuple((index,) for index in range(len(wanted.padding.dimensions))), is_lasting=False)
    known = _found(
        model,
        onnxruntime,
        wanted,
        "looking for equal dimensions",
        OnnxEqualDimensionsJob,
        EqualDimensions,
        lambda why: alone,
        lambda equal: equal.is_lasting,
    )
    return known.verdict.groups


def _found(
    model: ModelSource,
    onnxruntime: JobRunner,
    wanted: WantedSizes,
    what: str,
    job: Callable[[OnnxPaddingJob], Job],
    kind: type[Verdict],
    unknown: Callable[[str], Verdict],
    is_lasting: Callable[[Verdict], bool],
) -> Known[Verdict]:
    """Return a job's result on ONNX Runtime, new or from the cache. `what`: the job's name for users. `unknown`: makes
    the verdict from the reason if the job cannot run."""
    if not is_installed("onnxruntime"):
        return Known(unknown("ONNX Runtime is not installed"), is_from_cache=True)
    check, seconds = _job(model, wanted), model.settings.load_check_seconds + _START_SECONDS

    def found() -> Verdict:
        model.report_check(what)
        try:
            return onnxruntime.run(job(check), kind, timeout_seconds=seconds, limit_name="load_check_seconds")
        except JobError as error:
            return unknown(error.text)
        finally:
            model.report_check("")

    facts = (repr(check.padding), repr(sorted(check.shapes.items())), repr((check.written_values, check.has_rows)))
    key = verdict_key(kind.__name__, wanted.source.digest, "ONNX Runtime", *facts)
    return VerdictCache(cache_directory(model.settings)).find_or_check(key, kind, found, is_lasting, seconds)


def _job(model: ModelSource, wanted: WantedSizes) -> OnnxPaddingJob:
    return OnnxPaddingJob(
        model.name,
        wanted.source.path,
        wanted.shapes,
        wanted.padding,
        tuple(sorted(written_values(model.config))),
        has_rows=wanted.has_rows,
        has_company=wanted.has_rows,
        seconds=model.settings.load_check_seconds,
    )


def planned_sizes(context: CompileContext, plan: ProgramPlan, first: CachedProgram) -> ProgramPlan:
    """Return the affordable part of the plan, estimated by its first program, and log it."""
    model, about, cache = context.model, first.about, context.compiler.cache
    groups = [group for group in model.config.instance_groups if not group.passive]
    # Each instance has its own programs.
    program_bytes = compiled_memory(first).total_bytes * (sum(max(group.count, 1) for group in groups) or 1)
    free = _free_bytes(context)
    found = affordable(plan, program_bytes, free, about.compile_seconds, lambda recipe: _is_cached(cache, recipe.key))
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
        is_small = free_bytes is None or program_bytes * len(fewer.recipes) <= _MOST_OF_FREE_MEMORY * free_bytes
        return is_small and compile_seconds * sum(not is_cached(one) for one in fewer.recipes) <= _MOST_SECONDS

    fewest = plan
    for fewest in plan.fewer():
        if fits(fewest):
            break
    return fewest


def _free_bytes(context: CompileContext) -> int | None:
    """Return the free memory where programs are kept; None = not known."""
    host = Host()
    if context.options.target is not Target.GPU:
        free = host.free_memory()
    else:
        gpu = host.gpu(context.model.device or 0)
        free = host.free_gpu_memory(gpu) if gpu else None
    return None if free is None else free.free_bytes


def _is_cached(cache: ProgramCache, key: str) -> bool:
    found = cache.find(key)
    if found is not None:
        found.release()
    return found is not None
