"""YOLO's formulas cell by cell in plain Python, and OpenCV's suppression: the reference for the fast versions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np

Found = tuple[float, int, tuple[float, float, float, float]]
"""A score, a class and a box x1, y1, x2, y2."""


def sigmoid(raw: float) -> float:
    return 1 / (1 + math.exp(-raw))


def slow_decode(head: np.ndarray[Any, Any], geometry: Any, score_threshold: float) -> list[Found]:
    """The boxes in the order of cells and anchors."""
    found = []
    for row in range(head.shape[0]):
        for column in range(head.shape[1]):
            for anchor in range(head.shape[2]):
                x, y, width, height, is_object, *classes = (float(value) for value in head[row, column, anchor])
                best = max(range(len(classes)), key=lambda index: classes[index])
                # In the heads' precision: otherwise ties there would not be ties here.
                score = float(np.float32(is_object * classes[best]))
                if score <= score_threshold:
                    continue
                center_x = (sigmoid(x) * geometry.xy_scale - 0.5 * (geometry.xy_scale - 1) + column) * geometry.stride
                center_y = (sigmoid(y) * geometry.xy_scale - 0.5 * (geometry.xy_scale - 1) + row) * geometry.stride
                width = math.exp(width) * geometry.anchors[anchor][0]
                height = math.exp(height) * geometry.anchors[anchor][1]
                box = (center_x - width / 2, center_y - height / 2, center_x + width / 2, center_y + height / 2)
                found.append((score, best, box))
    return found


def opencv_suppress(found: Sequence[Found], iou_threshold: float) -> list[Found]:
    """Suppress class by class with cv2.dnn.NMSBoxes; best score first, of equal scores the first box first."""
    kept = []
    for number in sorted({number for _, number, _ in found}):
        of_class = [place for place, entry in enumerate(found) if entry[1] == number]
        boxes = [found[place][2] for place in of_class]
        rectangles = [(box[0], box[1], box[2] - box[0], box[3] - box[1]) for box in boxes]
        scores = [found[place][0] for place in of_class]
        kept += [of_class[index] for index in cv2.dnn.NMSBoxes(rectangles, scores, 0.0, iou_threshold)]
    return [found[place] for place in sorted(kept, key=lambda place: (-found[place][0], place))]
