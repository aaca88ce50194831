"""Compares an execution provider with ONNX Runtime's CPU provider before the model is served. A child process computes
the CPU's answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from rocserve.backends.base import Batch, LoadedModel, ModelSource, model_executions
from rocserve.backends.check_samples import sample_feeds
from rocserve.backends.onnx.checked_session import Sizes, configured_sizes, served_output
from rocserve.backends.onnx.external_weights import ExternalWeights
from rocserve.backends.onnx.provider_options import CUDA, MIGRAPHX_PROVIDER, OPENVINO
from rocserve.backends.onnx.providers import Provider, ProviderPlan
from rocserve.backends.onnx.reference_job import OnnxReferenceJob, OnnxReferenceResult
from rocserve.backends.onnx.rows_check import (
    judged,
    model_digest,
    needs_rows_check,
    rows_verdict_key,
    session_parts,
    without_experiment,
)
from rocserve.backends.parameters import load_check_mode
from rocserve.backends.warmup import as_served
from rocserve.cache.folders import cache_directory
from rocserve.cache.temporary_folder import temporary_folder
from rocserve.core.errors import ServeError
from rocserve.core.load_check import NOT_CHECKED, PADDING, REFERENCE, LoadCheckFailed, LoadCheckMode, LoadCheckReport
from rocserve.core.padding import NO_PADDING
from rocserve.core.requests import Signature
from rocserve.core.tensors import tensor_from_numpy
from rocserve.jobs.messages import JobError
from rocserve.jobs.runner import TEMPORARY_PREFIX, JobEngine, JobRunner
from rocserve.load_check.budget import Budget
from rocserve.load_check.reference import CASE_ROWS, Case, ReferenceVerdict, compare, load_cases, save_cases
from rocserve.load_check.rows import Independence, RowsVerdict
from rocserve.load_check.tensors import Feed, Run
from rocserve.load_check.verdict_cache import VerdictCache, verdict_key


@dataclass(eq=False)
class ProviderCheck:
    """The load check of one model on execution providers: `before` they open it, and `after`."""

    model: ModelSource
    plan: ProviderPlan
    weights: ExternalWeights
    report: LoadCheckReport = field(default=NOT_CHECKED, init=False)
    _cases: list[Case] = field(default_factory=list, init=False)
    _known: ReferenceVerdict | None = field(default=None, init=False)
    _reference_key: str = field(default="", init=False)
    _missing: str = field(default="", init=False)
    """Why there are no answers of the CPU; "" = there are, or none are needed."""

    def __post_init__(self) -> None:
        settings = self.model.settings
        self._mode = load_check_mode(self.model.config, settings)
        self._started = time.monotonic()
        self._cache = VerdictCache(cache_directory(settings))
        self._is_known = True

    def before(self, signature: Signature) -> Signature:
        """Run the model on the CPU, unless all verdicts are known, and return the signature completed with the rows'
        verdict. Runs before the providers compile for batch sizes. Raises LoadCheckFailed if the providers' answers are
        known to differ from the CPU's."""
        if self._mode is LoadCheckMode.OFF or not signature.inputs:
            return signature
        checks_rows = needs_rows_check(self.model, signature)
        batches = signature.supports_batching and (
            self.model.config.max_batch_size > 0 or (checks_rows and self.model.config.has_open_batch)
        )
        sizes, samples = configured_sizes(self.model.config, has_rows=batches), sample_feeds(self.model, signature)
        parts = (model_digest(self.model, self.weights), *session_parts(self.model.config, sizes, samples))
        rows_key = rows_verdict_key(self.model.config, parts)
        self._reference_key = verdict_key("reference", *parts, *map(_described, self.plan.providers))
        rows = self._cache.find(rows_key, RowsVerdict) if checks_rows else None
        self._known = self._cache.find(self._reference_key, ReferenceVerdict)
        if self._known is not None:
            # A provider that is known to be wrong need not compile.
            self._judged(self._known)
        if self._known is None or (checks_rows and rows is None):
            found = self._run_reference(sizes, samples, checks_rows, CASE_ROWS if batches else 0)
            self._is_known = False
            if checks_rows and found.rows is not None:
                rows = found.rows
                if rows.is_lasting:
                    self._cache.remember(rows_key, rows)
        if not checks_rows:
            self.report = without_experiment(signature)
            return signature
        rows = rows or RowsVerdict(Independence.UNDECIDED, f"not checked: {self._missing}", is_lasting=False)
        signature, self.report = judged(self.model, signature, rows, 0.0)
        return signature

    def after(self, opened: LoadedModel) -> None:
        """Compare the loaded model with the CPU's answers. Raises LoadCheckFailed if its answers differ."""
        if self._mode is LoadCheckMode.OFF or not opened.signature.inputs:
            return
        verdict = self._known
        if verdict is None and self._cases:
            with self.model.checking("comparing answers with the CPU's"):
                budget = Budget(self.model.settings.load_check_seconds)
                verdict = compare(self._cases, self._candidate(opened), self._precision, budget)
            if verdict.cases:
                self._cache.remember(self._reference_key, verdict)
        self.report = self.report.then(self._judged(verdict))
        self.report = replace(self.report, seconds=0.0 if self._is_known else time.monotonic() - self._started)

    def _judged(self, verdict: ReferenceVerdict | None) -> LoadCheckReport:
        names = ", ".join(provider.name for provider in self.plan.providers)
        if verdict is None:
            return LoadCheckReport((f"{names} not checked against ONNX Runtime's CPU provider: {self._missing}",))
        if verdict.right:
            return LoadCheckReport(
                (f"{verdict.cases} inputs on {names} and on the CPU, largest error {verdict.largest_error:.2g}",),
                warning=f"{names}: {verdict.remark}" if verdict.remark else "",
            )
        text = f"{names} does not compute what ONNX Runtime's CPU provider does: {verdict.reason}"
        if self._mode is not LoadCheckMode.WARN:
            raise LoadCheckFailed(REFERENCE, f"model '{self.model.name}': {text}")
        return LoadCheckReport((text,), warning=text, failures=(REFERENCE,))

    def _run_reference(
        self, sizes: Sizes, samples: Sequence[Feed], checks_rows: bool, case_rows: int
    ) -> OnnxReferenceResult:
        """Run the model on the CPU, and keep its answers."""
        model, seconds = self.model, self.model.settings.load_check_seconds
        what = "running it on ONNX Runtime's CPU provider"
        with model.checking(what), temporary_folder(TEMPORARY_PREFIX) as folder:
            cases_file, samples_file = folder / "cases.npz", folder / "samples.npz"
            if samples:
                save_cases(samples_file, [Case("sample", feed, {}, {}) for feed in samples])
            job = OnnxReferenceJob(
                model.name,
                str(model.model_file),
                {name: tuple(dims) for name, dims in sizes.items()},
                checks_rows,
                str(cases_file),
                case_rows,
                seconds,
                str(samples_file) if samples else "",
                tuple(str(model.model_folder / name) for name in model.config.operator_libraries),
                model.config.max_batch_size,
            )
            runner = JobRunner(JobEngine("ONNX Runtime"), model.report_check, logging.getLogger(__name__))
            try:
                found = runner.run_check(job, OnnxReferenceResult, seconds)
            except JobError as error:
                # Without the CPU's answers the model is served as it would be without a check.
                found = OnnxReferenceResult(None, 0, error.text)
            self._missing = found.reason
            self._cases = list(load_cases(cases_file)) if found.cases else []
        return found

    def _candidate(self, opened: LoadedModel) -> Run:
        """Return a function that runs the model as it serves."""
        execution, *_ = model_executions(opened)
        config = self.model.config
        # Sizes that are written although they change answers change them here, too.
        padding = NO_PADDING if PADDING in self.report.failures else opened.signature.padding
        inputs = {spec.name: spec for spec in opened.signature.inputs}
        outputs = {spec.name: spec for spec in opened.signature.outputs}
        batches = any(given.shape[:1] == (-1,) for given in inputs.values())

        def answer(feed: Feed) -> Feed:
            tensors = {name: tensor_from_numpy(name, values, inputs[name].datatype) for name, values in feed.items()}
            rows = max((tensor.shape[0] for tensor in tensors.values() if tensor.shape), default=1) if batches else 1
            batch = Batch(tensors, tuple(outputs), (rows,))
            if padding.dimensions:
                # Requests beyond the largest size are refused, but the provider takes them.
                with suppress(ServeError):
                    batch = as_served(batch, config, padding)
            execution.start(batch)
            found = {
                name: served_output(
                    outputs[name],
                    np.array(values) if isinstance(values, np.ndarray) else values.numpy(),
                    batches and rows == 1,
                )
                for name, values in execution.result().outputs.items()
            }
            own = {name: tuple(cut.own(0, found[name].shape)) for name, cut in batch.padded.items()}
            return {name: values[own.get(name, ())] for name, values in found.items()}

        return answer

    @property
    def _precision(self) -> str:
        """Return the precision in which the providers compute."""
        return next((one for one in map(precision_of, self.plan.providers) if one != "fp32"), "fp32")


