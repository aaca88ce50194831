"""Reads an ONNX file as far as ONNX Runtime cannot say what the server needs, and replaces ZipMap.

scikit-learn's and LightGBM's exporters end a classifier with the operator ZipMap, which turns the tensor of
probabilities into a sequence of maps from class to probability. No tensor protocol has maps, so the tensor itself is
served, under the name of ZipMap's output, and the classes become its labels.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

_ZIP_MAP = b"ZipMap"
_FLOAT = 1
"""TensorProto.DataType.FLOAT in onnx.proto."""
_CLASSES = ("classlabels_int64s", "classlabels_strings")


@dataclass(frozen=True)
class ModelFile:
    """An ONNX file, or what is served in its place."""

    path: Path
    content: bytes | None = None
    """The model that is served instead; None = the file as it is."""
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Output -> its classes, for outputs that were maps."""

    @cached_property
    def scalars(self) -> frozenset[str]:
        """The inputs and outputs that the file declares as scalars. ONNX Runtime says the same of a tensor without a
        shape, and of one whose declared and inferred shapes have different ranks."""
        message = _read(self.path)
        values = () if message is None else (*message.graph.input, *message.graph.output)
        return frozenset(
            value.name
            for value in values
            if value.type.tensor_type.HasField("shape") and not value.type.tensor_type.shape.dim
        )


def open_model_file(path: Path) -> ModelFile:
    """Read a file, and replace each ZipMap that makes an output of the model. An unreadable file stays as it is,
    because the engine reports its error."""
    # Importing onnx takes longer than loading a small model, so only files with this operator are parsed.
    message = _read(path) if holds(path, _ZIP_MAP) else None
    labels = {} if message is None else dict(_replace_zip_maps(message.graph))
    if message is None or not labels:
        return ModelFile(path)
    return ModelFile(path, message.SerializeToString(), labels)


def holds(path: Path, word: bytes) -> bool:
    """Return whether the bytes occur in a file; False if it is empty or cannot be read."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(word) >= 0
    except (OSError, ValueError):
        return False


def _read(path: Path) -> onnx.ModelProto | None:
    import onnx

    try:
        return onnx.load(path, format="protobuf", load_external_data=False)
    except Exception:
        # protobuf raises errors of its own classes, and no module here may import protobuf.
        return None


def _replace_zip_maps(graph: onnx.GraphProto) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Replace each ZipMap that makes an output by Identity, and yield the output with its classes."""
    outputs = {value.name: value for value in graph.output}
    for node in graph.node:
        if node.op_type != _ZIP_MAP.decode() or len(node.output) != 1 or node.output[0] not in outputs:
            continue
        classes = tuple(
            label.decode(errors="replace") if isinstance(label, bytes) else str(label)
            for attribute in node.attribute
            if attribute.name in _CLASSES
            for label in (*attribute.ints, *attribute.strings)
        )
        node.op_type, node.domain = "Identity", ""
        del node.attribute[:]
        # By ZipMap's definition: a row for each map, with a float for each class.
        kind = outputs[node.output[0]].type
        kind.Clear()
        kind.tensor_type.elem_type = _FLOAT
        kind.tensor_type.shape.dim.add()
        kind.tensor_type.shape.dim.add().dim_value = len(classes)
        yield node.output[0], classes
