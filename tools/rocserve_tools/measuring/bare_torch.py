"""Runs a file in plain PyTorch: the engine that `rocserve bench --against torch` compares with."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocserve.backends.base import Batch, BatchResult, ModelSource
from rocserve.backends.host import Host
from rocserve.backends.pytorch.installing import torch_command
from rocserve.backends.pytorch.model_file import FileKind, file_kind
from rocserve.core.errors import unavailable
from rocserve.core.model_config import InstanceKind
from rocserve.core.requests import Signature


def load(model: ModelSource) -> TorchModel:
    torch = _needed("torch", f"PyTorch is not installed; {torch_command(Host())}")
    module = _torch_module(torch, model.model_file)
    # PyTorch names AMD's GPUs "cuda" too.
    is_on_gpu = model.instance_kind is not InstanceKind.CPU and torch.cuda.is_available()
    device = torch.device("cuda" if is_on_gpu else "cpu")
    module = module.to(device) if hasattr(module, "to") else module
    facts = {"device": device.type, "file": model.model_file.name}
    return TorchModel(torch, module, device, facts, Signature((), (), supports_batching=False))


@dataclass(frozen=True, slots=True)
class TorchModel:
    """A module that takes its inputs by position. Implements LoadedModel."""

    _torch: Any
    _module: Any
    _device: Any
    properties: Mapping[str, str]
    signature: Signature

    def warm_up(self, samples: object) -> None:
        pass

    def execute(self, batch: Batch) -> BatchResult:
        torch = self._torch
        # Copies to and from the GPU are timed, as for the other engines.
        with torch.inference_mode():
            results = self._module(*(torch.from_numpy(array).to(self._device) for array in batch.arrays.values()))
            leaves = torch.utils._pytree.tree_leaves(results)
            return BatchResult({f"output_{place}": leaf.cpu().numpy() for place, leaf in enumerate(leaves)})

    def close(self) -> None:
        pass


def _torch_module(torch: Any, file: Path) -> Any:
    if file.suffix == ".onnx":
        converter = _needed(
            "onnx2torch",
            "PyTorch does not read ONNX files; install onnx2torch, which converts them, or put the model into its"
            " version folder as model.pt (TorchScript) or model.pt2 (torch.export)",
        )
        return converter.convert(str(file)).eval()
    from rocserve.backends.pytorch.exported_file import read_exported

    match file_kind(file):
        case FileKind.EXPORTED:
            return read_exported(file).module()
        case FileKind.PACKAGE:
            return torch._inductor.aoti_load_package(str(file))
        case FileKind.SCRIPT:
            return torch.jit.load(str(file), map_location="cpu").eval()


def _needed(module: str, advice: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise unavailable(f"{advice} ({error})") from None
