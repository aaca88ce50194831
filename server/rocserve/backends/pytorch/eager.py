"""Runs programs operator by operator, on the CPU or on a GPU: the engine eager."""

from __future__ import annotations

import logging
import warnings
from functools import partial

import torch

from rocserve.backends.base import LoadedModel, ModelSource
from rocserve.backends.device_tensors import instance_gpu
from rocserve.backends.parameters import asked_engine
from rocserve.backends.pytorch.exported_file import read_exported
from rocserve.backends.pytorch.model import TorchModel
from rocserve.backends.pytorch.model_file import FileKind, file_kind
from rocserve.backends.pytorch.package import open_package
from rocserve.backends.pytorch.package_check import check_package
from rocserve.backends.pytorch.parameters import RunOptions, run_options
from rocserve.backends.pytorch.program import DTYPES, Program, in_precision, open_exported, open_on_own_devices
from rocserve.backends.pytorch.script import open_script
from rocserve.core.errors import ServeError, invalid_argument, unavailable
from rocserve.core.model_config import InstanceKind


def load(model: ModelSource) -> LoadedModel:
    """Load a model; `parameters` describes its parameters. Raises ServeError (INVALID_ARGUMENT) if the file or the
    configuration is wrong, ServeError (UNAVAILABLE) as `set_up` and `open_package`."""
    kind = file_kind(model.model_file)
    options, device = set_up(model)
    properties = {"program": kind.value}
    place = None if model.instance_kind is InstanceKind.MODEL else device

    def original() -> Program:
        return _open(model, kind, "fp32", place)

    if place is not None:
        program = _open(model, kind, options.precision, place)
        check = partial(check_package, model, program, device) if kind is FileKind.PACKAGE else None
        return TorchModel(model, program, options, device, properties, original=original, check=check)
    try:
        program = _open(model, kind, options.precision, None)
    except ServeError as error:
        raise error.with_text(
            f"{error.text} (KIND_MODEL leaves the parts of a model on the devices that its file names; PyTorch"
            f" {torch.__version__} finds {torch.cuda.device_count()} GPUs here)",
        ) from error.__cause__
    properties["device"] = ", ".join(program.devices)
    return TorchModel(model, program, options, device, properties, original=original)


def set_up(model: ModelSource) -> tuple[RunOptions, torch.device]:
    """Configure PyTorch in this process by the model's parameters, and return the device. Raises ServeError:
    INVALID_ARGUMENT for a wrong parameter, UNAVAILABLE if the model is for a GPU and PyTorch finds none, unless
    `engine` is "auto"."""
    options = run_options(model.config)
    # Inputs are read in place, in memory that only the server writes. Inputs that a program writes to are copied.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    torch.set_num_threads(options.intra_op_threads)
    if torch.get_num_interop_threads() != options.inter_op_threads:
        torch.set_num_interop_threads(options.inter_op_threads)
    torch.backends.cudnn.enabled = options.cudnn
    switches = {
        "ENABLE_JIT_EXECUTOR": torch._C._jit_set_profiling_executor,
        "ENABLE_JIT_PROFILING": torch._C._jit_set_profiling_mode,
        "ENABLE_TENSOR_FUSER": torch._C._jit_set_texpr_fuser_enabled,
    }
    for name, value in options.script_switches.items():
        switches[name](value)
    return options, _find_device(model)


def _find_device(model: ModelSource) -> torch.device:
    if model.device is None:
        return torch.device("cpu")
    try:
        device = instance_gpu(model.device)
    except RuntimeError as why:
        if asked_engine(model.config) != "auto":
            raise unavailable(
                f"model '{model.name}': {why}; install PyTorch's build for this GPU, use KIND_CPU, or set parameter"
                " 'engine' to \"auto\" to accept the CPU"
            ) from None
        logging.getLogger(__name__).warning(
            "model '%s' runs on the CPU, as parameter 'engine' is \"auto\": %s", model.name, why
        )
        return torch.device("cpu")
    torch.cuda.set_device(device)
    return device


def _open(model: ModelSource, kind: FileKind, precision: str, device: torch.device | None) -> Program:
    """Open the program. `device`: None = its parts go to the devices that the file names."""
    dtype = DTYPES.get(precision)
    if kind is FileKind.EXPORTED:
        if device is None:
            return open_on_own_devices(model.model_file, dtype)
        return open_exported(read_exported(model.model_file, device), dtype)
    if kind is FileKind.SCRIPT:
        keys = [entry.name for entry in model.config.inputs]
        program = open_script(model.model_file, device, dtype, keys)
        return program if dtype is None else in_precision(program, dtype)
    if dtype is not None:
        raise invalid_argument(
            f"model '{model.name}': parameter 'precision' is \"{precision}\", but a package of AOTInductor is"
            " compiled already; compile it in that precision"
        )
    return open_package(model.model_file, device)
