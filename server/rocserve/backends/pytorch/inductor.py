"""Compiles programs of torch.export for this machine in a child process, into the cache: the engine inductor."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rocserve.backends.base import LoadedModel, ModelSource
from rocserve.backends.pytorch import eager
from rocserve.backends.pytorch.comparison import COMPARISON_FILE, EagerReference, compared
from rocserve.backends.pytorch.datatypes import torch_dtype
from rocserve.backends.pytorch.exported_file import devices_of, read_exported
from rocserve.backends.pytorch.job_files import machine_parts, written_folder
from rocserve.backends.pytorch.model import TorchModel
from rocserve.backends.pytorch.model_check import ModelCheck
from rocserve.backends.pytorch.model_file import FileKind, file_kind, require_exported
from rocserve.backends.pytorch.open_sizes import SizeCondition, check_sizes
from rocserve.backends.pytorch.package import open_package
from rocserve.backends.pytorch.parameters import torch_compile_options
from rocserve.backends.pytorch.program import (
    DTYPES,
    Program,
    ProgramSignature,
    ProgramTensor,
    open_exported,
    remove_non_tensor_results,
    size_conditions,
    unfit_precision,
)
from rocserve.backends.pytorch.results import outputs_of
from rocserve.core.errors import ServeError, invalid_argument, unavailable
from rocserve.core.model_config import InstanceKind
from rocserve.core.plain import from_json, to_json
from rocserve.jobs.messages import Report
from rocserve.load_check.reference import CASE_ROWS

_PACKAGE, _SIGNATURE = "program.pt2", "signature.json"
"""The files of a compiled program."""
_REVISION = "6"
"""Increase it when the files' content changes."""


def load(model: ModelSource) -> LoadedModel:
    """Load a model; `parameters` describes its parameters. A package is compiled already, and runs unchanged. Raises
    ServeError (INVALID_ARGUMENT) if the file or the configuration is wrong, ServeError (UNAVAILABLE) if there is no C++
    compiler, or Inductor cannot compile the program."""
    if file_kind(model.model_file) is FileKind.PACKAGE:
        return eager.load(model)
    require_exported(model, "inductor")
    options, device = eager.set_up(model)
    if model.instance_kind is InstanceKind.MODEL:
        device = _only_device(model)
    check = ModelCheck(model, device, options.precision)
    folder = _compiled(model, options.precision, device, check)
    program = _open_compiled(model.name, folder, device)
    # Compiled code may end the process on inputs that the program does not take, and zeros may be such inputs.
    takes_zeros = not model.config.model_warmup
    properties = {"program": "compiled by Inductor"}
    return TorchModel(model, program, options, device, properties, takes_zeros=takes_zeros, check=lambda bound: check)


def _open_compiled(name: str, folder: Path, device: torch.device) -> Program:
    """Open a model's compiled program. Raises ServeError as `open_package`."""
    package = open_package(folder / _PACKAGE, device, checks=False)
    signature = from_json(ProgramSignature, (folder / _SIGNATURE).read_bytes())
    names = [tensor.names[0] for tensor in signature.inputs]
    sizes = [tensor.open_sizes for tensor in signature.inputs]
    conditions = [SizeCondition(text) for text in signature.conditions]
    layouts = [_layout(name, tensor) for tensor in signature.inputs]

    def call(values: Sequence[Any]) -> Any:
        check_sizes(names, sizes, conditions, values)
        return package.call([value if lay is None else lay(value) for lay, value in zip(layouts, values, strict=True)])

    # Only tensors arrive here, whatever else the program takes, and the package may write to any of them.
    return Program(call, replace(signature, overwritten=frozenset(range(len(names)))))


