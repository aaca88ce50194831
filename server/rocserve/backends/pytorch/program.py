"""A program of PyTorch's that has been opened, whatever kind of file it comes from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rocserve.backends.pytorch.datatypes import torch_dtype
from rocserve.core.datatypes import DataType

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""By the parameter `precision`; fp32 is as the file has it."""
_PRECISIONS = {
    **{dtype: name for name, dtype in DTYPES.items()},
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "int8",
    torch.uint8: "uint8",
}
"""What weights may be in; integers of other sizes count or point."""


@dataclass(frozen=True, slots=True)
class ProgramTensor:
    """An input or an output as the program's file has it."""

    names: tuple[str, ...]
    """What a configuration may call it; the first is what it is called without one."""
    datatype: DataType | None = None
    """None = the file does not say."""
    shape: tuple[int, ...] | None = None
    """-1 where the size varies; None = the file does not say."""
    sample: tuple[int, ...] = ()
    """A shape that the program takes for sure, where the file says the shape."""


@dataclass(frozen=True, slots=True)
class ProgramSignature:
    """What a program's file says of it."""

    inputs: tuple[ProgramTensor, ...]
    outputs: tuple[ProgramTensor, ...] | None
    """None = a run tells."""
    batches: bool = False
    """Whether the first dimension of all inputs and outputs is one number, which may be any."""
    most_rows: int | None = None
    """That it takes; None = any number."""
    goes_by_order: bool = False
    """Whether names that are none of the program's stand for its tensors in the configuration's order."""
    overwritten: frozenset[int] = frozenset()
    """The inputs that it may write into, by their places."""
    precision: str = ""
    """Of its weights: "fp32", "int8, fp32"; "" = the file does not say."""


@dataclass(frozen=True, slots=True)
class Program:
    call: Callable[[Sequence[Any]], Any]
    """From all inputs, each a tensor or a list of str, to what the program returns: a tensor, a list of str, or tuples,
    lists and dicts of them."""
    signature: ProgramSignature


def precision_of(weights: Mapping[str, Any]) -> str:
    """What most of their bytes are in comes first."""
    sizes: Counter[str] = Counter()
    for tensor in weights.values():
        if isinstance(tensor, torch.Tensor) and tensor.dtype in _PRECISIONS:
            sizes[_PRECISIONS[tensor.dtype]] += tensor.nbytes
    return ", ".join(name for name, _ in sizes.most_common())


def outputs_of(result: Any) -> list[Any]:
    """The tensors and lists of str in what a program returned, in its order."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [leaf for leaf in pytree.tree_leaves(result, _is_strings) if isinstance(leaf, torch.Tensor | list)]


def output_names(result: Any, kind: type | tuple[type, ...] = (torch.Tensor, list)) -> list[tuple[str, ...]]:
    """What a configuration may call the leaves of this kind in a program's result.

    Triton's names are OUTPUT__<place>, and RESULT with the way there; what lies in a dict goes by its key first.
    """
    names: list[tuple[str, ...]] = []
    for path, leaf in pytree.tree_flatten_with_path(result, _is_strings)[0]:
        if isinstance(leaf, kind):
            key = (str(path[0].key),) if len(path) == 1 and isinstance(path[0], pytree.MappingKey) else ()
            names.append((*key, f"OUTPUT__{len(names)}", f"RESULT{_way(path)}"))
    return names


def input_names(in_spec: Any) -> list[str]:
    """ARGS[0], ARGS[1][key], KWARGS[mask]: Triton's names for what a program is called with."""
    args, kwargs = pytree.tree_unflatten([0] * in_spec.num_leaves, in_spec)
    positional = [f"ARGS{_way(path)}" for path, _ in pytree.tree_flatten_with_path(args)[0]]
    return positional + [f"KWARGS{_way(path)}" for path, _ in pytree.tree_flatten_with_path(kwargs)[0]]


def in_precision(program: Program, dtype: torch.dtype) -> Program:
    """The same program, whose weights are of `dtype`: it is given what it computes in, and its tensors stay as they
    are."""
    known = program.signature.outputs or ()
    wanted = [torch_dtype(tensor.datatype) for tensor in known if tensor.datatype is not None]

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def call(values: Sequence[Any]) -> Any:
        result = program.call([cast(value) for value in values])
        if wanted:
            return [value.to(own) for value, own in zip(outputs_of(result), wanted, strict=True)]
        return pytree.tree_map_only(
            torch.Tensor, lambda value: value.float() if value.dtype is dtype else value, result
        )

    return replace(program, call=call)


def _way(path: Sequence[Any]) -> str:
    return "".join(f"[{getattr(key, 'idx', getattr(key, 'key', getattr(key, 'name', '')))}]" for key in path)


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(element, str) for element in value)
