"""Names the outputs in a program's result, and finds them there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rocserve.backends.pytorch.datatypes import is_strings

NUMBERED = re.compile(r".*__(\d{1,6})")
"""Triton's INPUT__0 and OUTPUT__0, with any word before the underscores."""

Path = tuple[str, ...]
"""The keys, positions and field names that lead to an output, from the result down; () = the result itself."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a result that may be an output."""

    names: tuple[str, ...]
    """As `output_names` gives them."""
    path: Path
    value: Any
    """A tensor, a list of str, or nothing: None or an empty list."""


def outputs_of(result: Any) -> list[Any]:
    """Return the tensors in a program's result, in order."""
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def output_names(result: Any, kind: type) -> list[tuple[str, ...]]:
    """Return the names that a configuration may use for the leaves of this kind in a program's result: the key in a
    dict, or the field in a named tuple, if it is unique, then Triton's OUTPUT__<position>, and RESULT with the path."""
    return _names([path for path, leaf in pytree.tree_flatten_with_path(result)[0] if isinstance(leaf, kind)])


def parts_of(result: Any) -> list[Part]:
    """Return the parts of a result of TorchScript or of a package. None and an empty list count, because another run
    may return something in their place."""
    leaves = [
        (path, leaf)
        for path, leaf in pytree.tree_flatten_with_path(result, is_strings)[0]
        if leaf is None or isinstance(leaf, torch.Tensor | list)
    ]
    names = _names([path for path, _ in leaves])
    return [Part(own, tuple(map(key_text, path)), leaf) for own, (path, leaf) in zip(names, leaves, strict=True)]


def has_value(value: Any) -> bool:
    """Return whether a part is an output, of a known kind: a tensor, or strings."""
    return isinstance(value, torch.Tensor) or bool(value)


def value_at(result: Any, path: Path) -> Any:
    """Return the value at this path; None = the result has none."""
    for key in path:
        _, result = _at(result, key)
    return result


def path_named(name: str, result: Any) -> Path | None:
    """Return the path of a name without a result that has the output: RESULT with a path, or the key if this result is
    a dict. None = a result of this kind never has the output."""
    found = re.fullmatch(r"RESULT((?:\[[^\[\]]*\])*)", name)
    if found is None:
        return (name,) if isinstance(result, Mapping) else None
    path = tuple(re.findall(r"\[([^\[\]]*)\]", found[1]))
    for key in path:
        is_possible, result = _at(result, key)
        if not is_possible:
            return None
    return path


def _at(part: Any, key: str) -> tuple[bool, Any]:
    """Return whether another result may have a value at this key of this part, and this result's value; None = it has
    none. A dict may have any key, and a list any position; an absent part may be either of them."""
    if part is None:
        return True, None
    if isinstance(part, Mapping):
        return True, next((value for own, value in part.items() if str(own) == key), None)
    if isinstance(part, torch.Tensor | str):
        return False, None
    if isinstance(part, Sequence) and key.isdecimal():
        return True, part[int(key)] if int(key) < len(part) else None
    is_field = key in getattr(part, "_fields", ()) if isinstance(part, Sequence) else hasattr(part, key)
    return is_field, getattr(part, key) if is_field else None


def direct_path(name: str, position: int, result: Any) -> Path:
    """Return the path of an output if no run at the load has shown what results look like: `path_named`, else by the
    number in the name, else by `position`, the configuration's order."""
    path = path_named(name, result)
    if path is not None:
        return path
    numbered = NUMBERED.fullmatch(name)
    number, parts = int(numbered[1]) if numbered else position, parts_of(result)
    return parts[number].path if number < len(parts) else (name,)


def key_text(key: Any) -> str:
    """Return the text of one key of a path in PyTorch's form."""
    return str(getattr(key, "idx", getattr(key, "key", getattr(key, "name", ""))))


def path_text(path: Sequence[Any]) -> str:
    return "".join(f"[{key_text(key)}]" for key in path)


def _names(paths: Sequence[Any]) -> list[tuple[str, ...]]:
    named = pytree.MappingKey | pytree.GetAttrKey
    keys = [key_text(path[0]) if len(path) == 1 and isinstance(path[0], named) else "" for path in paths]
    return [
        (*((key,) if key and keys.count(key) == 1 else ()), f"OUTPUT__{index}", f"RESULT{path_text(path)}")
        for index, (key, path) in enumerate(zip(keys, paths, strict=True))
    ]
