"""A measuring process: `python -m rocserve.tools.measuring.child ANSWERS LIFELINE`, two descriptors; orders come by its
standard input."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from rocserve.core.exit_with_parent import exit_with_parent
from rocserve.core.plain import from_json, to_json
from rocserve.tools.measuring.engines import Array, OpenedEngine, Run, open_engine, reason_of
from rocserve.tools.measuring.files import inputs_of, save_outputs
from rocserve.tools.measuring.messages import Answer, Measure, Measured, MeasuredInput, Opened, Order

_STANDARD_INPUT = 0


def main(answers: int, parent_pipe: int) -> None:
    """Answer each order until there are no more."""
    for descriptor in (answers, parent_pipe):
        os.set_inheritable(descriptor, False)
    held = exit_with_parent(parent_pipe)
    engine: OpenedEngine | None = None
    with open(_STANDARD_INPUT, "rb") as orders, os.fdopen(answers, "wb", buffering=0) as writing:
        for line in orders:
            order = from_json(Order, line)
            try:
                if order.engine is not None:
                    engine = open_engine(order.engine)
                    answer = Answer(opened=Opened(engine.description, engine.signature))
                else:
                    assert engine is not None and order.measure is not None, "it is opened before"
                    answer = Answer(measured=measure(engine, order.measure))
            except Exception as error:
                answer = Answer(failure=reason_of(error))
            writing.write(to_json(answer) + b"\n")
    os.close(held)


def measure(engine: OpenedEngine, order: Measure) -> Measured:
    """Time runs as the order says."""
    run = engine.run_of(order.batch_size)
    inputs = _inputs(order.inputs, order.data_file)
    if order.outputs_file:
        save_outputs(order.outputs_file, run(inputs))
    time.sleep(max(0.0, order.begin_at - time.monotonic()))
    begun = time.monotonic()
    if order.threads == 1:
        latencies = _timed_runs(run, inputs, order, begun)
    else:
        gate = threading.Barrier(order.threads)
        with ThreadPoolExecutor(order.threads) as pool:
            runs = [pool.submit(_gated_runs, gate, run, inputs, order, begun) for _ in range(order.threads)]
            latencies = [latency for one in runs for latency in one.result()]
    return Measured(tuple(latencies), time.monotonic() - begun)


@lru_cache(maxsize=1)
def _inputs(inputs: tuple[MeasuredInput, ...], data_file: str) -> Mapping[str, Array]:
    """Made for the warm-up, and there when it is time to begin."""
    return inputs_of(inputs, data_file)


def _gated_runs(
    gate: threading.Barrier, run: Run, inputs: Mapping[str, Array], order: Measure, begun: float
) -> list[float]:
    gate.wait()
    return _timed_runs(run, inputs, order, begun)


def _timed_runs(run: Run, inputs: Mapping[str, Array], order: Measure, begun: float) -> list[float]:
    latencies: list[float] = []
    end = begun + order.seconds
    while len(latencies) < order.repeats or time.monotonic() < end:
        before = time.perf_counter()
        run(inputs)
        latencies.append(time.perf_counter() - before)
    return latencies


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
