"""Sends images to a model of a running server, several at a time. A bad image does not affect the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from rich.box import HEAVY_HEAD
from rich.console import Console, RenderableType
from rich.table import Column, Table

from rocserve.core.errors import ServeError, invalid_argument, unavailable
from rocserve.core.printable import names_hint
from rocserve.settings.flag import Kind, flag, positional, text
from rocserve.verbs.printing import console_on, say, table
from rocserve_client import (
    AsyncClient,
    DeadlineExceeded,
    ModelMetadata,
    NotFound,
    RocserveError,
    TensorMetadata,
    Unavailable,
)

ANSWER_TIMEOUT_S = 30.0
"""A server on a busy machine may need seconds. That no server listens is known at once."""
_LARGEST_IMAGE = 1 << 30
"""Bytes of an uncompressed image with 16 bits per channel and as many pixels as a pipeline accepts by default. The
limit is needed because a file may be endless."""
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class AskOptions:
    images: tuple[Path, ...] = positional((), Kind("IMAGE", Path), "JPEG or PNG files", nargs="+")
    model: str = flag("", text("MODEL"), "the model's name", required=True)
    url: str = flag("localhost:8001", text("URL"), "the server's gRPC address")


@dataclass(frozen=True, slots=True)
class Finding(Generic[Found]):
    """Holds what the model found in one image, best first, or why the image was not processed."""

    image: Path
    found: tuple[Found, ...] = ()
    error: str = ""


Ask = Callable[[AsyncClient, bytes], Awaitable[tuple[Found, ...]]]
"""Sends one encoded image and returns what the model found. Raises ServeError, RocserveError."""


async def ask_all(
    url: str, model: str, images: Sequence[Path], ask_of: Callable[[ModelMetadata], Ask[Found]]
) -> list[Finding[Found]]:
    """Return the findings in the order of the images. `ask_of` makes the function that sends an image, or raises
    ServeError if the model is of the wrong kind. Raises ServeError if no server answers, or if the server does not
    serve a suitable model."""
    try:
        connected = AsyncClient(url)
    except RocserveError as error:
        raise invalid_argument(error.text) from None
    async with connected as client:
        try:
            ask = ask_of(await require_model(client, url, model))
        except RocserveError as error:
            raise unavailable(f"the server at {url} says: {error}") from None
        slots = asyncio.Semaphore(8)

        async def finding(image: Path) -> Finding[Found]:
            async with slots:
                try:
                    return Finding(image, await ask(client, await asyncio.to_thread(read_image, image)))
                except (OSError, RocserveError, ServeError) as error:
                    return Finding(image, error=reason_of(error))

        return await asyncio.gather(*map(finding, images))


def read_image(path: Path) -> bytes:
    """Read a file. Raises OSError if it cannot be read, ServeError (INVALID_ARGUMENT) if it is larger than an image may
    be."""
    data = bytearray()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            data += piece
            if len(data) > _LARGEST_IMAGE:
                raise invalid_argument(f"it has more than the {_LARGEST_IMAGE} bytes that an image may have")
    return bytes(data)


async def require_model(client: AsyncClient, url: str, model: str) -> ModelMetadata:
    """Return the metadata of a model that is ready. Raises ServeError if no server answers or the model is not ready,
    RocserveError for an unexpected answer."""
    try:
        await client.server_live(timeout=ANSWER_TIMEOUT_S)
    except (Unavailable, DeadlineExceeded) as error:
        raise unavailable(f"no server answers at {url} ({error.text}); start one with: rocserve serve MODEL") from None
    try:
        if await client.model_ready(model, timeout=ANSWER_TIMEOUT_S):
            return await client.model_metadata(model, timeout=ANSWER_TIMEOUT_S)
    except (NotFound, Unavailable):
        pass  # The repository index has the reason.
    entries = {entry.name: entry for entry in await client.repository_index(timeout=ANSWER_TIMEOUT_S)}
    loading = sorted(entry.name for entry in entries.values() if entry.state in ("LOADING", "CHECKING"))
    wait = f"; the server still loads {', '.join(loading)}: try again when it has ended" if loading else ""
    if model not in entries:
        hint = names_hint("it has", model, entries)
        raise invalid_argument(f"the server at {url} has no model '{model}'{hint}{wait}")
    reason = entries[model].reason or f"it is {entries[model].state or 'not loaded'}"
    raise unavailable(f"model '{model}' is not ready: {reason}{wait}")


def tensors_text(metadata: ModelMetadata) -> str:
    """Return a text for "it takes ...": `ENCODED: BYTES [-1, 1] and gives LABEL: BYTES [1]`."""

    def listed(tensors: Sequence[TensorMetadata]) -> str:
        return ", ".join(f"{tensor.name}: {tensor.datatype} {list(tensor.shape)}" for tensor in tensors)

    return f"{listed(metadata.inputs)} and gives {listed(metadata.outputs)}"


def reason_of(error: Exception) -> str:
    """Return the error's text, without the file name that an OSError repeats."""
    if isinstance(error, ServeError):
        return error.text
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def findings_table(
    findings: Sequence[Finding[Found]],
    columns: Sequence[str | Column],
    rows_of: Callable[[Finding[Found]], Sequence[Sequence[RenderableType]]],
) -> Table:
    """Return a table of the images without errors; an image's first row has its name. Long names are wrapped, not cut,
    to leave room for the other columns."""
    is_short = max(len(str(finding.image)) for finding in findings) <= 30
    rows = [
        (str(finding.image) if place == 0 else "", *row)
        for finding in findings
        if not finding.error
        for place, row in enumerate(rows_of(finding))
    ]
    return table("", (Column("image", overflow="fold", no_wrap=is_short), *columns), rows, box=HEAVY_HEAD)


def print_findings(made: Table) -> None:
    if made.row_count:
        console_on().print(made)


def print_faults(findings: Sequence[Finding[Found]]) -> int:
    faults = [finding for finding in findings if finding.error]
    console = Console(stderr=True)
    for one in faults:
        say(console, f"{one.image}: {one.error}", "red")
    return 1 if faults else 0
