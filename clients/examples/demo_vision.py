"""The demo's third part: the two vision pipelines, JPEG -> ResNet-50 -> labels and JPEG -> YOLOv4 -> boxes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from asking import print_faults
from classify import classify_all
from classify import findings_table as classes_table
from detect import detect_all
from detect import findings_table as boxes_table
from detection_drawing import draw_detections, enlarge, read_picture
from picture_sheet import Tile, write_picture_sheet
from rich.console import Console

CLASSIFIER, DETECTOR = "classify_image", "detect_objects"
CLASSES_SHOWN, BOXES_SHOWN = 3, 3
UNTRAINED = (
    "the weights are untrained (seeded at random): the pipelines run as with real ones, labels and boxes mean nothing;"
    " real weights come with: rocserve get resnet50 yolov4"
)


def show_vision(address: str, images: Sequence[Path], is_untrained: bool, output: Path, console: Console) -> bool:
    """Classify and detect in the images and write a sheet of them; whether each got an answer."""
    if is_untrained:
        console.print(UNTRAINED, style="bold yellow", soft_wrap=True)
    started = time.perf_counter()
    classified = asyncio.run(classify_all(address, CLASSIFIER, images, CLASSES_SHOWN))
    between = time.perf_counter()
    detected = asyncio.run(detect_all(address, DETECTOR, images))
    ended = time.perf_counter()
    console.print(classes_table(classified))
    console.print(boxes_table(detected, BOXES_SHOWN))
    rates = len(images) / (between - started), len(images) / (ended - between)
    console.print(
        f"{CLASSIFIER}: {rates[0]:.1f} images/s; {DETECTOR}: {rates[1]:.1f} images/s; these {len(images)} alone, the"
        " first ever asked included",
        soft_wrap=True,
    )
    faults = [(finding.image, finding.error) for finding in classified if finding.error]
    faults += [(finding.image, finding.error) for finding in detected if finding.error]
    if faults:
        print_faults(faults)
        console.print("an image got no answer", style="bold red")
        return False
    tiles = []
    for classes, boxes in zip(classified, detected, strict=True):
        best = "\n".join(f"{found.score:.1%} {found.label}" for found in classes.classes)
        drawn = draw_detections(*enlarge(read_picture(boxes.image), boxes.detections))
        tiles.append(Tile(drawn, f"{len(boxes.detections)} boxes; the whole picture is:\n{best}"))
    title = f"rocserve, {DETECTOR} and {CLASSIFIER}" + (
        ": UNTRAINED weights, meaningless labels" if is_untrained else ""
    )
    sheet = output / "demo-vision.png"
    write_picture_sheet(tiles, title, sheet)
    console.print(f"pictures with boxes and labels: {sheet}", soft_wrap=True)
    return True
