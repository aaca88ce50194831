"""Finds the MIGraphX installation. Nothing is loaded: this is safe and quick in the server's own process."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rocserve.core.errors import unavailable
from rocserve.settings import EngineSettings

LIBRARY = "libmigraphx_c.so.3"
ROOT_VARIABLE = "ROCSERVE_MIGRAPHX_ROOT"
INSTALL_LINES = (
    "apt-get install amdrocm10-migraphx (ROCm 10) or migraphx (ROCm 7), or "
    "pip install 'migraphx>=2' 'migraphx-libs>=2' --extra-index-url https://stable.repo.amd.com/rocm/migraphx/whl-next/"
)
"""PyPI's own packages are an empty 0.0.1, so the line names AMD's index, and bounds both."""

QUIET = {"MIGRAPHX_LOG_LEVEL": "1"}
"""Variables for the processes that load MIGraphX, unless the operator sets them: from 2.16 on it logs what it does on
standard error, line by line; 1 = errors only."""

_ROOT_LIBRARIES = ("usr/lib/x86_64-linux-gnu", "lib", "lib64", "usr/lib64")
"""A root's folders that may hold the library: unpacked Debian packages, or a ROCm folder."""


@dataclass(frozen=True, slots=True)
class MigraphxInstallation:
    """Where MIGraphX is on this machine, and what starts a worker with it."""

    library: str
    """Path of the C library; "" = only the Python module was found."""
    module_folder: str = ""
    """Folder of the official Python module for this interpreter; "" = not found."""
    loader: tuple[str, ...] = ()
    """The words to put before a command to run it with the libc that MIGraphX was built for; empty = not needed."""
    origin: str = ""
    """Why the folder was searched, as users read it: "$ROCM_PATH", "the dynamic loader's cache", ..."""


def find_installation(
    settings: EngineSettings, environment: Mapping[str, str] = os.environ, system: Path = Path("/")
) -> MigraphxInstallation:
    """Find MIGraphX's C library and Python module. If the settings or $ROCSERVE_MIGRAPHX_ROOT name a root, the library
    is searched only there; else in $ROCM_PATH, $LD_LIBRARY_PATH, the wheel migraphx-libs, /opt/rocm, its extras-*,
    /opt/rocm-* (newest first) and the dynamic loader's cache, in this order. The Python module is searched next to the
    library, then on this interpreter's path; without a library in the reverse order. Raises ServeError (UNAVAILABLE)
    with the searched places if neither was found, or a root has no library."""
    root = settings.migraphx_root or environment.get(ROOT_VARIABLE, "")
    named_by = f"--migraphx-root or ${ROOT_VARIABLE}" if settings.migraphx_root else f"${ROOT_VARIABLE}"
    named = ((Path(root) / name, named_by) for name in _ROOT_LIBRARIES)
    searched = [(folder.absolute(), reason) for folder, reason in (named if root else _places(environment, system))]
    for folder, reason in searched:
        if (folder / LIBRARY).is_file():
            # A root with its own libc has the matching loader next to MIGraphX's C library, and the other libraries in
            # migraphx/lib.
            loader, path = folder / "ld-linux-x86-64.so.2", f"{folder}:{folder / 'migraphx/lib'}"
            words = (str(loader), "--library-path", path) if root and loader.exists() else ()
            module = _module_in(folder) or _importable_module()
            return MigraphxInstallation(str(folder / LIBRARY), module, words, reason)
    if root:
        raise unavailable(
            f"MIGraphX is not in {Path(root).absolute()}, which {named_by} names: there is no {LIBRARY} in its"
            f" {', '.join(_ROOT_LIBRARIES)} (make migraphx-root makes such a folder)"
        )
    module = _importable_module() or next(filter(None, (_module_in(folder) for folder, _ in searched)), "")
    if module:
        return MigraphxInstallation("", module, (), "the Python module")
    where = "; ".join(f"{folder} ({reason})" for folder, reason in searched)
    raise unavailable(
        f"MIGraphX is not installed: neither {LIBRARY} (in {where}, or the dynamic loader's cache) nor a Python "
        f"module migraphx was found. Install it ({INSTALL_LINES}), or name a folder that holds it "
        f"(--migraphx-root, ${ROOT_VARIABLE})"
    )


def remedy_if_missing(text: str) -> str:
    """Return a remedy to append if the text says that the dynamic loader did not find MIGraphX; else ""."""
    is_missing = re.search(r"libmigraphx\S*: cannot open shared object file", text)
    return f"; install MIGraphX: {INSTALL_LINES}" if is_missing else ""


def python_command(installation: MigraphxInstallation) -> tuple[str, ...]:
    """Return the command that starts this interpreter so that it can load the installation."""
    return (*installation.loader, sys.executable)


def _places(environment: Mapping[str, str], system: Path) -> Iterator[tuple[Path, str]]:
    """Yield the folders that may hold the library, and why."""
    named = environment.get("ROCM_PATH", "")
    if named:
        yield Path(named) / "lib", "$ROCM_PATH"
    for path in filter(None, environment.get("LD_LIBRARY_PATH", "").split(":")):
        yield Path(path), "$LD_LIBRARY_PATH"
    wheel = importlib.util.find_spec("migraphx_libs")
    for path in (wheel and wheel.submodule_search_locations) or ():
        yield Path(path), "the wheel migraphx-libs"
    rocm = system / "opt/rocm"
    yield rocm / "lib", "ROCm's default folder"
    for folder in _newest_first(rocm.glob("extras-*")):
        yield folder / "lib", "ROCm's extras"
    for folder in _newest_first((system / "opt").glob("rocm-*")):
        yield folder / "lib", "an installed ROCm"
    # The cache holds each library's path, followed by a zero byte. Reading it saves a process for ldconfig.
    with suppress(OSError):
        pattern = rb"\0(/[^\0]*/)" + re.escape(LIBRARY.encode()) + rb"\0"
        for match in re.findall(pattern, (system / "etc/ld.so.cache").read_bytes()):
            yield Path(os.fsdecode(match)), "the dynamic loader's cache"


def _module_in(folder: Path) -> str:
    """Return the folder if it holds the module for this interpreter (migraphx.cpython-3XX-*.so), else ""."""
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    return str(folder) if any((folder / f"migraphx{suffix}").is_file() for suffix in suffixes) else ""


def _importable_module() -> str:
    """Return the module's folder on this interpreter's path; "" = not found. The module's code does not run."""
    try:
        spec = importlib.util.find_spec("migraphx")
    except (ImportError, ValueError):
        return ""
    if spec is None or not spec.origin:
        return ""  # A namespace package: a folder that only has the name.
    file = Path(spec.origin)
    return str(file.parent.parent if spec.submodule_search_locations else file.parent)


def _newest_first(folders: Iterable[Path]) -> list[Path]:
    return sorted(folders, key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)], reverse=True)
