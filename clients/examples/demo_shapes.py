"""Shows the demo's second part: the shape detector on newly drawn pictures, measured against the truth."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from average_precision import LabelledBox, mean_average_precision
from picture_sheet import Tile, write_picture_sheet
from PIL import Image, ImageDraw
from rich.console import Console
from shapes import Shape, draw_pictures, read_truth, write_pictures

from rocserve_tools.images.asking import Finding, ask_all
from rocserve_tools.images.detect import Detection, detector
from rocserve_tools.images.drawing import draw_detections

MODEL = "detect_shapes"
SEED = 2026
"""No training has used it, because the seeds of training are pairs of numbers."""
PICTURES = 48
PICTURES_SHOWN = 12
REQUIRED_PRECISION = 0.9


def show_shapes(address: str, output: Path, console: Console) -> bool:
    """Draw pictures, find their shapes, and write a sheet. Returns whether the detector is precise enough."""
    folder = output / "demo-shapes"
    write_pictures(draw_pictures(SEED, PICTURES), folder)
    truth = read_truth(folder)
    started = time.perf_counter()
    findings = asyncio.run(ask_all(address, MODEL, [folder / name for name in truth], detector))
    rate = len(findings) / (time.perf_counter() - started)
    faults = [finding for finding in findings if finding.error]
    for fault in faults:
        console.print(f"{fault.image}: {fault.error}", style="bold red", markup=False)
    precision = measure(findings, truth)
    shapes = sum(len(shapes) for shapes in truth.values())
    summary = f"mAP@0.5 {precision:.3f} on {shapes} shapes in {len(truth)} pictures"
    sheet = output / "demo-shapes.png"
    tiles = [tile(finding, truth[finding.image.name]) for finding in findings[:PICTURES_SHOWN]]
    write_picture_sheet(tiles, f"rocserve, {MODEL}: {summary}. White dashes: the truth", sheet)
    console.print(f"{summary}; {rate:,.0f} pictures/s", soft_wrap=True)
    console.print(f"pictures with boxes: {sheet}", soft_wrap=True)
    if precision >= REQUIRED_PRECISION and not faults:
        return True
    console.print(f"expected a mAP of {REQUIRED_PRECISION} at least, and no errors", style="bold red")
    return False


def measure(findings: Sequence[Finding[Detection]], truth: Mapping[str, Sequence[Shape]]) -> float:
    """Return the mean average precision of the boxes found in the pictures of `truth`."""
    found = [
        LabelledBox(finding.image.name, detection.label, detection.box, detection.score)
        for finding in findings
        for detection in finding.found
    ]
    true = [LabelledBox(name, shape.label, shape.box) for name, shapes in truth.items() for shape in shapes]
    return mean_average_precision(found, true)


def tile(finding: Finding[Detection], truth: Sequence[Shape]) -> Tile:
    with Image.open(finding.image) as image:
        drawn = draw_detections(image.convert("RGB"), finding.found)
    for shape in truth:
        _dash_box(ImageDraw.Draw(drawn), shape.box)
    return Tile(drawn, f"{finding.image.name}: {len(truth)} shapes, {len(finding.found)} found")


def _dash_box(draw: ImageDraw.ImageDraw, box: tuple[int, int, int, int], dash: int = 5) -> None:
    left, top, right, bottom = box[0], box[1], box[2] - 1, box[3] - 1
    for x in range(left, right, 2 * dash):
        end = min(x + dash, right)
        draw.line((x, top, end, top), fill="white")
        draw.line((x, bottom, end, bottom), fill="white")
    for y in range(top, bottom, 2 * dash):
        end = min(y + dash, bottom)
        draw.line((left, y, left, end), fill="white")
        draw.line((right, y, right, end), fill="white")
