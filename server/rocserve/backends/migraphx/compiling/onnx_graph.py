"""Reads an ONNX file's graph without running or loading any of it.

Users drop the files, so nothing in them is trusted: no path in a file is opened, and any content gives either a
ModelGraph or a ServeError.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx

from rocserve.backends.contained_paths import path_within
from rocserve.backends.file_kinds import what_it_is
from rocserve.backends.migraphx.compiling.graph import (
    LARGEST_FILE,
    ONNX_DATATYPES,
    GraphTensor,
    ModelGraph,
    is_beyond_memory,
)
from rocserve.backends.migraphx.compiling.known_faults import known_faults
from rocserve.backends.purpose import read_purpose
from rocserve.core.errors import ServeError, invalid_argument, unreadable

_DATATYPES = {onnx.TensorProto.DataType.Value(name.upper()): datatype for name, datatype in ONNX_DATATYPES.items()}

_BITS: Mapping[int, int] = {
    getattr(onnx.TensorProto, name): bits
    for bits, names in (
        (2, "INT2 UINT2"),
        (4, "INT4 UINT4 FLOAT4E2M1"),
        (8, "BOOL INT8 UINT8 FLOAT8E4M3FN FLOAT8E4M3FNUZ FLOAT8E5M2 FLOAT8E5M2FNUZ FLOAT8E8M0"),
        (16, "INT16 UINT16 FLOAT16 BFLOAT16"),
        (32, "INT32 UINT32 FLOAT"),
        (64, "INT64 UINT64 DOUBLE COMPLEX64"),
        (128, "COMPLEX128"),
    )
    for name in names.split()
    # Older versions of the package lack some types.
    if hasattr(onnx.TensorProto, name)
}


def read_onnx_graph(path: Path, roots: tuple[Path, ...] = ()) -> ModelGraph:
    """Read a model's graph. External data lies next to the file or in `roots`; only its files' sizes are read. Raises
    ServeError (INVALID_ARGUMENT) if the file is damaged or unreadable, or needs something that MIGraphX lacks."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise unreadable(f"ONNX file {path.name} cannot be read: {error.strerror}", error) from None
    if size == 0:
        raise invalid_argument(f"ONNX file {path.name} is empty; copy it again")
    if size > LARGEST_FILE:
        raise invalid_argument(
            f"ONNX file {path.name} has {size} bytes, more than the format's 2 GB; export the model with its weights as"
            " external data"
        )
    try:
        model = onnx.load(path, format="protobuf", load_external_data=False)
    except OSError as error:
        raise unreadable(f"ONNX file {path.name} cannot be read: {error.strerror}", error) from None
    except Exception as error:
        # protobuf raises its own exceptions, and no module here may import protobuf.
        raise invalid_argument(
            f"ONNX file {path.name} is damaged or not an ONNX file ({size} bytes: {error})"
            f"{what_it_is(path) or '; copy or export it again'}"
        ) from None
    try:
        return _GraphReader(path, ExternalFiles(path, roots)).read(model)
    except UnicodeDecodeError:
        raise invalid_argument(f"ONNX file {path.name} is damaged: a name in it is not text") from None


