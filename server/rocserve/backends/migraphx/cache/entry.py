"""What the cache holds: a folder a program, with the program and a file that tells about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from rocserve.backends.migraphx.binding.interface import ProgramTensor
from rocserve.backends.migraphx.planning.recipe import ProgramRecipe

PROGRAM_FILENAME = "program.mxr"
ABOUT_FILENAME = "about.json"


@dataclass(frozen=True, slots=True)
class ProgramAbout:
    """What is known of a compiled program beside the program itself."""

    model: str
    """Whose load or tool compiled it; another model with the same file and options uses it too."""
    source_file: str
    """The name of the model's file, without its folder."""
    recipe: ProgramRecipe
    compile_seconds: float = 0.0
    inputs: tuple[ProgramTensor, ...] = ()
    outputs: tuple[ProgramTensor, ...] = ()
    scratch_bytes: int | None = None
    """The memory that it works in beside its weights, inputs and outputs; None where that is not known."""
    messages: tuple[str, ...] = ()
    """What MIGraphX wrote while it was compiled."""


@dataclass(frozen=True, slots=True)
class StoredAbout:
    """about.json."""

    about: ProgramAbout
    size: int
    """Of the program in bytes."""
    sha256: str
    """Of the program, in hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class CachedProgram:
    """A program that can be loaded. It is not evicted as long as this object lives in any process, or until
    `release`."""

    key: str
    path: Path
    about: ProgramAbout
    size_bytes: int = 0
    held: BinaryIO | None = field(default=None, repr=False, compare=False)
    """The open file, whose shared lock keeps it from being evicted."""

    def release(self) -> None:
        if self.held is not None:
            self.held.close()


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """An entry as `rocserve cache list` shows it; it may be gone by the time it is looked at."""

    key: str
    folder: Path
    about: ProgramAbout | None
    """None where it cannot be read: another version of rocserve has written it, or it is damaged."""
    size_bytes: int
    used_at: float
    """When it was last found or stored, in seconds since 1970."""
