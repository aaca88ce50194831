"""Runs an ONNX file on ONNX Runtime's CPU provider in a child process: finds whether its rows depend on each other, and
computes the reference for other engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocserve.backends.onnx.checked_session import checked_inputs, checked_run
from rocserve.backends.onnx.model_file import FATAL_ONLY, WEIGHTS_FOLDER, ModelFile, open_served
from rocserve.backends.onnx.signature import DATATYPES
from rocserve.cache.digests import file_digest
from rocserve.jobs.messages import Report
from rocserve.load_check.budget import Budget
from rocserve.load_check.dimension_names import names_disagree
from rocserve.load_check.made_inputs import seed_of
from rocserve.load_check.onnx_facts import onnx_facts
from rocserve.load_check.reference import load_cases, reference_cases, save_cases
from rocserve.load_check.rows import Independence, RowsVerdict, check_rows


@dataclass(frozen=True, slots=True)
class OnnxReferenceResult:
    """What a run of the reference found."""

    rows: RowsVerdict | None
    """None = the rows were not asked for, or ONNX Runtime cannot open the file."""
    cases: int
    reason: str
    """Why there are no cases; "" = there are."""


@dataclass(frozen=True, slots=True)
class OnnxReferenceJob:
    """`perform` needs ONNX Runtime alone, so that it may also run in a process of another engine."""

    model_name: str
    model_file: str
    shapes: Mapping[str, tuple[int, ...]]
    """Input -> sizes, -1 = any, without the first dimension if `case_rows` is above 0. The sizes of missing inputs come
    from the file."""
    checks_rows: bool
    cases_file: str
    case_rows: int
    """Rows of each case; 0 = the first dimension is not a batch."""
    seconds: float
    samples_file: str = ""
    """Cases whose inputs are warm-up samples; "" = none."""
    operator_libraries: tuple[str, ...] = ()
    """Libraries of custom operators that the model needs."""
    largest_batch: int = 0
    """The configuration's; 0 = it has none."""

    @property
    def title(self) -> str:
        return f"running model '{self.model_name}' on ONNX Runtime"

    def perform(self, report: Report) -> OnnxReferenceResult:
        report("opening the model")
        try:
            file, session = open_file(self.model_file, self.operator_libraries)
        except Exception as error:
            # The binding's exceptions have no common base class but Exception.
            return OnnxReferenceResult(None, 0, f"ONNX Runtime cannot open it: {error}")
        unknown = [node.name for node in (*session.get_inputs(), *session.get_outputs()) if node.type not in DATATYPES]
        if unknown:
            return OnnxReferenceResult(None, 0, f"tensor '{unknown[0]}' is of a type that requests do not have")
        has_rows = self.case_rows > 0
        inputs = checked_inputs(session, self.shapes, has_rows)
        run, outputs = checked_run(session, has_rows)
        facts, budget = onnx_facts(file.path), Budget(self.seconds)
        seed = seed_of(file_digest(file.path))
        samples = [case.feed for case in load_cases(Path(self.samples_file))] if self.samples_file else []
        rows = None
        if self.checks_rows:
            report("running batches of different rows")
            first, last = _first_dimensions(session.get_inputs()), _first_dimensions(session.get_outputs())
            fixed = next((size for size in first.values() if isinstance(size, int)), None)
            if named := names_disagree(first, last):
                rows = RowsVerdict(Independence.DEPENDENT, f"rows depend on each other: {named}")
            else:
                trial, shown = run, outputs
                if facts.exposed:
                    exposing = open_session(file.exposing(facts.exposed), self.operator_libraries)
                    trial, shown = checked_run(exposing, has_rows)
                rows = check_rows(
                    trial, inputs, shown, facts, budget, seed, samples,
                    fixed_rows=fixed, largest_batch=self.largest_batch,
                )  # fmt: skip
        report("computing cases")
        if inner := set(facts.narrowed.values()).difference(outputs, (one.name for one in inputs)):
            run, _ = checked_run(open_session(file.exposing(sorted(inner)), self.operator_libraries), has_rows)
        cases = reference_cases(run, inputs, outputs, facts, budget, seed, self.case_rows, samples)
        save_cases(Path(self.cases_file), cases)
        reason = "" if cases else "no made-up input runs on ONNX Runtime; give warm-up samples or check.npz"
        return OnnxReferenceResult(rows, len(cases), reason)


def open_file(model_file: str, operator_libraries: Sequence[str] = ()) -> tuple[ModelFile, Any]:
    """Open a file as served (see model_file.py). Raises as `open_session`."""
    return open_served(ModelFile(Path(model_file)), lambda file: open_session(file, operator_libraries))


def open_session(file: ModelFile, operator_libraries: Sequence[str] = ()) -> Any:
    """Open a model on the CPU. Raises ONNX Runtime's exceptions."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = FATAL_ONLY
    if file.content is not None:
        options.add_session_config_entry(WEIGHTS_FOLDER, str(file.path.parent))
    for library in operator_libraries:
        options.register_custom_ops_library(library)
    model = str(file.path) if file.content is None else file.content
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _first_dimensions(nodes: Sequence[Any]) -> Mapping[str, object]:
    return {node.name: node.shape[0] if node.shape else None for node in nodes}
