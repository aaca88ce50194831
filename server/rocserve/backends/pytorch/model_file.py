"""Finds the kind of a PyTorch file from the names in its archive, without PyTorch."""

from __future__ import annotations

import enum
import stat
import zipfile
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rocserve.backends.base import ModelSource
from rocserve.backends.file_kinds import what_it_is
from rocserve.backends.parameters import asked_engine
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.printable import printable

_MOST_UNPACKED, _UNPACKED_ANYWAY = 100, 1 << 30
"""Limits of an archive's unpacked size: a multiple of the file's size, plus bytes. No compressed weights reach them."""
EXPORT = "torch.export.save(torch.export.export(model.eval(), inputs), 'model.pt2')"
_PICKLE = (
    "holds a pickle of weights or of a module, not a program: load it where its class is defined and write"
    f" {EXPORT}, or serve class and weights by a Python model (model.py)"
)


class FileKind(enum.Enum):
    """The kinds of files; the values are their names in the log."""

    EXPORTED = "a program of torch.export"
    PACKAGE = "a package of AOTInductor"
    SCRIPT = "a TorchScript program"


def file_kind(path: Path) -> FileKind:
    """Return a file's kind from its content, not its name; compares each part of the file with its checksum. Raises
    ServeError (INVALID_ARGUMENT) if the file is of another kind, damaged, or unsafe to unpack."""
    try:
        with zipfile.ZipFile(path) as archive:
            kind = _kind_of(archive.namelist(), path.name)
            _require_contained(archive.infolist(), path)
            damaged = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError, RuntimeError) as error:
        raise _no_archive(path, error) from None
    if damaged is not None:
        raise invalid_argument(f"{path.name} is damaged: '{damaged}' in it has another checksum; copy it again")
    return kind


def engine_in_errors(model: ModelSource, engine: str) -> tuple[bool, str]:
    """Return whether the configuration names the engine, and the subject of an error text about the engine."""
    if asked_engine(model.config) == engine:
        return True, f"parameter 'engine' is \"{engine}\", which"
    return False, f"engine {engine}"


def require_exported(model: ModelSource, engine: str) -> None:
    """Require a program of torch.export, all that this engine takes. Raises ServeError (INVALID_ARGUMENT)."""
    kind = file_kind(model.model_file)
    if kind is not FileKind.EXPORTED:
        is_named, asks = engine_in_errors(model, engine)
        remedy = "remove the parameter" if is_named else "set parameter 'engine' to \"eager\""
        raise invalid_argument(
            f"model '{model.name}': {asks} takes programs of torch.export, and {model.model_file.name} is {kind.value};"
            f" export the module with torch.export, or {remedy}"
        )


def _kind_of(names: list[str], file: str) -> FileKind:
    # All names begin with a folder that has the saved file's name. Older programs of torch.export have no such folder.
    inner = {name.partition("/")[2] for name in names}
    if "serialized_exported_program.json" in names or any(
        name.startswith("models/") and name.endswith(".json") for name in inner
    ):
        return FileKind.EXPORTED
    if any(name.startswith("data/aotinductor/") for name in inner):
        return FileKind.PACKAGE
    if "constants.pkl" in inner and any(name.startswith("code/") for name in inner):
        return FileKind.SCRIPT
    if "data.pkl" in inner:
        raise invalid_argument(f"{file} {_PICKLE}")
    raise invalid_argument(
        f"{file} is a zip archive without a PyTorch program; write one with {EXPORT}, or"
        " torch.jit.script(model).save('model.pt')"
    )


def most_unpacked(path: Path) -> int:
    """Return the size in bytes that an archive may unpack to."""
    return path.stat().st_size * _MOST_UNPACKED + _UNPACKED_ANYWAY


def _require_contained(members: Sequence[zipfile.ZipInfo], path: Path) -> None:
    """Raises ServeError (INVALID_ARGUMENT) if the archive has a member that PyTorch does not write, or unpacks to more
    than `most_unpacked`. PyTorch unpacks a package's members under their names, even outside of its folder."""
    names = Counter(member.filename for member in members)
    for member in members:
        name = printable(member.filename)
        fault = ""
        if ".." in member.filename.split("/") or member.filename.startswith("/") or "\\" in member.filename:
            fault = f"its member '{name}' leads out of it"
        elif stat.S_ISLNK(member.external_attr >> 16):
            fault = f"its member '{name}' is a link"
        elif names[member.filename] > 1:
            fault = f"it has {names[member.filename]} members named '{name}'"
        if fault:
            raise invalid_argument(f"{path.name} is refused: {fault}, which PyTorch does not write; save it again")
    most = most_unpacked(path)
    size = sum(member.file_size for member in members)
    if size > most:
        raise invalid_argument(
            f"{path.name} is refused: it unpacks to {size >> 20} MiB, {most >> 20} MiB at most are possible for its"
            " size; save it again with PyTorch, which does not compress"
        )


def _no_archive(path: Path, error: Exception) -> ServeError:
    try:
        with path.open("rb") as file:
            start = file.read(2)
    except OSError as fault:
        return invalid_argument(f"{path.name} cannot be read: {fault.strerror or fault}")
    if start[:1] == b"\x80":
        return invalid_argument(f"{path.name} {_PICKLE}")
    if start == b"PK":
        return invalid_argument(f"{path.name} is cut short or damaged ({error}); copy it again")
    return invalid_argument(f"{path.name} is not a PyTorch file{what_it_is(path)}")
