"""Checks before a model is served whether the rows of a batch are independent, on its session on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnxruntime

from rocserve.backends.base import ModelSource
from rocserve.backends.check_samples import sample_feeds, samples_digest
from rocserve.backends.checked_verdicts import checked_rows
from rocserve.backends.onnx.checked_session import Sizes, checked_inputs, checked_run, configured_sizes
from rocserve.backends.onnx.external_weights import ExternalWeights
from rocserve.backends.onnx.opener import SessionOpener
from rocserve.backends.parameters import load_check_mode
from rocserve.cache.folders import cache_directory
from rocserve.core.load_check import NOT_CHECKED, LoadCheckMode, LoadCheckReport
from rocserve.core.model_config import ModelConfig
from rocserve.core.ragged import RaggedBatching
from rocserve.core.requests import Signature
from rocserve.load_check.budget import Budget
from rocserve.load_check.made_inputs import seed_of
from rocserve.load_check.onnx_facts import onnx_facts
from rocserve.load_check.rows import RowsVerdict, check_rows
from rocserve.load_check.tensors import Feed
from rocserve.load_check.verdict_cache import VerdictCache, verdict_key


def needs_rows_check(model: ModelSource, signature: Signature) -> bool:
    """Return whether requests might share a batch of the model, and only an experiment can decide it."""
    config = model.config
    return (
        signature.supports_batching
        and not signature.dependent_rows
        and (config.max_batch_size > 0 or config.has_open_batch)
        # Requests of a ragged batch share tensors without rows.
        and not RaggedBatching(config)
        and load_check_mode(config, model.settings) is not LoadCheckMode.OFF
    )


def with_checked_rows(
    model: ModelSource, opener: SessionOpener, weights: ExternalWeights, session: object, signature: Signature
) -> tuple[Signature, LoadCheckReport]:
    """Return the signature, completed by the check. `session`: on the CPU."""
    if not needs_rows_check(model, signature):
        return signature, without_experiment(signature)
    seconds = model.settings.load_check_seconds
    digest = model_digest(model, weights)
    sizes, samples = configured_sizes(model.config, has_rows=True), sample_feeds(model, signature)
    parts = session_parts(model.config, sizes, samples)

    def check() -> RowsVerdict:
        facts, inputs = onnx_facts(opener.file.path), checked_inputs(session, sizes, has_rows=True)
        shown = opener.open_exposing(facts.exposed) if facts.exposed else session
        run, outputs = checked_run(shown, has_rows=True)
        budget, largest = Budget(seconds), model.config.max_batch_size
        return check_rows(run, inputs, outputs, facts, budget, seed_of(digest), samples, largest_batch=largest)

    key = rows_verdict_key(model.config, (digest, *parts))
    return judged(model, signature, *checked_rows(model, key, seconds, check))


def without_experiment(signature: Signature) -> LoadCheckReport:
    """Return the report of a model whose file alone says that requests must not be joined."""
    reason = signature.dependent_rows
    return LoadCheckReport((reason,)) if reason else NOT_CHECKED


def judged(
    model: ModelSource, signature: Signature, verdict: RowsVerdict, seconds: float
) -> tuple[Signature, LoadCheckReport]:
    """Return the signature and the report that follow from a verdict."""
    is_strict = load_check_mode(model.config, model.settings) is LoadCheckMode.STRICT
    report = replace(verdict.report(model.config.max_batch_size > 0, is_strict), seconds=seconds)
    return replace(signature, dependent_rows=verdict.doubt), report


def model_digest(model: ModelSource, weights: ExternalWeights) -> str:
    """Return the digest of a model's file with its weights, of large files from the cache."""
    return VerdictCache(cache_directory(model.settings)).digest(model.model_file, tuple(weights.files.values()))


def rows_verdict_key(config: ModelConfig, parts: Sequence[str]) -> str:
    """Return the key of a verdict on rows. `parts`: the model's digest, and `session_parts`."""
    return verdict_key("rows", str(config.max_batch_size), *parts)


def session_parts(config: ModelConfig, sizes: Sizes, samples: Sequence[Feed]) -> Sequence[str]:
    """Return the further facts that a verdict depends on, beside the file."""
    return (
        "onnxruntime",
        onnxruntime.__version__,
        repr(sorted((name, tuple(dims)) for name, dims in sizes.items())),
        samples_digest(samples),
        repr((config.graph_level, config.operator_libraries, sorted(config.parameters.items()))),
    )
