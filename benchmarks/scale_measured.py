"""Measures on this machine what benchmarks.scale assumes of a server: `python -m benchmarks.scale_measured`.

ResNet-50 (untrained weights cost as much as trained ones) on ONNX Runtime, on the CPU; the drain has the flags of
deploy/kustomize. During the drain clients send requests on connections that they keep, as behind a Service's address;
another server takes their later requests.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
from tritonclient.grpc import InferenceServerClient, InferInput, InferResult
from tritonclient.utils import InferenceServerException

from benchmarks.cases import infer_request
from benchmarks.load_generator import Load, frame, run_load
from benchmarks.machine import machine_facts
from benchmarks.networks import resnet50
from benchmarks.rocserve_peer import rocserve_server
from benchmarks.sample_ensemble import REPOSITORY
from benchmarks.server_process import ServerProcess, free_port

_END_FLAGS = ("--drain-seconds=10", "--exit-timeout-secs=30", "--max-connection-age-secs=30")
_CLIENTS = 8
_SECONDS = 20.0
_IMAGE = np.zeros((1, 3, 224, 224), np.float32)


def main() -> int:
    print("\n".join(f"- {fact}" for fact in machine_facts(None)), "\n\n| what | |\n|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        add_model(folder / "models", "resnet50")
        server, other = (
            rocserve_server(folder / "models", free_port(), folder / f"log{number}", *_END_FLAGS) for number in range(2)
        )
        time.sleep(2.0)  # The server waits until younger files have settled.
        began = time.monotonic()
        with server:
            show("start until ready, s", time.monotonic() - began)
            show("first request, s", seconds_of(server, "resnet50"))
            add_model(folder / "models", "second")
            began = time.monotonic()
            with InferenceServerClient(server.address) as client:
                while not client.is_model_ready("second"):
                    time.sleep(0.01)
            show("a second model, from its last byte to ready, s", time.monotonic() - began)
            cores = psutil.cpu_count() or 1
            body = folder / "body"
            body.write_bytes(frame(infer_request("resnet50", {"data": _IMAGE})))
            rate = run_load(server.address, body, Load(1, 8 * cores, _SECONDS), folder / "load").requests_per_second
            show(f"images a second and core, {8 * cores} in flight", rate / cores)
            with other:
                seconds, answers, failures = end_under_load(server, other)
        show("from SIGTERM to the end, clients connected, s", seconds)
        show(f"requests of {_CLIENTS} clients meanwhile", answers)
        show("of these failed", failures)
    return 0


def show(what: str, value: float) -> None:
    print(f"| {what} | {value:.4g} |", flush=True)


def add_model(repository: Path, name: str) -> None:
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "model.onnx").write_bytes(resnet50.build().SerializeToString())
    config = (REPOSITORY / "resnet50" / "config.pbtxt").read_text()
    (repository / name / "config.pbtxt").write_text(config.replace('name: "resnet50"', f'name: "{name}"'))
    shutil.copy(REPOSITORY / "resnet50" / "labels.txt", repository / name)


def image() -> InferInput:
    entry = InferInput("data", list(_IMAGE.shape), "FP32")
    entry.set_data_from_numpy(_IMAGE)
    return entry


def seconds_of(server: ServerProcess, name: str) -> float:
    with InferenceServerClient(server.address) as client:
        began = time.monotonic()
        client.infer(name, [image()])
        return time.monotonic() - began


def end_under_load(ending: ServerProcess, other: ServerProcess) -> tuple[float, int, int]:
    """Seconds, answers, failures."""
    answers: list[InferResult] = []
    failures: list[InferenceServerException] = []
    stopping = threading.Event()

    def ask() -> None:
        with InferenceServerClient(f"ipv4:{ending.address},{other.address}") as client:
            while not stopping.is_set():
                try:
                    answers.append(client.infer("resnet50", [image()]))
                except InferenceServerException as error:
                    failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(_CLIENTS)]
    for thread in threads:
        thread.start()
    process = psutil.Process(next(pid for pid, _ in ending.cpu_seconds_by_process()))
    time.sleep(3.0)
    began = time.monotonic()
    process.terminate()
    process.wait()
    seconds = time.monotonic() - began
    stopping.set()
    for thread in threads:
        thread.join()
    return seconds, len(answers), len(failures)


if __name__ == "__main__":
    raise SystemExit(main())
