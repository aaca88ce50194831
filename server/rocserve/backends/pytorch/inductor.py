"""The engine inductor: programs of torch.export, compiled ahead for this machine and kept in the cache."""

from __future__ import annotations

import json
import os
import platform
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from rocserve.backends.base import LoadedModel, ModelSource
from rocserve.backends.pytorch import eager
from rocserve.backends.pytorch.compile_job import PACKAGE, SIGNATURE, InductorJob
from rocserve.backends.pytorch.declared import open_package
from rocserve.backends.pytorch.model import set_up
from rocserve.backends.pytorch.model_file import FileKind, file_kind, require_exported
from rocserve.backends.pytorch.parameters import run_options
from rocserve.backends.pytorch.program import Program, ProgramSignature
from rocserve.backends.pytorch.torch_compile import torch_compile_options
from rocserve.backends.pytorch.written_files import written_folder
from rocserve.core.errors import invalid_argument, unavailable
from rocserve.core.plain import from_json

_COMPILERS = ("g++", "clang++")


def load(model: ModelSource) -> LoadedModel:
    """Parameters: see `parameters` and `torch_compile`. A package, which is compiled already, is served as it is.

    Raises:
        ServeError: INVALID_ARGUMENT, the file or the configuration is wrong; UNAVAILABLE, there is no C++ compiler, or
            Inductor cannot compile the program.
    """
    if file_kind(model.model_file) is FileKind.PACKAGE:
        return eager.load(model)
    require_exported(model, "inductor")
    options = run_options(model.config)
    set_up(options)
    device = eager.find_device(model)
    folder = _compiled(model, options.precision, device)
    package = open_package(folder / PACKAGE, device)
    signature = from_json(ProgramSignature, (folder / SIGNATURE).read_bytes())
    if len(signature.inputs) != len(package.signature.inputs):
        raise invalid_argument(
            f"model '{model.name}': its program has inputs that are no tensors, with which Inductor's packages cannot"
            " be called; export it without them, or leave parameter 'engine' out"
        )
    program = Program(package.call, replace(signature, overwritten=package.signature.overwritten))
    return eager.served(model, program, options, device, {"program": "compiled by Inductor"})


def _compiled(model: ModelSource, precision: str, device: torch.device) -> Path:
    """The folder with the package."""
    _require_compiler(model.name)
    compiling = torch_compile_options(model.config)
    settings = json.dumps(dict(sorted(compiling.options.items())))

    def job(folder: Path) -> InductorJob:
        file = str(model.model_file)
        return InductorJob(model.name, file, str(folder), str(device), precision, compiling.mode, settings)

    parts = (precision, compiling.mode, settings, *_machine(device))
    return written_folder(model, "inductor", parts, job)


def _machine(device: torch.device) -> tuple[str, ...]:
    """What a package depends on beside the program."""
    if device.type == "cpu":
        return torch.__version__, platform.machine(), torch.backends.cpu.get_cpu_capability()
    found = torch.cuda.get_device_properties(device)
    return torch.__version__, str(found.name), str(getattr(found, "gcnArchName", (found.major, found.minor)))


def _require_compiler(name: str) -> None:
    named = os.environ.get("CXX", "")
    if not any(shutil.which(compiler) for compiler in ((named,) if named else _COMPILERS)):
        raise unavailable(
            f"model '{name}': parameter 'engine' is \"inductor\", which needs a C++ compiler, and there is no"
            f" {named or ' or '.join(_COMPILERS)} on this machine; install one (Debian, Ubuntu: apt-get install g++),"
            " or leave the parameter out, to run the program as it is"
        )
