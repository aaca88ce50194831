"""An ensemble's engine calls without a server: the members' engines in one process, called one after the other.

It is what the served ensemble is measured against, and what its twin runs inside Triton. Of rocserve it imports only
the engines and the plain types, so it works in Triton's environment too.

As a process, `python -m benchmarks.bare_ensemble STEPS IMAGE INPUT OUTPUT`: each line on standard input, "BATCH
SECONDS", runs the ensemble of STEPS on batches of the image in file IMAGE for that time and is answered by a line of
JSON: images, seconds, and the value of OUTPUT for the first image. Between lines it sleeps.
"""

from __future__ import annotations

import importlib
import json
import pickle
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from rocserve.backends.base import Batch, LoadedModel, ModelSource
from rocserve.core.tensors import Tensor, tensor_from_numpy


@dataclass(frozen=True, slots=True)
class BareStep:
    """A member of an ensemble, as its engine loads it."""

    engine: str
    """The module that loads the member."""
    source: ModelSource
    input_map: Mapping[str, str]
    """The member's input name -> the ensemble tensor's name."""
    output_map: Mapping[str, str]
    """The member's output name -> the ensemble tensor's name."""


class BareEnsemble:
    """The loaded members, in the order of the ensemble's steps."""

    def __init__(self, steps: Sequence[BareStep]) -> None:
        """Load every member; errors of engines are raised unchanged."""
        self._members: list[tuple[BareStep, LoadedModel]] = []
        for step in steps:
            member: LoadedModel = importlib.import_module(step.engine).load(step.source)
            member.warm_up([])
            self._members.append((step, member))

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
        """The named tensors for a batch of requests with one row each; an array of bytes objects is BYTES.

        Raises:
            ServeError: an engine failed the batch or a row of it.
        """
        tensors = {name: tensor_from_numpy(name, array) for name, array in inputs.items()}
        rows = next(iter(tensors.values())).shape[0]
        for step, member in self._members:
            batch = Batch(
                inputs={name: renamed(tensors[source], name) for name, source in step.input_map.items()},
                requested_outputs=tuple(step.output_map),
                request_sizes=(1,) * rows,
            )
            result = member.execute(batch)
            for error in result.failures.values():
                raise error
            for name, output in result.outputs.items():
                target = step.output_map[name]
                tensor = output if isinstance(output, Tensor) else tensor_from_numpy(target, output)
                tensors[target] = renamed(tensor, target)
        return {name: tensors[name].numpy() for name in outputs}


def renamed(tensor: Tensor, name: str) -> Tensor:
    return Tensor(name, tensor.datatype, tensor.shape, tensor.data)


def write_steps(steps: Sequence[BareStep], path: Path) -> None:
    path.write_bytes(pickle.dumps(list(steps)))


def read_steps(path: Path) -> list[BareStep]:
    """Read what `write_steps` wrote. Only for files of the benchmarks themselves: pickle runs what it reads."""
    steps: list[BareStep] = pickle.loads(path.read_bytes())
    return steps


def image_batch(encoded: bytes, count: int) -> NDArray[numpy.object_]:
    """One image `count` times, as BYTES of shape [count, 1]."""
    batch = numpy.empty((count, 1), dtype=numpy.object_)
    batch[:] = encoded
    return batch


def main() -> None:
    steps_file, image_file, input_name, output_name = sys.argv[1:]
    ensemble = BareEnsemble(read_steps(Path(steps_file)))
    encoded = Path(image_file).read_bytes()
    for line in sys.stdin:
        batch_size, seconds = line.split()
        images = image_batch(encoded, int(batch_size))
        count = 0
        begin = now = time.perf_counter()
        while now - begin < float(seconds):
            outputs = ensemble.run({input_name: images}, [output_name])
            count += len(images)
            now = time.perf_counter()
        first = outputs[output_name].reshape(-1)[0]
        answer = first.decode() if isinstance(first, bytes) else str(first)
        print(json.dumps({"images": count, "seconds": now - begin, "answer": answer}), flush=True)


if __name__ == "__main__":
    main()
