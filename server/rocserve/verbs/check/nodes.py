"""Compares the inner tensors of an ONNX graph in two engines, in workers.

Each cut of the graph is a separate model, loaded in new workers: the engine fuses operators as in the whole model, and
may crash."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from rocserve.cache.temporary_folder import temporary_folder
from rocserve.core.errors import ServeError
from rocserve.core.load_check import LoadCheckMode
from rocserve.load_check.difference import differences
from rocserve.load_check.made_inputs import nudged
from rocserve.load_check.reference import Case
from rocserve.load_check.tensors import Array, Feed
from rocserve.verbs.check.errors import OutputError, output_errors
from rocserve.verbs.check.graph_cuts import CutGraph, read_model, write_model
from rocserve.verbs.check.operator_search import CutResult, OperatorFinding, TensorFinding, farthest, first_difference
from rocserve.verbs.check.sides import open_side
from rocserve.verbs.model_choice import ModelOptions, ToolModel, configured_as, find_model
from rocserve.verbs.workers import ToolWorkers


async def first_operator(
    model: ToolModel, file: Path, engines: tuple[str, str], case: Case, report: Callable[[str], None]
) -> OperatorFinding | None:
    """Return the first operator whose results differ. `file`: the ONNX file. `engines`: the reference and the one to
    check. `case`: inputs on which they differ. Raises ServeError if the file has no graph that can be cut, or if the
    reference cannot run the graph."""
    graph = CutGraph(read_model(file), case.feed)
    with temporary_folder("rocserve-nodes-") as folder:
        # The programs of the cuts do not belong in the cache.
        settings = replace(model.source.settings, cache_directory=str(Path(folder, "cache")))

        async def examine(count: int) -> CutResult | None:
            report(f"comparing the first {count} of {len(graph.operators)} operators")
            part = Path(folder, f"first-{count}.onnx")
            write_model(graph.until(count), part, file.parent)
            cut = configured_as(find_model(ModelOptions(part, engines=settings)), model)
            async with ToolWorkers(settings) as workers:
                return await _examined(cut, engines, case, workers)

        return await first_difference(graph, examine)


async def _examined(cut: ToolModel, engines: tuple[str, str], case: Case, workers: ToolWorkers) -> CutResult | None:
    """Compare the cut in both engines; None = the reference cannot run it."""
    reference, engine = engines
    try:
        side = await open_side(cut, reference, workers, LoadCheckMode.OFF)
        feed = {spec.name: case.feed[spec.name] for spec in side.workers.signature.inputs}
        expected = await asyncio.to_thread(side.run, feed)
        moved = await asyncio.to_thread(side.run, nudged(feed))
    except ServeError:
        return None
    try:
        checked = await open_side(cut, engine, workers, LoadCheckMode.OFF)
        outputs = await asyncio.to_thread(checked.run, feed)
    except (ServeError, TimeoutError) as error:
        return CutResult(failure=str(error) or f"{engine} does not end its run")
    own_case = Case(case.name, feed, expected, differences(expected, moved))
    found = output_errors([own_case], lambda _: outputs, checked.precision)
    wrong = [one for one in found if not one.verdict.right]
    return CutResult([_finding(one, expected[one.output], outputs) for one in wrong])


def _finding(error: OutputError, expected: Array, outputs: Feed) -> TensorFinding:
    actual = outputs.get(error.output, np.empty(0))
    return TensorFinding(
        error.output,
        expected.shape,
        actual.shape,
        error.verdict.largest_error,
        error.verdict.case,
        farthest(expected, actual),
    )
