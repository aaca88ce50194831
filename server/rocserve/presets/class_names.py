"""The names of classes, as the Python models here answer with them."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

import numpy as np


def class_names_of(args: dict[str, str], output_name: str) -> np.ndarray[Any, Any]:
    """By what a model's `initialize` is given, the names in the output's file of labels. Raises: ValueError: the
    configuration names none."""
    outputs = json.loads(args["model_config"])["output"]
    filename = next((output.get("label_filename") for output in outputs if output["name"] == output_name), None)
    if not filename:
        raise ValueError(
            f"output '{output_name}' has no label_filename in config.pbtxt; expected the file of the labels"
        )
    return read_class_names(Path(args["model_repository"]) / filename)


def read_class_names(path: Path) -> np.ndarray[Any, Any]:
    """The lines of a label file in UTF-8, BYTES [classes]. A name may hold any character but a line feed, as in the
    label files that the server reads."""
    text = path.read_bytes().removeprefix(codecs.BOM_UTF8).removesuffix(b"\n")
    return np.array([line.removesuffix(b"\r") for line in text.split(b"\n")], dtype=object)
