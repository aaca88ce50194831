"""Weights in files beside an ONNX model: checked before ONNX Runtime sees them, whose older versions open any path, and
given to it such that they may be written to while it runs.

Left to itself ONNX Runtime maps the files, and then answers change, or its process is killed, when one is written to
before the new version of the model takes over.
"""

from __future__ import annotations

import mmap
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import onnxruntime

from rocserve.backends.base import ModelSource
from rocserve.core.errors import invalid_argument, unavailable

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
    """The files, each of which is there, long enough, and within the model's folder; none of a model file that cannot
    be read, which is for the engine to say. Raises: ServeError: INVALID_ARGUMENT; a file is not so."""
    path = model.model_file
    try:
        with _mapped(path) as content:
            if content.find(_KEY) < 0:
                return NO_WEIGHTS
    except (OSError, ValueError):
        return NO_WEIGHTS  # It may not be read, or has been emptied since it was checked; ONNX Runtime reports it.
    # The library takes longer to import than a small model to load, so only models that need it wait for it.
    import onnx

    from rocserve.backends.migraphx.model_files.onnx_graph import ExternalFiles, parts_of

    try:
        loaded = onnx.load(path, format="protobuf", load_external_data=False)
    except Exception:
        # protobuf's own errors, which nothing but protobuf may import.
        return NO_WEIGHTS
    checked = ExternalFiles(path, (model.model_folder,))
    tensors = [
        part for part in parts_of(loaded) if isinstance(part, onnx.TensorProto) and part.data_location == part.EXTERNAL
    ]
    try:
        for tensor in tensors:
            checked.add(tensor, 0)
    except UnicodeDecodeError:
        raise invalid_argument(f"ONNX file {path.name} is damaged: it says of external data what is no text") from None
    # ONNX Runtime takes from memory what the main graph's initializers are in, by names that need no normalising.
    given = sum(tensor.data_location == tensor.EXTERNAL for tensor in loaded.graph.initializer)
    in_memory = (
        hasattr(onnxruntime.SessionOptions, "add_external_initializers_from_files_in_memory")
        and all(str(PurePosixPath(name)) == name for name in checked.paths)
        and given == len(tensors)
    )
    return ExternalWeights(checked.paths, in_memory)


@contextmanager
def settled_weights(model_file: Path, weights: ExternalWeights, options: Any) -> Iterator[Path]:
    """Within, a session may be opened with the onnxruntime.SessionOptions on the file that this gives, and has weights
    that nobody writes to: given from memory, or in copies, which go at the end, but for those that are mapped. Raises:
    OSError: a file cannot be read. ServeError: UNAVAILABLE, it cannot be copied."""
    with ExitStack() as opened:
        if weights.files and weights.in_memory:
            contents = [opened.enter_context(_mapped(path)) for path in weights.files.values()]
            sizes = [len(content) for content in contents]
            options.add_external_initializers_from_files_in_memory(list(weights.files), contents, sizes)
        elif weights.files:
            try:
                folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="rocserve-weights-")))
                for location, path in weights.files.items():
                    (folder / location).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, folder / location)
                model_file = Path(shutil.copyfile(model_file, folder / model_file.name))
            except OSError as error:
                raise unavailable(
                    f"the external data of {model_file.name} cannot be copied to where ONNX Runtime may map them:"
                    f" {error}; make room among the temporary files, or name another folder for them by $TMPDIR"
                ) from None
        yield model_file


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
