"""Describes how two outcomes differ, for the report of a failure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from support.parity.exchange import Outcome


def contrast(one: Outcome | None, other: Outcome, names: tuple[str, str] = ("triton", "rocserve")) -> str:
    """Both outcomes if their status differs or one has no answer, else the places in the answers that differ."""
    if one is None or one.answer is None or other.answer is None or one.status != other.status:
        return f"  {names[0]:8} {one}\n  {names[1]:8} {other}"
    return "\n".join(_places("answer", one.answer, other.answer, names)) or f"  {one}\n  {other}"


def _places(path: str, one: Any, other: Any, names: tuple[str, str]) -> Iterator[str]:
    if one == other:
        return
    if isinstance(one, dict) and isinstance(other, dict):
        for key in dict.fromkeys([*one, *other]):
            yield from _places(f"{path}.{key}", one.get(key), other.get(key), names)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from _places(f"{path}[{index}]", left, right, names)
    else:
        yield f"  {path}: {names[0]} {one!r}, {names[1]} {other!r}"
