"""The engine migraphx-onnx: programs of torch.export, written as ONNX by a child process and compiled by MIGraphX.

Nothing of PyTorch is imported here: a process that loads MIGraphX cannot have both.
"""

from __future__ import annotations

import importlib.metadata
import logging
from pathlib import Path

from rocserve.backends.base import LoadedModel, ModelSource
from rocserve.backends.migraphx.serving.compile_context import open_compile_context
from rocserve.backends.migraphx.serving.compiled_model import load_compiled
from rocserve.backends.pytorch.compile_job import ONNX, OnnxJob
from rocserve.backends.pytorch.model_file import require_exported
from rocserve.backends.pytorch.written_files import written_folder

_LOG = logging.getLogger(__name__)


def load(model: ModelSource) -> LoadedModel:
    """Parameters: MIGraphX's, see migraphx/configuration.

    Raises:
        ServeError: INVALID_ARGUMENT, the file or the configuration is wrong; UNAVAILABLE, the program cannot be written
            as ONNX, or MIGraphX cannot be used or cannot compile it.
    """
    require_exported(model, "migraphx-onnx")
    context = open_compile_context(model, _LOG)
    return load_compiled(context, _exported(model), "written as ONNX from a program of torch.export")


def _exported(model: ModelSource) -> Path:
    inputs = tuple(entry.name for entry in model.config.inputs)
    outputs = tuple(entry.name for entry in model.config.outputs)
    parts = (importlib.metadata.version("torch"), repr((inputs, outputs)))
    folder = written_folder(
        model, "onnx", parts, lambda folder: OnnxJob(model.name, str(model.model_file), str(folder), inputs, outputs)
    )
    return folder / ONNX
