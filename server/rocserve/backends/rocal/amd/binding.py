"""Imports rocAL's Python module, amd.rocal.

The import loads the GPU's libraries, so it happens only in a worker that creates an engine.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from rocserve.core.errors import unavailable


@dataclass(frozen=True, slots=True)
class Binding:
    """Holds the modules of amd.rocal, which are untyped."""

    pipeline: ModuleType
    functions: ModuleType
    types: ModuleType
    native: ModuleType
    """rocal_pybind, which the other modules call; for functions that these do not wrap, or wrap wrongly."""
    version: str
    """For the log; "unknown" = amd.rocal was not installed as a wheel."""

    def fault(self, handle: Any) -> str | None:
        """Return rocAL's error text for a pipeline; None = no error. rocAL's calls themselves report no errors."""
        if self.native.getStatus(handle) == self.types.OK:
            return None
        return str(self.native.rocalGetErrorMessage(handle)).strip() or "rocAL gives no reason"


def import_binding() -> Binding:
    """Import amd.rocal. Raises ServeError (UNAVAILABLE) if it is not installed, cannot be loaded, or lacks a
    function."""
    remedy = "To run without rocAL, set parameter 'engine' to \"cpu\""
    try:
        pipeline, functions, types, native = (
            importlib.import_module(name)
            for name in ("amd.rocal.pipeline", "amd.rocal.fn", "amd.rocal.types", "rocal_pybind")
        )
    except ModuleNotFoundError as error:
        if error.name != "rocal_pybind":
            text = f"amd.rocal is not installed ({error}); install ROCm's rocAL with its Python module. {remedy}"
            raise unavailable(text) from None
        # rocal_pybind is a separate file next to the package, for one version of Python.
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise unavailable(
            f"amd.rocal is installed, but not rocal_pybind for Python {python}: it is built for one version of Python,"
            " with which the server must run, and lies with ROCm's libraries, usually in /opt/rocm/lib, that"
            f" PYTHONPATH must name. {remedy}"
        ) from None
    except (ImportError, OSError) as error:
        raise unavailable(
            f"amd.rocal is installed but cannot be loaded: {error}; its libraries are found by LD_LIBRARY_PATH, which"
            f" must name ROCm's, usually /opt/rocm/lib, when the server starts. {remedy}"
        ) from None
    needed = (
        "createIntParameter",
        "externalSourceFeedInput",
        "getOutputTensors",
        "getStatus",
        "rocalGetErrorMessage",
        "ROIxywh",
    )
    missing = [name for name in needed if not hasattr(native, name)]
    if missing:
        raise unavailable(f"this amd.rocal has no {', '.join(missing)} in rocal_pybind; rocAL 2.3 has")
    try:
        version = importlib.metadata.version("amd-rocal")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    return Binding(pipeline, functions, types, native, version)
