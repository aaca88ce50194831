"""The engine migraphx: programs of torch.export that torch_migraphx lowers onto MIGraphX within PyTorch, on an AMD GPU.

MIGraphX compiles each shape, so batches run at fixed sizes, all compiled before the model is READY.
"""

from __future__ import annotations

import importlib

import torch

from rocserve.backends.base import LoadedModel, ModelSource
from rocserve.backends.installed import is_installed
from rocserve.backends.pytorch.eager import set_up
from rocserve.backends.pytorch.model import TorchModel
from rocserve.backends.pytorch.model_file import require_exported
from rocserve.backends.pytorch.program import DTYPES, open_exported, read_exported
from rocserve.core.errors import unavailable

_MODULE = "torch_migraphx"


def load(model: ModelSource) -> LoadedModel:
    """Parameters: see `parameters`. Raises: ServeError: INVALID_ARGUMENT, the file or the configuration is wrong;
    UNAVAILABLE, there is no torch_migraphx or no GPU."""
    require_exported(model, "migraphx")
    if not is_installed(_MODULE):
        raise unavailable(
            f"model '{model.name}': parameter 'engine' is \"migraphx\", which needs torch_migraphx, and that is not"
            ' installed; pip install torch_migraphx beside PyTorch for ROCm, or use "migraphx-onnx"'
        )
    options, device = set_up(model)
    if device.type == "cpu":
        raise unavailable(
            f"model '{model.name}': parameter 'engine' is \"migraphx\", which runs programs on AMD GPUs only, and the"
            ' instance is on the CPU; give the model instances of KIND_GPU, or use "eager" or "migraphx-onnx"'
        )
    importlib.import_module(_MODULE)  # It registers the compiler.
    program = open_exported(
        read_exported(model.model_file, device),
        DTYPES.get(options.precision),
        lambda module: torch.compile(module, backend="migraphx", dynamic=False),
    )
    return TorchModel(model, program, options, device, {"program": "lowered by torch_migraphx"}, captures=False)
