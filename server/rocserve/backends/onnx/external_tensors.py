"""The tensors of an ONNX file that lie in other files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import onnx
import onnxruntime

from rocserve.backends.migraphx.model_files.external_data import ExternalFiles
from rocserve.core.errors import invalid_argument


def read_external_files(model_file: Path, roots: tuple[Path, ...]) -> tuple[Mapping[str, Path], bool]:
    """The files, each of which is there, long enough, and within the folder of the model file or `roots`; and whether
    ONNX Runtime takes their contents from memory.

    None of a model file that cannot be read, which is for the engine to say.

    Raises:
        ServeError: INVALID_ARGUMENT; a file is not as it must be.
    """
    try:
        model = onnx.load(model_file, format="protobuf", load_external_data=False)
    except Exception:
        # protobuf's own errors, which nothing but protobuf may import.
        return {}, True
    checked = ExternalFiles(model_file, roots)
    files: dict[str, Path] = {}
    for tensor in _external(_tensors(model)):
        try:
            checked.add(tensor, 0)
        except UnicodeDecodeError:
            raise invalid_argument(
                f"ONNX file {model_file.name} is damaged: it says of external data what is no text"
            ) from None
        files[_location(tensor)] = model_file.parent / _location(tensor)
    return files, _can_be_given(model, files)


@contextmanager
def copied_model(model_file: Path, files: Mapping[str, Path]) -> Iterator[Path]:
    """A copy of the model file, with copies of its `files` beside it. They go at the end; what has mapped them keeps
    them.

    Raises:
        OSError: a file cannot be read, or there is no room.
    """
    with tempfile.TemporaryDirectory(prefix="rocserve-weights-") as name:
        folder = Path(name)
        for location, path in files.items():
            (folder / location).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / location)
        yield Path(shutil.copyfile(model_file, folder / model_file.name))


def _can_be_given(model: onnx.ModelProto, files: Iterable[str]) -> bool:
    """Whether ONNX Runtime takes the files' contents from memory: it does for the main graph's initializers, by names
    that need no normalising."""
    if not hasattr(onnxruntime.SessionOptions, "add_external_initializers_from_files_in_memory"):
        return False
    given = sum(1 for _ in _external(model.graph.initializer))
    named_plainly = all(str(PurePosixPath(name)) == name for name in files)
    return named_plainly and given == sum(1 for _ in _external(_tensors(model)))


def _external(tensors: Iterable[onnx.TensorProto]) -> Iterator[onnx.TensorProto]:
    return (tensor for tensor in tensors if tensor.data_location == onnx.TensorProto.EXTERNAL)


def _location(tensor: onnx.TensorProto) -> str:
    return next((str(entry.value) for entry in reversed(tensor.external_data) if entry.key == "location"), "")


def _tensors(message: Any) -> Iterator[onnx.TensorProto]:
    """All within a message of ONNX, wherever they are."""
    if isinstance(message, onnx.TensorProto):
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            parts: Iterable[Any] = (value,) if hasattr(value, "ListFields") else value
            for part in parts:
                yield from _tensors(part)
