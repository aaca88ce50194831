"""Weights in files beside an ONNX model: checked before ONNX Runtime, whose older versions open any path, sees them."""

from __future__ import annotations

import mmap
from pathlib import Path

from rocserve.backends.base import ModelSource

_KEY = b"location"
"""A tensor names its file under this key, which is therefore somewhere in the model file."""


def check_external_weights(model: ModelSource) -> None:
    """
    Raises:
        ServeError: INVALID_ARGUMENT; a file of external data is missing, too short or outside of the model's folder.
    """
    if not _may_have_external_data(model.model_file):
        return
    # The library takes longer to import than a small model to load, so only models that need it wait for it.
    from rocserve.backends.onnx.external_tensors import external_tensors

    external_tensors(model.model_file, (model.model_folder,))


def _may_have_external_data(path: Path) -> bool:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(_KEY) >= 0
