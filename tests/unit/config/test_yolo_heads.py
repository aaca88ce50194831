"""Which heads of YOLO networks each preset takes: the boxes follow from the input's size (640 x 640 has 80 * 80 +
40 * 40 + 20 * 20 = 8400 cells, 416 x 416 has 3549, 1280 x 1280 with a fourth stride, and 640 x 640 with cells of
4 pixels, 34000), the columns from the classes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rocserve.config.class_names import ClassNames
from rocserve.config.preprocess.images import image_models
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.model_config import InputConfig, ModelConfig, OutputConfig, Purpose


def network(preset: str, size: tuple[int, int], *outputs: tuple[int, ...], batches: bool = True) -> ModelConfig:
    """A network for images of this height and width; without batching the dims begin with the batch of one."""
    lead = () if batches else (1,)
    return ModelConfig(
        "net",
        max_batch_size=4 if batches else 0,
        inputs=(InputConfig("images", DataType.FP32, (*lead, 3, *size)),),
        outputs=tuple(OutputConfig(f"out{place}", DataType.FP32, (*lead, *dims)) for place, dims in enumerate(outputs)),
        parameters={"preprocess": preset},
    )


def names(count: int) -> ClassNames:
    return ClassNames("net/labels.txt", "labels.txt", tuple(f"class {number}" for number in range(count)))


def made(config: ModelConfig, labels: int = 0) -> tuple[str, int]:
    """The form of the head, and the number of class names in the post-processing's label file."""
    _, post, _ = image_models(config, names(labels) if labels else None)
    files = {str(path): content.decode() for path, content in post.files.items()}
    text = files["config.pbtxt"].split('key: "head"')[1]
    return text.split('string_value: "')[1].split('"')[0], files["labels.txt"].count("\n")


def refusal(config: ModelConfig, labels: int = 0) -> str:
    with pytest.raises(ServeError) as caught:
        image_models(config, names(labels) if labels else None)
    return caught.value.text


@pytest.mark.parametrize("batches", [True, False])
@pytest.mark.parametrize(
    ("preset", "size", "dims", "labels", "form", "classes"),
    [
        ("yolov8", (640, 640), (84, 8400), 0, "classes", 80),
        ("yolov8", (640, 640), (7, 8400), 3, "classes", 3),
        ("yolov8", (640, 640), (7, 8400), 0, "classes", 3),
        ("yolov8", (480, 640), (84, 6300), 0, "classes", 80),
        ("yolov8", (160, 160), (84, 525), 0, "classes", 80),
        ("yolov8", (1280, 1280), (84, 34000), 0, "classes", 80),
        ("yolov8", (640, 640), (84, 34000), 0, "classes", 80),
        ("yolov8", (640, 640), (8400, 84), 0, "class_rows", 80),
        ("yolov8", (640, 640), (8400, 7), 3, "class_rows", 3),
        ("yolov8", (640, 640), (20, 8400), 16, "classes", 16),
        ("yolov8", (640, 640), (56, 8400), 52, "classes", 52),
        ("yolov8", (640, 640), (84, 1000), 0, "classes", 80),
        ("yolov8", (640, 640), (3000, 7), 3, "class_rows", 3),
        ("yolov8", (640, 640), (-1, 7), 3, "class_rows", 3),
        ("yolov5", (640, 640), (25200, 85), 0, "object_rows", 80),
        ("yolov5", (1280, 1280), (102000, 85), 0, "object_rows", 80),
        ("yolov5", (416, 416), (10647, 8), 3, "object_rows", 3),
        ("yolo_end2end", (640, 640), (300, 6), 0, "finished", 0),
        ("yolo_end2end", (640, 640), (300, 6), 80, "finished", 80),
        ("yolo_end2end", (640, 640), (-1, 6), 2, "finished", 2),
    ],
)
def test_heads_that_fit(
    preset: str, size: tuple[int, int], dims: tuple[int, ...], labels: int, form: str, classes: int, batches: bool
) -> None:
    assert made(network(preset, size, dims, batches=batches), labels) == (form, classes)


def test_finished_boxes_need_no_batch_dimension() -> None:
    config = replace(
        network("yolo_end2end", (640, 640), (300, 6), batches=False),
        outputs=(OutputConfig("out0", DataType.FP32, (-1, 6)),),
    )
    assert made(config, 80) == ("finished", 80)


