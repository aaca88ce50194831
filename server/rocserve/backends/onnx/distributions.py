"""Finds which Python packages bring the module onnxruntime. Each brings the whole module, with its own execution
providers; two in one environment overwrite each other's files, and pip does not notice."""

from __future__ import annotations

import hashlib
import sys
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackagePath, distributions
from pathlib import Path

_USES = {
    "onnxruntime": "CPUs",
    "onnxruntime-gpu": "NVIDIA GPUs",
    "onnxruntime-migraphx": "AMD GPUs",
    "onnxruntime-openvino": "Intel's CPUs and GPUs",
    "onnxruntime-rocm": "AMD GPUs",
}
"""Package -> its use, for packages that are recognised even if their list of files is lost."""


@dataclass(frozen=True, slots=True)
class OnnxRuntimes:
    found: Sequence[Distribution]
    """The packages that are installed."""

    @property
    def names(self) -> str:
        return ", ".join(f"{one.name} {one.version}" for one in self.found)

    @property
    def problem(self) -> str:
        """The problem if several packages are installed, with the one that this process has loaded; else ""."""
        if len(self.found) < 2:
            return ""
        engine = getattr(sys.modules.get("onnxruntime.capi.onnxruntime_pybind11_state"), "__file__", None)
        loaded = None if engine is None else self._owner(Path(engine))
        which = "" if loaded is None else f": {loaded.name} {loaded.version} runs, and the others do not"
        return f"each of these packages contains the whole module onnxruntime, so only one can be used{which}"

    @property
    def remedy(self) -> str:
        names = [one.name for one in self.found]
        choice = " or ".join(f"{name} ({_USES[name]})" if name in _USES else name for name in names)
        # Uninstalling one of them removes files of the others.
        return f"pip uninstall {' '.join(names)}, then pip install only one: {choice}"

    def _owner(self, file: Path) -> Distribution | None:
        claims = [(one, entry) for one in self.found for entry in one.files or () if _is(entry, file)]
        if len(claims) == 1:
            return claims[0][0]
        digest = urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).rstrip(b"=").decode() if claims else ""
        return next((one for one, entry in claims if entry.hash is not None and entry.hash.value == digest), None)


def installed_onnx_runtimes() -> OnnxRuntimes:
    """Look on Python's path, without importing anything."""
    found: dict[str, Distribution] = {}
    for one in distributions():
        name = (one.name or "").lower().replace("_", "-")
        if name.startswith("onnxruntime") and name not in found and _brings_module(name, one):
            found[name] = one
    return OnnxRuntimes([one for _, one in sorted(found.items())])


def empty_packages() -> Sequence[str]:
    """Return the installed packages that exist on PyPI only to reserve AMD's names: they hold only metadata."""
    names = {(one.name or "").lower().replace("_", "-"): one.files for one in distributions()}
    return sorted(
        name
        for name, files in names.items()
        if name.startswith(("migraphx", "onnxruntime-ep-"))
        and files is not None
        and all(file.parts[0].endswith(".dist-info") for file in files)
    )


def _brings_module(name: str, one: Distribution) -> bool:
    return name in _USES or any(str(file) == "onnxruntime/__init__.py" for file in one.files or ())


def _is(entry: PackagePath, file: Path) -> bool:
    return entry.name == file.name and Path(str(entry.locate())).resolve() == file.resolve()
