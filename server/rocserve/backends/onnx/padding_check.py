"""Checks on a loaded session on the CPU whether the dimensions that the parameter `sizes` names may be padded."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from rocserve.backends.base import ModelSource
from rocserve.backends.check_samples import sample_feeds
from rocserve.backends.checked_verdicts import checked_padding
from rocserve.backends.onnx.checked_session import checked_inputs, checked_run, configured_sizes, fixed_rows
from rocserve.backends.onnx.external_weights import ExternalWeights
from rocserve.backends.onnx.opener import SessionOpener
from rocserve.backends.onnx.rows_check import model_digest, session_parts
from rocserve.backends.parameters import load_check_mode
from rocserve.backends.written_sizes import has_rows, padding_report, written_values
from rocserve.core.load_check import NOT_CHECKED, LoadCheckMode, LoadCheckReport
from rocserve.core.requests import Signature
from rocserve.load_check.budget import Budget, OutOfTime
from rocserve.load_check.input_search import NoInputs
from rocserve.load_check.length_trials import LengthTrials
from rocserve.load_check.made_inputs import seed_of
from rocserve.load_check.onnx_facts import onnx_facts
from rocserve.load_check.padding import check_padding


@dataclass(frozen=True, slots=True)
class PaddingCheck:
    """The padding check of one model."""

    model: ModelSource
    opener: SessionOpener
    weights: ExternalWeights

    def run(self, session: Any, signature: Signature, seconds: float) -> tuple[Signature, LoadCheckReport]:
        """Return the signature, with the pad values that the check finds. `seconds`: the time left. Raises
        LoadCheckFailed if the check is strict, and answers change."""
        config, padding = self.model.config, signature.padding
        mode = load_check_mode(config, self.model.settings)
        if not padding.dimensions or mode is LoadCheckMode.OFF:
            return signature, NOT_CHECKED
        sizes = configured_sizes(config, has_rows(config, signature))
        parts = session_parts(config, sizes, sample_feeds(self.model, signature))
        verdict, took = checked_padding(
            self.model,
            padding,
            seconds,
            (model_digest(self.model, self.weights), signature.dependent_rows, *parts),
            lambda: check_padding(
                self._trials(session, signature, Budget(seconds), exposes=True), padding, written_values(config)
            ),
        )
        report = replace(padding_report(verdict, mode), seconds=took)
        return replace(signature, padding=replace(padding, values=verdict.values)), report

    def search(self, session: Any, signature: Signature) -> LengthTrials:
        """Look for inputs that the session takes, whatever the mode of the check."""
        trials = self._trials(session, signature, Budget(self.model.settings.load_check_seconds), exposes=False)
        # Without inputs, each run then reports that there are none.
        with self.model.checking("looking for inputs"), suppress(NoInputs, OutOfTime, MemoryError):
            _ = trials.found
        return trials

    def _trials(self, session: Any, signature: Signature, budget: Budget, exposes: bool) -> LengthTrials:
        """`exposes`: whether to look at inner tensors, too."""
        rows, facts = has_rows(self.model.config, signature), onnx_facts(self.opener.file.path)
        facts = facts if exposes else replace(facts, exposed=())
        run, outputs = checked_run(self.opener.open_exposing(facts.exposed) if facts.exposed else session, rows)
        return LengthTrials(
            run,
            checked_inputs(session, configured_sizes(self.model.config, rows), rows),
            outputs,
            facts,
            budget,
            seed_of(model_digest(self.model, self.weights)),
            sample_feeds(self.model, signature),
            has_company=rows and not signature.dependent_rows,
            fixed_rows=fixed_rows(session, rows),
        )
