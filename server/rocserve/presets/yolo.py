"""Computes boxes in the original image from the heads of a YOLO network, with numpy alone.

Up to version 7 a head is an FP32 array [rows, columns, anchors, 5 + classes], one for each stride. The last dimension
has four raw values (x, y, width, height), then the probability of an object, then one for each class. The ONNX Model
Zoo's YOLOv4 has such heads, and the formulas are those of its description.

Exported networks have one head of boxes, in a form of `HeadForm`, in pixels of the network's input.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

FINISHED_COLUMNS = 6
"""Of boxes that need no more work: four corners, score, class."""
_BOX_VALUES = 5
"""The values before the classes' probabilities: x, y, width, height, object."""


class Resize(enum.Enum):
    """How the original image was resized to the network's input."""

    STRETCH = "stretch"
    """Both sides fill the input."""
    NOT_LARGER = "not_larger"
    """The longer side fills the input, the image is in the top left corner (rocAL's scaling mode of this name)."""
    LETTERBOX = "letterbox"
    """The longer side fills the input, the image is in the middle."""


class HeadForm(enum.Enum):
    """The columns of a head of boxes."""

    CLASSES = "classes"
    """[4 + classes, boxes]: centre, width and height, then a probability for each class (YOLOv8 and later)."""
    CLASS_ROWS = "class_rows"
    """The same, [boxes, 4 + classes]."""
    OBJECT_ROWS = "object_rows"
    """[boxes, 5 + classes]: the probability of an object comes before those of the classes (YOLOv5, YOLOv7)."""
    FINISHED = "finished"
    """[boxes, 6]: left, top, right, bottom, score and class of the boxes after suppression."""


@dataclass(frozen=True, slots=True)
class HeadGeometry:
    """Geometry of one of YOLO's output tensors."""

    stride: int
    """Pixels of the network's input for each cell."""
    anchors: tuple[tuple[float, float], ...]
    """Width and height in pixels of the network's input."""
    xy_scale: float
    """How far a centre may lie outside of its cell: 1 = not at all, 1.2 = a tenth of the cell on each side."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Which boxes an answer contains."""

    score: float
    """Bound that a box's score must exceed: probability of object times class; from version 8 on, of the class."""
    iou: float
    """If two boxes of one class overlap (intersection over union) by more, the box with the lower score is dropped."""
    max_boxes: int


@dataclass(frozen=True, slots=True)
class Detections:
    """Boxes, best score first."""

    boxes: Array
    """FP32 [n, 4]: x1, y1, x2, y2."""
    scores: Array
    """FP32 [n]."""
    classes: Array
    """INT32 [n]."""

    def __getitem__(self, selection: Array) -> Detections:
        return Detections(self.boxes[selection], self.scores[selection], self.classes[selection])


def detect(
    heads: Sequence[Array],
    geometries: Sequence[HeadGeometry],
    resize: Resize,
    image_size: tuple[int, int],
    thresholds: Thresholds,
) -> Detections:
    """Return the objects of one image, in its pixels; `image_size`: height, width. Raises ValueError if the heads
    belong to different input sizes, or the image has no pixels."""
    input_size = _input_size(heads, geometries)
    decoded = [decode(head, geometry, thresholds.score) for head, geometry in zip(heads, geometries, strict=True)]
    found = Detections(
        np.concatenate([part.boxes for part in decoded]),
        np.concatenate([part.scores for part in decoded]),
        np.concatenate([part.classes for part in decoded]),
    )
    return _finish(found, input_size, resize, image_size, thresholds)


def detect_boxes(
    head: Array,
    form: HeadForm,
    input_size: tuple[int, int],
    resize: Resize,
    image_size: tuple[int, int],
    thresholds: Thresholds,
) -> Detections:
    """As `detect`, for one head of boxes and the network's `input_size` (height, width). Raises ValueError also if the
    head claims finished boxes, but has no classes."""
    rows = head.T if form is HeadForm.CLASSES else head
    if form is HeadForm.FINISHED:
        classes, scores = rows[:, 5], rows[:, 4]
    else:
        probabilities = rows[:, 5:] * rows[:, 4:5] if form is HeadForm.OBJECT_ROWS else rows[:, 4:]
        classes = probabilities.argmax(axis=1)
        scores = np.take_along_axis(probabilities, classes[:, np.newaxis], axis=1)[:, 0]
    above = (scores > thresholds.score) & np.isfinite(scores) & np.isfinite(classes)
    if form is HeadForm.FINISHED and (broken := classes[above][classes[above] % 1 != 0]).size:
        raise ValueError(
            f"a box has the class {broken[0]:.3g}, expected a whole number: the head has columns [corners, score,"
            " class] only if the network finishes its boxes, which RT-DETR and YOLOv5 do not"
        )
    boxes = rows[above, :4]
    if form is not HeadForm.FINISHED:
        centres, halves = boxes[:, :2], boxes[:, 2:] / 2
        boxes = np.concatenate([centres - halves, centres + halves], axis=1)
    found = Detections(boxes, scores[above], classes[above].astype(np.int32))
    return _finish(found, input_size, resize, image_size, thresholds)


def _finish(
    found: Detections, input_size: tuple[int, int], resize: Resize, image_size: tuple[int, int], thresholds: Thresholds
) -> Detections:
    if min(image_size) < 1:
        raise ValueError(f"expected the height and width of the original image, got {list(image_size)}")
    return suppress(place(found, resize, input_size, image_size), thresholds.iou, thresholds.max_boxes)


