"""ResNet-50 on a GPU: a bare loop over captured graphs, and the same program served: `python -m benchmarks.gpu`.

Single images of 150,528 bytes (UINT8) come by gRPC from h2load; weights are random, in fp16. --cpu measures the same on
the CPU, in fp32. --onnx: the same network as ONNX, on ONNX Runtime, and a bare loop of that: on a GPU by a captured
graph with bound memory. --jpeg: images of 500 x 375 pixels, decoded by rocAL's CPU engine in so many processes, alone
and before the network; and what the cores decode without a server.
"""

from __future__ import annotations

import argparse
import functools
import io
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from benchmarks.load_generator import Load, frame, run_load
from benchmarks.rocserve_peer import rocserve_server
from benchmarks.server_process import free_port
from rocserve_client import Client, ModelStatistics
from rocserve_client.messages import RequestOptions, encode_infer_request

SIDE = 224
MODEL = "resnet50"
ONNX = "onnxruntime"
READY_SECONDS = 300.0
MOST_LOAD_THREADS = 8
"""Threads of h2load for each GPU: one sends about 3,000 images a second."""
WARM_UP_SECONDS = 12.0
"""Front ends come after two seconds of load. After 18 s the server renews connections: h2load then fails."""
SCORES_BYTES = 4000
"""Size of an image's scores; no answer is smaller."""
GRAPH_SWITCHES = {"CUDAExecutionProvider": "enable_cuda_graph", "ROCMExecutionProvider": "enable_hip_graph"}
CONFIG = """
{platform}
max_batch_size: {most}
dynamic_batching {{ max_queue_delay_microseconds: {delay} }}
instance_group {{ {place} count: {instances} }}
parameters {{ key: "engine" value {{ string_value: "{engine}" }} }}
parameters {{ key: "{parameter}" value {{ string_value: "{value}" }} }}
"""

PIPELINE = """
{"decoder": {"max_width": 0, "max_height": 0}, "pipeline": [
  {"operation": "resize", "resize_shorter": 256},
  {"operation": "crop", "crop_w": 224, "crop_h": 224, "crop_pos_x": 58, "crop_pos_y": 16, "is_output": true}]}
"""
DECODE_CONFIG = """
platform: "rocal_json"
max_batch_size: 16
input {{ name: "encoded" data_type: TYPE_STRING dims: 1 }}
output {{ name: "image" data_type: TYPE_UINT8 dims: [ 3, 224, 224 ] }}
dynamic_batching {{ }}
parameters {{ key: "threads" value {{ string_value: "2" }} }}
{groups}
"""
JPEG_CONFIG = """
platform: "ensemble"
max_batch_size: 1
input { name: "encoded" data_type: TYPE_STRING dims: 1 }
output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: 1000 }
ensemble_scheduling {
  step { model_name: "decode" model_version: -1
    input_map { key: "encoded" value: "encoded" } output_map { key: "image" value: "image" } }
  step { model_name: "resnet50" model_version: -1
    input_map { key: "image" value: "image" } output_map { key: "OUTPUT__0" value: "OUTPUT__0" } }
}
"""


class Bottleneck(nn.Module):
    """Three convolutions with a shortcut."""

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