@pytest.mark.parametrize(
    ("preset", "size", "dims", "labels", "why"),
    [
        (
            "yolov8",
            (640, 640),
            (25200, 85),
            0,
            "3 boxes for each cell, as YOLOv5 and YOLOv7 [boxes, 5 + classes]; *'yolov5'",
        ),
        (
            "yolov8",
            (416, 416),
            (10647, 8),
            3,
            "3 boxes for each cell, as YOLOv5 and YOLOv7 [boxes, 5 + classes]; *'yolov5'",
        ),
        ("yolov8", (416, 416), (3549, 6), 0, "4 and 2 classes, or YOLOX's 5 and 1; a labels.txt of 2 lines"),
        ("yolov8", (416, 416), (3549, 6), 1, "as YOLOX [boxes, 5 + classes]"),
        ("yolov8", (640, 640), (8400, 85), 0, "as YOLOX [boxes, 5 + classes]"),
        ("yolov8", (640, 640), (300, 84), 80, "RT-DETR [queries, 4 + classes], whose boxes are fractions"),
        ("yolov8", (640, 640), (300, 84), 0, "RT-DETR [queries, 4 + classes], whose boxes are fractions"),
        ("yolov8", (640, 640), (300, 6), 0, "corners, score and class; *'yolo_end2end' fits it"),
        ("yolov8", (640, 640), (-1, 6), 0, "corners, score and class; *'yolo_end2end' fits it"),
        ("yolov8", (640, 640), (9, 8399), 0, "the number of boxes is one of 2000, 8400, 8500, 34000, not 8399"),
        ("yolov8", (640, 640), (20, 8400), 0, "20 rows can be 16 classes or 15 classes and the angle of rotated boxes"),
        ("yolov8", (640, 640), (56, 8400), 0, "56 rows can be 52 classes or 17 keypoints of one class"),
        (
            "yolov8",
            (640, 640),
            (1000,),
            0,
            "expected 2 dimensions for an image, got 1; *'imagenet' or *'inception' fits it",
        ),
        ("yolov5", (640, 640), (84, 8400), 0, "not 8400; *'yolov8' fits it"),
        ("yolov5", (640, 640), (8400, 85), 0, "as YOLOX [boxes, 5 + classes]"),
        ("yolov5", (640, 640), (300, 6), 0, "not 300; *'yolo_end2end' fits it"),
        ("yolo_end2end", (416, 416), (3549, 6), 0, "boxes for all cells (3549), which are not finished"),
        ("yolo_end2end", (640, 640), (84, 8400), 0, "it has 8400 columns, not 6; *'yolov8' fits it"),
        ("yolo_end2end", (640, 640), (100, 7), 0, "it has 7 columns, not 6"),
        ("imagenet", (640, 640), (84, 8400), 0, "*'yolov8' fits it"),
    ],
)
def test_heads_that_do_not_fit_are_refused_with_the_preset_that_does(
    preset: str, size: tuple[int, int], dims: tuple[int, ...], labels: int, why: str
) -> None:
    text = refusal(network(preset, size, dims), labels)
    assert f"preprocess '{preset}' is for a model with " in text
    assert why.replace("*", "preprocess ") in text


@pytest.mark.parametrize(
    ("task", "own", "dims", "why"),
    [
        ("pose", 1, (56, 8400), "its file says that its task is 'pose', not 'detect'"),
        ("obb", 15, (20, 8400), "its file says that its task is 'obb', not 'detect'"),
        (
            "",
            15,
            (20, 8400),
            "it has columns for 16 classes, and its file names 15: the others may be masks or keypoints",
        ),
    ],
)
def test_the_file_s_own_words_tell_other_networks(task: str, own: int, dims: tuple[int, ...], why: str) -> None:
    purpose = Purpose(task, tuple(f"kind {number}" for number in range(own)))
    assert why in refusal(replace(network("yolov8", (640, 640), dims), purpose=purpose))


def test_the_file_s_own_class_names_are_taken() -> None:
    purpose = Purpose("detect", ("cat", "dog"))
    for preset, dims in (
        ("yolov8", (6, 8400)),
        ("yolov8", (8400, 6)),
        ("yolov5", (25200, 7)),
        ("yolo_end2end", (9, 6)),
    ):
        config = replace(network(preset, (640, 640), dims), purpose=purpose)
        _, post, _ = image_models(config, None)
        assert b"cat\ndog\n" in post.files.values()
        assert made(config, 2)[1] == 2, "a labels.txt comes first"
