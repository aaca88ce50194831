"""What the commands that ask a model about images have in common: the model must be there, some images may be bad."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Column

from rocserve.settings.flag import Kind, flag, positional, text
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
ENDED_BY_USER = 130
"""The exit status after Ctrl-C, as shells have it: 128 and SIGINT's number."""
_LONGEST_ON_ONE_LINE = 30
_Finding = TypeVar("_Finding")


@dataclass(frozen=True, slots=True)
class AskOptions:
    images: tuple[Path, ...] = positional((), Kind("IMAGE", Path), "JPEG or PNG files", nargs="+")
    model: str = flag("", text("MODEL"), "the model's name", required=True)
    url: str = flag("localhost:8001", text("URL"), "the server's gRPC address")


class CannotAskError(Exception):
    """There is no such model to ask; the text says what to do."""


async def require_model(client: AsyncClient, url: str, model: str) -> ModelMetadata:
    """The metadata of a model that is ready.

    Raises:
        CannotAskError: no server answers, or it does not serve the model.
        RocserveError: the server answers otherwise than expected.
    """
    try:
        await client.server_live(timeout=CONNECT_TIMEOUT_S)
    except (Unavailable, DeadlineExceeded) as error:
        raise CannotAskError(
            f"no server answers at {url} ({error.text}); start one with: rocserve serve MODEL"
        ) from None
    try:
        if await client.model_ready(model, timeout=CONNECT_TIMEOUT_S):
            return await client.model_metadata(model, timeout=CONNECT_TIMEOUT_S)
    except (NotFound, Unavailable):
        pass  # The index knows why.
    entries = {entry.name: entry for entry in await client.repository_index(timeout=CONNECT_TIMEOUT_S)}
    if model not in entries:
        raise CannotAskError(f"the server at {url} has no model '{model}'; it has {', '.join(sorted(entries))}")
    reason = entries[model].reason or f"it is {entries[model].state or 'not loaded'}"
    raise CannotAskError(f"model '{model}' is not ready: {reason}")


def tensors_text(tensors: Sequence[TensorMetadata]) -> str:
    """Such as `ENCODED: BYTES [-1, 1], SIZE: INT32 [2]`."""
    return ", ".join(f"{tensor.name}: {tensor.datatype} {list(tensor.shape)}" for tensor in tensors)


async def read_image(path: Path) -> bytes:
    """
    Raises:
        OSError: there is no such file, or it cannot be read.
    """
    return await asyncio.to_thread(path.read_bytes)


async def ask_each(
    images: Sequence[Path], most_at_once: int, ask: Callable[[Path], Coroutine[Any, Any, _Finding]]
) -> list[_Finding]:
    """What asking has found for each image, in their order."""
    at_once = asyncio.Semaphore(most_at_once)

    async def one(image: Path) -> _Finding:
        async with at_once:
            return await ask(image)

    return await asyncio.gather(*map(one, images))


def reason_of(error: Exception) -> str:
    """Of a file or a server; the file's name, which an OSError repeats, is left out."""
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def image_column(images: Sequence[Path]) -> Column:
    """The names of the images, none of them cut; long ones take several lines, so that there is room for the rest."""
    return Column("image", overflow="fold", no_wrap=max(len(str(image)) for image in images) <= _LONGEST_ON_ONE_LINE)


def print_faults(faults: Iterable[tuple[Path, str]]) -> None:
    """A line for each image without an answer, on standard error."""
    console = Console(stderr=True)
    for image, reason in faults:
        console.print(f"{image}: {reason}", style="red", markup=False, highlight=False, soft_wrap=True)


def print_refusal(url: str, error: CannotAskError | RocserveError) -> None:
    """Why nothing was asked, on standard error."""
    print(error if isinstance(error, CannotAskError) else f"the server at {url} says: {error}", file=sys.stderr)