def _layout(model: str, tensor: ProgramTensor) -> Callable[[Any], Any] | None:
    """Return the function that gives an input the memory layout of the export's example, for which Inductor compiled;
    None = requests have that layout. Raises ServeError (INVALID_ARGUMENT) if the example's values had gaps between them
    or shared memory."""
    if not tensor.strides:
        return None
    order = sorted(range(len(tensor.strides)), key=lambda dimension: (-tensor.strides[dimension], dimension))
    back = sorted(range(len(order)), key=order.__getitem__)
    made = torch.empty(tensor.sample, device="meta").permute(order).contiguous().permute(back)
    if any(
        size > 1 and own != wanted
        for size, own, wanted in zip(tensor.sample, made.stride(), tensor.strides, strict=True)
    ):
        raise invalid_argument(
            f"model '{model}': its program was exported with an example for input '{tensor.names[0]}' that is a part of"
            " another tensor, or expanded, and compiled code expects all inputs in that layout; export it with"
            " example.contiguous(), or remove parameter 'engine'"
        )
    return lambda value: value.permute(order).contiguous().permute(back)


def _only_device(model: ModelSource) -> torch.device:
    """Return the device of the file's program. Raises ServeError (INVALID_ARGUMENT) if it is on several devices."""
    devices = sorted(devices_of(read_exported(model.model_file, None)))
    if len(devices) > 1:
        raise invalid_argument(
            f"model '{model.name}': engine inductor compiles a program for one device, and with KIND_MODEL the parts of"
            f" {model.model_file.name} are on {' and '.join(devices)}; set parameter 'engine' to \"eager\", or use"
            " KIND_GPU or KIND_CPU"
        )
    return torch.device(devices[0] if devices else "cpu")


def _compiled(model: ModelSource, precision: str, device: torch.device, check: ModelCheck) -> Path:
    """Return the folder with the package, compiled if the cache has none. Raises LoadCheckFailed as
    `ModelCheck.compared`."""
    compiler = _compiler(model.name)
    compiling = torch_compile_options(model.config)
    settings = json.dumps(dict(sorted(compiling.options.items())))

    def job(folder: Path) -> InductorJob:
        file = str(model.model_file)
        trials = str(trials_folder(model, compiler, machine_parts(torch.device("cpu"))) or "")
        return InductorJob(
            model.name, file, str(folder), str(device), precision, compiling.mode, settings, trials, check.seconds
        )

    parts = (_REVISION, precision, compiling.mode, settings, *machine_parts(device))
    return check.compiled_folder("inductor", "Inductor", parts, job)


def _compiler(name: str) -> Path:
    named = os.environ.get("CXX", "")
    compilers = ("g++", "clang++")
    for compiler in (named,) if named else compilers:
        if found := shutil.which(compiler):
            return Path(found)
    raise unavailable(
        f"model '{name}': parameter 'engine' is \"inductor\", which needs a C++ compiler, and there is no"
        f" {named or ' or '.join(compilers)} on this machine; install one (Debian, Ubuntu: apt-get install g++),"
        " or remove the parameter to run the program operator by operator"
    )


