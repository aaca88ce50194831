"""Recipes and stored programs for the tests of the compile cache; the programs' bytes are anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from rocserve.backends.migraphx.binding.interface import DimensionRange, ProgramTensor
from rocserve.backends.migraphx.cache.entry import CachedProgram, ProgramAbout
from rocserve.backends.migraphx.cache.store import ProgramCache
from rocserve.backends.migraphx.configuration.options import CompileOptions, Target
from rocserve.backends.migraphx.planning.recipe import ProgramEnvironment, ProgramRecipe, ProgramSource, SourceKind

GENEROUS = 1 << 30


def cache_at(directory: Path, limit_bytes: int = GENEROUS) -> ProgramCache:
    """A cache whose spare folder is beside it, not the one that this machine's servers may have."""
    return ProgramCache(directory, limit_bytes, spare_directory=directory.parent / "spare")


def a_recipe(digest: str = "d1", **fields: Any) -> ProgramRecipe:
    plain: dict[str, Any] = {
        "options": CompileOptions(Target.REF),
        "environment": ProgramEnvironment("2.14.0"),
        "batch_size": 1,
        "input_shapes": {"x": (1, 3)},
    }
    return ProgramRecipe(ProgramSource(SourceKind.ONNX, "/models/m/1/model.onnx", digest), **{**plain, **fields})


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


def store(cache: ProgramCache, recipe: ProgramRecipe, content: bytes = b"program", model: str = "m") -> CachedProgram:
    """As a compiler does it."""
    with cache.scratch() as folder:
        file = folder / "compiled.mxr"
        file.write_bytes(content)
        return cache.store(recipe.key, file, about(recipe, model))


def stored(cache: ProgramCache, recipe: ProgramRecipe, content: bytes = b"program", model: str = "m") -> str:
    """The same; the key, with nobody holding the program."""
    program = store(cache, recipe, content, model)
    program.release()
    return program.key


PREAMBLE = """
import os, sys, time
from pathlib import Path
from support.cached_programs import *
"""


def start(script: str, *arguments: object, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """A process of its own that runs the script (after PREAMBLE), its sys.argv[1:] the arguments.

    `before`: words in front of the interpreter's."""
    words = [*before, sys.executable, "-c", PREAMBLE + script, *map(str, arguments)]
    environment = {"PYTHONPATH": str(Path(__file__).parents[1]), "PATH": "/usr/bin:/bin"}
    pipe = subprocess.PIPE
    return subprocess.Popen(words, env=environment, stdin=pipe, stdout=pipe, text=True)


def printed_lines(process: subprocess.Popen[str]) -> list[str]:
    """The lines that it printed, once it has ended well."""
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    return output.splitlines()
