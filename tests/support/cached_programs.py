"""Recipes and stored programs for tests of the compile cache. The programs' bytes are arbitrary."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rocserve.backends.migraphx.binding import DimensionRange, ProgramTensor
from rocserve.backends.migraphx.compiling.program_cache import (
    ABOUT_FILENAME,
    PROGRAM_FILENAME,
    CachedProgram,
    ProgramAbout,
    ProgramCache,
)
from rocserve.backends.migraphx.compiling.recipe import ProgramEnvironment, ProgramRecipe, ProgramSource, SourceKind
from rocserve.backends.migraphx.options import CompileOptions, Target
from rocserve.cache.folders import FolderCache
from support.waiting import PATIENCE_SECONDS

GENEROUS = 1 << 30


def cache_at(directory: Path, limit_bytes: int = GENEROUS) -> ProgramCache:
    """A cache with its spare folder next to it, not at the place that servers of this machine may use."""
    return ProgramCache(directory, limit_bytes, spare_directory=directory.parent / "spare")


def a_recipe(digest: str = "d1", **fields: Any) -> ProgramRecipe:
    plain: dict[str, Any] = {
        "source": ProgramSource(SourceKind.ONNX, "/models/m/1/model.onnx", digest),
        "options": CompileOptions(Target.REF),
        "environment": ProgramEnvironment("2.14.0"),
        "batch_size": 1,
        "input_shapes": {"x": (1, 3)},
    }
    return ProgramRecipe(**{**plain, **fields})


def about(recipe: ProgramRecipe, model: str = "m") -> ProgramAbout:
    return ProgramAbout(
        model,
        "model.onnx",
        recipe,
        compile_seconds=1.5,
        inputs=(ProgramTensor("x", "float", (DimensionRange(1, 8), 3)),),
        outputs=(ProgramTensor("", "half", (1, 4)),),
        scratch_bytes=100,
        messages=("a warning",),
    )


def wait() -> None:
    """Does nothing: stands in for waiting while another process builds the program."""


def store(cache: ProgramCache, recipe: ProgramRecipe, content: bytes = b"program", model: str = "m") -> CachedProgram:
    """Store a program as a compiler does."""

    def build(file: Path) -> ProgramAbout:
        file.write_bytes(content)
        return about(recipe, model)

    return cache.find_or_build(recipe.key, build, wait)


def stored(cache: ProgramCache, recipe: ProgramRecipe, content: bytes = b"program", model: str = "m") -> str:
    """Store a program and release it; return its key."""
    program = store(cache, recipe, content, model)
    program.release()
    return program.key


def stored_by_another_version(cache: ProgramCache, key: str) -> None:
    """Store a program whose description only a later rocserve can read."""

    def make(folder: Path) -> None:
        (folder / PROGRAM_FILENAME).write_bytes(b"program")
        (folder / ABOUT_FILENAME).write_text('{"of": "the future"}')

    FolderCache(cache.directory / "programs", GENEROUS, print).find_or_make(key, make, wait).release()


@contextmanager
def being_built(cache: ProgramCache, key: str, waiting: Callable[[], None] = wait) -> Iterator[Path]:
    """A context in which this process builds a program and has written half of its file. The build fails at the end."""

    class Given(Exception):
        pass

    begun, ended = threading.Event(), threading.Event()
    files: list[Path] = []
    problems: list[Exception] = []

    def build(file: Path) -> ProgramAbout:
        file.write_bytes(b"half")
        files.append(file)
        begun.set()
        ended.wait()
        raise Given

    def run() -> None:
        try:
            cache.find_or_build(key, build, waiting)
        except Given:
            pass
        except Exception as error:
            problems.append(error)
            begun.set()

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    try:
        if problems:
            raise problems[0]
        yield files[0]
    finally:
        ended.set()
        thread.join()


PREAMBLE = """
import os, sys, time
from pathlib import Path
from support.cached_programs import *
"""


def start(script: str, *arguments: object, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Start a process that runs PREAMBLE and the script, with the arguments as sys.argv[1:]. `before`: words in front
    of the interpreter."""
    words = [*before, sys.executable, "-c", PREAMBLE + script, *map(str, arguments)]
    environment = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]), "PATH": "/usr/bin:/bin"}
    pipe = subprocess.PIPE
    return subprocess.Popen(words, env=environment, stdin=pipe, stdout=pipe, text=True)


def printed_lines(process: subprocess.Popen[str]) -> list[str]:
    """Wait until the process has succeeded, and return the lines that it printed."""
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, output
    return output.splitlines()
