"""Reads the inputs and outputs of a frozen TensorFlow graph (GraphDef) without TensorFlow.

The file is read because MIGraphX names a program's parameters, but gives no reliable order of outputs, and does not say
that images were NHWC. The field numbers are those of TensorFlow's graph.proto, node_def.proto, attr_value.proto and
tensor_shape.proto.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rocserve.backends.migraphx.compiling.graph import LARGEST_FILE, Dims, GraphTensor, ModelGraph
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, invalid_argument, unreadable
from rocserve.core.wire_format import Buffer, WireError, WireMessage

_DATATYPES = {
    1: DataType.FP32,
    2: DataType.FP64,
    3: DataType.INT32,
    5: DataType.INT16,
    6: DataType.INT8,
    9: DataType.INT64,
    17: DataType.UINT16,
    19: DataType.FP16,
    22: DataType.UINT32,
    23: DataType.UINT64,
}
"""Number in types.proto -> datatype, for the placeholders that MIGraphX takes."""


class TensorflowNode:
    def __init__(self, message: Buffer) -> None:
        node = WireMessage(message)
        self.name = node.text(_NODE_NAME)
        self.operator = node.text(_NODE_OPERATOR)
        self.inputs = [str(value, "utf-8") for value in node.parts(_NODE_INPUT)]
        """"name", "name:1" for a further output, "^name" for a control dependency."""
        entries = [WireMessage(entry) for entry in node.parts(_NODE_ATTRIBUTE)]
        attributes = {entry.text(_ENTRY_KEY): WireMessage(entry.message(_ENTRY_VALUE)) for entry in entries}
        nothing = WireMessage(b"")
        self.datatype = attributes.get("dtype", nothing).number(_VALUE_TYPE)
        """0 = the node has no datatype."""
        self.layout = attributes.get("data_format", nothing).text(_VALUE_TEXT)
        """"" = the node has no layout."""
        self.dims: Dims | None = None
        value = attributes.get("shape", nothing)
        shape = WireMessage(value.message(_VALUE_SHAPE))
        if value.values[_VALUE_SHAPE] and not shape.number(_SHAPE_UNKNOWN_RANK):
            dims = [WireMessage(dim) for dim in shape.parts(_SHAPE_DIM)]
            # An open dimension is -1, which is the largest number if read as unsigned.
            self.dims = tuple(
                size if 0 < (size := dim.number(_DIM_SIZE)) < 1 << 63 else dim.text(_DIM_NAME) for dim in dims
            )

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(source.partition(":")[0] for source in self.inputs if not source.startswith("^"))


def read_tensorflow_graph(path: Path, wanted: Sequence[str] = ()) -> ModelGraph:
    """Return the graph's inputs and outputs. Inputs are the placeholders in the file's order; images keep the graph's
    layout. Outputs are the `wanted` nodes if all of them exist, else the nodes that no other node reads, in the file's
    order. Raises ServeError (INVALID_ARGUMENT) if the file is unreadable, damaged or not a frozen graph, if MIGraphX
    does not take a placeholder's type, or if an output depends on an operator that MIGraphX misreads."""
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise _wrong(path, "has more than the format's 2 GB")
        data = path.read_bytes()
    except OSError as error:
        raise unreadable(f"TensorFlow graph {path.name} cannot be read: {error.strerror}", error) from None
    if not data:
        raise _wrong(path, "is empty; copy it again")
    try:
        messages = WireMessage(memoryview(data)).values[_GRAPH_NODE]
        if any(isinstance(message, int) for message in messages):
            raise _wrong(
                path,
                "is a SavedModel, not a GraphDef: convert its folder with python -m tf2onnx.convert --saved-model"
                " FOLDER --output model.onnx",
            )
        nodes = [TensorflowNode(message) for message in messages if not isinstance(message, int)]
    except (WireError, UnicodeDecodeError) as error:
        raise _wrong(
            path, f"is damaged or not a GraphDef ({len(data)} bytes: {error}); copy or export it again"
        ) from None
    operators = {node.operator for node in nodes}
    read = {source.removeprefix("^").partition(":")[0] for node in nodes for source in node.inputs}
    names = [node.name for node in nodes]
    outputs = tuple(
        node.name
        for node in nodes
        if node.name not in read and node.operator not in ("Const", "NoOp", "Assert", "Placeholder")
    )
    if not all(names) or not outputs:
        raise _wrong(path, "is not a GraphDef, or is damaged: it has no outputs; copy or export it again")
    if len(set(names)) != len(names):
        raise _wrong(path, "has two nodes of one name")
    variables = sorted(operators & {"Variable", "VariableV2", "VarHandleOp", "ReadVariableOp", "AutoReloadVariable"})
    if variables:
        raise _wrong(
            path,
            f"is not frozen: it has variables ({', '.join(variables)}); freeze the graph, so that they are constants",
        )
    inputs = []
    for node in nodes:
        if node.layout.startswith("NC"):
            raise _wrong(
                path,
                f"has node '{node.name}' with data_format {node.layout}, which MIGraphX would read as NHWC; export the"
                " graph in TensorFlow's own layout, NHWC",
            )
        if node.operator == "Placeholder":
            datatype = _DATATYPES.get(node.datatype)
            if datatype is None:
                others = {4: "uint8", 7: "string", 8: "complex64", 10: "bool", 14: "bfloat16", 18: "complex128"}
                kind = others.get(node.datatype, f"number {node.datatype}")
                known = ", ".join(known.value for known in _DATATYPES.values())
                text = f"has placeholder '{node.name}' of type {kind}, which MIGraphX does not take; it takes {known}"
                raise _wrong(path, text)
            inputs.append(GraphTensor(node.name, datatype, node.dims))
    by_name = {node.name: node for node in nodes}
    if wanted and all(name.removesuffix(":0") in by_name for name in wanted):
        outputs = tuple(wanted)
    waiting = [name.removesuffix(":0") for name in outputs]
    seen = set(waiting)
    while waiting:
        name = waiting.pop()
        if name not in by_name:
            continue
        operator, sources = by_name[name].operator, by_name[name].sources
        # MIGraphX treats these operators as identities of their first input. They mostly feed assertions, which it
        # drops.
        if operator in {"All", "LessEqual"}:
            raise invalid_argument(
                f"node '{name}' of the TensorFlow graph has operator {operator}, which MIGraphX treats as an identity,"
                " with wrong answers; write the graph without it, or convert it to ONNX"
            )
        waiting.extend(source for source in sources if source not in seen)
        seen.update(sources)
    return ModelGraph(tuple(inputs), tuple(GraphTensor(name, None, None) for name in outputs), len(data))


_GRAPH_NODE = 1
_NODE_NAME, _NODE_OPERATOR, _NODE_INPUT, _NODE_ATTRIBUTE = 1, 2, 3, 5
_ENTRY_KEY, _ENTRY_VALUE = 1, 2
_VALUE_TEXT, _VALUE_TYPE, _VALUE_SHAPE = 2, 6, 7
_SHAPE_DIM, _SHAPE_UNKNOWN_RANK = 2, 3
_DIM_SIZE, _DIM_NAME = 1, 2
"""Field numbers of GraphDef, NodeDef, an attribute's entry, AttrValue, TensorShapeProto and its Dim."""


def _wrong(path: Path, text: str) -> ServeError:
    return invalid_argument(f"TensorFlow graph {path.name} {text}")
