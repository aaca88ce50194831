"""Checks the external weight files of an ONNX model, and opens them so that they may be overwritten while the model
runs.

The files are checked before ONNX Runtime sees them, because its older versions open any path. By default ONNX Runtime
maps the files: if a file is overwritten before the model's new version takes over, answers change, or the process is
killed.
"""

from __future__ import annotations

import mmap
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import onnxruntime

from rocserve.backends.base import ModelSource
from rocserve.backends.onnx.model_file import read_message
from rocserve.cache.temporary_folder import temporary_folder
from rocserve.core.errors import invalid_argument, unavailable


@dataclass(frozen=True, slots=True)
class ExternalWeights:
    """The files with a model's weights, if they lie outside the model file."""

    files: Mapping[str, Path] = field(default_factory=dict)
    """File name in the model -> path; empty = all weights are in the model file."""
    in_memory: bool = True
    """Whether ONNX Runtime takes the files' contents from memory."""


NO_WEIGHTS = ExternalWeights()


def find_external_weights(model: ModelSource) -> ExternalWeights:
    """Return the weight files, after checking that each exists, is long enough and lies within the model's folder. An
    unreadable model file gives NO_WEIGHTS, because the engine reports its error. Raises ServeError (INVALID_ARGUMENT)
    if a weight file fails a check."""
    path = model.model_file
    try:
        with _mapped(path) as content:
            # A tensor names its file under this key.
            if content.find(b"location") < 0:
                return NO_WEIGHTS
    except (OSError, ValueError):
        return NO_WEIGHTS  # ONNX Runtime reports that the file is unreadable, or empty since its check.
    # Importing onnx takes longer than loading a small model, so it is imported only if there may be external weights.
    import onnx

    from rocserve.backends.migraphx.compiling.onnx_graph import ExternalFiles, parts_of

    if (loaded := read_message(path)) is None:
        return NO_WEIGHTS
    checked = ExternalFiles(path, (model.model_folder,))
    tensors = [
        part for part in parts_of(loaded) if isinstance(part, onnx.TensorProto) and part.data_location == part.EXTERNAL
    ]
    try:
        for tensor in tensors:
            checked.add(tensor, 0)
    except UnicodeDecodeError:
        raise invalid_argument(f"ONNX file {path.name} is damaged: its external data entries are not text") from None
    # ONNX Runtime takes from memory only initializers of the main graph, and only under normalised file names.
    given = sum(tensor.data_location == tensor.EXTERNAL for tensor in loaded.graph.initializer)
    in_memory = (
        hasattr(onnxruntime.SessionOptions, "add_external_initializers_from_files_in_memory")
        and all(str(PurePosixPath(name)) == name for name in checked.paths)
        and given == len(tensors)
    )
    return ExternalWeights(checked.paths, in_memory)


@contextmanager
def stable_weights(model_file: Path, weights: ExternalWeights, options: Any) -> Iterator[Path]:
    """Yield the path of a model file whose weights cannot be overwritten, for a session with these
    onnxruntime.SessionOptions. The weights come from memory, or from copies that are deleted afterwards (mapped pages
    remain). Raises OSError if a file cannot be read, ServeError (UNAVAILABLE) if a file cannot be copied."""
    with ExitStack() as opened:
        if weights.files and weights.in_memory:
            contents = [opened.enter_context(_mapped(path)) for path in weights.files.values()]
            sizes = [len(content) for content in contents]
            options.add_external_initializers_from_files_in_memory(list(weights.files), contents, sizes)
        elif weights.files:
            try:
                folder = opened.enter_context(temporary_folder("rocserve-weights-"))
                for location, path in weights.files.items():
                    (folder / location).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, folder / location)
                model_file = Path(shutil.copyfile(model_file, folder / model_file.name))
            except OSError as error:
                raise unavailable(
                    f"cannot copy the external data of {model_file.name} to a temporary file for ONNX Runtime:"
                    f" {error}; free space in the temporary folder, or set another one with $TMPDIR"
                ) from None
        yield model_file


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
