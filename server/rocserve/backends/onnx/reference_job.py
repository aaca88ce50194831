"""Runs an ONNX file on ONNX Runtime's CPU provider in a child process: finds whether its rows depend on each other, and
computes what other engines must compute, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rocserve.backends.migraphx.model_files.graph import ONNX_DATATYPES
from rocserve.cache.digests import file_digest
from rocserve.core.datatypes import DataType
from rocserve.core.requests import Signature, TensorSpec
from rocserve.jobs.messages import Report
from rocserve.load_check.budget import Budget
from rocserve.load_check.dimension_names import names_disagree
from rocserve.load_check.onnx_facts import expose, onnx_facts
from rocserve.load_check.reference import reference_cases, save_cases
from rocserve.load_check.rows import Independence, RowsVerdict, check_rows
from rocserve.load_check.tensors import ROWS, CheckedInput, Feed, Run

_DATATYPES = {f"tensor({name})": datatype for name, datatype in ONNX_DATATYPES.items()}
_FATAL_ONLY = 4


@dataclass(frozen=True, slots=True)
class OnnxReferenceResult:
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
    """Input -> sizes, without the first dimension if `case_rows` is above 0."""
    checks_rows: bool
    cases_file: str
    case_rows: int
    """Rows of each case; 0 = the first dimension is no batch."""
    seconds: float

    @property
    def title(self) -> str:
        return f"running model '{self.model_name}' on ONNX Runtime"

    def perform(self, report: Report) -> OnnxReferenceResult:
        path = Path(self.model_file)
        report("opening the model")
        try:
            session = _open(str(path))
        except Exception as error:
            # The binding's exceptions have no common base class but Exception.
            return OnnxReferenceResult(None, 0, f"ONNX Runtime cannot open it: {error}")
        unknown = [node.name for node in session.get_inputs() if node.type not in _DATATYPES]
        unknown += [node.name for node in session.get_outputs() if node.type not in _DATATYPES]
        if unknown:
            return OnnxReferenceResult(None, 0, f"tensor '{unknown[0]}' is of a type that requests do not have")
        lead = (ROWS,) if self.case_rows else ()
        inputs = [
            CheckedInput(node.name, _DATATYPES[node.type], (*lead, *self.shapes[node.name]))
            for node in session.get_inputs()
        ]
        outputs = [node.name for node in session.get_outputs()]
        facts, budget = onnx_facts(path), Budget(self.seconds)
        seed = int(file_digest(path)[:8], 16)
        rows = None
        if self.checks_rows:
            report("running batches of different rows")
            run, shown = _run(session), outputs
            if facts.exposed:
                run, shown = _run(_exposed(path, facts.exposed)), [*outputs, *facts.exposed]
            first = {node.name: node.shape[0] if node.shape else None for node in session.get_inputs()}
            fixed = next((size for size in first.values() if isinstance(size, int)), None)
            named = names_disagree(
                first, {node.name: node.shape[0] if node.shape else None for node in session.get_outputs()}
            )
            if named:
                rows = RowsVerdict(Independence.DEPENDENT, f"rows depend on each other: {named}")
            else:
                rows = check_rows(run, inputs, shown, facts, budget, seed, fixed_rows=fixed)
        report("computing cases")
        cases = reference_cases(_run(session), inputs, outputs, facts, budget, seed, rows=self.case_rows)
        save_cases(Path(self.cases_file), cases)
        reason = "" if cases else "no made-up input runs on ONNX Runtime; give warm-up samples or check.npz"
        return OnnxReferenceResult(rows, len(cases), reason)


def _open(model: str | bytes, folder: str = "") -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = _FATAL_ONLY
    if folder:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _exposed(path: Path, tensors: Sequence[str]) -> Any:
    """Open the model with inner tensors as outputs."""
    import onnx

    message = onnx.load(path, format="protobuf", load_external_data=False)
    expose(message, tensors)
    return _open(message.SerializeToString(), str(path.parent))


def _run(session: Any) -> Run:
    from rocserve.backends.onnx.runs import session_run

    inputs, outputs = (
        tuple(TensorSpec(node.name, _DATATYPES.get(node.type, DataType.BYTES), ()) for node in nodes)
        for nodes in (session.get_inputs(), session.get_outputs())
    )
    run, names = session_run(session, Signature(inputs, outputs, False)), [spec.name for spec in outputs]
    bfloat16 = {spec.name for spec in outputs if spec.datatype is DataType.BF16}

    def answer(feed: Feed) -> Feed:
        found = zip(names, run(names, feed), strict=True)
        return {name: _numbers(np.asarray(values)) if name in bfloat16 else values for name, values in found}

    return answer


def _numbers(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (bits.astype(np.uint32) << 16).view(np.float32)
