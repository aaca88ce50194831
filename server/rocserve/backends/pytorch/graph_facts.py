"""Reads facts from a program's graph that the load check needs, and that experiments cannot show for certain."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Set
from typing import Any

import torch

from rocserve.backends.pytorch.exported_file import is_in_training, operator_name, training_switch
from rocserve.load_check.facts import LARGEST_COMPARED, MOST_THRESHOLDS, GraphFacts

_ONE_SCALE = "{} takes one scale from all rows"


def graph_facts(exported: Any) -> GraphFacts:
    """Return the facts of a program of torch.export."""
    graphs = [module.graph for module in exported.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    nodes = [node for graph in graphs for node in graph.nodes]
    fed = {node for graph in graphs for node in _fed(graph, set(exported.graph_signature.user_inputs))}
    thresholds = tuple(itertools.islice(dict.fromkeys(_thresholds(nodes, fed)), MOST_THRESHOLDS))
    return GraphFacts(
        couples_rows=next(_couplings(nodes, fed), ""),
        is_random=next((_short(node) for node in nodes if _is_random(node)), ""),
        thresholds=thresholds,
        compared=tuple(value for value in thresholds if abs(value) <= LARGEST_COMPARED),
    )


def script_facts(module: Any) -> GraphFacts:
    """Return the facts of a TorchScript program."""
    graph = module.inlined_graph
    # TorchScript's operators that do so inside.
    found = (
        kind
        for kind in ("quantized::linear_dynamic", "quantized::linear_relu_dynamic")
        if graph.findAllNodes(kind, recurse=True)
    )
    return GraphFacts(couples_rows=next((_ONE_SCALE.format(kind) for kind in found), ""))


def _fed(graph: Any, user_inputs: Set[str]) -> Iterator[Any]:
    """Yield the nodes that the values of the program's inputs change. In the graph of a branch, those are all."""
    is_branch = not any(node.name in user_inputs for node in graph.nodes if node.op == "placeholder")
    fed: set[Any] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            changes = is_branch or node.name in user_inputs
        else:
            # A tensor's values do not change its sizes.
            is_size = operator_name(node) in ("aten::sym_size", "aten::sym_numel", "aten::sym_stride")
            changes = not is_size and not fed.isdisjoint(node.all_input_nodes)
        if changes:
            fed.add(node)
            yield node


def _couplings(nodes: list[Any], fed: Set[Any]) -> Iterator[str]:
    for node in nodes:
        name = operator_name(node)
        if node.target is torch.ops.higher_order.cond and node.args[0] in fed:
            yield "torch.cond takes one branch for all rows"
        # Such an operator computes the scale of a dynamic quantisation.
        elif "choose_qparams" in name and node in fed and _has_one_size(node):
            yield _ONE_SCALE.format(_short(node))
        elif "batch_norm" in name and is_in_training(node):
            yield f"{_short(node)} takes mean and variance from all rows, as the program was exported in training mode"


def _is_random(node: Any) -> bool:
    """Return whether equal runs of an operator differ. Dropout and its like do so in training mode only."""
    is_operator = isinstance(node.target, torch._ops.OpOverload)
    return is_operator and torch.Tag.nondeterministic_seeded in node.target.tags and training_switch(node) is not False


def _thresholds(nodes: list[Any], fed: Set[Any]) -> Iterator[float]:
    """Yield the constants with which one number of the whole batch is compared: of its values, or its size."""
    comparisons = frozenset(f"aten::{name}" for name in ("gt", "ge", "lt", "le", "eq", "ne"))
    size_comparisons = (operator.gt, operator.ge, operator.lt, operator.le, operator.eq, operator.ne)
    for node in nodes:
        is_of_values = operator_name(node) in comparisons and node in fed and _has_one_size(node)
        if not is_of_values and node.target not in size_comparisons:
            continue
        if all(operator_name(user).startswith("aten::_assert") for user in node.users):
            continue
        yield from (float(value) for value in node.args if type(value) in (int, float))


def _has_one_size(node: Any) -> bool:
    """Return whether a node's tensors have a number of elements that the batch does not change."""
    value = node.meta.get("val")
    tensors = value if isinstance(value, tuple | list) else (value,)
    return all(isinstance(size, int) for tensor in tensors for size in getattr(tensor, "shape", ()))


def _short(node: Any) -> str:
    return operator_name(node).rpartition("::")[2]
