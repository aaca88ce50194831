"""The engine migraphx: programs of torch.export that torch_migraphx lowers onto MIGraphX within PyTorch, on an AMD GPU.

MIGraphX compiles each shape, so batches run at fixed sizes, all compiled before the model is READY.
"""

from __future__ import annotations

import importlib

import torch

from rocserve.backends.base import LoadedModel, ModelSource
from rocserve.backends.installed import is_installed
from rocserve.backends.pytorch import eager
from rocserve.backends.pytorch.exported import exported_program, read_exported, to_device
from rocserve.backends.pytorch.model import set_up
from rocserve.backends.pytorch.model_file import require_exported
from rocserve.backends.pytorch.parameters import run_options
from rocserve.backends.pytorch.program import DTYPES, in_precision
from rocserve.core.errors import unavailable

_MODULE = "torch_migraphx"


def load(model: ModelSource) -> LoadedModel:
    """Parameters: see `parameters`.

    Raises:
        ServeError: INVALID_ARGUMENT, the file or the configuration is wrong; UNAVAILABLE, there is no torch_migraphx or
            no GPU.
    """
    require_exported(model, "migraphx")
    if not is_installed(_MODULE):
        raise unavailable(
            f"model '{model.name}': parameter 'engine' is \"migraphx\", which needs torch_migraphx, and that is not"
            ' installed; pip install torch_migraphx beside PyTorch for ROCm, or use "migraphx-onnx"'
        )
    options = run_options(model.config)
    set_up(options)
    device = eager.find_device(model)
    importlib.import_module(_MODULE)  # It registers the compiler.
    exported = to_device(read_exported(model.model_file), device)
    module = exported.module()
    dtype = DTYPES.get(options.precision)
    module = module if dtype is None else module.to(dtype)
    compiled = torch.compile(module, backend="migraphx", dynamic=False)
    program = exported_program(exported, compiled, module.state_dict())
    program = program if dtype is None else in_precision(program, dtype)
    return eager.served(model, program, options, device, {"program": "lowered by torch_migraphx"}, captures=False)
