"""Runs `rocserve classify`: asks a model that takes encoded images and gives probabilities.

The model's input and its output of probabilities are found in its metadata, so any such model will do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.bar import Bar
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from rocserve.settings.flag import flag, number, part
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
from rocserve_client import AsyncClient, Classification, Output, RocserveError

REQUESTS_AT_ONCE = 8
BAR_WIDTH = 12


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


async def describe(client: AsyncClient, url: str, model: str) -> Classifier:
    """How to ask the model.

    Raises:
        CannotAskError: it is not there, does not take one encoded image, or gives no floating-point output.
    """
    metadata = await require_model(client, url, model)
    encoded = [tensor for tensor in metadata.inputs if tensor.datatype == "BYTES"]
    probabilities = [tensor for tensor in metadata.outputs if tensor.datatype.startswith(("FP", "BF"))]
    if len(metadata.inputs) != 1 or not encoded or not probabilities:
        raise CannotAskError(
            f"model '{model}' does not make probabilities from one encoded image (BYTES): it takes"
            f" {tensors_text(metadata.inputs)} and gives {tensors_text(metadata.outputs)}"
        )
    return Classifier(model, encoded[0].name, (1,) * len(encoded[0].shape), probabilities[0].name)


async def classify(client: AsyncClient, classifier: Classifier, image: Path, top: int) -> Finding:
    """Ask for one image; a bad one is a finding of its own and harms no other."""
    try:
        encoded = np.full(classifier.input_shape, await read_image(image), dtype=object)
        wanted = Output(classifier.probabilities, classification=top)
        result = await client.infer(classifier.model, {classifier.input: encoded}, [wanted])
    except (OSError, RocserveError) as error:
        return Finding(image, error=reason_of(error))
    classes = result.classes(classifier.probabilities)[0]
    if not all(0.0 <= found.score <= 1.0 for found in classes):
        return Finding(image, error=f"output '{classifier.probabilities}' of '{classifier.model}' is no probabilities")
    return Finding(image, classes)


async def classify_all(url: str, model: str, images: Sequence[Path], top: int) -> list[Finding]:
    """The findings in the order of the images.

    Raises:
        CannotAskError: the server is not there, does not serve the model, or that is no classifier.
    """
    async with AsyncClient(url) as client:
        classifier = await describe(client, url, model)
        return await ask_each(images, REQUESTS_AT_ONCE, lambda image: classify(client, classifier, image, top))


def findings_table(findings: Sequence[Finding]) -> Table:
    """The best classes of each image that has them, their probabilities also as bars: a full one is certainty."""
    table = Table(
        image_column([finding.image for finding in findings]),
        Column("label", overflow="fold"),
        Column("confidence", justify="right"),
        Column("", width=BAR_WIDTH),
    )
    for finding in findings:
        for place, found in enumerate(finding.classes):
            name = Text(str(finding.image) if place == 0 else "")
            bar = Bar(1.0, 0.0, found.score, width=BAR_WIDTH, color="green")
            table.add_row(name, Text(found.label or str(found.class_index)), f"{found.score:.1%}", bar)
    return table


@dataclass(frozen=True, slots=True)
class ClassifyOptions:
    ask: AskOptions = part(AskOptions)
    top: int = flag(1, number("K", 1), "how many classes an image, the best first")


def run(options: ClassifyOptions) -> int:
    """Print the best classes of each image; returns the exit status."""
    ask = options.ask
    try:
        findings = asyncio.run(classify_all(ask.url, ask.model, ask.images, options.top))
    except (CannotAskError, RocserveError) as error:
        print_refusal(ask.url, error)
        return 1
    except KeyboardInterrupt:
        return ENDED_BY_USER
    table = findings_table(findings)
    if table.row_count:
        Console().print(table)
    faults = [(finding.image, finding.error) for finding in findings if finding.error]
    print_faults(faults)
    return 1 if faults else 0


VERB = Verb(
    "Classify images with a model of a running server that takes encoded images and gives probabilities, such as those"
    " of --preprocess=imagenet.",
    ClassifyOptions(),
    run,
)
