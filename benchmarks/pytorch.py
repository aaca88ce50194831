"""PyTorch on the CPU: ResNet-50 in a bare loop and served over gRPC, alternately: `python -m benchmarks.pytorch`. A
request is a whole batch, and two are in flight, so that the worker always has the next one. The ratio is that of the
medians of all rounds of one run."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu import MODEL, READY_SECONDS, SIDE, write_model
from benchmarks.rocserve_peer import rocserve_server
from benchmarks.server_process import free_port
from rocserve_client import AsyncClient, Client

UNDER_WAY = 2


def bare_seconds(module: Callable[[torch.Tensor], torch.Tensor], images: np.ndarray, batches: int) -> float:
    """Seconds of a batch, from an array to an array."""
    start = time.perf_counter()
    with torch.inference_mode():
        for _ in range(batches):
            module(torch.from_numpy(images)).numpy()
    return (time.perf_counter() - start) / batches


async def served_seconds(address: str, images: np.ndarray, batches: int) -> float:
    """Seconds of a batch, averaged over concurrent ones."""
    async with AsyncClient(address) as client:

        async def ask(count: int) -> None:
            for _ in range(count):
                await client.infer(MODEL, {"image": images})

        await ask(1)
        start = time.perf_counter()
        await asyncio.gather(*(ask(batches // UNDER_WAY) for _ in range(UNDER_WAY)))
        return (time.perf_counter() - start) / (batches // UNDER_WAY * UNDER_WAY)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="eager")
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 16, 32], help="of batches")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=8, help="in a round")
    options = parser.parse_args(arguments)
    print(f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads, engine {options.engine}")
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder, "repository")
        module = torch.export.load(write_model(repository, [], sizes=options.sizes, engine=options.engine)).module()
        port = free_port()
        with rocserve_server(repository, port, Path(folder, "log"), tree=Path(__file__).parents[1]):
            with Client(address := f"127.0.0.1:{port}") as client:
                client.wait_until_ready(READY_SECONDS, model=MODEL)
            for size in options.sizes:
                images = np.zeros((size, 3, SIDE, SIDE), np.uint8)
                bare_seconds(module, images, 1)
                bare, served = [], []
                for _ in range(options.rounds):
                    bare.append(bare_seconds(module, images, options.batches))
                    served.append(asyncio.run(served_seconds(address, images, options.batches)))
                slow, fast = (statistics.median(one) for one in (served, bare))
                print(
                    f"batch {size}: bare {size / fast:.2f} images/s, served {size / slow:.2f}, ratio {fast / slow:.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
