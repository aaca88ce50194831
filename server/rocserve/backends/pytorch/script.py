"""Opens TorchScript programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rocserve.backends.pytorch.exported_file import import_operators, read_fault
from rocserve.backends.pytorch.graph_facts import script_facts
from rocserve.backends.pytorch.program import Program, precision_of, without_shapes
from rocserve.core.errors import ServeError, invalid_argument


def open_script(path: Path, device: torch.device | None, dtype: torch.dtype | None, keys: Sequence[str]) -> Program:
    """Open a TorchScript program. `device`: None = each part stays on the device that the file names, and inputs are on
    the CPU. `dtype`: the datatype of weights and computation; None = the file's. `keys`: the configuration's input
    names, for a `forward` that takes a dict or has optional inputs. Raises ServeError (INVALID_ARGUMENT) if PyTorch
    cannot read the file, or the program takes anything but tensors and strings."""
    try:
        module = _load(path, device)
        if hasattr(module, "training"):  # A frozen module has no modes.
            module.eval()
        if dtype is not None:
            module.to(dtype)
        arguments = module.forward.schema.arguments[1:]
    except ServeError:
        raise
    except Exception as error:
        raise read_fault(path, error) from error
    facts, buffers, keep_attributes = script_facts(module), tuple(module.buffers()), partial(_keep_attributes, module)
    weights = module.state_dict()
    precision = precision_of(weights)
    devices = tuple(sorted({str(one.device) for one in weights.values() if isinstance(one, torch.Tensor)}))
    needed = [
        argument
        for index, argument in enumerate(arguments)
        if not argument.has_default_value()
        or str(argument.type) == "Tensor"
        or (_is_tensor(argument) and not {argument.name, f"INPUT__{index}"}.isdisjoint(keys))
    ]
    if len(needed) == 1 and str(needed[0].type) == "Dict[str, Tensor]":
        signature = without_shapes([(key,) for key in keys], precision)
        return Program(
            lambda values: module(dict(zip(keys, values, strict=True))),
            signature,
            devices,
            facts=facts,
            buffers=buffers,
            keep_attributes=keep_attributes,
        )
    for argument in needed:
        if not _is_tensor(argument) and str(argument.type) != "List[str]":
            raise invalid_argument(
                f"argument '{argument.name}' of forward in {path.name} has type {argument.type}; expected arguments of"
                " type Tensor or List[str], or a single one of type Dict[str, Tensor]"
            )
    argument_names = [argument.name for argument in needed]
    is_first = argument_names == [argument.name for argument in arguments[: len(argument_names)]]

    def call(values: Sequence[Any]) -> Any:
        return module(*values) if is_first else module(**dict(zip(argument_names, values, strict=True)))

    names = [(name, f"INPUT__{index}") for index, name in enumerate(argument_names)]
    signature = without_shapes(names, precision, by_position=True)
    return Program(call, signature, devices, facts=facts, buffers=buffers, keep_attributes=keep_attributes)


def _keep_attributes(module: Any) -> Callable[[], None]:
    """Copy the attributes that the program uses, without its weights and tables, and return a function that gives them
    back: as the same tensors, because captured graphs know their places."""
    graph = module.inlined_graph
    changed = {node.s("name") for node in graph.findAllNodes("prim::SetAttr")}
    for operator in (
        "append", "clear", "Delete", "extend", "insert", "pop", "popitem", "remove", "_set_item", "setdefault",
        "update",
    ):  # fmt: skip
        containers = [next(node.inputs()).node() for node in graph.findAllNodes(f"aten::{operator}")]
        changed |= {node.s("name") for node in containers if node.kind() == "prim::GetAttr"}
    used = changed | {node.s("name") for node in graph.findAllNodes("prim::GetAttr")}
    others = {id(one): one for one in (*module.parameters(), *module.buffers())}
    kept: list[tuple[Any, str, Any, Any]] = []
    for part in module.modules():
        for name in used:
            if not part._c.hasattr(name):
                continue
            value = part._c.getattr(name)
            is_state = isinstance(value, torch.Tensor) and id(value) not in others
            if name in changed or is_state:
                kept.append((part._c, name, value, _copied(value)))

    def give_back() -> None:
        for part, name, value, copy in kept:
            if isinstance(value, torch.Tensor):
                value.copy_(copy)
            part.setattr(name, value if isinstance(value, torch.Tensor) else copy)

    return give_back


def _copied(value: Any) -> Any:
    """Copy a value, whose tensors a run may overwrite."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), value)


def _load(path: Path, device: torch.device | None) -> Any:
    try:
        return torch.jit.load(path, map_location=device)
    except RuntimeError as error:
        if not import_operators(path.name, str(error)):
            raise
    return torch.jit.load(path, map_location=device)


def _is_tensor(argument: Any) -> bool:
    return str(argument.type) in ("Tensor", "Optional[Tensor]")
