"""Runs `rocserve detect`: sends images to a model that finds objects in them, and draws the objects.

A detector takes an encoded image as ENCODED and returns BOXES, SCORES, CLASSES and LABELS, like a model made by
`--preprocess=yolov8` or `detect_shapes` of the sample repository.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from os.path import realpath
from pathlib import Path

import numpy as np
from rich.table import Column, Table
from rich.text import Text

from rocserve.core.errors import invalid_argument
from rocserve.core.extras import install_command
from rocserve.core.printable import printable
from rocserve.flags import FlagError
from rocserve.settings.flag import FOLDER, POSITIVE, flag, part
from rocserve.verbs.printing import console_on, replacing, say
from rocserve.verbs.verb import Verb
from rocserve_client import AsyncClient, ModelMetadata
from rocserve_tools.images import asking
from rocserve_tools.images.asking import (
    Ask,
    AskOptions,
    Finding,
    ask_all,
    print_faults,
    print_findings,
    reason_of,
    tensors_text,
)

INPUT = "ENCODED"
OUTPUTS = ("BOXES", "SCORES", "CLASSES", "LABELS")


@dataclass(frozen=True, slots=True)
class Detection:
    label: str
    class_index: int
    score: float
    box: tuple[float, float, float, float]
    """x1, y1, x2, y2 in pixels."""


def detector(metadata: ModelMetadata) -> Ask[Detection]:
    """Return a function that asks for the objects in an image. Raises ServeError if the model is not a detector."""
    texts = {tensor.name: tensor.datatype == "BYTES" for tensor in metadata.outputs}
    is_fit = all(texts.get(name) is (name == "LABELS") for name in OUTPUTS)
    if [tensor.name for tensor in metadata.inputs] != [INPUT] or not is_fit:
        raise invalid_argument(
            f"model '{metadata.name}': expected a detector, which takes {INPUT} and gives {', '.join(OUTPUTS)}, got a"
            f" model that takes {tensors_text(metadata)}"
        )

    async def ask(client: AsyncClient, image: bytes) -> tuple[Detection, ...]:
        result = await client.infer(metadata.name, {INPUT: np.array([image], dtype=object)})
        outputs = [result[name] for name in OUTPUTS]
        count = len(outputs[-1])
        if [one.shape for one in outputs] != [(count, 4), (count,), (count,), (count,)]:
            shapes = ", ".join(f"{name} {list(one.shape)}" for name, one in zip(OUTPUTS, outputs, strict=True))
            raise invalid_argument(f"'{metadata.name}' gives {shapes}, expected [n, 4] and [n] of the others")
        return tuple(
            Detection(printable(label.decode(errors="replace")), int(number), float(score), (left, top, right, bottom))
            for (left, top, right, bottom), score, number, label in zip(outputs[0].tolist(), *outputs[1:], strict=True)
        )

    return ask


def write_drawings(findings: Sequence[Finding[Detection]], folder: Path) -> Iterator[Finding[Detection] | Path]:
    """Draw each image without an error into a PNG of the same name. Yield its path, or the finding with an error if the
    drawing failed. No drawing overwrites another one of this run, or an input image."""
    from PIL import Image

    from rocserve_tools.images.drawing import draw_detections, enlarge, read_picture

    used = {realpath(finding.image) for finding in findings}
    for finding in findings:
        if finding.error:
            continue
        endings = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
        paths = (folder / f"{finding.image.stem}{ending}.png" for ending in endings)
        path = next(path for path in paths if realpath(path) not in used)
        try:
            drawn = draw_detections(*enlarge(read_picture(finding.image), finding.found))
            with replacing(path) as file:
                drawn.save(file, "PNG")
        # Pillow raises ValueError if a box has a NaN.
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            yield replace(finding, error=f"cannot draw it into {path}: {reason_of(error)}")
        else:
            used.add(realpath(path))
            yield path


def findings_table(findings: Sequence[Finding[Detection]], most: int) -> Table:
    """Return a table with at most `most` rows for each image without an error."""
    columns = (
        Column("label", no_wrap=True),
        Column("score", justify="right", no_wrap=True),
        Column("x1, y1, x2, y2", justify="right", no_wrap=True),
    )

    def rows(finding: Finding[Detection]) -> list[tuple[str | Text, str, str]]:
        made: list[tuple[str | Text, str, str]] = [
            (found.label, f"{found.score:.1%}", ", ".join(f"{side:.0f}" for side in found.box))
            for found in finding.found[:most]
        ]
        if not made:
            made.append((Text("nothing", style="dim"), "", ""))
        elif len(finding.found) > most:
            made.append((Text(f"and {len(finding.found) - most} more", style="dim"), "", ""))
        return made

    return asking.findings_table(findings, columns, rows)


@dataclass(frozen=True, slots=True)
class DetectOptions:
    ask: AskOptions = part(AskOptions)
    out: Path | None = flag(None, FOLDER, "draw the objects into PNGs in this folder")
    rows: int = flag(10, POSITIVE, "how many objects of each image are printed at most")


def run(options: DetectOptions) -> int:
    """Print the objects in each image and, if a folder is given, draw them. Return the exit status. Raises FlagError
    if the folder cannot be created or Pillow is missing; ServeError if no server answers, or the model is not served or
    not a detector."""
    if options.out is not None:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FlagError(f"argument --out: '{options.out}' cannot be made a folder: {error.strerror}") from None
        if find_spec("PIL") is None:
            raise FlagError(f"argument --out: drawing needs Pillow; run: {install_command('tools')}")
    findings = asyncio.run(ask_all(options.ask.url, options.ask.model, options.ask.images, detector))
    print_findings(findings_table(findings, options.rows))
    faults = [finding for finding in findings if finding.error]
    for written in write_drawings(findings, options.out) if options.out is not None else ():
        if isinstance(written, Finding):
            faults.append(written)
        else:
            say(console_on(), str(written))
    return print_faults(faults)


VERB = Verb(
    "Find objects in images with a model of a running server that takes encoded images and gives boxes, such as those"
    " of --preprocess=yolov8.",
    DetectOptions(),
    run,
)
