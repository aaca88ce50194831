"""Runs in a worker instead of an engine: loads the model in the engine, and times each of its runs.

The runs are timed next to the engine, so that the way from the tool to the worker does not count.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rocserve.backends.base import Batch, BatchResult, LoadedModel, ModelSource, model_properties
from rocserve.core.requests import Signature
from rocserve.core.tensors import Tensor

ENGINE = "rocserve:engine"
"""Parameter with the module of the engine."""
ORDER = "rocserve:order"
"""Input: the least number of runs, and the seconds that they take at least."""
LATENCIES = "rocserve:latencies"
"""Output: the seconds of each run."""


def load(model: ModelSource) -> TimedModel:
    parameters = dict(model.config.parameters)
    engine = importlib.import_module(parameters.pop(ENGINE))
    return TimedModel(engine.load(replace(model, config=replace(model.config, parameters=parameters))))


@dataclass(frozen=True, slots=True)
class TimedModel:
    """Implements LoadedModel. Threads may call `execute` at the same time if the engine allows it."""

    _model: LoadedModel

    @property
    def signature(self) -> Signature:
        return self._model.signature

    @property
    def properties(self) -> Mapping[str, str]:
        return model_properties(self._model)

    def warm_up(self, samples: Sequence[Batch]) -> None:
        """Warm up the model without samples, and wait until all its batch sizes are in service or have failed."""
        self._model.warm_up(())
        if (wait := getattr(self._model, "wait", None)) is not None:
            wait()

    def execute(self, batch: Batch) -> BatchResult:
        """Run the batch as the input ORDER says. Returns the outputs of the last run that are not BYTES."""
        inputs = dict(batch.inputs)
        repeats, seconds = inputs.pop(ORDER).numpy().tolist()
        outputs = tuple(spec.name for spec in self.signature.outputs)
        ordered = Batch(inputs, outputs, (1,))
        latencies: list[float] = []
        end = time.monotonic() + seconds
        while len(latencies) < repeats or time.monotonic() < end:
            before = time.perf_counter()
            result = self._model.execute(ordered)
            latencies.append(time.perf_counter() - before)
            for failure in result.failures.values():
                raise failure
        arrays = {name: one.numpy() if isinstance(one, Tensor) else one for name, one in result.outputs.items()}
        kept = {name: arrays[name] for name in outputs or arrays if arrays[name].dtype.kind in "biuf"}
        return BatchResult({**kept, LATENCIES: np.array(latencies)})

    def close(self) -> None:
        self._model.close()
