"""Reads facts from an ONNX graph that made-up inputs need, or that no experiment shows."""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rocserve.load_check.facts import LARGEST_COMPARED, MOST_THRESHOLDS, NO_FACTS, GraphFacts
from rocserve.load_check.onnx_graph import OnnxGraph
from rocserve.load_check.onnx_message import ElementType, Node
from rocserve.load_check.tensors import Array

if TYPE_CHECKING:
    import onnx

_COMPARISONS = frozenset(("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"))
_MOST_MAKERS = 200
_OVER_ALL = frozenset(("ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum"))
_CHOICES = frozenset(("ArgMax", "ArgMin", "Ceil", "Floor", "Hardmax", "Round", "TopK", *_COMPARISONS))
"""Operators that turn numbers into few values."""
_LABELS = frozenset(("Add", "And", "ArrayFeatureExtractor", "Cast", "Concat", "Expand", "Flatten", "Gather"))
_LABELS |= {"GatherND", "Identity", "LabelEncoder", "Mul", "Not", "Or", "Reshape", "Slice", "Squeeze", "StringConcat"}
_LABELS |= {"Sub", "Tile", "Transpose", "Unsqueeze", "Where"}
"""Operators between a choice and an output."""


def onnx_facts(model: onnx.ModelProto | Path) -> GraphFacts:
    """Return the facts of a model or of a file; large weights are not read. A file that is not an ONNX model has no
    facts."""
    try:
        return _facts(OnnxGraph(_mapped(model) if isinstance(model, Path) else model.SerializeToString()))
    except (IndexError, OSError, RecursionError, TypeError, ValueError):
        # A node lacks inputs, or a tensor values. The engine refuses such a file.
        return NO_FACTS


def _mapped(path: Path) -> memoryview:
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _facts(graph: OnnxGraph) -> GraphFacts:
    return GraphFacts(
        ends=_ends(graph),
        levels=_levels(graph),
        tables=tuple(sorted(set(_tables(graph)))),
        words=_words(graph),
        couples_rows=next(_couplings(graph), ""),
        is_random=next((node.op_type for node in (*graph.nodes, *graph.function_nodes) if _is_random(node, graph)), ""),
        precision=_precision(graph),
        exposed=tuple(itertools.islice(dict.fromkeys(_chosen_from(graph)), 4)),
        thresholds=tuple(itertools.islice(dict.fromkeys(_thresholds(graph)), MOST_THRESHOLDS)),
        compared=tuple(itertools.islice(dict.fromkeys(_compared(graph)), MOST_THRESHOLDS)),
        narrowed=dict(_narrowed(graph)),
        texts=tuple(itertools.islice(dict.fromkeys(_compared_texts(graph)), MOST_THRESHOLDS)),
    )


def expose(model: onnx.ModelProto, tensors: Sequence[str]) -> None:
    """Make inner tensors outputs of the model."""
    for name in tensors:
        # ONNX Runtime infers the type.
        model.graph.output.add().name = name


def _ends(graph: OnnxGraph) -> Mapping[str, int]:
    """Return the exclusive ends of inputs that index tables."""
    ends: dict[str, int] = {}
    for node in graph.nodes:
        for indices, end in _indices(node, graph):
            for name, limit in _inputs_below(indices, end, graph):
                ends[name] = min(limit, ends.get(name, limit))
    return {name: end for name, end in ends.items() if end > 0}