def decode(head: Array, geometry: HeadGeometry, score_threshold: float) -> Detections:
    """Return the candidates of one head, unordered, in pixels of the network's input, each with its most probable
    class.

    centre = (sigmoid(raw) * xy_scale - (xy_scale - 1) / 2 + cell) * stride; side = exp(raw) * anchor.
    """
    # A class has at most probability 1, so the object's probability must exceed the threshold: this ends most of the
    # work.
    rows, columns, anchors = np.nonzero(head[..., 4] > score_threshold)
    values = head[rows, columns, anchors]
    classes = values[:, _BOX_VALUES:].argmax(axis=1) if len(values) else np.zeros(0, dtype=np.int64)
    with np.errstate(invalid="ignore"):  # A broken head may have infinities, and infinity times 0 is NaN.
        scores = values[:, 4] * values[np.arange(len(values)), _BOX_VALUES + classes]
    above = (scores > score_threshold) & np.isfinite(scores)
    values, cells = values[above], np.stack([columns[above], rows[above]], axis=1)
    shift = np.float32((geometry.xy_scale - 1) / 2)
    # This form of the sigmoid never overflows.
    offsets = (np.tanh(values[:, 0:2] / 2) + 1) / 2 * np.float32(geometry.xy_scale) - shift
    centres = (offsets + cells.astype(np.float32)) * np.float32(geometry.stride)
    sizes = np.asarray(geometry.anchors, dtype=np.float32)[anchors[above]]
    # A larger raw width or height means a box far larger than any image, and its exponential would overflow.
    halves = np.exp(np.minimum(values[:, 2:4], 20.0)) * sizes / 2
    boxes = np.concatenate([centres - halves, centres + halves], axis=1)
    return Detections(boxes, scores[above], classes[above].astype(np.int32))


def place(found: Detections, resize: Resize, input_size: tuple[int, int], image_size: tuple[int, int]) -> Detections:
    """Convert boxes to pixels of the original image, and clip them. Sizes are (height, width). Drops boxes outside the
    image and boxes with NaN."""
    scale = np.array([input_size[1] / image_size[1], input_size[0] / image_size[0]])
    if resize is not Resize.STRETCH:
        scale[:] = scale.min()
    limits = np.array([image_size[1], image_size[0]])
    margin = np.zeros(2)
    if resize is Resize.LETTERBOX:
        margin = (np.array([input_size[1], input_size[0]]) - limits * scale) / 2
    corners = (found.boxes.reshape(-1, 2, 2) - margin) / scale
    boxes = np.clip(corners, 0, limits).reshape(-1, 4).astype(np.float32)
    has_area = (boxes[:, 0] < boxes[:, 2]) & (boxes[:, 1] < boxes[:, 3])
    return Detections(boxes, found.scores, found.classes)[has_area]


def suppress(found: Detections, iou_threshold: float, max_boxes: int) -> Detections:
    """Return the boxes that non-maximum suppression keeps in each class. Among equal scores the first is best."""
    order = np.argsort(-found.scores, kind="stable")
    kept = order[:0]
    # Best first, 128 candidates are compared in one step. The first block is usually enough.
    for start in range(0, len(order), 128):
        block = order[start : start + 128]
        block = block[~_overlap(found[block], found[kept], iou_threshold).any(axis=1)]
        clashes = _overlap(found[block], found[block], iou_threshold)
        stays = np.ones(len(block), dtype=bool)
        for index in range(len(block)):
            if stays[index]:
                stays[index + 1 :] &= ~clashes[index, index + 1 :]
        kept = np.concatenate([kept, block[stays]])
        if len(kept) >= max_boxes:
            break
    return found[kept[:max_boxes]]


def _overlap(left: Detections, right: Detections, iou_threshold: float) -> Array:
    """Return bool [left, right]: both boxes are of one class and overlap more than the threshold."""
    first, second = left.boxes[:, np.newaxis], right.boxes[np.newaxis]
    widths = np.minimum(first[..., 2], second[..., 2]) - np.maximum(first[..., 0], second[..., 0])
    heights = np.minimum(first[..., 3], second[..., 3]) - np.maximum(first[..., 1], second[..., 1])
    common = np.maximum(widths, 0) * np.maximum(heights, 0)
    union = _areas(left.boxes)[:, np.newaxis] + _areas(right.boxes) - common
    overlaps: Array = (common > iou_threshold * union) & (left.classes[:, np.newaxis] == right.classes)
    return overlaps


def _input_size(heads: Sequence[Array], geometries: Sequence[HeadGeometry]) -> tuple[int, int]:
    """Return the height and width of the network's input, on which all heads must agree."""
    sizes = []
    for index, (head, geometry) in enumerate(zip(heads, geometries, strict=True)):
        if head.ndim != 4 or head.shape[2] != len(geometry.anchors) or head.shape[3] <= _BOX_VALUES:
            raise ValueError(
                f"head {index} must have shape [rows, columns, {len(geometry.anchors)}, 5 + classes], got"
                f" {list(head.shape)}"
            )
        sizes.append((head.shape[0] * geometry.stride, head.shape[1] * geometry.stride))
    if len(set(sizes)) != 1:
        raise ValueError(f"the heads belong to inputs of different sizes (height, width): {sizes}; check the strides")
    return sizes[0]


def _areas(boxes: Array) -> Array:
    areas: Array = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    return areas
