"""What an ONNX file says of itself, read without running or loading any of it.

Files are what users drop: nothing in one is trusted, no path that it names is opened, and whatever it holds there is
either an OnnxGraph or a ServeError.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from rocserve.backends.file_kinds import what_it_is
from rocserve.backends.migraphx.model_files.external_data import ExternalFiles, as_text
from rocserve.backends.migraphx.model_files.graph_tensor import GraphTensor
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, invalid_argument

_LARGEST_FILE = (1 << 31) - 1
"""protobuf takes no more."""

_TYPES = onnx.TensorProto

_DATATYPES: Mapping[int, DataType] = {
    _TYPES.BOOL: DataType.BOOL,
    _TYPES.UINT8: DataType.UINT8,
    _TYPES.UINT16: DataType.UINT16,
    _TYPES.UINT32: DataType.UINT32,
    _TYPES.UINT64: DataType.UINT64,
    _TYPES.INT8: DataType.INT8,
    _TYPES.INT16: DataType.INT16,
    _TYPES.INT32: DataType.INT32,
    _TYPES.INT64: DataType.INT64,
    _TYPES.FLOAT16: DataType.FP16,
    _TYPES.BFLOAT16: DataType.BF16,
    _TYPES.FLOAT: DataType.FP32,
    _TYPES.DOUBLE: DataType.FP64,
}

_BITS: Mapping[int, int] = {
    _TYPES.BOOL: 8, _TYPES.UINT8: 8, _TYPES.INT8: 8, _TYPES.UINT16: 16, _TYPES.INT16: 16, _TYPES.FLOAT16: 16,
    _TYPES.BFLOAT16: 16, _TYPES.UINT32: 32, _TYPES.INT32: 32, _TYPES.FLOAT: 32, _TYPES.UINT64: 64, _TYPES.INT64: 64,
    _TYPES.DOUBLE: 64, _TYPES.COMPLEX64: 64, _TYPES.COMPLEX128: 128, _TYPES.FLOAT8E4M3FN: 8, _TYPES.FLOAT8E4M3FNUZ: 8,
    _TYPES.FLOAT8E5M2: 8, _TYPES.FLOAT8E5M2FNUZ: 8, _TYPES.UINT4: 4, _TYPES.INT4: 4,
}  # fmt: skip

_QUANTISED = frozenset(
    {
        "QuantizeLinear",
        "DequantizeLinear",
        "QLinearConv",
        "QLinearMatMul",
        "ConvInteger",
        "MatMulInteger",
        "DynamicQuantizeLinear",
    }
)


_EXTERNAL_ORDER = ("location", "offset", "length")
"""Of what MIGraphX looks at."""


@dataclass(frozen=True, slots=True)
class OnnxGraph:
    inputs: tuple[GraphTensor, ...]
    """What a run needs: without the inputs that have a default (those that are initializers too)."""
    outputs: tuple[GraphTensor, ...]
    external_files: tuple[Path, ...]
    """Of external data, in the order in which they are first named; each is there and long enough."""
    weight_bytes: int
    """Of all initializers and constants, external ones included."""
    operators: Mapping[str, int]
    """How often each is used, subgraphs included; "domain:Operator" outside ONNX's own domain."""
    opset: int
    """Of ONNX's own domain; 0 where the file names none."""
    domains: Mapping[str, int]
    """The other operator sets."""
    is_quantised: bool
    """Whether it holds quantising operators (QDQ or integer ones)."""


def read_onnx_graph(path: Path, roots: tuple[Path, ...] = ()) -> OnnxGraph:
    """Read a model file. External data is looked for beside it, and only its files' sizes are.

    Args:
        roots: where links of external data may lead, beside the file's own folder.

    Raises:
        ServeError: INVALID_ARGUMENT; the file cannot be read, is damaged, or asks for what cannot be served.
    """
    model = _parse(path)
    try:
        return _GraphReader(path, ExternalFiles(path, roots)).read(model)
    except UnicodeDecodeError:
        raise invalid_argument(f"ONNX file {path.name} is damaged: it has a name that is no text") from None


def _parse(path: Path) -> onnx.ModelProto:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise invalid_argument(f"ONNX file {path.name} cannot be read: {error.strerror}") from None
    if size == 0:
        raise invalid_argument(f"ONNX file {path.name} is empty; copy it again")
    if size > _LARGEST_FILE:
        raise invalid_argument(
            f"ONNX file {path.name} has {size} bytes, above the 2 GB that the format can have; export the model with"
            " its weights as external data"
        )
    try:
        return onnx.load(path, format="protobuf", load_external_data=False)
    except OSError as error:
        raise invalid_argument(f"ONNX file {path.name} cannot be read: {error.strerror}") from None
    except Exception as error:
        # protobuf's own errors, which nothing but protobuf may import.
        raise invalid_argument(
            f"ONNX file {path.name} is damaged or no ONNX file ({size} bytes: {error})"
            f"{what_it_is(path) or '; copy or export it again'}"
        ) from None


