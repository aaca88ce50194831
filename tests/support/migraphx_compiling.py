"""Compiles the small networks of migraphx_models.py in child processes, with the real MIGraphX and target ref."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rocserve.backends.migraphx.compiling.calibration import calibration_digest
from rocserve.backends.migraphx.compiling.child_process import migraphx_jobs
from rocserve.backends.migraphx.compiling.compiler import ProgramCompiler
from rocserve.backends.migraphx.compiling.program_cache import CachedProgram
from rocserve.backends.migraphx.compiling.recipe import ProgramEnvironment, ProgramRecipe, ProgramSource, SourceKind
from rocserve.backends.migraphx.installation import find_installation
from rocserve.backends.migraphx.options import CompileOptions, Precision, Target
from rocserve.cache.digests import file_digest
from rocserve.jobs.compile_semaphore import CompileSemaphore
from rocserve.jobs.messages import JobError
from rocserve.jobs.runner import JobRunner
from rocserve.settings import EngineSettings
from support import migraphx_models as networks
from support.cached_programs import cache_at

LOG = logging.getLogger("test.compiler")
ENVIRONMENT = ProgramEnvironment("2.14.0")
MLP = {"x": (networks.MLP_WIDTH,)}
"""Input of an `mlp` -> shape without the batch."""


class Bench:
    """A compiler for one model's file, with its cache and its reports."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = root
        self.folder = folder / "model"
        self.folder.mkdir()
        self.cache = cache_at(folder / "cache")
        self.reports: list[str] = []
        """The reports without the time in them and without repetitions. The report that a child starts is left out,
        because a start may be too quick to be reported."""
        installation = find_installation(EngineSettings(migraphx_root=str(root)))
        self.runner = JobRunner(migraphx_jobs(installation), self._take, LOG)
        # Other tests may compile meanwhile, for which a compile would wait and say so.
        self.compiler = ProgramCompiler(
            self.runner,
            self.cache,
            model_name="x",
            model_folder=self.folder,
            semaphore=CompileSemaphore(folder / "semaphore"),
        )

    def recipe(self, model: bytes, batch: int, shapes: Mapping[str, tuple[int, ...]], **changes: Any) -> ProgramRecipe:
        """`shapes`: input -> shape without the batch."""
        path = self.folder / "model.onnx"
        path.write_bytes(model)
        recipe = ProgramRecipe(
            ProgramSource(SourceKind.ONNX, str(path), file_digest(path)),
            CompileOptions(Target.REF, precision=changes.pop("precision", Precision.FP32)),
            ENVIRONMENT,
            batch_size=batch,
            input_shapes={name: (batch, *shape) for name, shape in shapes.items()},
        )
        return replace(recipe, **changes)

    def tensorflow_recipe(
        self, graph: bytes, batch: int, shapes: Mapping[str, tuple[int, ...]], outputs: tuple[str, ...]
    ) -> ProgramRecipe:
        """`shapes`: input -> shape in the program's layout (NCHW), without the batch."""
        path = self.folder / "model.graphdef"
        path.write_bytes(graph)
        source = ProgramSource(SourceKind.TENSORFLOW, str(path), file_digest(path))
        return self.recipe(b"", batch, shapes, source=source, output_names=outputs)

    def calibrated(
        self, model: bytes, batch: int, precision: Precision, width: int = networks.MLP_WIDTH
    ) -> ProgramRecipe:
        """The recipe of an `mlp` that is calibrated with five samples."""
        samples = np.random.default_rng(0).uniform(-1, 1, (5, width)).astype(np.float32)
        np.savez(self.folder / "samples.npz", x=samples)
        options = CompileOptions(Target.REF, precision, calibration_data="samples.npz", calibration_samples=128)
        digest = calibration_digest(options, self.folder)
        return self.recipe(model, batch, MLP, options=options, calibration_digest=digest)

    def program(self, recipe: ProgramRecipe, **options: Any) -> CachedProgram:
        return self.compiler.program(recipe, **{"timeout_seconds": 100.0, **options})

    def error(self, recipe: ProgramRecipe, **options: Any) -> JobError:
        with pytest.raises(JobError) as caught:
            self.program(recipe, **options)
        return caught.value

    def _take(self, report: str) -> None:
        text = re.sub(r" \(.* so far\).*", "", report)
        if self.reports[-1:] != [text] and not text.endswith(": starting"):
            self.reports.append(text)
