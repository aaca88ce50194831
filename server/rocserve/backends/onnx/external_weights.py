"""Weights in files beside an ONNX model: checked before ONNX Runtime sees them, whose older versions open any path, and
given to it such that they may be written to while it runs.

Left to itself ONNX Runtime maps the files, and then answers change, or its process is killed, when one is written to
before the new version of the model takes over.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rocserve.backends.base import ModelSource

_KEY = b"location"
"""A tensor names its file under this key, which is therefore somewhere in the model file."""


@dataclass(frozen=True, slots=True)
class ExternalWeights:
    files: Mapping[str, Path] = field(default_factory=dict)
    """By the names that the model has for them; empty where all of it is in the model file."""
    in_memory: bool = True
    """Whether ONNX Runtime takes their contents from memory."""


NO_WEIGHTS = ExternalWeights()


def find_external_weights(model: ModelSource) -> ExternalWeights:
    """
    Raises:
        ServeError: INVALID_ARGUMENT; a file is missing, too short or outside of the model's folder.
    """
    if not _may_have_external_data(model.model_file):
        return NO_WEIGHTS
    # The library takes longer to import than a small model to load, so only models that need it wait for it.
    from rocserve.backends.onnx.external_tensors import read_external_files

    return ExternalWeights(*read_external_files(model.model_file, (model.model_folder,)))


@contextmanager
def settled_weights(model_file: Path, weights: ExternalWeights, options: Any) -> Iterator[Path]:
    """Within, a session may be opened with the onnxruntime.SessionOptions on the file that this gives, and has weights
    that nobody writes to.

    Raises:
        OSError: a file cannot be read or copied.
    """
    with ExitStack() as opened:
        if not weights.files:
            yield model_file
        elif weights.in_memory:
            contents = [opened.enter_context(_mapped(path)) for path in weights.files.values()]
            sizes = [len(content) for content in contents]
            options.add_external_initializers_from_files_in_memory(list(weights.files), contents, sizes)
            yield model_file
        else:
            # Imported already, by what found the files.
            from rocserve.backends.onnx.external_tensors import copied_model

            yield opened.enter_context(copied_model(model_file, weights.files))


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _may_have_external_data(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            return False  # It has been emptied since it was looked at; ONNX Runtime tells of it.
        with content:
            return content.find(_KEY) >= 0
