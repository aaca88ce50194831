"""Tries in a child process, on ONNX Runtime's CPU provider, whether dimensions may be padded that another engine
pads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rocserve.backends.onnx.checked_session import checked_inputs, checked_run
from rocserve.backends.onnx.reference_job import open_file, open_session
from rocserve.cache.digests import file_digest
from rocserve.core.padding import Padding
from rocserve.jobs.messages import Report
from rocserve.load_check.budget import Budget
from rocserve.load_check.made_inputs import seed_of
from rocserve.load_check.onnx_facts import expose, onnx_facts
from rocserve.load_check.padding import check_padding
from rocserve.load_check.padding_verdict import PaddingVerdict, undecided


@dataclass(frozen=True, slots=True)
class OnnxPaddingJob:
    """`perform` needs ONNX Runtime alone."""

    model_name: str
    model_file: str
    shapes: Mapping[str, tuple[int, ...]]
    """Input -> sizes, -1 where it is padded, without the rows."""
    padding: Padding
    written_values: tuple[str, ...]
    """Inputs whose value somebody has chosen."""
    has_rows: bool
    has_company: bool
    """Whether requests share batches."""
    seconds: float

    @property
    def title(self) -> str:
        return f"padding short inputs of model '{self.model_name}' on ONNX Runtime"

    def perform(self, report: Report) -> PaddingVerdict:
        report("opening the model")
        try:
            file, session = open_file(self.model_file)
        except Exception as error:
            # The binding's exceptions have no common base class but Exception.
            return undecided(self.padding, f"ONNX Runtime cannot open it: {error}")
        facts, inputs = onnx_facts(file.path), checked_inputs(session, self.shapes, self.has_rows)
        run, outputs = checked_run(session, self.has_rows)
        if facts.exposed:
            message = file.message()
            expose(message, facts.exposed)
            run, outputs = checked_run(open_session(self.model_file, message.SerializeToString()), self.has_rows)
        first = [node.shape[0] if node.shape else None for node in session.get_inputs()] if self.has_rows else []
        fixed = next((size for size in first if isinstance(size, int)), None)
        report("padding short inputs")
        return check_padding(
            run,
            inputs,
            outputs,
            facts,
            self.padding,
            Budget(self.seconds),
            seed_of(file_digest(file.path)),
            written_values=frozenset(self.written_values),
            has_company=self.has_company and fixed is None,
            fixed_rows=fixed,
        )
