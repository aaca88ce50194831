"""The names of classes, as the Python models here answer with them."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Any

import numpy as np


def read_class_names(path: Path) -> np.ndarray[Any, Any]:
    """The lines of a label file in UTF-8, BYTES [classes]. A name may hold any character but a line feed, as in the
    label files that the server reads."""
    text = path.read_bytes().removeprefix(codecs.BOM_UTF8).removesuffix(b"\n")
    return np.array([line.removesuffix(b"\r") for line in text.split(b"\n")], dtype=object)
