"""How far results are from those that they are measured by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Difference:
    """Of one output over all samples."""

    largest: float
    """The largest absolute difference; infinite where one has a NaN or infinity that the other has not."""
    mean: float
    """The mean absolute difference."""
    relative: float
    """The norm of the difference over the norm of the reference."""
    cosine: float
    """Of the angle between both as vectors: 1 = the same direction."""
    top1: float | None
    """The share of rows whose largest element is at the same place; None where rows have one element only."""


def difference(pairs: Iterable[tuple[Array, Array]]) -> Difference:
    """Of (result, reference) pairs, each of the same shape; the first dimension counts rows.

    Raises:
        ValueError: there is no pair, or one whose shapes differ.
    """
    results, references = [], []
    for result, reference in pairs:
        if result.shape != reference.shape:
            raise ValueError(f"shapes differ: {list(result.shape)} and {list(reference.shape)}")
        rows = reference.shape[0] if reference.ndim > 1 else 1
        results.append(result.astype(np.float64).reshape(rows, -1))
        references.append(reference.astype(np.float64).reshape(rows, -1))
    if not results:
        raise ValueError("nothing to compare")
    top1 = _top1(results, references)
    given, expected = (np.concatenate([rows.ravel() for rows in side]) for side in (results, references))
    return Difference(*_distances(given, expected), _cosine(given, expected), top1)


def worst(differences: Sequence[Difference]) -> Difference:
    """Of several outputs: of each figure the one that is furthest from agreement."""
    top1 = [one.top1 for one in differences if one.top1 is not None]
    return Difference(
        largest=max(one.largest for one in differences),
        mean=max(one.mean for one in differences),
        relative=max(one.relative for one in differences),
        cosine=min(one.cosine for one in differences),
        top1=min(top1) if top1 else None,
    )


def _distances(given: Array, expected: Array) -> tuple[float, float, float]:
    # Equal infinities and NaNs are no difference; what only one side has is an infinite one.
    same = (given == expected) | (np.isnan(given) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        distance = np.where(same, 0.0, np.abs(given - expected))
    distance = np.where(np.isnan(distance), np.inf, distance)
    if not distance.size:
        return 0.0, 0.0, 0.0
    norm, scale = float(np.linalg.norm(distance)), float(np.linalg.norm(expected[np.isfinite(expected)]))
    relative = norm / scale if scale else (0.0 if norm == 0 else float("inf"))
    return float(distance.max()), float(distance.mean()), relative


def _cosine(given: Array, expected: Array) -> float:
    if np.array_equal(given, expected, equal_nan=True):
        return 1.0
    norms = float(np.linalg.norm(given) * np.linalg.norm(expected))
    if not np.isfinite(norms):
        return float("nan")
    return float(np.dot(given, expected)) / norms if norms else 0.0


def _top1(results: list[Array], references: list[Array]) -> float | None:
    if all(rows.shape[1] < 2 for rows in references):
        return None
    agreements = [
        given.argmax(axis=1) == expected.argmax(axis=1) for given, expected in zip(results, references, strict=True)
    ]
    return float(np.concatenate(agreements).mean())
