"""Label files: the names of an output's classes, one a line, for the classification extension."""

from __future__ import annotations

from pathlib import Path

from rocserve.config.bounds import MOST_LABEL_BYTES, MOST_LABELS
from rocserve.config.model_folder import ModelFolder
from rocserve.core.errors import internal, invalid_argument
from rocserve.protocol.model_config_pb2 import ModelConfig


def read_labels(message: ModelConfig, folder: Path) -> dict[str, tuple[str, ...]]:
    """The labels of each output with a `label_filename`, which lies within the model's folder.

    Raises:
        ServeError: INVALID_ARGUMENT when the file leads out of the folder or is not UTF-8, INTERNAL when it is absent.
    """
    return {
        output.name: _read_lines(ModelFolder(folder), output.label_filename, f"label file of output '{output.name}'")
        for output in message.output
        if output.label_filename
    }


def read_names(folder: ModelFolder, filename: str) -> tuple[str, ...]:
    """The lines of a label file that need not be there.

    Raises:
        ServeError: as `read_labels`.
    """
    return _read_lines(folder, filename, "label file") if folder.listing.has(filename) else ()


def _read_lines(folder: ModelFolder, filename: str, what: str) -> tuple[str, ...]:
    path = folder.resolve(filename, what)
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_LABEL_BYTES + 1)
    except OSError as error:
        raise internal(
            f"failed to open text file for read {path}: {error.strerror} ({what}; put it in the model's folder)"
        ) from None
    if len(raw) > MOST_LABEL_BYTES or raw.count(b"\n") > MOST_LABELS:
        raise invalid_argument(
            f"{what}: {filename} is larger than the {MOST_LABELS} lines and {MOST_LABEL_BYTES} bytes that a label file"
            " may have"
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise invalid_argument(f"{what}: {filename} is not UTF-8 text") from None
    # Not splitlines: a label may hold any character but a line feed.
    lines = text.removesuffix("\n").split("\n") if text else []
    return tuple(line.removesuffix("\r") for line in lines)
