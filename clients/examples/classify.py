"""Classify images with a model that takes encoded images and gives probabilities.

    python clients/examples/classify.py tests/data/digits/*.jpg
    python clients/examples/classify.py --model classify_image --top 5 photo.jpg

The model's input and its output of probabilities are found in its metadata, so any such model will do.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.bar import Bar
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from rocserve_client import AsyncClient, Classification, Output, RocserveError, Unavailable

REQUESTS_AT_ONCE = 8
BAR_WIDTH = 20
CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Classifier:
    """A model's name and those of its two tensors, and the shape of one image's input."""

    model: str
    input: str
    input_shape: tuple[int, ...]
    probabilities: str


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found for an image: its best classes, or why there are none."""

    image: Path
    classes: tuple[Classification, ...] = ()
    error: str = ""


async def describe(client: AsyncClient, model: str) -> Classifier:
    """How to ask the model.

    Raises:
        SystemExit: the model does not take one encoded image, or gives no floating-point output.
    """
    metadata = await client.model_metadata(model, timeout=CONNECT_TIMEOUT_S)
    encoded = [tensor for tensor in metadata.inputs if tensor.datatype == "BYTES"]
    probabilities = [tensor for tensor in metadata.outputs if tensor.datatype.startswith(("FP", "BF"))]
    if len(metadata.inputs) != 1 or not encoded or not probabilities:
        raise SystemExit(f"model '{model}' does not make probabilities from one BYTES input: {metadata}")
    return Classifier(model, encoded[0].name, (1,) * len(encoded[0].shape), probabilities[0].name)


async def classify(client: AsyncClient, classifier: Classifier, image: Path, top: int) -> Finding:
    """Ask for one image; a bad one is a finding of its own and harms no other."""
    try:
        encoded = np.full(classifier.input_shape, await asyncio.to_thread(image.read_bytes), dtype=object)
        wanted = Output(classifier.probabilities, classification=top)
        result = await client.infer(classifier.model, {classifier.input: encoded}, [wanted])
    except (OSError, RocserveError) as error:
        return Finding(image, error=str(error))
    return Finding(image, result.classes(classifier.probabilities)[0])


async def classify_all(url: str, model: str, images: Sequence[Path], top: int) -> list[Finding]:
    """The findings in the order of the images.

    Raises:
        RocserveError: the server is not there, or does not have the model.
    """
    async with AsyncClient(url) as client:
        classifier = await describe(client, model)
        at_once = asyncio.Semaphore(REQUESTS_AT_ONCE)

        async def one(image: Path) -> Finding:
            async with at_once:
                return await classify(client, classifier, image, top)

        return await asyncio.gather(*map(one, images))


def findings_table(findings: Sequence[Finding]) -> Table:
    """The best classes of each image, their probabilities also as bars: a full one is certainty."""
    table = Table("image", "label", Column("confidence", justify="right"), Column("", width=BAR_WIDTH))
    for finding in findings:
        if finding.error:
            table.add_row(Text(str(finding.image)), Text(finding.error, style="red"), "", "")
        for place, found in enumerate(finding.classes):
            name = Text(str(finding.image) if place == 0 else "")
            bar = Bar(1.0, 0.0, found.score, width=BAR_WIDTH, color="green")
            table.add_row(name, Text(found.label or str(found.class_index)), f"{found.score:.1%}", bar)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description="Classify images with a model of a running server.")
    parser.add_argument("images", nargs="+", type=Path, metavar="IMAGE")
    parser.add_argument("--url", default="localhost:8001", help="the server's gRPC address (default localhost:8001)")
    parser.add_argument("--model", default="digits", help="the model's name (default digits)")
    parser.add_argument(
        "--top", type=int, default=1, metavar="K", help="how many classes an image, the best first (default 1)"
    )
    options = parser.parse_args()
    try:
        findings = asyncio.run(classify_all(options.url, options.model, options.images, options.top))
    except Unavailable as error:
        print(
            f"no server answers at {options.url} ({error.text}); start one with:"
            " rocserve serve --model-repository model_repository",
            file=sys.stderr,
        )
        return 1
    except RocserveError as error:
        print(f"the server at {options.url} says: {error}", file=sys.stderr)
        return 1
    Console().print(findings_table(findings))
    return 1 if any(finding.error for finding in findings) else 0


if __name__ == "__main__":
    sys.exit(main())
