"""The tensors of an ONNX file that lie in other files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import onnx

from rocserve.backends.migraphx.external_data import ExternalFiles


def external_tensors(model_file: Path, roots: tuple[Path, ...]) -> tuple[Path, ...]:
    """The files, each checked: it is there, long enough, and within the folder of the model file or `roots`.

    None of a file that cannot be read, which is for the engine to say.

    Raises:
        ServeError: INVALID_ARGUMENT; a file is not as it must be.
    """
    try:
        model = onnx.load(model_file, format="protobuf", load_external_data=False)
    except Exception:
        # protobuf's own errors, which nothing but protobuf may import.
        return ()
    files = ExternalFiles(model_file, roots)
    for tensor in _tensors(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            files.add(tensor, 0)
    return files.paths


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