def _indices(node: Node, graph: OnnxGraph) -> Iterator[tuple[str, int]]:
    """Yield the tensors of indices that a node takes, with their ends."""
    given, domain = node.input, node.domain
    # Operator of com.microsoft -> its inputs of indices, and those of the tables whose first dimension they index.
    tables = {
        "EmbedLayerNormalization": ((0, 2), (1, 4), (8, 3)),
        "QEmbedLayerNormalization": ((0, 2), (1, 4)),
        "RotaryEmbedding": ((1, 2),),
    }
    if node.op_type == "OneHot":
        if (depth := graph.number(given[1])) is not None:
            yield given[0], int(depth)
    elif node.op_type in ("Gather", "GatherElements", "GatherBlockQuantized"):
        axis = node.attribute("gather_axis" if node.op_type == "GatherBlockQuantized" else "axis", 0)
        yield from _below_size(given[1], given[0], axis, graph)
    elif node.op_type == "Equal":
        # A one-hot encoding, as some exporters write it: each index beside all numbers up to the largest.
        for place in (0, 1):
            for source in graph.sources(given[place]):
                if (end := _range_end(graph.constant(source))) is not None:
                    yield given[1 - place], end
    elif node.op_type == "ArrayFeatureExtractor":
        yield from _below_size(given[1], given[0], -1, graph)
    elif domain == "com.microsoft":
        for place, table in tables.get(node.op_type, ()):
            if place < len(given) and table < len(given) and given[place] and given[table]:
                yield from _below_size(given[place], given[table], 0, graph)


def _below_size(indices: str, table: str, axis: int, graph: OnnxGraph) -> Iterator[tuple[str, int]]:
    shape = graph.shape(table)
    if -len(shape) <= axis < len(shape) and (size := shape[axis]):
        yield indices, size


def _tables(graph: OnnxGraph) -> Iterator[int]:
    """Yield the sizes of constants of which parts are taken by their places, not by values of inputs."""
    for node in graph.nodes:
        if node.op_type == "Slice" and node.input[0] not in graph.fed:
            yield from (size for size in graph.shape(node.input[0]) if size)
        elif node.op_type.startswith("Gather"):
            for indices, size in _indices(node, graph):
                if not any(True for _ in _inputs_below(indices, size, graph)):
                    yield size


def _range_end(values: Array | None) -> int | None:
    """Return the end of a constant that contains 0, 1, 2, ... in order; None for other constants."""
    if values is None or values.dtype.kind not in "fiu" or values.size < 3:
        return None
    return values.size if np.array_equal(values.reshape(-1), np.arange(values.size)) else None


def _inputs_below(tensor: str, end: int, graph: OnnxGraph) -> Iterator[tuple[str, int]]:
    """Yield the inputs that a tensor's values come from, with the end that follows from the tensor's."""
    waiting, seen = [(tensor, end)], set[str]()
    while waiting:
        start, limit = waiting.pop()
        for source in graph.sources(start):
            if source in seen:
                continue
            seen.add(source)
            if source in graph.inputs:
                yield source, limit
            waiting += _before_arithmetic(source, limit, graph)


def _before_arithmetic(tensor: str, end: int, graph: OnnxGraph) -> Iterator[tuple[str, int]]:
    """Yield the tensor that a constant was added to, subtracted from or multiplied by to make a tensor, with its
    end."""
    node = graph.makers.get(tensor)
    if node is None or node.op_type not in ("Add", "Mul", "Sub") or len(node.input) != 2:
        return
    for place in (0, 1) if node.op_type != "Sub" else (0,):
        other = graph.number(node.input[1 - place])
        if other is None or (node.op_type == "Mul" and other <= 0):
            continue
        moved = end - other if node.op_type == "Add" else end + other if node.op_type == "Sub" else end / other
        yield node.input[place], math.ceil(moved)


def _levels(graph: OnnxGraph) -> Mapping[str, tuple[float, ...]]:
    """Return the numbers that trees compare inputs with, and the integers that operators look up."""
    found: dict[str, tuple[float, ...]] = {}
    for node in graph.nodes:
        if not node.op_type.startswith("TreeEnsemble"):
            continue
        leaves = np.array([mode == b"LEAF" for mode in node.attribute("nodes_modes", ())], bool)
        values = np.array(node.attribute("nodes_values", ()), float)
        if len(leaves) == len(values) and not leaves.all():
            levels = np.unique(values[~leaves])
            # So many numbers show in which range a forest's inputs lie.
            levels = levels[np.linspace(0, len(levels) - 1, min(len(levels), 256)).astype(int)]
            found |= {name: tuple(levels) for name in graph.sources(node.input[0]) if name in graph.inputs}
    for node in graph.nodes:
        for tensor, values in _categories(node, graph):
            found |= {name: tuple(np.unique(values)[:256]) for name in graph.sources(tensor) if name in graph.inputs}
    return found


