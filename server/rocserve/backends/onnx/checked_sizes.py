"""Runs the jobs of padding_job.py in a child process on ONNX Runtime's CPU provider, unless the cache has the results:
which dimensions must be equal, and whether they may be padded, to sizes that are written or to default sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rocserve.backends.base import ModelSource
from rocserve.backends.installed import is_installed
from rocserve.backends.migraphx.compiling.wanted_sizes import USUAL, WantedSizes
from rocserve.backends.onnx.padding_job import (
    DefaultSizes,
    EqualDimensions,
    OnnxDefaultSizesJob,
    OnnxEqualDimensionsJob,
    OnnxPaddingJob,
)
from rocserve.backends.written_sizes import written_values
from rocserve.cache.folders import cache_directory
from rocserve.jobs.messages import Job, JobError
from rocserve.jobs.runner import JobRunner
from rocserve.load_check.padding_verdict import PaddingVerdict, undecided
from rocserve.load_check.verdict_cache import Verdict, VerdictCache, verdict_key


def default_sizes(model: ModelSource, onnxruntime: JobRunner, wanted: WantedSizes) -> tuple[DefaultSizes, float]:
    """Return sizes up to the longest that the model takes, with the verdict on them, and the seconds that the check
    took; 0 = it was known."""
    return _found(
        model,
        onnxruntime,
        wanted,
        wanted.has_rows,
        "padding short inputs",
        lambda check: OnnxDefaultSizesJob(check, USUAL),
        DefaultSizes,
        lambda why: DefaultSizes(wanted.padding, undecided(wanted.padding, why)),
        lambda sizes: sizes.verdict.is_lasting,
    )


def equal_dimensions(model: ModelSource, onnxruntime: JobRunner, wanted: WantedSizes) -> Sequence[Sequence[int]]:
    """Return the dimensions by their indices, in groups: the lengths of those of a group must be equal. Each is alone
    if nothing can be found out."""
    alone = EqualDimensions(tuple((index,) for index in range(len(wanted.padding.dimensions))), is_lasting=False)
    found, _ = _found(
        model,
        onnxruntime,
        wanted,
        wanted.has_rows,
        "looking for equal dimensions",
        OnnxEqualDimensionsJob,
        EqualDimensions,
        lambda why: alone,
        lambda equal: equal.is_lasting,
    )
    return found.groups


def checked_sizes(
    model: ModelSource, onnxruntime: JobRunner, wanted: WantedSizes, has_company: bool
) -> tuple[PaddingVerdict, float]:
    """Return whether dimensions may be padded to sizes that are written, and the seconds that the check took; 0 = it
    was known. `has_company`: requests share batches."""
    return _found(
        model,
        onnxruntime,
        wanted,
        has_company,
        "padding short inputs",
        lambda check: check,
        PaddingVerdict,
        lambda why: undecided(wanted.padding, why),
        lambda verdict: verdict.is_lasting,
    )


def _found(
    model: ModelSource,
    onnxruntime: JobRunner,
    wanted: WantedSizes,
    has_company: bool,
    what: str,
    job: Callable[[OnnxPaddingJob], Job],
    kind: type[Verdict],
    unknown: Callable[[str], Verdict],
    is_lasting: Callable[[Verdict], bool],
) -> tuple[Verdict, float]:
    """Return a job's result on ONNX Runtime, and the seconds that it took; 0 = it was known. `what`: the job's name for
    users. `unknown`: makes the verdict from the reason if the job cannot run."""
    if not is_installed("onnxruntime"):
        return unknown("ONNX Runtime is not installed"), 0.0
    seconds = model.settings.load_check_seconds
    check = OnnxPaddingJob(
        model.name,
        wanted.source.path,
        wanted.shapes,
        wanted.padding,
        tuple(sorted(written_values(model.config))),
        has_rows=wanted.has_rows,
        has_company=has_company,
        seconds=seconds,
    )

    def found() -> Verdict:
        with model.checking(what):
            try:
                return onnxruntime.run_check(job(check), kind, seconds)
            except JobError as error:
                return unknown(error.text)

    written = repr((check.written_values, check.has_rows, has_company))
    facts = (repr(check.padding), repr(sorted(check.shapes.items())), written)
    key = verdict_key(kind.__name__, wanted.source.digest, "ONNX Runtime", *facts)
    # A worker waits for another's job, which may take a minute more.
    return VerdictCache(cache_directory(model.settings)).find_or_check(key, kind, found, is_lasting, seconds + 60)