def write_model(
    repository: Path,
    gpus: Sequence[int],
    *,
    sizes: Sequence[int],
    engine: str,
    name: str = MODEL,
    delay: int = 0,
    instances: int = 1,
    batches_at_once: int = 1,
) -> Path:
    """Write a folder with the exported network; return its file.

    Args:
        gpus: none = on the CPU.
        sizes: batch sizes; only ONNX Runtime is limited to them.
        engine: onnxruntime, or one of the pytorch backend's.
        instances: of each GPU.
    """
    torch.manual_seed(0)
    dtype = torch.float16 if gpus else torch.float32
    network = ResNet50(dtype).eval().to(dtype).to(memory_format=torch.channels_last)
    example = torch.zeros(2, 3, SIDE, SIDE, dtype=torch.uint8)
    rows = torch.export.Dim("rows", max=1024)
    is_onnx = engine == ONNX
    file = repository / name / ("1/model.onnx" if is_onnx else "1/model.pt2")
    file.parent.mkdir(parents=True)
    exported = torch.export.export(network, (example,), dynamic_shapes={"image": {0: rows}})
    if is_onnx:
        names = {"input_names": ["image"], "output_names": ["OUTPUT__0"]}
        torch.onnx.export(exported, (), file, dynamo=True, external_data=False, verbose=False, **names)
    else:
        torch.export.save(exported, file)
    place = f"kind: KIND_GPU gpus: {[*gpus]}" if gpus else "kind: KIND_CPU"
    parameter, value = (
        ("batch_sizes", ", ".join(map(str, sizes))) if is_onnx else ("batches_at_once", str(batches_at_once))
    )
    text = CONFIG.format(
        platform='platform: "onnxruntime_onnx"' if is_onnx else "",
        most=max(sizes),
        delay=delay,
        place=place,
        instances=instances,
        engine=engine,
        parameter=parameter,
        value=value,
    )
    (repository / name / "config.pbtxt").write_text(text)
    return file


def write_jpeg_models(repository: Path, decoders: int) -> None:
    """Write the decoding model, with this many processes, and the ensemble of it and the network."""
    pipeline = repository / "decode/1/pipeline.json"
    pipeline.parent.mkdir(parents=True)
    pipeline.write_text(PIPELINE)
    groups = "instance_group { kind: KIND_CPU count: 2 }\n" * decoders
    (repository / "decode/config.pbtxt").write_text(DECODE_CONFIG.format(groups=groups))
    (repository / "jpeg/1").mkdir(parents=True)
    (repository / "jpeg/config.pbtxt").write_text(JPEG_CONFIG)


