"""Recognises the head of a YOLO network by its shape: the number of boxes follows from the input's size, the number of
columns from the classes. Known class names decide between forms of equal shape."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rocserve.presets.yolo import FINISHED_COLUMNS, HeadForm

_ANCHORS = 3
"""Boxes for each cell, up to YOLOv7."""
_PUBLIC_CLASSES = 80
"""COCO's: a number that does not occur by chance."""
_YOLOX = (
    "it has one box for each cell and a column for the object, as YOLOX [boxes, 5 + classes], which needs different"
    " pixels and arithmetic: write a Python model for it"
)


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The dimensions of one image's head, and further known facts."""

    dims: tuple[int, ...]
    height: int
    """The input's."""
    width: int
    names: int | None
    """The number of class names; None = not known."""

    def cells(self) -> Collection[int]:
        # Pixels of the input for each cell: of most networks, and of those that are trained for large (P6) or small
        # objects (P2), or to be tiny.
        return {
            sum(-(-self.height // stride) * -(-self.width // stride) for stride in strides)
            for strides in ((8, 16, 32), (8, 16, 32, 64), (4, 8, 16, 32), (16, 32))
        }


def yolov8_head(shape: HeadShape) -> tuple[HeadForm, int]:
    """Return the form and the number of classes of a head without anchors. Raises ValueError with the reason."""
    first, last = _two(shape)
    cells, known = shape.cells(), _PUBLIC_CLASSES if shape.names is None else shape.names
    # Columns of public networks that find more than boxes.
    other_tasks = {
        20: "15 classes and the angle of rotated boxes",
        56: "17 keypoints of one class",
        116: "80 classes and 32 weights of masks",
    }
    if last in cells or last == -1:
        if shape.names is None and first in other_tasks:
            raise ValueError(
                f"{first} rows can be {first - 4} classes or {other_tasks[first]}; a labels.txt of {first - 4} lines"
                " says that they are classes"
            )
        if first > 4:
            return HeadForm.CLASSES, first - 4
    elif first in {_ANCHORS * count for count in cells}:
        raise ValueError(f"it has {_ANCHORS} boxes for each cell, as YOLOv5 and YOLOv7 [boxes, 5 + classes]")
    elif first in cells:
        if known == last - 4:
            return HeadForm.CLASS_ROWS, last - 4
        if known == last - 5:
            raise ValueError(_YOLOX)
        raise ValueError(
            f"its {first} boxes have {last} columns: 4 and {last - 4} classes, or YOLOX's 5 and {last - 5}; a"
            f" labels.txt of {last - 4} lines says that they are classes"
        )
    elif last == FINISHED_COLUMNS:
        raise ValueError(f"{FINISHED_COLUMNS} columns are those of finished boxes: corners, score and class")
    elif first - 4 == known > 0:
        return HeadForm.CLASSES, first - 4
    elif 0 < first < min(cells) and last - 4 == known > 0:
        raise ValueError(
            "it has fewer boxes than the network has cells, as RT-DETR [queries, 4 + classes], whose boxes are"
            " fractions of the picture's sides: write a Python model for it"
        )
    elif shape.names is not None and last - 4 == known > 0:
        return HeadForm.CLASS_ROWS, last - 4
    raise ValueError(_no_head(shape, max(first, last)))


def yolov5_head(shape: HeadShape) -> tuple[HeadForm, int]:
    """As `yolov8_head`, for a head with anchors that gives boxes in pixels."""
    first, last = _two(shape)
    cells = shape.cells()
    if first in cells:
        raise ValueError(
            _YOLOX if last - 5 == (shape.names or _PUBLIC_CLASSES) else "it has one box for each cell, not three"
        )
    fits = first in {_ANCHORS * count for count in cells} or (first == -1 and last != FINISHED_COLUMNS)
    if last <= 5 or not (fits or shape.names == last - 5):
        raise ValueError(_no_head(shape, max(first, last), _ANCHORS))
    return HeadForm.OBJECT_ROWS, last - 5


def finished_head(shape: HeadShape) -> tuple[HeadForm, int]:
    """As `yolov8_head`, for boxes that need no suppression. Their shape does not show the number of classes: 0."""
    first, last = _two(shape)
    cells = shape.cells()
    if last != FINISHED_COLUMNS:
        raise ValueError(f"it has {last} columns, not {FINISHED_COLUMNS}")
    if first in cells or first in {_ANCHORS * count for count in cells}:
        raise ValueError(f"it has boxes for all cells ({first}), which are not finished")
    return HeadForm.FINISHED, shape.names or 0


def _two(shape: HeadShape) -> tuple[int, int]:
    if len(shape.dims) != 2:
        raise ValueError(f"expected 2 dimensions for an image, got {len(shape.dims)}")
    return shape.dims[0], shape.dims[1]


def _no_head(shape: HeadShape, boxes: int, anchors: int = 1) -> str:
    expected = ", ".join(str(anchors * count) for count in sorted(shape.cells()))
    return f"for an input of {shape.height} x {shape.width} the number of boxes is one of {expected}, not {boxes}"
