"""Asks a model of a running server about images, several at a time; a bad image harms no other."""

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
from rocserve.core.hints import names_hint
from rocserve.settings.flag import Kind, flag, positional, text
from rocserve.tools.printing import console_on, say, table
from rocserve_client import (
    AsyncClient,
    DeadlineExceeded,
    ModelMetadata,
    NotFound,
    RocserveError,
    TensorMetadata,
    Unavailable,
)

CONNECT_TIMEOUT_S = 5.0
_AT_ONCE = 8
"""Requests."""
_LARGEST_IMAGE = 1 << 30
"""Bytes: of as many pixels as a pipeline takes by default, uncompressed, with 16 bits each. Files may be endless."""
_PIECE = 1 << 20
_LONGEST_ON_ONE_LINE = 30
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class AskOptions:
    images: tuple[Path, ...] = positional((), Kind("IMAGE", Path), "JPEG or PNG files", nargs="+")
    model: str = flag("", text("MODEL"), "the model's name", required=True)
    url: str = flag("localhost:8001", text("URL"), "the server's gRPC address")


@dataclass(frozen=True, slots=True)
class Finding(Generic[Found]):
    """Of one image: what the model found, best first, or why it could not be asked."""

    image: Path
    found: tuple[Found, ...] = ()
    error: str = ""


Ask = Callable[[AsyncClient, bytes], Awaitable[tuple[Found, ...]]]
"""Asks about one encoded image. Raises: ServeError, RocserveError."""


async def ask_all(
    url: str, model: str, images: Sequence[Path], ask_of: Callable[[ModelMetadata], Ask[Found]]
) -> list[Finding[Found]]:
    """The findings in the order of the images. `ask_of` makes what asks the model, or raises ServeError. Raises:
    ServeError: no server answers, it does not serve the model, or that is one of another kind."""
    try:
        connected = AsyncClient(url)
    except RocserveError as error:
        raise invalid_argument(error.text) from None
    async with connected as client:
        try:
            ask = ask_of(await require_model(client, url, model))
        except RocserveError as error:
            raise unavailable(f"the server at {url} says: {error}") from None
        at_once = asyncio.Semaphore(_AT_ONCE)

        async def finding(image: Path) -> Finding[Found]:
            async with at_once:
                try:
                    return Finding(image, await ask(client, await asyncio.to_thread(read_image, image)))
                except (OSError, RocserveError, ServeError) as error:
                    return Finding(image, error=reason_of(error))

        return await asyncio.gather(*map(finding, images))


def read_image(path: Path) -> bytes:
    """Raises: OSError: it cannot be read; ServeError: INVALID_ARGUMENT, it is larger than an image may be."""
    data = bytearray()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            data += piece
            if len(data) > _LARGEST_IMAGE:
                raise invalid_argument(f"it has more than the {_LARGEST_IMAGE} bytes that an image may have")
    return bytes(data)


async def require_model(client: AsyncClient, url: str, model: str) -> ModelMetadata:
    """The metadata of a model that is ready. Raises: ServeError: no server answers, or it does not serve the model;
    RocserveError: the server answers otherwise than expected."""
    try:
        await client.server_live(timeout=CONNECT_TIMEOUT_S)
    except (Unavailable, DeadlineExceeded) as error:
        raise unavailable(f"no server answers at {url} ({error.text}); start one with: rocserve serve MODEL") from None
    try:
        if await client.model_ready(model, timeout=CONNECT_TIMEOUT_S):
            return await client.model_metadata(model, timeout=CONNECT_TIMEOUT_S)
    except (NotFound, Unavailable):
        pass  # The index knows why.
    entries = {entry.name: entry for entry in await client.repository_index(timeout=CONNECT_TIMEOUT_S)}
    if model not in entries:
        raise invalid_argument(f"the server at {url} has no model '{model}'{names_hint('it has', model, entries)}")
    reason = entries[model].reason or f"it is {entries[model].state or 'not loaded'}"
    raise unavailable(f"model '{model}' is not ready: {reason}")


def tensors_text(metadata: ModelMetadata) -> str:
    """Such as `ENCODED: BYTES [-1, 1] and gives LABEL: BYTES [1]`, which goes on after "it takes"."""

    def listed(tensors: Sequence[TensorMetadata]) -> str:
        return ", ".join(f"{tensor.name}: {tensor.datatype} {list(tensor.shape)}" for tensor in tensors)

    return f"{listed(metadata.inputs)} and gives {listed(metadata.outputs)}"


def reason_of(error: Exception) -> str:
    """Of a file or a server; the file's name, which an OSError repeats, is left out."""
    if isinstance(error, ServeError):
        return error.text
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def findings_table(
    findings: Sequence[Finding[Found]],
    columns: Sequence[str | Column],
    rows_of: Callable[[Finding[Found]], Sequence[Sequence[RenderableType]]],
) -> Table:
    """The rows of each image without an error, its name before the first. Names are not cut: long ones take several
    lines, so that there is room for the rest."""
    is_short = max(len(str(finding.image)) for finding in findings) <= _LONGEST_ON_ONE_LINE
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
    """A line for each image with an error, on standard error; the exit status."""
    faults = [finding for finding in findings if finding.error]
    console = Console(stderr=True)
    for one in faults:
        say(console, f"{one.image}: {one.error}", "red")
    return 1 if faults else 0
