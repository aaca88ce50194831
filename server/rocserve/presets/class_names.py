"""Reads the names of classes for the Python models of this package."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

import numpy as np


def class_names_of(args: dict[str, str], output_name: str) -> np.ndarray[Any, Any]:
    """Return the names in an output's label file. `args`: as in `initialize`. Raises ValueError if no file is named."""
    outputs = json.loads(args["model_config"])["output"]
    filename = next((output.get("label_filename") for output in outputs if output["name"] == output_name), None)
    if not filename:
        raise ValueError(
            f"output '{output_name}' has no label_filename in config.pbtxt; expected the file of the labels"
        )
    return read_class_names(Path(args["model_repository"]) / filename)


def read_class_names(path: Path) -> np.ndarray[Any, Any]:
    """Return the lines of a UTF-8 label file, BYTES [classes]. A name may have any character but a line feed."""
    text = path.read_bytes().removeprefix(codecs.BOM_UTF8).removesuffix(b"\n")
    return np.array([line.removesuffix(b"\r") for line in text.split(b"\n")], dtype=object)
