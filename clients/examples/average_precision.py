"""Measures detectors: the mean average precision of boxes against the truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

IOU_THRESHOLD = 0.5

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class LabelledBox:
    """A box (x1, y1, x2, y2 in pixels) in one picture; the score of a true box has no meaning."""

    picture: str
    label: str
    box: tuple[float, float, float, float]
    score: float = 1.0


def mean_average_precision(
    found: Sequence[LabelledBox], true: Sequence[LabelledBox], iou_threshold: float = IOU_THRESHOLD
) -> float:
    """Return the mean of `average_precision` over the truth's labels. Raises ValueError if there is no true box."""
    labels = sorted({box.label for box in true})
    if not labels:
        raise ValueError("expected at least one true box to measure against, got none")
    precisions = [
        average_precision(
            [box for box in found if box.label == label], [box for box in true if box.label == label], iou_threshold
        )
        for label in labels
    ]
    return float(np.mean(precisions))


def average_precision(found: Sequence[LabelledBox], true: Sequence[LabelledBox], iou_threshold: float) -> float:
    """Return the area under the curve of precision over recall, for the boxes of one label.

    The rules are those of the PASCAL VOC challenge since 2010. In the order of the scores, a box is right if the true
    box of its picture that it overlaps most has at least this IoU and has not been found before. The precision at a
    recall is the best at this recall or any higher recall.
    """
    truth: dict[str, list[LabelledBox]] = {}
    for box in true:
        truth.setdefault(box.picture, []).append(box)
    taken: set[tuple[str, int]] = set()
    right = np.zeros(len(found))
    for place, box in enumerate(sorted(found, key=lambda box: -box.score)):
        candidates = truth.get(box.picture, [])
        overlaps = [intersection_over_union(box.box, candidate.box) for candidate in candidates]
        if not overlaps or max(overlaps) < iou_threshold:
            continue
        match = (box.picture, int(np.argmax(overlaps)))
        right[place] = match not in taken
        taken.add(match)
    recall = np.cumsum(right) / len(true)
    precision = np.cumsum(right) / np.arange(1, len(found) + 1)
    best_from_here = np.maximum.accumulate(precision[::-1])[::-1]
    return float(np.sum(np.diff(recall, prepend=0.0) * best_from_here))


def intersection_over_union(left: Sequence[float], right: Sequence[float]) -> float:
    """Return the IoU of two boxes x1, y1, x2, y2; 0 if they do not touch."""
    width = min(left[2], right[2]) - max(left[0], right[0])
    height = min(left[3], right[3]) - max(left[1], right[1])
    if width <= 0 or height <= 0:
        return 0.0
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (left, right)]
    return width * height / (sum(areas) - width * height)
