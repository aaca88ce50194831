"""Checks whether a module is installed, without importing any part of it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path


def has_file(module: str, files: Iterable[str]) -> bool:
    """Return whether a package is installed and has one of these files in its folder. No code of the package runs."""
    spec = importlib.util.find_spec(module)
    folders = [] if spec is None or spec.submodule_search_locations is None else spec.submodule_search_locations
    return any(Path(folder, name).is_file() for folder in folders for name in files)


def is_installed(module: str) -> bool:
    """Return whether a module is installed, without running it or its packages, so that any process may ask."""
    if module in sys.modules:
        return True
    package, *inner = module.split(".")
    spec = importlib.util.find_spec(package)
    name = package
    for part in inner:
        if spec is None or spec.submodule_search_locations is None:
            return False
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    return spec is not None