class _GraphReader:
    def __init__(self, path: Path, files: ExternalFiles) -> None:
        self._file = path.name
        self._files = files

    def read(self, model: onnx.ModelProto) -> ModelGraph:
        graph = model.graph
        if not model.ir_version or not graph.node or not graph.output:
            missing = "ir_version" if not model.ir_version else "nodes" if not graph.node else "outputs"
            raise self._wrong(f"is not an ONNX model, or is damaged: it has no {missing}; copy or export it again")
        weight_bytes, nodes = 0, []
        for whole in (*graph.initializer, *graph.node, *model.functions):
            for part in parts_of(whole):
                if isinstance(part, onnx.TensorProto):
                    weight_bytes += self._size(part)
                else:
                    nodes.append(part)
        if graph.sparse_initializer:
            raise self._wrong(
                "has sparse initializers, which MIGraphX does not support; let ONNX Runtime run the model: parameter"
                " 'engine' \"onnxruntime\""
            )
        self._check_made_once(graph)
        defaults = {as_text(tensor.name) for tensor in graph.initializer}
        return ModelGraph(
            inputs=tuple(self._tensors("input", (value for value in graph.input if value.name not in defaults))),
            outputs=tuple(self._tensors("output", graph.output)),
            # Includes all initializers and constants, also external ones.
            weight_bytes=weight_bytes,
            defaults=frozenset(value.name for value in graph.input if value.name in defaults),
            external_files=tuple(dict.fromkeys(self._files.paths.values())),
            is_quantised=any(
                as_text(node.op_type)
                in {"QuantizeLinear", "DequantizeLinear", "ConvInteger", "MatMulInteger", "DynamicQuantizeLinear"}
                or as_text(node.op_type).startswith("QLinear")
                for node in nodes
            ),
            faults=known_faults(model, [node for node in nodes if as_text(node.domain) in ("", "ai.onnx")]),
            purpose=read_purpose({as_text(entry.key): as_text(entry.value) for entry in model.metadata_props}),
        )

    def _check_made_once(self, graph: onnx.GraphProto) -> None:
        """Refuse a tensor with two producers, because MIGraphX silently uses one of them."""
        made = {as_text(value.name) for value in graph.input} | {as_text(value.name) for value in graph.initializer}
        for name in (as_text(name) for node in graph.node for name in node.output if name):
            if name in made:
                raise self._wrong(f"is not a valid ONNX model: tensor '{name}' is made twice; export it again")
            made.add(name)

    def _size(self, tensor: onnx.TensorProto) -> int:
        """Return the tensor's size in bytes, in the file or in external data."""
        if is_beyond_memory(tensor.dims) or min(tensor.dims, default=0) < 0:
            raise self._wrong(
                f"is damaged: the shape of tensor '{as_text(tensor.name)}' exceeds any memory; copy or export it again"
            )
        bits = _BITS.get(tensor.data_type, 0) * math.prod(tensor.dims)
        size = (bits + 7) // 8
        # MIGraphX reads external data whatever data_location says.
        if tensor.external_data or tensor.data_location == onnx.TensorProto.EXTERNAL:
            # MIGraphX reads the entries by position, so any other order is refused.
            order = ("location", "offset", "length")
            keys = [as_text(entry.key) for entry in tensor.external_data][: len(order)]
            if keys != list(order[: len(keys)]):
                raise self._wrong(
                    f"lists for the external data of tensor '{tensor.name}' {', '.join(keys)}, in this order, but"
                    f" MIGraphX reads them as {', '.join(order)}; write it again with onnx.save_model(...,"
                    " save_as_external_data=True)"
                )
            return self._files.add(tensor, size)
        # MIGraphX would read beyond the end of data that is too short, or write beyond the tensor's end.
        if tensor.HasField("raw_data"):
            fault = f"{len(tensor.raw_data)} bytes, expected {size}" if len(tensor.raw_data) < size else ""
        else:
            found = len(getattr(tensor, onnx.helper.tensor_dtype_to_field(tensor.data_type))) if bits else 0
            # A complex number takes two values. One value holds several numbers of less than a byte.
            expected = min(
                math.prod(tensor.dims)
                * (1 + (tensor.data_type in (onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128))),
                size,
            )
            fault = f"{found} values, expected {expected}" if found != expected else ""
        if fault:
            raise self._wrong(f"is damaged: tensor '{as_text(tensor.name)}' has {fault}; copy or export it again")
        return size

    def _tensors(self, kind: str, values: Iterable[onnx.ValueInfoProto]) -> Iterator[GraphTensor]:
        names: set[str] = set()
        for value in values:
            name = as_text(value.name)
            if not name or name in names:
                raise self._wrong(
                    f"has two {kind}s with the name '{value.name}'" if value.name else f"has an {kind} without a name"
                )
            names.add(name)
            yield self._tensor(f"{kind} '{name}'", value)

    def _tensor(self, what: str, value: onnx.ValueInfoProto) -> GraphTensor:
        held = value.type.WhichOneof("value")
        if held != "tensor_type":
            kind = f"type {held.removesuffix('_type').replace('_', ' ')}" if held else "a type that is not given"
            raise self._wrong(
                f"has {what} of {kind}, but only dense tensors can be served; export the model with tensors instead"
            )
        tensor = value.type.tensor_type
        datatype = _DATATYPES.get(tensor.elem_type)
        if datatype is None:
            known = ", ".join(map(_type_name, _DATATYPES))
            advice = f"which the KServe protocol does not have; supported types are {known}"
            if tensor.elem_type == onnx.TensorProto.STRING:
                advice = (
                    "which MIGraphX does not support; let ONNX Runtime run the model: parameter 'engine'"
                    ' "onnxruntime"'
                )
            raise self._wrong(f"has {what} with elements of type {_type_name(tensor.elem_type)}, {advice}")
        # For an open dimension exporters also write 0 and -1, which MIGraphX accepts.
        dims = tuple(dim.dim_value if dim.dim_value > 0 else as_text(dim.dim_param) for dim in tensor.shape.dim)
        return GraphTensor(value.name, datatype, dims if tensor.HasField("shape") else None)

    def _wrong(self, text: str) -> ServeError:
        return invalid_argument(f"ONNX file {self._file} {text}")


