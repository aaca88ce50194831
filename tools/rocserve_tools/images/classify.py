"""Runs `rocserve classify`: sends images to a model that takes encoded images and returns probabilities.

The input and the output are found in the model's metadata, so any such model works.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
from rich.bar import Bar
from rich.table import Column, Table

from rocserve.core.errors import invalid_argument
from rocserve.core.printable import printable
from rocserve.settings.flag import LARGEST_INT32, flag, number, part
from rocserve.verbs.verb import Verb
from rocserve_client import AsyncClient, Classification, ModelMetadata, Output
from rocserve_tools.images import asking
from rocserve_tools.images.asking import Ask, AskOptions, Finding, ask_all, print_faults, print_findings, tensors_text

_BAR_WIDTH = 12


def classifier(top: int, metadata: ModelMetadata) -> Ask[Classification]:
    """Return a function that asks for the `top` best classes. Raises ServeError if the model does not take one encoded
    image, or has no floating-point output."""
    encoded = [tensor for tensor in metadata.inputs if tensor.datatype == "BYTES"]
    floats = [tensor for tensor in metadata.outputs if tensor.datatype.startswith(("FP", "BF"))]
    if len(metadata.inputs) != 1 or not encoded or not floats:
        raise invalid_argument(
            f"model '{metadata.name}' does not compute probabilities of one encoded image (BYTES): it takes"
            f" {tensors_text(metadata)}; for a network of images, --preprocess makes the model"
            f" '{metadata.name}_image', which does"
        )
    (entry,) = encoded
    # A single number may be the best class's probability, beside the output of all classes.
    scores = next((tensor.name for tensor in floats if tensor.shape[-1:] != (1,)), floats[0].name)
    wanted = [Output(scores, classification=top)]

    async def ask(client: AsyncClient, image: bytes) -> tuple[Classification, ...]:
        images = np.full((1,) * len(entry.shape), image, dtype=object)
        result = await client.infer(metadata.name, {entry.name: images}, wanted)
        classes: tuple[Classification, ...] = ()
        # An empty output has no classes.
        with suppress(ValueError):
            classes = result.classes(scores)[0]
        if not classes or not all(0.0 <= found.score <= 1.0 for found in classes):
            raise invalid_argument(f"output '{scores}' of '{metadata.name}' does not hold probabilities")
        return classes

    return ask


def findings_table(findings: Sequence[Finding[Classification]]) -> Table:
    """Return a table of each image's best classes. A probability is also shown as a bar; a full bar is 1."""
    columns = (Column("label", overflow="fold"), Column("confidence", justify="right"), Column("", width=_BAR_WIDTH))
    return asking.findings_table(
        findings,
        columns,
        lambda finding: [
            (
                printable(found.label) or str(found.class_index),
                f"{found.score:.1%}",
                Bar(1.0, 0.0, found.score, width=_BAR_WIDTH, color="green"),
            )
            for found in finding.found
        ],
    )


@dataclass(frozen=True, slots=True)
class ClassifyOptions:
    ask: AskOptions = part(AskOptions)
    top: int = flag(1, number("K", 1, most=LARGEST_INT32), "how many classes of each image, the best first")


def run(options: ClassifyOptions) -> int:
    """Print the best classes of each image and return the exit status. Raises ServeError."""
    ask_of = partial(classifier, options.top)
    findings = asyncio.run(ask_all(options.ask.url, options.ask.model, options.ask.images, ask_of))
    print_findings(findings_table(findings))
    return print_faults(findings)


VERB = Verb(
    "Classify images with a model of a running server that takes encoded images and gives probabilities, such as those"
    " of --preprocess=imagenet.",
    ClassifyOptions(),
    run,
)