def precision_of(provider: Provider) -> str:
    options = provider.options
    if provider.kind is MIGRAPHX_PROVIDER:
        # The provider's reduced precisions -> those of the load check.
        precisions = {"fp16": "fp16", "bf16": "bf16", "int8": "int8", "fp8": "int8"}
        enabled = [one for one in precisions if options.get(f"migraphx_{one}_enable", "") in ("1", "True", "true")]
        return precisions[enabled[-1]] if enabled else "fp32"
    if provider.kind is CUDA:
        # TF32 has as many digits as FP16.
        return "fp32" if options.get("use_tf32") == "0" else "fp16"
    if provider.kind is OPENVINO:
        # Its GPUs and NPUs compute in FP16 by default.
        on_cpu = options.get("device_type", "CPU").upper().partition(".")[0] == "CPU"
        return {"FP16": "fp16", "FP32": "fp32"}.get(options.get("precision", ""), "fp32" if on_cpu else "fp16")
    return "fp32"


def _described(provider: Provider) -> str:
    """Return the properties of a provider that a verdict depends on: its name, version, options and device."""
    devices = [(one.ep_name, sorted(one.ep_metadata.items()), one.device.vendor) for one in provider.devices]
    return repr((provider.name, sorted(provider.options.items()), sorted(provider.variables.items()), devices))
