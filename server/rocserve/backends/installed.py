"""Whether a module is installed, found out without importing any part of it."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import PathFinder


def is_installed(module: str) -> bool:
    """Of a dotted name; neither it nor the packages around it are run, so any process may ask for any engine."""
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
