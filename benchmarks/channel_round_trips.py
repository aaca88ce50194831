"""How many batches a second pass through one worker's channel, and what of the time is the worker's own.

usage: channel_round_trips.py [SECONDS]

A 16-int add/sub model runs in ONNX Runtime behind a Channel, one request a batch, at depth 1 and 2; beside it an engine
that only adds in numpy. "worker" is the worker's processor time for a batch without the engine's call.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx

from rocserve.core.datatypes import DataType
from rocserve.core.model_config import InputConfig, InstanceKind, ModelConfig, OutputConfig
from rocserve.workers.batch_inputs import InputLayout
from rocserve.workers.channel import BatchOutcome, Channel
from rocserve.workers.completion import CompletionThread
from rocserve.workers.group import WorkerGroup, WorkerPlan
from rocserve.workers.launcher import WorkerLauncher
from rocserve.workers.messages import BatchLayout, Load, TensorHead

ENGINES = Path(__file__).resolve().parent.parent / "tests" / "unit" / "workers" / "engines"


class Quiet:
    """A group's events, ignored."""

    def channel_opened(self, channel: Channel) -> None: ...
    def channel_lost(self, channel: Channel, reason: Exception) -> None: ...
    def restarting(self, reason: str, delay_seconds: float) -> None: ...
    def progress(self, text: str) -> None: ...
    def described(self, properties: Mapping[str, str]) -> None: ...
    def recovered(self) -> None: ...


def write_add_sub(path: Path) -> None:
    """A graph of one Add and one Sub."""
    kind = onnx.TensorProto.INT32
    names = ("INPUT0", "INPUT1", "OUTPUT0", "OUTPUT1")
    values = [onnx.helper.make_tensor_value_info(name, kind, ["n", 16]) for name in names]
    nodes = [
        onnx.helper.make_node("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"]),
        onnx.helper.make_node("Sub", ["INPUT0", "INPUT1"], ["OUTPUT1"]),
    ]
    graph = onnx.helper.make_graph(nodes, "add_sub", values[:2], values[2:])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=9), path)


def model_config(names: tuple[str, ...]) -> ModelConfig:
    inputs = tuple(InputConfig(name, DataType.INT32, (16,)) for name in names[:2])
    outputs = tuple(OutputConfig(name, DataType.INT32, (16,)) for name in names[2:])
    return ModelConfig("add_sub", max_batch_size=64, inputs=inputs, outputs=outputs)


def round_trips(channel: Channel, names: tuple[str, ...], depth: int, rows: int, seconds: float) -> float:
    """Batches a second with `depth` of them under way; each is of `rows` requests of one row."""
    data = np.arange(16, dtype=np.int32).tobytes()
    heads = tuple(TensorHead(name, DataType.INT32, (rows, 16)) for name in names[:2])
    layout = InputLayout(BatchLayout(heads, names[2:], (1,) * rows))
    requests = [(data, data)] * rows
    done = threading.Event()
    finished = 0
    running = depth
    end = time.monotonic() + seconds

    def start() -> None:
        channel.execute(layout, requests, on_outcome)

    def on_outcome(outcome: BatchOutcome) -> None:
        nonlocal finished, running
        assert outcome.error is None, outcome.error
        for index in range(rows):
            outcome.outputs_of(index)
        outcome.release()
        finished += 1
        if time.monotonic() < end:
            start()
        else:
            running -= 1
            if not running:
                done.set()

    for _ in range(depth):
        start()
    done.wait()
    return finished / seconds


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(engine: str, names: tuple[str, ...], folder: Path, seconds: float) -> None:
    log = logging.getLogger("benchmark")
    completion = CompletionThread(log)
    completion.start()
    launcher = WorkerLauncher(("numpy", "onnxruntime"), log)
    launcher.start()
    config = model_config(names)
    load = Load(
        "add_sub", 1, str(folder), str(folder), str(folder / "model.onnx"), engine, config, InstanceKind.CPU, None, 1
    )
    group = WorkerGroup(
        load=load,
        plans=[WorkerPlan(InstanceKind.CPU, None, 1)],
        launcher=launcher,
        completion=completion,
        events=Quiet(),
        log=log,
        forked=True,
    )
    await group.load()
    await group.warm_up(config)
    (channel,) = group.channels
    for depth, rows in ((1, 1), (2, 1), (1, 32), (2, 32)):
        before = processor_seconds(group.pids[0]), time.process_time()
        rate = await asyncio.to_thread(round_trips, channel, names, depth, rows, seconds)
        worker = (processor_seconds(group.pids[0]) - before[0]) / (rate * seconds) * 1e6
        server = (time.process_time() - before[1]) / (rate * seconds) * 1e6
        print(
            f"{engine:30s} depth {depth} requests {rows:3d}: {rate:8.0f} batches/s"
            f"  processor time a batch: worker {worker:5.1f} us, server {server:5.1f} us"
        )
    await group.stop(5.0)
    await launcher.close()
    completion.stop()


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 3.0
    os.environ["PYTHONPATH"] = str(ENGINES)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_add_sub(folder / "model.onnx")
        onnx_names = ("INPUT0", "INPUT1", "OUTPUT0", "OUTPUT1")
        asyncio.run(measure("rocserve_test_onnx_engine", onnx_names, folder, seconds))
        asyncio.run(measure("rocserve_test_engine", ("A", "B", "SUM", "DIFFERENCE"), folder, seconds))


if __name__ == "__main__":
    main()
