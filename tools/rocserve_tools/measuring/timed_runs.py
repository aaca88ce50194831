"""Times the runs of a model in workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from rocserve.load_check.tensors import Array
from rocserve.repository.engine_plan import EnginePlan
from rocserve.repository.load_order import LoadOrder
from rocserve.verbs.workers import LoadedWorkers, ToolWorkers, titled
from rocserve.workers.instance import Instance
from rocserve_tools.measuring import timed_engine
from rocserve_tools.measuring.timed_engine import ENGINE, LATENCIES, ORDER

Sample = Mapping[str, Array]
"""Inputs of a run by name; those that no output depends on may be missing."""


class Samples(Protocol):
    """Inputs of several runs."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sample]: ...


@dataclass(frozen=True, slots=True)
class Runs:
    """Holds what runs gave."""

    latencies: Sequence[float]
    """Seconds of each run, of all instances."""
    outputs: Sequence[Array]
    """Of the last run, in the model's order, without those of BYTES."""


async def open_timed(workers: ToolWorkers, order: LoadOrder, plan: EnginePlan, title: str) -> LoadedWorkers:
    """Load the model and warm it up, as ToolWorkers.open, so that each run of the engine is timed. Raises
    ServeError."""
    config = order.definition.config
    parameters = {**config.parameters, ENGINE: plan.engine.module}
    definition = replace(order.definition, config=replace(config, parameters=parameters))
    plan = replace(plan, engine=replace(plan.engine, module=timed_engine.__name__))
    return await workers.open(replace(order, definition=definition), plan, title)


async def timed_runs(timed: LoadedWorkers, samples: Samples, repeats: int, seconds: float = 0.0) -> Runs:
    """Run samples in turn, on all instances at the same time: on each, each sample equally often, and together
    `repeats` times and for `seconds` at least. Raises ServeError if a run fails."""

    async def of(instance: Instance) -> Runs:
        """Return the runs of one instance; the outputs are those of the last."""
        # All runs of a single sample are one order, so that nothing is between them.
        order = np.array([repeats, seconds] if len(samples) == 1 else [1, 0])
        latencies: list[float] = []
        outputs: Mapping[str, Array] = {}
        end = time.monotonic() + seconds
        while len(latencies) < max(repeats, 1) or time.monotonic() < end:
            for sample in samples:
                outputs = dict(await timed.run_on(instance, {**sample, ORDER: order}, ()))
                latencies += outputs.pop(LATENCIES).tolist()
        return Runs(latencies, [*outputs.values()])

    with titled(timed.title):
        found = await asyncio.gather(*map(of, timed.open_instances()))
    return Runs([latency for runs in found for latency in runs.latencies], found[0].outputs)
