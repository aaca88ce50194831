"""What differs between two outcomes, for the report of a failure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from support.parity.exchange import Outcome


def contrast(triton: Outcome | None, rocserve: Outcome) -> str:
    """The whole outcomes where they are of two kinds, else the places in the answers that differ."""
    if triton is None or triton.answer is None or rocserve.answer is None or triton.status != rocserve.status:
        return f"  triton   {triton}\n  rocserve {rocserve}"
    return "\n".join(_places("answer", triton.answer, rocserve.answer)) or f"  {triton}\n  {rocserve}"


def _places(path: str, triton: Any, rocserve: Any) -> Iterator[str]:
    if triton == rocserve:
        return
    if isinstance(triton, dict) and isinstance(rocserve, dict):
        for key in dict.fromkeys([*triton, *rocserve]):
            yield from _places(f"{path}.{key}", triton.get(key), rocserve.get(key))
    elif isinstance(triton, list) and isinstance(rocserve, list) and len(triton) == len(rocserve):
        for index, (left, right) in enumerate(zip(triton, rocserve, strict=True)):
            yield from _places(f"{path}[{index}]", left, right)
    else:
        yield f"  {path}: triton {triton!r}, rocserve {rocserve!r}"
