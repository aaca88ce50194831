"""Find objects in images with a detector of a running server, and draw them.

    python clients/examples/detect.py tests/data/shapes/*.jpg --model detect_shapes --out build/detected

A detector takes an encoded image as ENCODED and gives BOXES, SCORES, CLASSES and LABELS, as `detect_objects` (COCO's 80
kinds of objects, YOLOv4) and `detect_shapes` (circles, squares and triangles) of the sample repository do.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from detection_drawing import Detection, draw_detections
from PIL import Image
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from rocserve_client import AsyncClient, InferResult, NotFound, RocserveError, Unavailable

REQUESTS_AT_ONCE = 4
CONNECT_TIMEOUT_S = 5.0


class DetectorMissingError(Exception):
    """There is nobody to ask; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found in an image, best first, or why nothing could be."""

    image: Path
    detections: tuple[Detection, ...] = ()
    error: str = ""


async def require_detector(client: AsyncClient, url: str, model: str) -> None:
    """
    Raises:
        DetectorMissingError: no server answers, or it does not serve the model.
        RocserveError: the server answers otherwise than expected.
    """
    try:
        await client.server_live(timeout=CONNECT_TIMEOUT_S)
    except Unavailable as error:
        raise DetectorMissingError(
            f"no server answers at {url} ({error.text}); start one with:"
            " rocserve serve --model-repository model_repository"
        ) from None
    try:
        ready = await client.model_ready(model, timeout=CONNECT_TIMEOUT_S)
    except (NotFound, Unavailable):
        ready = False
    if ready:
        return
    entries = {entry.name: entry for entry in await client.repository_index(timeout=CONNECT_TIMEOUT_S)}
    if model not in entries:
        raise DetectorMissingError(f"the server at {url} has no model '{model}'; it has {', '.join(sorted(entries))}")
    reason = entries[model].reason or f"it is {entries[model].state or 'not loaded'}"
    raise DetectorMissingError(f"model '{model}' is not ready: {reason}")


async def detect(client: AsyncClient, model: str, image: Path) -> Finding:
    """Ask for one image; a bad one is a finding of its own and harms no other."""
    try:
        encoded = np.array([await asyncio.to_thread(image.read_bytes)], dtype=object)
        return Finding(image, detections_of(await client.infer(model, {"ENCODED": encoded})))
    except (OSError, RocserveError) as error:
        return Finding(image, error=str(error))


def detections_of(result: InferResult) -> tuple[Detection, ...]:
    rows = zip(result["BOXES"], result["SCORES"], result["CLASSES"], result["LABELS"], strict=True)
    return tuple(
        Detection(
            label.decode(), int(number), float(score), (float(box[0]), float(box[1]), float(box[2]), float(box[3]))
        )
        for box, score, number, label in rows
    )


async def detect_all(url: str, model: str, images: Sequence[Path]) -> list[Finding]:
    """The findings in the order of the images.

    Raises:
        DetectorMissingError: no server answers, or it does not serve the model.
    """
    async with AsyncClient(url) as client:
        await require_detector(client, url, model)
        at_once = asyncio.Semaphore(REQUESTS_AT_ONCE)

        async def one(image: Path) -> Finding:
            async with at_once:
                return await detect(client, model, image)

        return await asyncio.gather(*map(one, images))


def write_drawings(findings: Sequence[Finding], folder: Path) -> list[Path]:
    """A PNG for each image that could be looked at, named like it."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for finding in findings:
        if finding.error:
            continue
        path = folder / f"{finding.image.stem}.png"
        for number in range(2, len(findings) + 2):
            if path not in written:
                break
            path = folder / f"{finding.image.stem}-{number}.png"
        with Image.open(finding.image) as image:
            draw_detections(image.convert("RGB"), finding.detections).save(path)
        written.append(path)
    return written


def findings_table(findings: Sequence[Finding], most: int) -> Table:
    """At most `most` rows for each image."""
    table = Table(
        Column("image", overflow="fold"),
        "label",
        Column("score", justify="right"),
        Column("x1, y1, x2, y2", justify="right"),
    )
    for finding in findings:
        rows = [
            (Text(found.label), f"{found.score:.1%}", ", ".join(f"{side:.0f}" for side in found.box))
            for found in finding.detections[:most]
        ]
        if finding.error:
            rows = [(Text(finding.error, style="red"), "", "")]
        elif not rows:
            rows = [(Text("nothing", style="dim"), "", "")]
        elif len(finding.detections) > most:
            rows.append((Text(f"and {len(finding.detections) - most} more", style="dim"), "", ""))
        for place, row in enumerate(rows):
            table.add_row(Text(str(finding.image) if place == 0 else ""), *row)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description="Find objects in images with a detector of a running server.")
    parser.add_argument("images", nargs="+", type=Path, metavar="IMAGE")
    parser.add_argument("--out", type=Path, metavar="DIR", help="draw what was found into PNGs in this folder")
    parser.add_argument("--model", default="detect_objects", help="the model's name (default detect_objects)")
    parser.add_argument("--url", default="localhost:8001", help="the server's gRPC address (default localhost:8001)")
    parser.add_argument("--rows", type=int, default=10, help="how many objects an image are printed (default 10)")
    options = parser.parse_args()
    try:
        findings = asyncio.run(detect_all(options.url, options.model, options.images))
    except DetectorMissingError as error:
        print(error, file=sys.stderr)
        return 1
    except RocserveError as error:
        print(f"the server at {options.url} says: {error}", file=sys.stderr)
        return 1
    console = Console()
    console.print(findings_table(findings, options.rows))
    if options.out:
        for path in write_drawings(findings, options.out):
            console.print(str(path), soft_wrap=True)
    return 1 if any(finding.error for finding in findings) else 0


if __name__ == "__main__":
    sys.exit(main())
