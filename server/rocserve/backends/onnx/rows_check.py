"""Checks before a model is served whether the rows of a batch are independent, on its session on the CPU."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnxruntime

from rocserve.backends.base import ModelSource
from rocserve.backends.check_samples import sample_feeds, samples_digest
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
from rocserve.load_check.rows import Independence, RowsVerdict, check_rows
from rocserve.load_check.tensors import Feed
from rocserve.load_check.verdict_cache import VerdictCache, verdict_key

_LOG = logging.getLogger(__name__)
_WAIT_SECONDS = 5.0
"""The time beyond the check's own after which a worker no longer waits for another's verdict."""


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


@dataclass(frozen=True, slots=True)
class RowsCheck:
    """The rows check of one model."""

    model: ModelSource
    opener: SessionOpener
    weights: ExternalWeights

    def run(self, session: object, signature: Signature) -> tuple[Signature, LoadCheckReport]:
        """Return the signature, completed by the check. `session`: on the CPU."""
        if not needs_rows_check(self.model, signature):
            return signature, without_experiment(signature)
        started, settings = time.monotonic(), self.model.settings
        cache = VerdictCache(cache_directory(settings))
        digest = cache.digest(self.model.model_file, tuple(self.weights.files.values()))
        sizes, samples = configured_sizes(self.model.config, has_rows=True), sample_feeds(self.model, signature)
        key = verdict_key(
            "rows", digest, "onnxruntime", onnxruntime.__version__, *session_parts(self.model.config, sizes, samples)
        )

        def check() -> RowsVerdict:
            self.model.report_check("running batches of different rows")
            try:
                return self._verdict(session, sizes, samples, seed_of(digest))
            except Exception as error:
                # A fault of the check must not keep a model from being served, one request after the other.
                _LOG.warning("model '%s': the load check failed", self.model.name, exc_info=True)
                return RowsVerdict(Independence.UNDECIDED, f"not checked: {error}", is_lasting=False)
            finally:
                self.model.report_check("")

        seconds = settings.load_check_seconds
        known = cache.find_or_check(
            key, RowsVerdict, check, lambda verdict: verdict.is_lasting, seconds + _WAIT_SECONDS
        )
        return judged(self.model, signature, known.verdict, 0.0 if known.is_from_cache else time.monotonic() - started)

    def _verdict(self, session: object, sizes: Sizes, samples: Sequence[Feed], seed: int) -> RowsVerdict:
        facts, inputs = onnx_facts(self.opener.file.path), checked_inputs(session, sizes, has_rows=True)
        run, outputs = checked_run(session, has_rows=True)
        if facts.exposed:
            run, outputs = checked_run(self.opener.open_exposing(facts.exposed), has_rows=True)
        budget = Budget(self.model.settings.load_check_seconds)
        return check_rows(run, inputs, outputs, facts, budget, seed, samples)


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


def session_parts(config: ModelConfig, sizes: Sizes, samples: Sequence[Feed]) -> Sequence[str]:
    """Return the further facts that a verdict depends on, beside the file and the engine."""
    return (
        repr(sorted((name, tuple(dims)) for name, dims in sizes.items())),
        samples_digest(samples),
        repr((config.graph_level, config.operator_libraries, sorted(config.parameters.items()))),
    )
