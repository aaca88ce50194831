"""Jobs of child processes with PyTorch: compiling a program with Inductor, and exporting one to ONNX."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rocserve.core.errors import invalid_argument, unavailable
from rocserve.core.plain import to_json
from rocserve.jobs.messages import Report

PACKAGE, SIGNATURE, ONNX = "program.pt2", "signature.json", "model.onnx"
"""The files that jobs write into their folders."""
_WORK = "work"
"""Where Inductor keeps its sources and objects meanwhile."""
_LARGEST_ONNX_BYTES = 1 << 31
"""Of one file, as protobuf has it."""


@dataclass(frozen=True, slots=True)
class InductorJob:
    model_name: str
    model_file: str
    folder: str
    device: str
    """As PyTorch writes it, e.g. "cuda:0"."""
    precision: str
    mode: str
    """Of torch.compile: "", or default, reduce-overhead, max-autotune ..."""
    options: str
    """Inductor's own, by their names, as a JSON object."""

    @property
    def title(self) -> str:
        return f"compiling model '{self.model_name}' with Inductor"


@dataclass(frozen=True, slots=True)
class OnnxJob:
    model_name: str
    model_file: str
    folder: str
    inputs: tuple[str, ...]
    """What the configuration calls them."""
    outputs: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"exporting model '{self.model_name}' to ONNX"


@dataclass(frozen=True, slots=True)
class Written:
    """A job's files are in its folder."""


def perform(job: InductorJob | OnnxJob, report: Report) -> Written:
    """
    Raises:
        ServeError: why it cannot be done.
    """
    report("importing PyTorch")
    if isinstance(job, OnnxJob):
        _export_onnx(job, report)
    else:
        work = Path(job.folder) / _WORK
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(work)
        _compile(job, report)
        shutil.rmtree(work, ignore_errors=True)
    return Written()


def _compile(job: InductorJob, report: Report) -> None:
    import torch

    from rocserve.backends.pytorch.exported import exported_program, read_exported, to_device
    from rocserve.backends.pytorch.program import DTYPES, in_precision

    device = torch.device(job.device)
    report("reading the program")
    exported = to_device(read_exported(Path(job.model_file)), device)
    signature = exported_program(exported, exported.module()).signature
    if job.precision in DTYPES:
        dtype = DTYPES[job.precision]
        report(f"exporting it in {job.precision}")
        module = exported.module().to(dtype)
        inner = in_precision(exported_program(exported, module, module.state_dict()), dtype)
        signature = replace(signature, precision=inner.signature.precision)
        exported = _flat_export(inner, device)
    # As many threads as the process has that runs it, not this one.
    settings: dict[str, Any] = {"cpp.dynamic_threads": True}
    if job.mode:
        settings.update(torch._inductor.list_mode_options(job.mode))
    settings.update(json.loads(job.options))
    report("compiling")
    try:
        torch._inductor.aoti_compile_and_package(
            exported, package_path=str(Path(job.folder) / PACKAGE), inductor_configs=settings
        )
    except Exception as error:
        raise unavailable(f"Inductor cannot compile it: {error}") from error
    (Path(job.folder) / SIGNATURE).write_bytes(to_json(signature))


def _flat_export(program: Any, device: Any) -> Any:
    """A program of PyTorch's own that does the same, called with the tensors one behind the other."""
    import torch

    from rocserve.backends.pytorch.datatypes import torch_dtype
    from rocserve.backends.pytorch.program import outputs_of

    class Flat(torch.nn.Module):  # type: ignore[misc]
        def forward(self, *values: Any) -> Any:
            return tuple(outputs_of(program.call(values)))

    tensors = program.signature.inputs
    example = tuple(torch.zeros(each.sample, dtype=torch_dtype(each.datatype), device=device) for each in tensors)
    varying = tuple(
        {place: torch.export.Dim.AUTO for place, size in enumerate(each.shape) if size == -1} for each in tensors
    )
    try:
        with torch.no_grad():
            return torch.export.export(Flat(), example, dynamic_shapes={"values": varying})
    except Exception as error:
        raise invalid_argument(f"the program cannot compute in that precision: {error}") from error


def _export_onnx(job: OnnxJob, report: Report) -> None:
    missing = [name for name in ("onnx", "onnxscript") if not _is_there(name)]
    if missing:
        raise unavailable(f"torch.onnx.export needs {' and '.join(missing)}: pip install onnx onnxscript")
    from rocserve.backends.pytorch.binding import given_names
    from rocserve.backends.pytorch.exported import exported_program, read_exported
    from rocserve.backends.pytorch.onnx_file import write_onnx

    report("reading the program")
    exported = read_exported(Path(job.model_file))
    signature = exported_program(exported, exported.module()).signature
    names = given_names(signature.inputs, job.inputs), given_names(signature.outputs or (), job.outputs)
    size = sum(value.nbytes for value in exported.state_dict.values())
    if size >= _LARGEST_ONNX_BYTES:
        raise unavailable(f"its weights are {size >> 20} MiB, and one ONNX file holds 2 GiB at most")
    report("exporting")
    try:
        write_onnx(exported, Path(job.folder) / ONNX, *names)
    except Exception as error:
        raise unavailable(f"PyTorch cannot export it to ONNX: {error}") from error


def _is_there(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
