"""ResNet-50 on a GPU: a bare loop over captured graphs, and the same program served: `python -m benchmarks.gpu`.

Single images of 150,528 bytes (UINT8) come by gRPC from processes of clients; weights are random, in fp16. --cpu
measures the same on the CPU, in fp32.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.rocserve_peer import rocserve_server
from benchmarks.server_process import free_port
from rocserve_client import AsyncClient, Client

SIDE = 224
MODEL = "resnet50"
READY_SECONDS = 300.0
CONFIG = """
max_batch_size: {most}
dynamic_batching {{ max_queue_delay_microseconds: {delay} }}
instance_group {{ {place} count: {instances} }}
parameters {{ key: "engine" value {{ string_value: "{engine}" }} }}
"""


class Bottleneck(nn.Module):
    """Three convolutions around a short cut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.path = nn.Sequential(
            *_convolution(inputs, width, 1, 1), nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride), nn.ReLU(inplace=True),
            *_convolution(width, outputs, 1, 1),
        )  # fmt: skip
        is_same = stride == 1 and inputs == outputs
        self.short_cut = nn.Identity() if is_same else nn.Sequential(*_convolution(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.path(x) + self.short_cut(x))


class ResNet50(nn.Module):
    """Images as UINT8, channels first, to 1000 scores."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        inputs = 64
        for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for number in range(count):
                blocks.append(Bottleneck(inputs, width, stride if number == 0 else 1))
                inputs = 4 * width
        self.dtype = dtype
        self.stem = nn.Sequential(*_convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.Sequential(*blocks)
        self.scores = nn.Linear(inputs, 1000)

    def forward(self, image: Tensor) -> Tensor:
        x = (image.to(self.dtype) / 255 - 0.45) / 0.225
        return self.scores(self.blocks(self.stem(x)).mean((2, 3))).float()


def _convolution(inputs: int, outputs: int, size: int, stride: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)


def write_model(repository: Path, on_gpu: bool, options: argparse.Namespace) -> Path:
    """A folder with the exported network; its file."""
    torch.manual_seed(0)
    dtype = torch.float16 if on_gpu else torch.float32
    network = ResNet50(dtype).eval().to(dtype).to(memory_format=torch.channels_last)
    example = torch.zeros(2, 3, SIDE, SIDE, dtype=torch.uint8)
    rows = torch.export.Dim("rows", max=1024)
    file = repository / MODEL / "1/model.pt2"
    file.parent.mkdir(parents=True)
    torch.export.save(torch.export.export(network, (example,), dynamic_shapes={"image": {0: rows}}), file)
    place = f"kind: KIND_GPU gpus: [ {options.device} ]" if on_gpu else "kind: KIND_CPU"
    text = CONFIG.format(
        most=max(options.sizes), delay=options.delay, place=place, instances=options.instances, engine=options.engine
    )
    (repository / MODEL / "config.pbtxt").write_text(text)
    return file


def bare_loop(file: Path, size: int, device: torch.device, seconds: float) -> float:
    """Images a second at a batch size: from pinned memory, through a graph, and back."""
    program = torch.export.load(file)
    if device.type == "cpu":
        module, images = program.module(), torch.zeros(size, 3, SIDE, SIDE, dtype=torch.uint8)
        return _rate(lambda: module(images), size, seconds)
    from torch.export.passes import move_to_device_pass

    module = move_to_device_pass(program, device).module()
    images = torch.zeros(size, 3, SIDE, SIDE, dtype=torch.uint8).pin_memory()
    placed = images.to(device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        for _ in range(3):
            module(placed)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        scores = module(placed)
    answer = torch.empty(scores.shape, dtype=scores.dtype).pin_memory()

    def run() -> None:
        with torch.cuda.stream(stream):
            placed.copy_(images, non_blocking=True)
            graph.replay()
            answer.copy_(scores, non_blocking=True)
        stream.synchronize()

    return _rate(run, size, seconds)


def _rate(run: Any, size: int, seconds: float) -> float:
    for _ in range(3):
        run()
    count, start = 0, time.perf_counter()
    while (taken := time.perf_counter() - start) < seconds:
        run()
        count += size
    return count / taken


def ask(port: int, at_once: int, rows: int, seconds: float, answered: Any) -> None:
    """A process of clients; puts the latencies of what was answered in the time into `answered`."""

    async def follow() -> list[float]:
        latencies: list[float] = []
        image = np.zeros((rows, 3, SIDE, SIDE), np.uint8)
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            await client.infer(MODEL, {"image": image})
            end = time.perf_counter() + seconds

            async def one() -> None:
                while (start := time.perf_counter()) < end:
                    await client.infer(MODEL, {"image": image})
                    latencies.append(time.perf_counter() - start)

            await asyncio.gather(*(one() for _ in range(at_once)))
        return latencies

    answered.put(asyncio.run(follow()))


def served(port: int, processes: int, in_flight: int, rows: int, seconds: float) -> tuple[float, list[float]]:
    """Images a second, and latencies in seconds, ascending."""
    context = multiprocessing.get_context("spawn")
    answered: Any = context.Queue()
    arguments = (port, max(1, in_flight // processes), rows, seconds, answered)
    clients = [context.Process(target=ask, args=arguments) for _ in range(min(processes, in_flight))]
    for client in clients:
        client.start()
    latencies = sorted(latency for _ in clients for latency in answered.get())
    for client in clients:
        client.join()
    return len(latencies) * rows / seconds, latencies


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--engine", default="eager")
    parser.add_argument("--instances", type=int, default=1)
    parser.add_argument("--delay", type=int, default=0, help="max_queue_delay_microseconds")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 8, 16, 32, 64], help="of the bare loop's batches")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 16, 64, 256], help="requests at once")
    parser.add_argument("--rows", type=int, default=1, help="images in a request")
    parser.add_argument("--processes", type=int, default=6, help="of clients")
    parser.add_argument("--flags", nargs="*", default=[], help="of rocserve serve")
    options = parser.parse_args(arguments)
    device = torch.device("cpu") if options.cpu else torch.device("cuda", options.device)
    name = "CPU" if options.cpu else torch.cuda.get_device_name(device)
    print(f"{name}, PyTorch {torch.__version__}, engine {options.engine}, {options.instances} instance(s)")
    with tempfile.TemporaryDirectory() as folder:
        file = write_model(Path(folder, "repository"), not options.cpu, options)
        port = free_port()
        with torch.inference_mode():
            for size in options.sizes:
                print(f"bare, batch {size}: {bare_loop(file, size, device, options.seconds):.0f} images/s", flush=True)
        if device.type != "cpu":
            torch.cuda.empty_cache()
        with rocserve_server(
            Path(folder, "repository"), port, Path(folder, "log"), *options.flags, tree=Path(__file__).parents[1]
        ):
            with Client(f"127.0.0.1:{port}") as client:
                client.wait_until_ready(READY_SECONDS, model=MODEL)
                print(dict(client.model_metadata(MODEL).properties))
            for in_flight in options.in_flight:
                rate, latencies = served(port, options.processes, in_flight, options.rows, options.seconds)
                half, late = (1000 * latencies[int(part * (len(latencies) - 1))] for part in (0.5, 0.99))
                print(
                    f"served, {in_flight} in flight: {rate:.0f} images/s, p50 {half:.2f} ms, p99 {late:.2f} ms",
                    flush=True,
                )


if __name__ == "__main__":
    main()