@dataclass(frozen=True, slots=True)
class InductorJob:
    model_name: str
    model_file: str
    folder: str
    device: str
    """PyTorch's name, e.g. "cuda:0"."""
    precision: str
    mode: str
    """Mode of torch.compile: default, reduce-overhead, max-autotune ...; "" = not set."""
    options: str
    """Inductor's options, as a JSON object."""
    trials: str = ""
    """The folder with the trials of instruction sets; "" = none."""
    check_seconds: float = 0.0
    """For the comparison with PyTorch; 0 = none."""

    @property
    def title(self) -> str:
        return f"compiling model '{self.model_name}' with Inductor"

    def perform(self, report: Report) -> None:
        """Compile the program. Raises ServeError if the program cannot be compiled."""
        # For Inductor's sources and objects.
        work = Path(self.folder) / "work"
        use_trials(self.trials, work)
        device = torch.device(self.device)
        report("reading the program")
        exported = read_exported(Path(self.model_file), device)
        program = open_exported(exported, DTYPES.get(self.precision))
        signature = replace(program.signature, conditions=size_conditions(exported))
        for tensor in signature.inputs:
            _layout(self.model_name, tensor)
        if self.precision in DTYPES:
            report(f"exporting it in {self.precision}")
            exported = _flat_export(program, self.precision, device)
            inputs = tuple(replace(tensor, strides=()) for tensor in signature.inputs)
            signature = replace(signature, inputs=inputs)
        remove_non_tensor_results(exported)
        # Int8 kernels need constant weights. If a size varies, constants give wrong results in PyTorch 2.13.
        sizes_vary = any(-1 in (tensor.shape or ()) for tensor in program.signature.inputs)
        freezes = device.type == "cpu" and "int8" in program.signature.precision and not sizes_vary
        # The code uses as many threads as the process that runs it, not as many as this process.
        settings: dict[str, Any] = {"cpp.dynamic_threads": True, "freezing": freezes}
        # Precompiling headers costs more than it saves for a program's two files, and 300 MB of the disk meanwhile.
        settings["aot_inductor.precompile_headers"] = False
        report("compiling")
        try:
            if self.mode:
                settings.update(torch._inductor.list_mode_options(self.mode))
            settings.update(json.loads(self.options))
            with torch.set_grad_enabled(not freezes):  # PyTorch freezes weights only without gradients.
                torch._inductor.aoti_compile_and_package(
                    exported, package_path=str(Path(self.folder) / _PACKAGE), inductor_configs=settings
                )
        except Exception as error:
            raise unavailable(f"Inductor cannot compile it: {error}") from error
        (Path(self.folder) / _SIGNATURE).write_bytes(to_json(signature))
        shutil.rmtree(work, ignore_errors=True)
        if self.check_seconds:
            reference = EagerReference(Path(self.model_file), self.check_seconds)
            folder = Path(self.folder)
            candidate = CASE_ROWS, lambda: _open_compiled(self.model_name, folder, device)
            found = compared(reference, (candidate,), device, self.precision, report, checks_rows=True)
            (folder / COMPARISON_FILE).write_bytes(to_json(found))


def _flat_export(program: Program, precision: str, device: torch.device) -> Any:
    """Export the program again, as a function of its tensors in one flat list."""

    class Flat(torch.nn.Module):  # type: ignore[misc]
        def forward(self, *values: Any) -> Any:
            return tuple(outputs_of(program.call(values)))

    example = []
    varying = []
    for tensor in program.signature.inputs:
        assert tensor.datatype is not None and tensor.shape is not None, "programs of torch.export say them"
        example.append(torch.zeros(tensor.sample, dtype=torch_dtype(tensor.datatype), device=device))
        varying.append({index: torch.export.Dim.AUTO for index, size in enumerate(tensor.shape) if size == -1})
    try:
        with torch.no_grad():
            return torch.export.export(Flat(), tuple(example), dynamic_shapes={"values": tuple(varying)})
    except Exception as error:
        raise unfit_precision(precision, str(error)) from error


def trials_folder(model: ModelSource, compiler: Path, parts: Sequence[str]) -> Path | None:
    """Return the folder with the trials of which of the processor's instruction sets the C++ compiler supports, and run
    them if the cache has none: Inductor runs them before it compiles, and they take longer than compiling a small
    program. `parts` identify the machine. None = the folder cannot be made; a compile then runs the trials itself, and
    reports the error."""
    found = compiler.resolve().stat()
    of_compiler = (str(compiler.resolve()), str(found.st_size), str(found.st_mtime_ns))
    with suppress(ServeError):
        return written_folder(
            model, "instruction-sets", (*of_compiler, *parts), lambda to: TrialsJob(str(to)), of_model=False
        )
    return None


def use_trials(trials: str, work: Path) -> None:
    """Make Inductor work in the folder `work`, and find the trials there. `trials`: "" = none."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(work)
    # The folder may have been removed to free space. A partial copy does no harm: each trial is found or run
    # separately.
    with suppress(OSError):
        if trials:
            shutil.copytree(trials, work, ignore=shutil.ignore_patterns(".*"))


@dataclass(frozen=True, slots=True)
class TrialsJob:
    folder: str

    @property
    def title(self) -> str:
        return "trying the C++ compiler with this processor's instruction sets"

    def perform(self, report: Report) -> None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = self.folder
        report("compiling")
        from torch._inductor.cpu_vec_isa import valid_vec_isa_list

        valid_vec_isa_list()
        shutil.rmtree(Path(self.folder) / "locks", ignore_errors=True)
