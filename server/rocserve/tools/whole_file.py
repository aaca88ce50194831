"""Writes files that others may be looking at: they see the old one or the new one, never a part."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast


@contextmanager
def replacing(path: Path, mode: int) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` when the block ends, with these permissions; where the block
    fails, `path` is as it was.

    Raises:
        OSError: it cannot be written, or not be put there.
    """
    with tempfile.NamedTemporaryFile(dir=path.absolute().parent, prefix=".", suffix=".tmp", delete=False) as part:
        try:
            yield cast(BinaryIO, part)
            part.flush()
            os.fsync(part.fileno())
            os.fchmod(part.fileno(), mode)
            Path(part.name).replace(path)
        except BaseException:
            Path(part.name).unlink(missing_ok=True)
            raise
