"""Writes programs of torch.export as ONNX in a child process, and compiles them with MIGraphX: the engine
migraphx-onnx.

Only the child process imports PyTorch, because a process cannot load both PyTorch and MIGraphX.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rocserve.backends.base import LoadedModel, ModelSource
from rocserve.backends.installed import is_installed
from rocserve.backends.migraphx.compiling.context import open_compile_context
from rocserve.backends.migraphx.model import load_compiled
from rocserve.backends.migraphx.model_check import ReferenceEngine
from rocserve.backends.onnx.reference_job import OnnxReferenceResult
from rocserve.backends.pytorch.job_files import written_folder
from rocserve.backends.pytorch.model_file import require_exported
from rocserve.core.errors import unavailable
from rocserve.jobs.messages import Report
from rocserve.jobs.runner import JobEngine, JobRunner
from rocserve.load_check.reference import save_cases

_LOG = logging.getLogger(__name__)

_FILE = "model.onnx"
_REVISION = "3"
"""Increase it when the ONNX file of an unchanged program changes."""


def load(model: ModelSource) -> LoadedModel:
    """Load a model; migraphx/options.py describes its parameters. Raises ServeError (INVALID_ARGUMENT) if the file
    or the configuration is wrong, ServeError (UNAVAILABLE) if the program cannot be written as ONNX, or MIGraphX cannot
    be used or cannot compile it."""
    require_exported(model, "migraphx-onnx")
    context = open_compile_context(model, _LOG)
    inputs = tuple(entry.name for entry in model.config.inputs)
    outputs = tuple(entry.name for entry in model.config.outputs)
    parts = (_REVISION, importlib.metadata.version("torch"), repr((inputs, outputs)))
    folder = written_folder(
        model, "onnx", parts, lambda folder: OnnxJob(model.name, str(model.model_file), str(folder), inputs, outputs)
    )
    note = "written as ONNX from a program of torch.export"
    job = partial(EagerReferenceJob, model.name, str(model.model_file), inputs, outputs)
    reference = ReferenceEngine("PyTorch", JobRunner(JobEngine("PyTorch"), model.report_check, _LOG), job)
    # A quantised program is written in int8, even if it was in uint8.
    return load_compiled(context, folder / _FILE, note, quantised_in="int8", reference=reference)


@dataclass(frozen=True, slots=True)
class EagerReferenceJob:
    """Does with PyTorch and the program itself what OnnxReferenceJob does with an ONNX file, because the export may
    change the program, too."""

    model_name: str
    model_file: str
    inputs: tuple[str, ...]
    """The names in the configuration."""
    outputs: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    """As OnnxReferenceJob's fields."""
    checks_rows: bool
    cases_file: str
    case_rows: int
    seconds: float

    @property
    def title(self) -> str:
        return f"running model '{self.model_name}' on PyTorch"

    def perform(self, report: Report) -> OnnxReferenceResult:
        report("importing PyTorch")
        from rocserve.backends.pytorch.comparison import NO_INPUTS, EagerReference

        report("reading the program")
        reference = EagerReference(Path(self.model_file), self.seconds, self.inputs, self.outputs)
        reference.with_sizes(self.shapes, has_rows=self.case_rows > 0)
        rows = None
        if self.checks_rows:
            report("running batches of different rows")
            rows = reference.rows()
        report("computing cases")
        cases = reference.cases(self.case_rows)
        save_cases(Path(self.cases_file), cases)
        return OnnxReferenceResult(rows, len(cases), "" if cases else NO_INPUTS)


@dataclass(frozen=True, slots=True)
class OnnxJob:
    model_name: str
    model_file: str
    folder: str
    inputs: tuple[str, ...]
    """The names in the configuration."""
    outputs: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"exporting model '{self.model_name}' to ONNX"

    def perform(self, report: Report) -> None:
        """Write the ONNX file. Raises ServeError if the program cannot be written as ONNX."""
        missing = [name for name in ("onnx", "onnxscript") if not is_installed(name)]
        if missing:
            raise unavailable(f"torch.onnx.export needs {' and '.join(missing)}: pip install onnx onnxscript")
        report("importing PyTorch")
        from rocserve.backends.pytorch.binding import given_names
        from rocserve.backends.pytorch.exported_file import read_exported
        from rocserve.backends.pytorch.onnx_file import write_onnx
        from rocserve.backends.pytorch.program import open_exported

        report("reading the program")
        exported = read_exported(Path(self.model_file))
        signature = open_exported(exported).signature
        names = given_names(signature.inputs, self.inputs), given_names(signature.outputs or (), self.outputs)
        size = sum(value.nbytes for value in exported.state_dict.values())
        # protobuf's limit for one file.
        if size >= 1 << 31:
            raise unavailable(f"its weights are {size >> 20} MiB, and one ONNX file holds 2 GiB at most")
        report("exporting")
        try:
            write_onnx(exported, Path(self.folder) / _FILE, *names)
        except Exception as error:
            raise unavailable(f"PyTorch cannot export it to ONNX: {error}") from error
