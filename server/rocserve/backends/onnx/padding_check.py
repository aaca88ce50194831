"""Tries on a loaded session on the CPU whether the dimensions that the parameter `sizes` names may be padded."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnxruntime

from rocserve.backends.base import ModelSource
from rocserve.backends.check_samples import sample_feeds
from rocserve.backends.onnx.checked_session import Sizes, checked_inputs, checked_run, configured_sizes, fixed_rows
from rocserve.backends.onnx.external_weights import ExternalWeights
from rocserve.backends.onnx.opener import SessionOpener
from rocserve.backends.onnx.rows_check import session_parts
from rocserve.backends.parameters import load_check_mode
from rocserve.backends.written_sizes import has_rows, padding_report, written_values
from rocserve.cache.folders import cache_directory
from rocserve.core.load_check import NOT_CHECKED, LoadCheckMode, LoadCheckReport
from rocserve.core.padding import Padding
from rocserve.core.requests import Signature
from rocserve.load_check.budget import Budget
from rocserve.load_check.length_trials import LengthTrials
from rocserve.load_check.made_inputs import seed_of
from rocserve.load_check.onnx_facts import onnx_facts
from rocserve.load_check.padding import check_padding
from rocserve.load_check.padding_verdict import PaddingVerdict, undecided
from rocserve.load_check.tensors import Feed
from rocserve.load_check.verdict_cache import VerdictCache, verdict_key

_LOG = logging.getLogger(__name__)
_WAIT_SECONDS = 5.0
"""The time beyond the check's own after which a worker no longer waits for another's verdict."""


@dataclass(frozen=True, slots=True)
class PaddingCheck:
    """The padding check of one model."""

    model: ModelSource
    opener: SessionOpener
    weights: ExternalWeights

    def run(self, session: Any, signature: Signature, seconds: float) -> tuple[Signature, LoadCheckReport]:
        """Return the signature, with the values to pad with that the check finds. `seconds`: what is left of the time.
        Raises LoadCheckFailed if the check is strict, and answers change."""
        padding = signature.padding
        mode = load_check_mode(self.model.config, self.model.settings)
        if not padding.dimensions or mode is LoadCheckMode.OFF:
            return signature, NOT_CHECKED
        started = time.monotonic()
        cache = VerdictCache(cache_directory(self.model.settings))
        digest = cache.digest(self.model.model_file, tuple(self.weights.files.values()))
        rows = has_rows(self.model.config, signature)
        sizes, samples = configured_sizes(self.model.config, rows), sample_feeds(self.model, signature)
        parts = session_parts(self.model.config, sizes, samples)
        engine = "onnxruntime", onnxruntime.__version__
        key = verdict_key("padding", digest, *engine, repr(padding), signature.dependent_rows, *parts)

        def check() -> PaddingVerdict:
            self.model.report_check("padding short inputs")
            try:
                return self._verdict(session, signature, padding, sizes, samples, Budget(seconds), seed_of(digest))
            except Exception as error:
                # A fault of the check must not keep a model from being served.
                _LOG.warning("model '%s': the load check failed", self.model.name, exc_info=True)
                return undecided(padding, str(error))
            finally:
                self.model.report_check("")

        known = cache.find_or_check(
            key, PaddingVerdict, check, lambda verdict: verdict.is_lasting, seconds + _WAIT_SECONDS
        )
        report = padding_report(known.verdict, mode)
        took = 0.0 if known.is_from_cache else time.monotonic() - started
        padding = replace(padding, values=known.verdict.values)
        return replace(signature, padding=padding), replace(report, seconds=took)

    def search(self, session: Any, signature: Signature) -> LengthTrials:
        """Look for inputs that the session takes, whatever the mode of the check. Raises as LengthTrials."""
        config, settings = self.model.config, self.model.settings
        rows = has_rows(config, signature)
        run, outputs = checked_run(session, rows)
        self.model.report_check("looking for inputs")
        try:
            return LengthTrials(
                run,
                checked_inputs(session, configured_sizes(config, rows), rows),
                outputs,
                replace(onnx_facts(self.opener.file.path), exposed=()),
                Budget(settings.load_check_seconds),
                seed_of(VerdictCache(cache_directory(settings)).digest(self.model.model_file)),
                sample_feeds(self.model, signature),
                fixed_rows(session, rows),
            )
        finally:
            self.model.report_check("")

    def _verdict(
        self,
        session: Any,
        signature: Signature,
        padding: Padding,
        sizes: Sizes,
        samples: Sequence[Feed],
        budget: Budget,
        seed: int,
    ) -> PaddingVerdict:
        rows = has_rows(self.model.config, signature)
        facts, inputs = onnx_facts(self.opener.file.path), checked_inputs(session, sizes, rows)
        run, outputs = checked_run(session, rows)
        if facts.exposed:
            run, outputs = checked_run(self.opener.open_exposing(facts.exposed), rows)
        fixed = fixed_rows(session, rows)
        return check_padding(
            run,
            inputs,
            outputs,
            facts,
            padding,
            budget,
            seed,
            samples,
            written_values(self.model.config),
            has_company=rows and not signature.dependent_rows and fixed is None,
            fixed_rows=fixed,
        )
