"""Cuts an ONNX graph after any of its operators, into models whose outputs are the graph's inner tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto, helper
from onnx.external_data_helper import load_external_data_for_model

from rocserve.core.errors import invalid_argument

Array = np.ndarray[Any, Any]


class CutGraph:
    """An ONNX graph for inputs of fixed shapes."""

    def __init__(self, model: ModelProto, feed: Mapping[str, Array]) -> None:
        """`feed`: values of the graph's inputs, of which the shapes count."""
        self._model = with_shapes(model, feed)
        graph = self._model.graph
        inferred = onnx.shape_inference.infer_shapes(self._model, data_prop=True).graph
        values: list[ValueInfoProto] = [*inferred.value_info, *inferred.output]
        self._types = {one.name: one for one in values if one.type.HasField("tensor_type")}
        self.operators: Sequence[NodeProto] = graph.node
        self._fronts = tuple(self._find_fronts())

    def _find_fronts(self) -> Iterator[Sequence[str]]:
        graph = self._model.graph
        last_use = {name: number for number, node in enumerate(graph.node) for name in used_by(node)}
        last_use |= {output.name: len(graph.node) for output in graph.output}
        varying = {one.name for one in graph.input} - {one.name for one in graph.initializer}
        live: dict[str, None] = {}
        for number, node in enumerate(graph.node):
            if varying.intersection(used_by(node)):
                varying.update(node.output)
            live.update((name, None) for name in node.output if name in varying and name in last_use)
            live = {name: None for name in live if last_use[name] > number}
            yield tuple(live)

    def front(self, count: int) -> Sequence[str]:
        """Return the tensors that the first `count` operators hand to the others, and the graph's outputs among theirs.
        Tensors that depend on no input are left out."""
        return self._fronts[count - 1]

    @property
    def cuts(self) -> Sequence[int]:
        """The numbers of operators after which the graph can be cut: those whose front has tensors of known types."""
        last = len(self.operators)
        counts = range(1, last + 1)
        return [one for one in counts if one == last or ((front := self.front(one)) and self._types.keys() >= {*front})]

    def until(self, count: int) -> ModelProto:
        """Return a model of the first `count` operators, whose outputs are their front."""
        cut, graph = ModelProto(), self._model.graph
        cut.CopyFrom(self._without_graph())
        nodes = graph.node[:count]
        used = {name for node in nodes for name in used_by(node)}
        cut.graph.name = graph.name or "graph"
        cut.graph.input.extend(one for one in graph.input if one.name in used)
        cut.graph.node.extend(nodes)
        cut.graph.initializer.extend(one for one in graph.initializer if one.name in used)
        cut.graph.sparse_initializer.extend(graph.sparse_initializer)
        given = {one.name: one for one in graph.output}
        cut.graph.output.extend(self._types.get(name) or given[name] for name in self.front(count))
        return cut

    def _without_graph(self) -> ModelProto:
        model = self._model
        return ModelProto(
            ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions, producer_name="cut"
        )


def title(node: NodeProto) -> str:
    """Return an operator's title, such as "Softplus 'act_3' (x -> y)"."""
    kind = f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
    name = f" '{node.name}'" if node.name else ""
    inputs = [one for one in node.input if one]
    # A Concat may have hundreds of inputs.
    shown = ", ".join(inputs[:4]) + (", ..." if len(inputs) > 4 else "")
    return f"{kind}{name} ({shown} -> {', '.join(filter(None, node.output))})"


def used_by(node: NodeProto) -> Iterator[str]:
    """Yield the names of the tensors that an operator takes, and those of outside that its inner graphs take."""
    yield from filter(None, node.input)
    for attribute in node.attribute:
        for inner in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
            yield from _used_from_outside(inner)


def _used_from_outside(graph: GraphProto) -> Iterator[str]:
    own = {one.name for one in graph.input} | {one.name for one in graph.initializer}
    own |= {name for node in graph.node for name in node.output}
    used = [name for node in graph.node for name in used_by(node)]
    yield from (name for name in (*used, *(one.name for one in graph.output)) if name not in own)


def with_shapes(model: ModelProto, feed: Mapping[str, Array]) -> ModelProto:
    """Return a copy of the model whose inputs have the shapes of `feed`, and whose outputs have no fixed shapes."""
    fixed = ModelProto()
    fixed.CopyFrom(model)
    del fixed.graph.value_info[:]
    for one in fixed.graph.input:
        if one.name in feed:
            shape = feed[one.name].shape
            one.CopyFrom(helper.make_tensor_value_info(one.name, one.type.tensor_type.elem_type, shape))
    for one in fixed.graph.output:
        if one.type.HasField("tensor_type"):
            one.type.tensor_type.ClearField("shape")
    return fixed


def read_model(file: Path) -> ModelProto:
    """Return the model without its external weights. Raises ServeError (INVALID_ARGUMENT) if the file is not a
    model."""
    try:
        return onnx.load(file, load_external_data=False)
    except Exception as error:
        raise invalid_argument(f"{file.name} cannot be read as an ONNX model: {error}") from None


def dimension_names(model: ModelProto) -> Mapping[str, Sequence[str]]:
    """Return the names of each input's dimensions; "" for a number or a dimension without a name."""
    return {one.name: [dim.dim_param for dim in one.type.tensor_type.shape.dim] for one in model.graph.input}


def write_model(cut: ModelProto, file: Path, weights: Path) -> None:
    """Write a cut with its weights. `weights`: the folder of the external ones. Raises ServeError (INVALID_ARGUMENT) if
    they cannot be read."""
    try:
        load_external_data_for_model(cut, str(weights))
    except Exception as error:
        raise invalid_argument(f"its weights cannot be read: {error}") from None
    # A larger model is written with its weights in a separate file: protobuf's limit is 2 GiB.
    onnx.save(cut, file, save_as_external_data=cut.ByteSize() > 1 << 30, location=f"{file.name}.data")
