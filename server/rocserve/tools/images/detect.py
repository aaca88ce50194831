"""Runs `rocserve detect`: asks a model that finds objects in encoded images, and draws them.

A detector takes an encoded image as ENCODED and gives BOXES, SCORES, CLASSES and LABELS, as `--preprocess=yolov8` makes
it, or `detect_shapes` of the sample repository.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from rocserve.settings.flag import FOLDER, POSITIVE, flag, part
from rocserve.tools.images.asking import (
    ENDED_BY_USER,
    AskOptions,
    CannotAskError,
    ask_each,
    image_column,
    print_faults,
    print_refusal,
    read_image,
    reason_of,
    require_model,
    tensors_text,
)
from rocserve.tools.verb import Verb
from rocserve_client import AsyncClient, InferResult, RocserveError

REQUESTS_AT_ONCE = 4
INPUT = "ENCODED"
OUTPUTS = ("BOXES", "SCORES", "CLASSES", "LABELS")


@dataclass(frozen=True, slots=True)
class Detection:
    """An object that a detector found in an image."""

    label: str
    class_index: int
    score: float
    box: tuple[float, float, float, float]
    """x1, y1, x2, y2 in pixels."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found in an image, best first, or why nothing could be."""

    image: Path
    detections: tuple[Detection, ...] = ()
    error: str = ""


async def require_detector(client: AsyncClient, url: str, model: str) -> None:
    """
    Raises:
        CannotAskError: the model is not there, or is no detector.
        RocserveError: the server answers otherwise than expected.
    """
    metadata = await require_model(client, url, model)
    outputs = {tensor.name for tensor in metadata.outputs}
    if [tensor.name for tensor in metadata.inputs] != [INPUT] or not outputs.issuperset(OUTPUTS):
        raise CannotAskError(
            f"model '{model}' is no detector, which takes {INPUT} and gives {', '.join(OUTPUTS)}: it takes"
            f" {tensors_text(metadata.inputs)} and gives {tensors_text(metadata.outputs)}"
        )


async def detect(client: AsyncClient, model: str, image: Path) -> Finding:
    """Ask for one image; a bad one is a finding of its own and harms no other."""
    try:
        encoded = np.array([await read_image(image)], dtype=object)
        return Finding(image, detections_of(await client.infer(model, {INPUT: encoded})))
    except (OSError, RocserveError) as error:
        return Finding(image, error=reason_of(error))


def detections_of(result: InferResult) -> tuple[Detection, ...]:
    rows = zip(*(result[name] for name in OUTPUTS), strict=True)
    return tuple(
        Detection(
            label.decode(), int(number), float(score), (float(box[0]), float(box[1]), float(box[2]), float(box[3]))
        )
        for box, score, number, label in rows
    )


async def detect_all(url: str, model: str, images: Sequence[Path]) -> list[Finding]:
    """The findings in the order of the images.

    Raises:
        CannotAskError: no server answers, it does not serve the model, or that is no detector.
    """
    async with AsyncClient(url) as client:
        await require_detector(client, url, model)
        return await ask_each(images, REQUESTS_AT_ONCE, lambda image: detect(client, model, image))


def write_drawings(findings: Sequence[Finding], folder: Path) -> Iterator[Finding | Path]:
    """A PNG for each image that could be looked at, named like it; the finding with its error where none can be made.

    None is written over another one of this run, nor over an image.
    """
    from PIL import Image

    from rocserve.tools.images.drawing import draw_detections, enlarge, read_picture

    taken = {finding.image.resolve() for finding in findings}
    for finding in findings:
        if finding.error:
            continue
        path = next(path for path in _names(folder, finding.image.stem) if path.resolve() not in taken)
        try:
            drawn = draw_detections(*enlarge(read_picture(finding.image), finding.detections))
            drawn.save(path)
        except (OSError, Image.DecompressionBombError) as error:
            yield replace(finding, error=f"it cannot be drawn into {path}: {reason_of(error)}")
        else:
            taken.add(path.resolve())
            yield path


def _names(folder: Path, stem: str) -> Iterator[Path]:
    yield folder / f"{stem}.png"
    for number in itertools.count(2):
        yield folder / f"{stem}-{number}.png"


def findings_table(findings: Sequence[Finding], most: int) -> Table:
    """At most `most` rows for each image that could be looked at."""
    table = Table(
        image_column([finding.image for finding in findings]),
        Column("label", no_wrap=True),
        Column("score", justify="right", no_wrap=True),
        Column("x1, y1, x2, y2", justify="right", no_wrap=True),
    )
    for finding in findings:
        if finding.error:
            continue
        rows = [
            (Text(found.label), f"{found.score:.1%}", ", ".join(f"{side:.0f}" for side in found.box))
            for found in finding.detections[:most]
        ]
        if not rows:
            rows = [(Text("nothing", style="dim"), "", "")]
        elif len(finding.detections) > most:
            rows.append((Text(f"and {len(finding.detections) - most} more", style="dim"), "", ""))
        for place, row in enumerate(rows):
            table.add_row(Text(str(finding.image) if place == 0 else ""), *row)
    return table


@dataclass(frozen=True, slots=True)
class DetectOptions:
    ask: AskOptions = part(AskOptions)
    out: Path | None = flag(None, FOLDER, "draw what was found into PNGs in this folder")
    rows: int = flag(10, POSITIVE, "how many objects an image are printed")


def run(options: DetectOptions) -> int:
    """Print what is in each image and, with a folder, draw it; returns the exit status."""
    ask, out = options.ask, options.out
    if out is not None and not _can_draw(out):
        return 2
    try:
        findings = asyncio.run(detect_all(ask.url, ask.model, ask.images))
    except (CannotAskError, RocserveError) as error:
        print_refusal(ask.url, error)
        return 1
    except KeyboardInterrupt:
        return ENDED_BY_USER
    console = Console()
    table = findings_table(findings, options.rows)
    if table.row_count:
        console.print(table)
    faults = [finding for finding in findings if finding.error]
    for written in write_drawings(findings, out) if out is not None else ():
        if isinstance(written, Finding):
            faults.append(written)
        else:
            console.print(str(written), soft_wrap=True, markup=False, highlight=False)
    print_faults((fault.image, fault.error) for fault in faults)
    return 1 if faults else 0


def _can_draw(folder: Path) -> bool:
    """Whether the folder is there, or could be made, and what draws is installed; else it is told."""
    fault = ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fault = f"argument --out: '{folder}' cannot be made a folder: {error.strerror}"
    if find_spec("PIL") is None:
        fault = "argument --out: drawing needs Pillow; run: pip install 'rocserve[tools]'"
    if fault:
        print(f"rocserve detect: {fault}", file=sys.stderr)
    return not fault


VERB = Verb(
    "Find objects in images with a model of a running server that takes encoded images and gives boxes, such as those"
    " of --preprocess=yolov8.",
    DetectOptions(),
    run,
)