class _GraphReader:
    def __init__(self, path: Path, files: ExternalFiles) -> None:
        self._file = path.name
        self._files = files
        self._operators: Counter[str] = Counter()
        self._weight_bytes = 0

    def read(self, model: onnx.ModelProto) -> OnnxGraph:
        graph = model.graph
        if not model.ir_version or not graph.node or not graph.output:
            missing = "ir_version" if not model.ir_version else "nodes" if not graph.node else "outputs"
            raise self._wrong(f"is no ONNX model, or a damaged one: it has no {missing}; copy or export it again")
        self._walk(graph)
        for function in model.functions:
            self._count_nodes(function.node)
        defaults = {as_text(tensor.name) for tensor in graph.initializer}
        defaults.update(as_text(tensor.values.name) for tensor in graph.sparse_initializer)
        # Operator sets of ONNX itself go by two names.
        opsets = {as_text(entry.domain): entry.version for entry in model.opset_import}
        own = max(opsets.pop("", 0), opsets.pop("ai.onnx", 0))
        return OnnxGraph(
            inputs=tuple(self._tensors("input", (value for value in graph.input if value.name not in defaults))),
            outputs=tuple(self._tensors("output", graph.output)),
            external_files=self._files.paths,
            weight_bytes=self._weight_bytes,
            operators=dict(self._operators.most_common()),
            opset=own,
            domains=opsets,
            is_quantised=not _QUANTISED.isdisjoint(self._operators),
        )

    def _walk(self, graph: onnx.GraphProto) -> None:
        """Count what the graph and the graphs within its nodes hold."""
        for tensor in graph.initializer:
            self._weigh(tensor)
        for sparse in graph.sparse_initializer:
            self._weigh(sparse.values)
            self._weigh(sparse.indices)
        self._count_nodes(graph.node)

    def _count_nodes(self, nodes: Iterable[onnx.NodeProto]) -> None:
        for node in nodes:
            domain = as_text(node.domain)
            prefix = "" if domain in ("", "ai.onnx") else f"{domain}:"
            self._operators[prefix + as_text(node.op_type)] += 1
            for attribute in node.attribute:
                for tensor in _tensors_of(attribute):
                    self._weigh(tensor)
                if attribute.HasField("g"):
                    self._walk(attribute.g)
                for graph in attribute.graphs:
                    self._walk(graph)

    def _weigh(self, tensor: onnx.TensorProto) -> None:
        bits = _BITS.get(tensor.data_type, 0) * math.prod(tensor.dims)
        size = max(0, (bits + 7) // 8)
        # MIGraphX reads what is named there whatever the location says.
        if tensor.external_data or tensor.data_location == _TYPES.EXTERNAL:
            self._check_external_order(tensor)
            size = self._files.add(tensor, size)
        elif tensor.HasField("raw_data") and bits and len(tensor.raw_data) < size:
            # MIGraphX would read on behind their end.
            raise self._wrong(
                f"is damaged: tensor '{as_text(tensor.name)}' has {len(tensor.raw_data)} bytes, expected {size}; copy"
                " or export it again"
            )
        self._weight_bytes += size

    def _check_external_order(self, tensor: onnx.TensorProto) -> None:
        """
        Raises:
            ServeError: INVALID_ARGUMENT; MIGraphX, which goes by places and not by names, would read something else.
        """
        keys = [as_text(entry.key) for entry in tensor.external_data][: len(_EXTERNAL_ORDER)]
        if keys != list(_EXTERNAL_ORDER[: len(keys)]):
            raise self._wrong(
                f"says of the external data of tensor '{tensor.name}' {', '.join(keys)}, in this order, but MIGraphX"
                f" takes them for {', '.join(_EXTERNAL_ORDER)}; write it anew with onnx.save_model(...,"
                " save_as_external_data=True)"
            )

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
            raise self._wrong(
                f"has {what} with elements of type {_type_name(tensor.elem_type)}, {_advice(tensor.elem_type)}"
            )
        dims = tuple(_dim(dim) for dim in tensor.shape.dim) if tensor.HasField("shape") else None
        return GraphTensor(value.name, datatype, dims)

    def _wrong(self, text: str) -> ServeError:
        return invalid_argument(f"ONNX file {self._file} {text}")


def _tensors_of(attribute: onnx.AttributeProto) -> Iterator[onnx.TensorProto]:
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors
    sparse: Any = (attribute.sparse_tensor,) if attribute.HasField("sparse_tensor") else ()
    for each in (*sparse, *attribute.sparse_tensors):
        yield each.values
        yield each.indices


def _dim(dim: Any) -> int | str:
    # Exporters write 0 and -1, too, for what is left open; MIGraphX takes them so.
    if dim.WhichOneof("value") == "dim_value" and dim.dim_value > 0:
        return int(dim.dim_value)
    return as_text(dim.dim_param)


def _type_name(element_type: int) -> str:
    try:
        return str(_TYPES.DataType.Name(element_type))
    except ValueError:
        return str(element_type)


def _advice(element_type: int) -> str:
    if element_type == _TYPES.STRING:
        return "which MIGraphX does not have; let ONNX Runtime run the model: parameter 'engine' \"onnxruntime\""
    return f"which has no datatype in the KServe protocol; those that have are {', '.join(map(_type_name, _DATATYPES))}"
