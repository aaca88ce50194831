"""Programs of torch.export, which say all of their inputs and outputs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.export.graph_signature import ConstantArgument, TensorArgument
from torch.utils import _pytree as pytree

from rocserve.backends.pytorch.datatypes import datatype_of
from rocserve.backends.pytorch.program import (
    Program,
    ProgramSignature,
    ProgramTensor,
    input_names,
    output_names,
    precision_of,
)
from rocserve.core.errors import invalid_argument

_MOST_ROWS = 1 << 31
"""The bound of a size that has none is beyond it."""
_LEAST_ROWS = 2
"""torch.export says so of a size that it has not tried with 0 and 1, which work."""


def read_exported(path: Path) -> Any:
    """
    Raises:
        ServeError: INVALID_ARGUMENT, PyTorch cannot read it, in its own words.
    """
    # Its operators are those of quantised programs; only what is read after it can have them.
    import torch.ao.quantization.fx._decomposed

    # What is pickled in it, its example's tensors, is read as tensors and nothing else: PyTorch itself would fall back
    # to pickles that call what they name.
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    try:
        return torch.export.load(path)
    except Exception as error:
        raise invalid_argument(f"PyTorch {torch.__version__} cannot read {path.name}: {error}") from error


def to_device(exported: Any, device: torch.device) -> Any:
    """The program with its weights there."""
    if device.type == "cpu":
        return exported
    from torch.export.passes import move_to_device_pass

    return move_to_device_pass(exported, device)


def exported_program(exported: Any, module: Callable[..., Any], weights: Mapping[str, Any] | None = None) -> Program:
    """What the program says of itself, and `module`, which is called as it is, to run it.

    Args:
        weights: those that it computes with; None = the file's.

    Raises:
        ServeError: INVALID_ARGUMENT, a tensor of it cannot be served.
    """
    in_spec = exported.call_spec.in_spec
    values = _values(exported)
    constants: list[Any] = []
    places: list[int] = []
    inputs: list[ProgramTensor] = []
    for place, (spec, way) in enumerate(zip(_user_inputs(exported), input_names(in_spec), strict=True)):
        constants.append(spec.arg.value if isinstance(spec.arg, ConstantArgument) else None)
        if isinstance(spec.arg, ConstantArgument):
            continue
        if not isinstance(spec.arg, TensorArgument):
            raise invalid_argument(
                f"input '{spec.arg.name}' of the program is no tensor; export it with a tensor there"
            )
        inputs.append(_tensor("input", (spec.arg.name, f"INPUT__{len(inputs)}", way), values[spec.arg.name]))
        places.append(place)
    results = [spec for spec in exported.graph_signature.output_specs if spec.kind.name == "USER_OUTPUT"]
    tensors = [spec.arg.name for spec in results if isinstance(spec.arg, TensorArgument)]
    names = output_names(
        pytree.tree_unflatten([spec.arg for spec in results], exported.call_spec.out_spec), TensorArgument
    )
    rows = _common_rows([values[tensor.names[0]] for tensor in inputs] + [values[name] for name in tensors])
    bounds = exported.range_constraints.get(rows)
    written = exported.graph_signature.user_inputs_to_mutate.values()

    def call(given: Sequence[Any]) -> Any:
        leaves = list(constants)
        for place, value in zip(places, given, strict=True):
            leaves[place] = value
        args, kwargs = pytree.tree_unflatten(leaves, in_spec)
        return module(*args, **kwargs)

    signature = ProgramSignature(
        tuple(inputs),
        tuple(_tensor("output", own, values[name]) for own, name in zip(names, tensors, strict=True)),
        batches=bool(inputs) and rows is not None and (bounds is None or bool(bounds.lower <= _LEAST_ROWS)),
        most_rows=None if bounds is None or not bounds.upper < _MOST_ROWS else int(bounds.upper),
        overwritten=frozenset(place for place, tensor in enumerate(inputs) if tensor.names[0] in written),
        precision=precision_of(exported.state_dict if weights is None else weights),
    )
    return Program(call, signature)


def _values(exported: Any) -> dict[str, Any]:
    """By the names of the graph's nodes: tensors without data, of what goes in and comes out."""
    (results,) = exported.graph.output_node().args
    nodes = [node for node in exported.graph.nodes if node.op == "placeholder"]
    nodes += [node for node in results if isinstance(node, torch.fx.Node)]
    return {node.name: node.meta.get("val") for node in nodes}


def _user_inputs(exported: Any) -> list[Any]:
    return [spec for spec in exported.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]


def _tensor(what: str, names: tuple[str, ...], value: Any) -> ProgramTensor:
    shape = tuple(size if isinstance(size, int) else -1 for size in value.shape)
    datatype = datatype_of(value.dtype, f"{what} '{names[0]}' of the program")
    return ProgramTensor(names, datatype, shape, tuple(map(_example_size, value.shape)))


def _example_size(size: Any) -> int:
    """As it was when the program was exported."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else 1


def _common_rows(tensors: Sequence[Any]) -> Any:
    """The symbol that is the first size of all of them, and in no other size; None where there is none."""
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if not all(shape and not isinstance(shape[0], int) for shape in shapes):
        return None
    first = {shape[0].node.expr for shape in shapes}
    others = [size.node.expr for shape in shapes for size in shape[1:] if not isinstance(size, int)]
    symbol: Any = first.pop() if len(first) == 1 else None
    is_alone = symbol is not None and not any(symbol in size.free_symbols for size in others)
    return symbol if is_alone and symbol.is_symbol else None
