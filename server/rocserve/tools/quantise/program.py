"""Programs of torch.export: run on samples, and exported again after they have been changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from rocserve.backends.pytorch.program import Program, exported_program, outputs_of

Array = np.ndarray[Any, Any]

_WITH_WEIGHTS = ("conv1d", "conv2d", "conv3d", "linear")
_ORIGINS = ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node", "torch_fn")
"""What nodes say of where they come from; it may be more than the weights."""


def results(program: Program, run: Mapping[str, Array]) -> list[Array]:
    """What the program makes of one run's inputs."""
    with torch.no_grad():
        return [found.numpy() for found in outputs_of(program.call(_tensors(program, run)))]


def _tensors(program: Program, run: Mapping[str, Array]) -> list[Any]:
    return [torch.from_numpy(np.ascontiguousarray(run[tensor.names[0]])) for tensor in program.signature.inputs]


def layers(graph: Any) -> list[Any]:
    """The nodes that multiply by weights."""
    return [node for node in graph.nodes if _operator(node) in _WITH_WEIGHTS]


def _operator(node: Any) -> str:
    target = node.target
    return target.overloadpacket.__name__ if isinstance(target, torch._ops.OpOverload) else ""


def export_again(module: GraphModule, original: ExportedProgram, run: Mapping[str, Array]) -> ExportedProgram:
    """The module as a program that takes and gives what the original does. `run`: inputs to export it with."""
    _drop_unused(module)
    program = exported_program(original, lambda *args, **kwargs: (args, kwargs))
    if program.signature.batches:
        # Of one row it would become a program for one row, and what it is exported with is in the file.
        run = {name: np.resize(array, (2, *array.shape[1:])) for name, array in run.items()}
    args, kwargs = program.call(_tensors(program, run))
    rows = {0: Dim.DYNAMIC(min=1, max=program.signature.most_rows)} if program.signature.batches else {}
    shapes = [pytree.tree_map(lambda value: rows if isinstance(value, torch.Tensor) else None, args)]
    shapes.append(pytree.tree_map(lambda value: rows if isinstance(value, torch.Tensor) else None, kwargs))
    with torch.no_grad():
        exported = torch.export.export(module, args, kwargs, dynamic_shapes=(*shapes[0], *shapes[1].values()))
    # What torchao's own operators stand for; a server need not have torchao.
    own = {op: made for op, made in torch.export.default_decompositions().items() if op.namespace == "torchao"}
    exported = exported.run_decompositions(own)
    for node in exported.graph.nodes:
        for origin in _ORIGINS:
            node.meta.pop(origin, None)
    return exported


def _drop_unused(module: GraphModule) -> None:
    """Weights that have been replaced."""
    module.graph.eliminate_dead_code()
    module.recompile()
    called = tuple(f"{node.target}." for node in module.graph.nodes if node.op == "call_module")
    used = {node.target for node in module.graph.nodes if node.op == "get_attr"}
    for name in [name for name, _ in (*module.named_parameters(), *module.named_buffers())]:
        if name not in used and not name.startswith(called):
            owner, _, last = name.rpartition(".")
            delattr(module.get_submodule(owner), last)
