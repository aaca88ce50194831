"""What libraries write to the standard error stream, where ONNX Runtime's providers say why they do not start."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LEVEL = re.compile(r"^.*?\[(?P<level>[EWIVF]):onnxruntime:[^\]]*\] *")
_PLACE = re.compile(r"^\S*/\S+\.(?:cc|h|cpp|hpp):\d+ .*?(?=\[ERROR\]|\[ONNXRuntimeError\]|$)")
_MOST_BYTES = 64 * 1024


@contextmanager
def standard_error_kept() -> Iterator[Callable[[], str]]:
    """Within, what is written to descriptor 2 is kept; the function that it gives returns it, also afterwards.

    Only for a process that writes nothing else to that stream meanwhile.
    """
    sys.stderr.flush()
    original = os.dup(2)
    with tempfile.TemporaryFile() as file:
        kept: list[str] = []

        def written() -> str:
            return kept[0] if kept else os.pread(file.fileno(), _MOST_BYTES, 0).decode(errors="replace")

        os.dup2(file.fileno(), 2)
        try:
            yield written
        finally:
            os.dup2(original, 2)
            os.close(original)
            kept.append(written())


def error_lines(written: str) -> list[str]:
    """The errors among ONNX Runtime's lines, without colours, times and the places in its source."""
    errors: list[str] = []
    is_error = False
    for line in _COLOURS.sub("", written).splitlines():
        head = _LEVEL.match(line)
        if head is not None:
            is_error = head["level"] in "EF"
            line = line[head.end() :]
        line = without_place(line)
        if is_error and line:
            errors.append(line)
    return errors


def without_place(text: str) -> str:
    """A message without the place in ONNX Runtime's source that it may begin with."""
    return _PLACE.sub("", text, count=1).removeprefix("[ERROR]").strip()
