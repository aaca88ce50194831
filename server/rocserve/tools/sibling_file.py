"""Says of errors about the ONNX file beside a compiled program why that file was read at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rocserve.core.errors import ServeError


@contextmanager
def read_beside(given: Path, read: Path, reason: str) -> Iterator[None]:
    """
    Args:
        given: the file that the user named.
        read: the one that is read instead; the same = there is nothing to explain.
        reason: why, as a sentence without its end.

    Raises:
        ServeError: what the block raises, after the reason.
    """
    try:
        yield
    except ServeError as error:
        if given == read:
            raise
        raise ServeError(error.code, f"{reason}: {error.text}") from None