def parts_of(message: Any) -> Iterator[Any]:
    """Yield the nodes and tensors anywhere in an ONNX message, nested graphs included."""
    kind = message.DESCRIPTOR.name
    if kind in ("NodeProto", "TensorProto"):
        yield message
    for descriptor, value in () if kind == "TensorProto" else message.ListFields():
        if descriptor.message_type is not None:
            for part in (value,) if hasattr(value, "ListFields") else value:
                yield from parts_of(part)


def _type_name(element_type: int) -> str:
    try:
        return str(onnx.TensorProto.DataType.Name(element_type))
    except ValueError:
        return str(element_type)


def as_text(value: str | bytes) -> str:
    """Return a text of an ONNX file. Raises UnicodeDecodeError for bytes, protobuf's form of text that is not UTF-8."""
    return value if isinstance(value, str) else value.decode()


class ExternalFiles:
    """Collects the external data files that tensors name, and checks each use."""

    def __init__(self, model_file: Path, roots: tuple[Path, ...]) -> None:
        """`roots`: the folders that links may lead to, in addition to the model file's own."""
        self._model_file = model_file
        self._folder = model_file.parent
        self._roots = (self._folder, *roots)
        self._sizes: dict[str, int] = {}
        self.paths: dict[str, Path] = {}
        """File name in the model -> path, in the order of first mention."""

    def add(self, tensor: onnx.TensorProto, size: int) -> int:
        """Check the external data of a tensor of `size` bytes (0 = unknown). Returns the size of the data in bytes.
        Raises ServeError (INVALID_ARGUMENT) if the entries are wrong, or the file is outside of the roots, missing or
        too short."""
        entries = {as_text(entry.key): as_text(entry.value) for entry in tensor.external_data}
        if len(entries) != len(tensor.external_data):
            raise self._wrong(tensor, "has an entry of its external data twice")
        location = entries.get("location", "")
        if not location:
            raise self._wrong(tensor, "is external, but names no file")
        offset = self._number(tensor, entries, "offset", 0)
        length = self._number(tensor, entries, "length", size)
        if location not in self._sizes:
            path = path_within(self._folder, location, self._roots, f"external data of {self._model_file.name}:")
            if not path.is_file():
                raise invalid_argument(
                    f"ONNX file {self._model_file.name} needs external data file '{location}', which is missing; copy"
                    " it into the same folder"
                )
            self._sizes[location] = path.stat().st_size
            self.paths[location] = self._folder / location
        available = self._sizes[location]
        if offset + length > available:
            raise self._wrong(
                tensor,
                f"needs bytes {offset} to {offset + length} of external data file '{location}', which has"
                f" {available}; copy that file again",
            )
        if size and "length" in entries and length != size:
            raise self._wrong(tensor, f"has {size} bytes by its type and shape, but {length} in '{location}'")
        return length

    def _number(self, tensor: onnx.TensorProto, entries: Mapping[str, str], key: str, default: int) -> int:
        text = entries.get(key, "")
        if not text:
            return default
        if not (text.isascii() and text.isdecimal() and len(text) <= 19):
            raise self._wrong(tensor, f"has external data with {key} '{text[:40]}', which is not a number of bytes")
        return int(text)

    def _wrong(self, tensor: onnx.TensorProto, text: str) -> ServeError:
        return invalid_argument(f"ONNX file {self._model_file.name}: tensor '{tensor.name}' {text}")
