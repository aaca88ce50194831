"""The engine eager: programs as they are, operator by operator, on the CPU or on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from rocserve.backends.base import LoadedModel, ModelSource
from rocserve.backends.pytorch.declared import open_package, open_script
from rocserve.backends.pytorch.exported import exported_program, read_exported, to_device
from rocserve.backends.pytorch.model import TorchModel, set_up
from rocserve.backends.pytorch.model_file import FileKind, file_kind
from rocserve.backends.pytorch.parameters import RunOptions, run_options
from rocserve.backends.pytorch.program import DTYPES, Program, in_precision
from rocserve.core.errors import invalid_argument, unavailable

_LOG = logging.getLogger(__name__)


def load(model: ModelSource) -> LoadedModel:
    """Parameters: see `parameters`.

    Raises:
        ServeError: INVALID_ARGUMENT, the file or the configuration is wrong; UNAVAILABLE, there is no such GPU.
    """
    kind = file_kind(model.model_file)
    options = run_options(model.config)
    set_up(options)
    device = find_device(model)
    return served(model, _open(model, kind, options, device), options, device, {"program": kind.value})


def served(
    model: ModelSource,
    program: Program,
    options: RunOptions,
    device: torch.device,
    properties: Mapping[str, str],
    captures: bool = True,
) -> TorchModel:
    """The model of an opened program, with what its device has for batches.

    Args:
        captures: whether its batches may run by captured graphs.

    Raises:
        ServeError: INVALID_ARGUMENT, the configuration does not do for the program.
    """
    facts = {
        "device": str(device),
        "precision": program.signature.precision,
        "threads": str(options.intra_op_threads),
    }
    told = {name: value for name, value in {**properties, **facts}.items() if value}
    loaded = TorchModel(model.config, program, options, device, told)
    if device.type != "cpu":
        loaded.fix_sizes(captures, model.report)
    elif model.config.has_open_batch and loaded.signature.supports_batching:
        loaded.bound_batches(model.memory_bytes)
    return loaded


def find_device(model: ModelSource) -> torch.device:
    """
    Raises:
        ServeError: UNAVAILABLE, the instance is on a GPU and PyTorch has none; not where parameter `engine` is "auto".
    """
    if model.device is None:
        return torch.device("cpu")
    if torch.cuda.is_available():
        # A worker that is shown no GPU but its own finds that as the first.
        count = torch.cuda.device_count()
        device = torch.device("cuda", 0 if count == 1 else model.device)
        torch.cuda.set_device(device)
        return device
    why = f"PyTorch {torch.__version__} finds no GPU here that it can use"
    if model.config.parameters.get("engine") != "auto":
        raise unavailable(
            f"model '{model.name}': {why}; install PyTorch's build for this GPU, use KIND_CPU, or set parameter"
            " 'engine' to \"auto\" to accept the CPU"
        )
    _LOG.warning("model '%s' runs on the CPU, as parameter 'engine' is \"auto\": %s", model.name, why)
    return torch.device("cpu")


def _open(model: ModelSource, kind: FileKind, options: RunOptions, device: torch.device) -> Program:
    dtype = DTYPES.get(options.precision)
    if kind is FileKind.PACKAGE:
        if dtype is not None:
            raise invalid_argument(
                f"model '{model.name}': parameter 'precision' is \"{options.precision}\", but a package of AOTInductor"
                " is compiled already; compile it in that precision"
            )
        return open_package(model.model_file, device)
    if kind is FileKind.SCRIPT:
        keys = [entry.name for entry in model.config.inputs]
        program = open_script(model.model_file, device, dtype, keys)
    else:
        exported = to_device(read_exported(model.model_file), device)
        module = exported.module()
        module = module if dtype is None else module.to(dtype)
        program = exported_program(exported, module, module.state_dict())
    return program if dtype is None else in_precision(program, dtype)