def photograph() -> bytes:
    """A JPEG of 500 x 375 pixels."""
    rows, columns = np.mgrid[0:375, 0:500]
    noise = np.random.default_rng(0).integers(0, 24, (375, 500, 3))
    pixels = np.stack([columns * 230 // 500, rows * 230 // 375, (columns + rows) * 230 // 875], -1) + noise
    encoded = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(encoded, "JPEG", quality=90)
    return encoded.getvalue()


def decode(file: bytes, seconds: float) -> float:
    """Images a second that one process decodes, resizes and crops."""
    cv2.setNumThreads(1)
    data = np.frombuffer(file, np.uint8)

    def run() -> None:
        image = cv2.resize(cv2.imdecode(data, cv2.IMREAD_COLOR), (341, 256), interpolation=cv2.INTER_LINEAR)
        np.ascontiguousarray(image[16:240, 58:282, ::-1].transpose(2, 0, 1))

    return _rate(run, 1, seconds)


def bare_run(file: Path, size: int, device: torch.device) -> Callable[[], None]:
    """Make a function that runs a batch: from pinned memory, through a graph, and back."""
    program = torch.export.load(file)
    if device.type == "cpu":
        module, images = program.module(), torch.zeros(size, 3, SIDE, SIDE, dtype=torch.uint8)
        return lambda: module(images)
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

    return run


def bare_onnx_run(file: Path, size: int, device: torch.device) -> Callable[[], None]:
    """The same with ONNX Runtime: on a GPU with the graph that its provider captures, on bound memory."""
    import onnxruntime

    images = torch.zeros(size, 3, SIDE, SIDE, dtype=torch.uint8)
    if device.type == "cpu":
        on_cpu = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        return lambda: on_cpu.run(None, {"image": images.numpy()})
    provider = next(name for name in onnxruntime.get_available_providers() if name in GRAPH_SWITCHES)
    options = {"device_id": str(device.index), GRAPH_SWITCHES[provider]: "1"}
    session = onnxruntime.InferenceSession(file, providers=[(provider, options)])
    images = images.pin_memory()
    placed = images.to(device)
    scores = torch.empty(size, SCORES_BYTES // 4, device=device)
    answer = torch.empty(scores.shape).pin_memory()
    binding = session.io_binding()
    binding.bind_input("image", "cuda", device.index, np.uint8, tuple(images.shape), placed.data_ptr())
    binding.bind_output("OUTPUT__0", "cuda", device.index, np.float32, tuple(scores.shape), scores.data_ptr())
    stream = torch.cuda.current_stream(device)

    def run() -> None:
        placed.copy_(images, non_blocking=True)
        stream.synchronize()
        session.run_with_iobinding(binding)
        answer.copy_(scores, non_blocking=True)
        stream.synchronize()

    return run


def rested(run: Callable[[], None], seconds: float) -> float:
    """The median seconds of a run that begins a millisecond after the previous one, like a lone client's."""
    taken = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        time.sleep(0.001)
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return sorted(taken)[len(taken) // 2]


def _rate(run: Any, size: int, seconds: float) -> float:
    for _ in range(3):
        run()
    count, start = 0, time.perf_counter()
    while (taken := time.perf_counter() - start) < seconds:
        run()
        count += size
    return count / taken


def phases(before: ModelStatistics, after: ModelStatistics) -> str:
    """The batch sizes between two statistics, and the mean milliseconds of a request in each phase."""
    count = max(1, after.queue.count - before.queue.count)
    rows = (after.inference_count - before.inference_count) / max(1, after.execution_count - before.execution_count)
    parts = []
    for name in ("queue", "compute_input", "compute_infer", "compute_output"):
        parts.append(f"{name} {(getattr(after, name).ns - getattr(before, name).ns) / count / 1e6:.2f}")
    return f"batches of {rows:.1f}, {', '.join(parts)}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--gpus", type=int, default=1, help="more: the same network on so many, beside one")
    parser.add_argument("--engine", default="eager")
    parser.add_argument("--onnx", action="store_const", dest="engine", const=ONNX, help="--engine onnxruntime")
    parser.add_argument("--instances", type=int, default=1)
    parser.add_argument("--batches-at-once", type=int, default=2)
    parser.add_argument("--delay", type=int, default=0, help="max_queue_delay_microseconds")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--warm-up", type=float, default=WARM_UP_SECONDS, help="seconds of load that count for nothing")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 8, 16, 32, 64], help="of the bare loop's batches")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 16, 64, 256], help="requests at once")
    parser.add_argument("--connections", type=int, default=8, help="of h2load for each GPU, at most one a request")
    parser.add_argument("--rows", type=int, default=1, help="images in a request")
    parser.add_argument("--jpeg", type=int, default=0, help="processes that decode")
    parser.add_argument("--flags", nargs="*", default=[], help="of rocserve serve")
    options = parser.parse_args(arguments)
    device = torch.device("cpu") if options.cpu else torch.device("cuda", options.device)
    name = "CPU" if options.cpu else torch.cuda.get_device_name(device)
    print(f"{name}, PyTorch {torch.__version__}, engine {options.engine}, {options.instances} instance(s)")
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder, "repository")
        write = functools.partial(
            write_model,
            repository,
            sizes=options.sizes,
            engine=options.engine,
            delay=options.delay,
            instances=options.instances,
            batches_at_once=options.batches_at_once,
        )
        file = write([] if options.cpu else [options.device])
        many = f"{MODEL}_on_{options.gpus}"
        if options.gpus > 1:
            write(range(options.gpus), name=many)
        if options.jpeg:
            write_jpeg_models(repository, options.jpeg)
        port = free_port()
        bare = 0.0
        with torch.inference_mode():
            for size in options.sizes:
                run = (bare_onnx_run if options.engine == ONNX else bare_run)(file, size, device)
                rate, rest = _rate(run, size, options.seconds), rested(run, options.seconds)
                bare = max(bare, rate)
                print(
                    f"bare, batch {size}: {rate:.0f} images/s, {1000 * rest:.2f} ms after a rest",
                    flush=True,
                )
                del run
        if device.type != "cpu":
            torch.cuda.empty_cache()
        with (
            rocserve_server(
                repository, port, Path(folder, "log"), *options.flags, tree=Path(__file__).parents[1]
            ) as server,
            Client(f"127.0.0.1:{port}") as client,
        ):
            client.wait_until_ready(READY_SECONDS, model=MODEL)
            print(dict(client.model_metadata(MODEL).properties))
            image = np.zeros((options.rows, 3, SIDE, SIDE), np.uint8)
            asked = {MODEL: {"image": image}}
            if options.gpus > 1:
                asked[many] = {"image": image}
            if options.jpeg:
                file = np.array([[photograph()]], np.object_)
                asked |= {"decode": {"encoded": file}, "jpeg": {"encoded": file}}
            best = dict.fromkeys([*asked, "jpeg"], 0.0)
            for number, (model, inputs) in enumerate(asked.items()):
                client.wait_until_ready(READY_SECONDS, model=model)
                request = encode_infer_request(model, inputs, None, RequestOptions())
                if not number:
                    streams = max(1, max(options.in_flight) // options.connections)
                    warm_up = Load(options.connections, streams, options.warm_up, 1)
                    measure(client, port, model, request, warm_up, Path(folder))
                for in_flight in options.in_flight:
                    # Each GPU has the same work.
                    gpus = options.gpus if model == many else 1
                    connections = min(options.connections, in_flight) * gpus
                    streams = max(1, in_flight // options.connections)
                    load = Load(connections, streams, options.seconds, min(connections, MOST_LOAD_THREADS * gpus))
                    before = server.cpu_seconds_by_process()
                    rate = measure(client, port, model, request, load, Path(folder))
                    used = cpu_milliseconds(before, server.cpu_seconds_by_process(), rate * options.seconds)
                    print(f"  CPU ms an image: {used}", flush=True)
                    best[model] = max(best[model], rate)
            print(f"served: {best[MODEL] / bare:.2f} of the bare loop")
            if options.gpus > 1:
                print(f"{options.gpus} GPUs: {best[many] / best[MODEL]:.2f} times the images/s of one")
    if options.jpeg:
        with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
            rates = pool.starmap(decode, [(photograph(), options.seconds)] * (os.cpu_count() or 1))
        print(f"decoding in {len(rates)} processes without a server: {sum(rates):.0f} images/s")
        most = min(sum(rates), bare)
        rate = best["jpeg"]
        print(f"JPEG in, scores out: {rate:.0f} images/s, {rate / most:.2f} of the less of decoding and the bare loop")


def cpu_milliseconds(before: Mapping[Any, float], after: Mapping[Any, float], images: float) -> str:
    """CPU milliseconds by the name of the server's processes."""
    used: Counter[str] = Counter()
    for process, seconds in after.items():
        used[process[1]] += seconds - before.get(process, 0.0)
    return ", ".join(f"{name} {1000 * seconds / images:.3f}" for name, seconds in used.items() if seconds)


def measure(client: Client, port: int, model: str, request: bytes, load: Load, folder: Path) -> float:
    """Images a second that h2load receives; prints them, and the time they took."""
    body = folder / "body"
    body.write_bytes(frame(request))
    before = client.statistics(model)[0]
    result = run_load(f"127.0.0.1:{port}", body, load, folder / "h2load.log")
    after = client.statistics(model)[0]
    rows = (after.inference_count - before.inference_count) / max(1, after.success.count - before.success.count)
    if result.report.body_bytes < result.report.succeeded * SCORES_BYTES:
        raise SystemExit("answers were none, see the log")
    rate = result.requests_per_second * rows
    figures = f"{rate:.0f} images/s, p50 {1000 * result.p50:.2f} ms"
    print(
        f"{model}, {load.in_flight} in flight: {figures}, p99 {1000 * result.p99:.2f} ms; {phases(before, after)}",
        flush=True,
    )
    return rate


if __name__ == "__main__":
    main()
