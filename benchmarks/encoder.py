"""Texts of unlike lengths on a GPU: an encoder as large as BERT-base, served, and in a bare loop over captured graphs.

usage: python -m benchmarks.encoder [--server 'NAME=TREE [FLAG ...]'] [--in-flight 256 1024] [--rounds 3] [--seconds 4]
                                    [--checked 20000] [--warm-up 12] [--flags '--front-ends=8'] [--gpus 4]
                                    [--onnx] [--write NAME]

The encoder (12 layers, 768 wide, fp16, random weights, the mean of its states as the answer) is exported by
torch.export for up to 512 tokens, and has no parameter `sizes`: the server chooses them. Requests are single texts as
token ids, over gRPC. Their lengths are the middles of equal parts of a law with a long tail (log-normal around 40, 8 to
512): one h2load for each, all at once, with as many requests in flight as the others.

The bare loop has the same sizes, sorts the texts, and runs batches of 64, one after the other, with copies from and to
pinned memory. Its rate is that of the texts that the server was sent in the same round. Each --server is measured on
the same repository in turn. First a client sends texts of random lengths, and compares every answer with that of the
encoder to the text alone. With --gpus, the same encoder on so many GPUs of the host is measured in turn with that on
one; each GPU then has --in-flight requests. --onnx: the same encoder as ONNX, on ONNX Runtime, and a bare loop of that:
one session of any size on the inputs in the GPU's memory.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.front_ends import parse_server
from benchmarks.gpu import GRAPH_SWITCHES, WARM_UP_SECONDS, cpu_milliseconds
from benchmarks.load_generator import Load, frame, run_load
from benchmarks.machine import processor, version
from benchmarks.ratios import Spread
from benchmarks.rocserve_peer import rocserve_server
from benchmarks.server_process import ServerProcess, free_port
from benchmarks.table import markdown_table
from rocserve.backends.written_sizes import half_steps
from rocserve_client import AsyncClient, Client
from rocserve_client.messages import RequestOptions, encode_infer_request

_RESULTS = Path(__file__).parent / "results"
_MODEL = "encoder"
_INPUTS, _OUTPUT = ["input_ids", "attention_mask"], "pooled"
_LAYERS, _HEADS, _WIDTH, _INNER, _VOCABULARY, _MOST = 12, 12, 768, 3072, 30_522, 512
_MEDIAN, _SPREAD, _FEWEST = 40, 0.8, 8
"""The law of lengths: of its logarithm the spread is the standard deviation."""
_LENGTHS = 128
"""Different lengths, and so processes of h2load."""
_ROWS = 64
_REPETITIONS = 15
_SEED = 38
_TOLERANCE = 3e-2
"""Of answers of size one, in fp16."""
_ONE_BY_ONE = 2000
_CLIENTS_IN_FLIGHT = 128
_OURS = "this"
_MOST_OF_OTHERS, _LONGER = 256, 4
"""Requests in flight with which other servers are loaded, and for how many times as long: else some h2loads may have no
answer in their time."""
_CONFIG = f"""
backend: "{{backend}}"
max_batch_size: {_ROWS}
dynamic_batching {{{{ }}}}
instance_group {{{{ kind: KIND_GPU count: 1 gpus: {{gpus}} }}}}
"""

Array = np.ndarray[Any, Any]


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.joined = nn.Linear(_WIDTH, _WIDTH)
        self.first, self.second = nn.Linear(_WIDTH, _INNER), nn.Linear(_INNER, _WIDTH)
        self.norms = nn.ModuleList([nn.LayerNorm(_WIDTH) for _ in range(2)])

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        rows, length, _ = states.shape
        parts = self.attention(states).view(rows, length, 3, _HEADS, _WIDTH // _HEADS).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], attn_mask=mask)
        states = self.norms[0](states + self.joined(mixed.transpose(1, 2).reshape(rows, length, _WIDTH)))
        result: Tensor = self.norms[1](states + self.second(nn.functional.gelu(self.first(states))))
        return result


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(_VOCABULARY, _WIDTH), nn.Embedding(_MOST, _WIDTH)
        self.layers = nn.ModuleList([_Layer() for _ in range(_LAYERS)])

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        seen = attention_mask.bool()[:, None, None, :]
        for layer in self.layers:
            states = layer(states, seen)
        weights = attention_mask[:, :, None].to(states.dtype)
        return (states * weights).sum(1) / weights.sum(1)


def write_repository(folder: Path, gpus: int, onnx: bool) -> Any:
    """Export the encoder for one GPU and, if there are more, for all of them; return it, on the first GPU."""
    torch.manual_seed(_SEED)
    encoder = Encoder().half().cuda().eval()
    # Two tensors: one that is given twice would be one input to the program.
    examples = tuple(torch.ones((2, 24), dtype=torch.int64, device="cuda") for _ in range(2))
    batch, sequence = torch.export.Dim("batch", max=_ROWS), torch.export.Dim("sequence", min=2, max=_MOST)
    dimensions = {0: batch, 1: sequence}
    shapes = (dimensions, dimensions)
    program = None if onnx else torch.export.export(encoder, examples, dynamic_shapes=shapes)
    for count in sorted({1, gpus}):
        model = folder / model_name(count)
        (model / "1").mkdir(parents=True)
        if program is None:
            file = onnx_file(folder, count)
            names: dict[str, Any] = {"input_names": _INPUTS, "output_names": [_OUTPUT], "dynamic_shapes": shapes}
            torch.onnx.export(encoder, examples, file, dynamo=True, external_data=False, verbose=False, **names)
        else:
            torch.export.save(program, model / "1" / "model.pt2")
        backend = "pytorch" if program is not None else "onnxruntime"
        (model / "config.pbtxt").write_text(_CONFIG.format(backend=backend, gpus=[*range(count)]))
    return encoder


def model_name(gpus: int) -> str:
    return _MODEL if gpus == 1 else f"{_MODEL}_on_{gpus}"


def onnx_file(folder: Path, gpus: int) -> Path:
    return folder / model_name(gpus) / "1" / "model.onnx"


class OnnxEncoder:
    """Runs the encoder's ONNX file on inputs in the GPU's memory, on a separate stream."""

    def __init__(self, file: Path) -> None:
        import onnxruntime

        self._stream = torch.cuda.Stream()
        options = {"device_id": "0", "user_compute_stream": str(self._stream.cuda_stream)}
        provider = next(name for name in onnxruntime.get_available_providers() if name in GRAPH_SWITCHES)
        self._session = onnxruntime.InferenceSession(file, providers=[(provider, options)])
        self._options = onnxruntime.RunOptions()
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def __call__(self, *inputs: Tensor) -> Tensor:
        output = torch.empty((len(inputs[0]), _WIDTH), dtype=torch.float16, device="cuda")
        binding = self._session.io_binding()
        for name, value in zip(_INPUTS, inputs, strict=True):
            binding.bind_input(name, "cuda", 0, np.int64, tuple(value.shape), value.data_ptr())
        binding.bind_output(_OUTPUT, "cuda", 0, np.float16, tuple(output.shape), output.data_ptr())
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        self._session.run_with_iobinding(binding, self._options)
        current.wait_stream(self._stream)
        return output


class BareLoop:
    """The encoder in batches of 64 rows of each size; PyTorch's as captured graphs."""

    def __init__(self, encoder: Any) -> None:
        self.seconds: dict[int, float] = {}
        """Size -> seconds of a batch."""
        with torch.inference_mode():
            for size in half_steps(_MOST):
                self.seconds[size] = self._measured(encoder, size)

    def _measured(self, encoder: Any, size: int) -> float:
        ids, mask = (torch.ones((_ROWS, size), dtype=torch.int64, device="cuda") for _ in range(2))
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                encoder(ids, mask)
        stream.synchronize()
        output = torch.empty((_ROWS, _WIDTH), dtype=torch.float16, device="cuda")

        def run() -> None:
            output.copy_(encoder(ids, mask), non_blocking=True)

        if not isinstance(encoder, OnnxEncoder):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                run()
            run = graph.replay
        staged = [torch.ones((_ROWS, size), dtype=torch.int64, pin_memory=True) for _ in range(2)]
        result = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
        times = []
        for _ in range(_REPETITIONS):
            began = time.perf_counter()
            for own, given in zip((ids, mask), staged, strict=True):
                own.copy_(given, non_blocking=True)
            run()
            result.copy_(output, non_blocking=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return median(times)

    def texts_per_second(self, counts: Mapping[int, int]) -> float:
        """Return the rate for so many texts of each length, sorted."""
        sizes = [next(size for size in self.seconds if size >= length) for length in counts]
        seconds = sum(count * self.seconds[size] / _ROWS for size, count in zip(sizes, counts.values(), strict=True))
        return sum(counts.values()) / seconds


@dataclass(frozen=True, slots=True)
class Served:
    texts_per_second: float
    p50: float
    p99: float
    """Seconds; of all texts, weighted by their numbers."""
    to_bare: float


def lengths() -> Sequence[int]:
    """The middles of equal parts of the law."""
    drawn = np.sort(np.clip(np.random.default_rng(_SEED).lognormal(np.log(_MEDIAN), _SPREAD, 100_000), _FEWEST, _MOST))
    return [int(part[len(part) // 2]) for part in np.array_split(drawn, _LENGTHS)]


def text_of(length: int, seed: int = _SEED) -> dict[str, Array]:
    ids = np.random.default_rng((seed, length)).integers(1, _VOCABULARY, (1, length))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def measure(server: ServerProcess, load: Load, gpus: int, bare: BareLoop, folder: Path) -> Served:
    """Load the model on so many GPUs with `load` for each length; compare it with as many bare loops."""
    all_lengths = lengths()
    files = []
    for number, length in enumerate(all_lengths):
        files.append(folder / f"body-{number}")
        files[-1].write_bytes(frame(encode_infer_request(model_name(gpus), text_of(length), None, RequestOptions())))
    with ThreadPoolExecutor(len(files)) as pool:
        found = [*pool.map(lambda file: run_load(server.address, file, load, file.with_suffix(".log")), files)]
    counts: dict[int, int] = {}
    for length, result in zip(all_lengths, found, strict=True):
        if result.report.body_bytes < result.report.succeeded * 2 * _WIDTH:
            raise RuntimeError(f"{server.name}: answers are too short, so some are errors")
        counts[length] = counts.get(length, 0) + result.report.succeeded
    weights = np.array([result.report.succeeded for result in found])
    rate = sum(result.requests_per_second for result in found)
    p50 = float(np.average([result.p50 for result in found], weights=weights))
    return Served(rate, p50, max(result.p99 for result in found), rate / (gpus * bare.texts_per_second(counts)))


def one_by_one(server: ServerProcess) -> tuple[float, float]:
    """Return p50 and p99 in seconds of texts of random lengths, one in flight."""
    chosen = np.random.default_rng(_SEED).choice(lengths(), _ONE_BY_ONE)
    times = []
    with Client(server.address) as client:
        for length in chosen:
            inputs = text_of(int(length))
            began = time.perf_counter()
            client.infer(_MODEL, inputs)
            times.append(time.perf_counter() - began)
    times.sort()
    return times[len(times) // 2], times[len(times) * 99 // 100]


def wrong_answers(server: ServerProcess, encoder: Any, count: int) -> tuple[int, float]:
    """Send texts of random lengths, beside each other; return how many answers differ from the encoder's, and by how
    much the worst does."""
    sent = np.random.default_rng(_SEED + 1).integers(2, _MOST + 1, count)
    own: dict[int, Array] = {}
    with torch.inference_mode():
        for length in sorted({*map(int, sent)}):
            inputs = [torch.from_numpy(values).cuda() for values in text_of(length, 1).values()]
            own[length] = encoder(*inputs).float().cpu().numpy()
    worst, wrong, upcoming = 0.0, 0, iter(sent.tolist())

    async def run() -> None:
        async with AsyncClient(server.address) as client:
            await asyncio.gather(*(send(client) for _ in range(_CLIENTS_IN_FLIGHT)))

    async def send(client: AsyncClient) -> None:
        nonlocal worst, wrong
        for length in upcoming:
            answer = await client.infer(_MODEL, text_of(length, 1))
            (values,) = answer.outputs.values()
            largest = float(np.abs(values - own[length]).max())
            worst = max(worst, largest)
            wrong += not largest <= _TOLERANCE

    asyncio.run(run())
    return wrong, worst


def shown(values: Sequence[float], digits: int) -> str:
    spread = Spread.of(values)
    return f"{spread.median:,.{digits}f} ({spread.least:,.{digits}f} to {spread.most:,.{digits}f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", type=parse_server, action="append", default=[], metavar="'NAME=TREE [FLAG ...]'")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--checked", type=int, default=20_000, help="answers that are compared")
    parser.add_argument("--warm-up", type=float, default=WARM_UP_SECONDS, help="seconds of load that count for nothing")
    parser.add_argument("--flags", default="", help="further flags of this checkout's server")
    parser.add_argument("--gpus", type=int, default=1, help="more: the same encoder on so many, beside one")
    parser.add_argument("--onnx", action="store_true", help="the encoder as ONNX, on ONNX Runtime")
    parser.add_argument("--write", metavar="NAME", help="also write benchmarks/results/NAME.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        encoder = write_repository(folder / "models", options.gpus, options.onnx)
        bare = BareLoop(OnnxEncoder(onnx_file(folder / "models", 1)) if options.onnx else encoder)
        running = {
            name: stack.enter_context(
                rocserve_server(
                    folder / "models", free_port(), Path(f"/tmp/encoder-{name}.log"), *flags, name=name, tree=tree
                )
            )
            for name, tree, flags in [(_OURS, Path(__file__).parents[1], options.flags.split()), *options.server]
        }
        with Client(running[_OURS].address) as client:
            facts = dict(client.model_metadata(_MODEL).properties)
        wrong, worst = wrong_answers(running[_OURS], encoder, options.checked)
        print(f"{options.checked} answers, {wrong} wrong, largest difference {worst:.2g}", file=sys.stderr, flush=True)
        measure(running[_OURS], Load(1, max(1, _MOST_OF_OTHERS // _LENGTHS), options.warm_up), 1, bare, folder)
        measured: dict[tuple[str, int, int], list[Served]] = {}
        contenders = [*itertools.product(running, sorted({1, options.gpus}))]
        for turn, in_flight in itertools.product(range(options.rounds), options.in_flight):
            for name, gpus in contenders[:: 1 if turn % 2 else -1]:
                if name != _OURS and (in_flight > _MOST_OF_OTHERS or gpus > 1):
                    continue
                seconds = options.seconds * (1 if name == _OURS else _LONGER)
                load = Load(1, in_flight * gpus // _LENGTHS, seconds)
                before = running[name].cpu_seconds_by_process()
                found = measure(running[name], load, gpus, bare, folder)
                measured.setdefault((name, gpus, in_flight), []).append(found)
                print(name, f"{gpus} GPUs, {in_flight} in flight each:", found, file=sys.stderr, flush=True)
                used = cpu_milliseconds(
                    before, running[name].cpu_seconds_by_process(), found.texts_per_second * seconds
                )
                print(f"  CPU ms a text: {used}", file=sys.stderr, flush=True)
        alone = {name: one_by_one(server) for name, server in running.items()}
    lines = [
        [
            name,
            str(gpus),
            str(in_flight * gpus),
            shown([one.texts_per_second for one in found], 0),
            shown([one.to_bare for one in found], 2),
            f"{median(one.p50 for one in found) * 1e3:.1f}",
            f"{median(one.p99 for one in found) * 1e3:.1f}",
        ]
        for (name, gpus, in_flight), found in sorted(measured.items())
    ]
    for name, (p50, p99) in alone.items():
        lines.append([name, "1", "1", f"{1 / p50:,.0f}", "-", f"{p50 * 1e3:.2f}", f"{p99 * 1e3:.2f}"])
    mean = float(np.mean(lengths()))
    engine = f"; ONNX Runtime {version('onnxruntime')}" if options.onnx else ""
    page = (
        f"# An encoder on a GPU\n\n- {torch.cuda.get_device_name(0)}; {processor()}, {os.cpu_count()} cores; PyTorch"
        f" {version('torch')}{engine}\n- bare loop, batches of {_ROWS}, mean length {mean:.0f}:"
        f" {bare.texts_per_second(dict.fromkeys(lengths(), 1)):,.0f} texts/s\n- {options.checked:,} answers of random"
        f" lengths: {wrong} wrong, largest difference {worst:.1g}\n- sizes: {facts.get('sizes', 'none')}; load check:"
        f" {facts.get('load_check', '')}\n\n"
        + markdown_table(["server", "GPUs", "in flight", "texts/s", "to bare", "p50 ms", "p99 ms"], lines)
    )
    if options.gpus > 1:
        one, many = (
            max(
                median(found.texts_per_second for found in measured[_OURS, gpus, in_flight])
                for in_flight in options.in_flight
            )
            for gpus in (1, options.gpus)
        )
        page += f"\n{options.gpus} GPUs answer {many / one:.2f} times the texts/s of one.\n"
    print(page)
    if options.write:
        (_RESULTS / f"{options.write}.md").write_text(f"{page}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