def _categories(node: Node, graph: OnnxGraph) -> Iterator[tuple[str, Array]]:
    # OneHotEncoder, LabelEncoder and CategoryMapper have them as attributes.
    for name in ("cats_int64s", "keys_int64s"):
        if values := node.attribute(name, ()):
            yield node.input[0], np.array(values)
    if node.op_type == "Equal":
        for place in (0, 1):
            numbers = graph.constant(node.input[place])
            # A single one is a mark, such as the id of padding.
            if numbers is not None and numbers.dtype.kind in "iu" and numbers.size > 1:
                yield node.input[1 - place], numbers


def _words(graph: OnnxGraph) -> tuple[str, ...]:
    """Return texts that operators look up, evenly out of all, since vocabularies are sorted."""
    # The texts that OneHotEncoder, LabelEncoder, TfIdfVectorizer and DictVectorizer know.
    words = sorted(
        {
            word.decode(errors="replace")
            for node in graph.nodes
            for name in ("cats_strings", "keys_strings", "pool_strings", "string_vocabulary")
            for word in node.attribute(name, ())
            if isinstance(word, bytes)
        }
    )
    return tuple(words[:: -(-len(words) // 256) or 1])


def _compared_texts(graph: OnnxGraph) -> Iterator[str]:
    for node in graph.nodes:
        if node.op_type == "Equal":
            yield from (text for name in node.input for text in graph.texts(name))


def _couplings(graph: OnnxGraph) -> Iterator[str]:
    # Operators that take one scale from the whole tensor. Saturated outputs may hide the effect.
    one_scale = frozenset(("DynamicQuantizeLinear", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul"))
    for node in (*graph.nodes, *graph.function_nodes):
        # All tensors of a function count as made of inputs.
        if node.op_type in one_scale and (node.input[0] in graph.fed or node in graph.function_nodes):
            yield f"{node.op_type} takes one scale from all rows"
        elif node.op_type == "BatchNormalization" and (
            node.attribute("training_mode", 0) or sum(map(bool, node.output)) > 1
        ):
            yield "BatchNormalization in training mode takes mean and variance from all rows"


def _precision(graph: OnnxGraph) -> str:
    """Return the coarsest numbers that the graph computes with, by its operators, weights and casts."""
    nodes = (*graph.nodes, *graph.function_nodes)
    if any("Quantize" in node.op_type or node.op_type.startswith("QLinear") for node in nodes):
        return "quantised"
    types = {tensor.element_type for tensor in graph.initializers.values()}
    types |= {value.element_type for value in (*graph.graph.inputs, *graph.graph.outputs)}
    types |= {node.attribute("to", 0) for node in nodes if node.op_type == "Cast"}
    return "bf16" if ElementType.BFLOAT16 in types else "fp16" if ElementType.FLOAT16 in types else "fp32"


def _is_random(node: Node, graph: OnnxGraph) -> bool:
    if node.op_type == "Dropout" and len(node.input) > 2 and node.input[2]:
        training = graph.constant(node.input[2])
        return training is None or bool(training.any())
    return node.op_type in {
        "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike",
    }  # fmt: skip


def _thresholds(graph: OnnxGraph) -> Iterator[float]:
    """Yield the constants that one number of a tensor is compared with, and those in comparisons that control If or
    Loop or that are reduced to one number."""
    starts = {"If": slice(0, 1), "Loop": slice(1, 2), **dict.fromkeys(_OVER_ALL, slice(0, 1))}
    # Operators between a comparison and the operator that it controls.
    conditions = {"And", "Cast", "Identity", "Not", "Or", "Reshape", "Squeeze", "Unsqueeze", "Xor", *_OVER_ALL}
    steering = {
        source
        for node in graph.nodes
        for start in node.input[starts.get(node.op_type, slice(0))]
        for source in graph.sources(start, conditions, through_all=True)
    }
    for node in graph.nodes:
        if node.op_type not in _COMPARISONS:
            continue
        for place in (0, 1):
            number = graph.number(node.input[place])
            if number is not None and (node.output[0] in steering or _is_of_whole_tensor(node.input[1 - place], graph)):
                yield number


def _compared(graph: OnnxGraph) -> Iterator[float]:
    """Yield the constants of comparisons that the values of the made-up inputs may have."""
    for node in graph.nodes:
        if node.op_type not in _COMPARISONS:
            continue
        for place in (0, 1):
            number = graph.number(node.input[place])
            if number is not None and abs(number) <= LARGEST_COMPARED and _has_values(node.input[1 - place], graph):
                yield number


def _has_values(name: str, graph: OnnxGraph) -> bool:
    """Return whether a tensor is made of the values of inputs, not of constants and sizes alone."""
    waiting, seen = [name], set[str]()
    while waiting and len(seen) < _MOST_MAKERS:
        current = waiting.pop()
        node = graph.makers.get(current)
        if node is None and current and current not in graph.initializers:
            return True
        if node is not None and current not in seen and node.op_type not in ("Shape", "Size"):
            waiting += node.input
        seen.add(current)
    return bool(waiting)


def _is_of_whole_tensor(name: str, graph: OnnxGraph) -> bool:
    """Return whether a number is made of a whole tensor within a few steps."""
    waiting = [name]
    for _ in range(8):
        node = graph.makers.get(waiting.pop(0)) if waiting else None
        if node is None:
            continue
        # These operators make one number of a whole tensor.
        if node.op_type.startswith("Reduce") or node.op_type in {"ArgMax", "NonZero", "Shape", "Size"}:
            return True
        waiting += node.input
    return False


def _chosen_from(graph: OnnxGraph) -> Iterator[str]:
    """Yield the inner tensors from which a model chooses that answers with classes, indices or texts only."""
    floats = (ElementType.FLOAT, ElementType.FLOAT16, ElementType.DOUBLE, ElementType.BFLOAT16, ElementType.UNDEFINED)
    outputs = {value.name: value.element_type for value in graph.graph.outputs}
    if any(kind in floats for kind in outputs.values()):
        return
    outer = {name for node in graph.graph.nodes for name in node.output}
    for output in outputs:
        for source in graph.sources(output, _LABELS, through_all=True):
            node = graph.makers.get(source)
            if node is None or node.op_type in ("Constant", "Shape"):
                continue
            if node.op_type.endswith("Classifier"):
                chosen = node.output[1:2]
            elif node.op_type in _CHOICES or (node.op_type == "Cast" and not _is_label(node.input[0], graph)):
                chosen = node.input[:1]
            else:
                continue
            yield from (name for name in chosen if name in outer and name not in outputs)


def _narrowed(graph: OnnxGraph) -> Iterator[tuple[str, str]]:
    """Yield outputs that a Cast makes of few bits or without a sign, and the Cast's input. The value of an integer of
    32 or 64 bits shows that a float did not fit."""
    unsigned = {ElementType.UINT8, ElementType.UINT16, ElementType.UINT32, ElementType.UINT64}
    narrow = {ElementType.INT8, ElementType.INT16, *unsigned}
    outer = {*graph.inputs, *(name for node in graph.graph.nodes for name in node.output)}
    for output in graph.graph.outputs:
        for source in graph.sources(output.name):
            node = graph.makers.get(source)
            if node is not None and node.op_type == "Cast" and node.attribute("to", 0) in narrow:
                if node.input[0] in outer:
                    yield output.name, node.input[0]
                break


def _is_label(name: str, graph: OnnxGraph) -> bool:
    node = graph.makers.get(name)
    return node is not None and node.op_type in _LABELS | _CHOICES
