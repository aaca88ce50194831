"""Goodput under overload: the requests that a model answers within their deadlines, at half to ten times its capacity.
Both servers run the same model.py, which sleeps, so that servers and clients do not compete for CPU time."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.deadline_clients import Answers, Run
from benchmarks.line_process import LineProcess
from benchmarks.probe import WrongAnswer
from benchmarks.rocserve_peer import rocserve_server
from benchmarks.server_process import ServerProcess, free_port
from benchmarks.table import markdown_table
from benchmarks.triton_peer import TritonPeer

OVERLOAD_GROUP = "overload"
OVERLOAD_FACTS = (
    "overload: a model.py that sleeps, the same in both servers, on one instance; clients in a separate process"
    " send at random times, whatever becomes of their requests, and end each at its deadline",
)
_LOADS = (0.5, 0.9, 1.3, 4.0, 10.0)
_DEADLINE_SECONDS = 0.2
_MODEL = """\
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep({seconds})
        tensors = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", tensor + 1)]) for tensor in tensors]
"""
_CONFIG = """\
backend: "python"
max_batch_size: 8
input {{ name: "INPUT0" data_type: TYPE_INT32 dims: [ 1 ] }}
output {{ name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 1 ] }}
instance_group {{ kind: KIND_CPU count: 1 }}
{batching}
"""


@dataclass(frozen=True, slots=True)
class PacedModel:
    name: str
    title: str
    seconds: str
    """The time of one batch, as Python text."""
    batching: str
    per_second: float
    """Its capacity if only the sleep took time."""

    def write(self, repository: Path) -> None:
        version = repository / self.name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(_MODEL.format(seconds=self.seconds))
        (repository / self.name / "config.pbtxt").write_text(_CONFIG.format(batching=self.batching))


MODELS = (
    PacedModel("single", "10 ms, no batching", "0.010", "", 100.0),
    PacedModel(
        "batched",
        "40 ms and 5 a request, dynamic batching up to 8",
        "0.040 + 0.005 * len(requests)",
        "dynamic_batching { }",
        100.0,
    ),
)


@dataclass(frozen=True, slots=True)
class Goodput:
    """One model at one load on one server; each number for each round."""

    model: PacedModel
    load: float
    server: str
    seconds: float
    answers: Sequence[Answers]

    @property
    def per_second(self) -> float:
        return self.middle(lambda answers: answers.in_time / self.seconds)

    @property
    def sent_per_second(self) -> float:
        return self.middle(lambda answers: answers.sent / self.seconds)

    def middle(self, value: Callable[[Answers], float]) -> float:
        """The median over the rounds."""
        return median(value(answers) for answers in self.answers)


def measure_overload(
    triton: TritonPeer | None, rounds: int, seconds: float, folder: Path, progress: Callable[[str], None]
) -> str:
    """The section of the page. Raises ServerFailed if a server does not start, WrongAnswer if an answer is wrong."""
    answers: dict[tuple[PacedModel, float, str], list[Answers]] = {}
    with ExitStack() as stack:
        servers = [stack.enter_context(server) for server in _servers(triton, folder)]
        clients = stack.enter_context(
            LineProcess("the process of the clients", [sys.executable, "-m", "benchmarks.deadline_clients"])
        )
        for turn in range(rounds):
            for model in MODELS:
                for load in _LOADS:
                    for place in range(len(servers)):
                        server = servers[(turn + place) % len(servers)]
                        run = Run(server.address, model.name, load * model.per_second, seconds, _DEADLINE_SECONDS, turn)
                        result = Answers(**clients.ask(json.dumps(asdict(run))))
                        if result.wrong:
                            raise WrongAnswer(f"{server.name}: {result.wrong} wrong answers of {model.name}")
                        answers.setdefault((model, load, server.name), []).append(result)
                        progress(
                            f"overload, {model.name}, {load:g} times, {server.name}:"
                            f" {result.in_time / seconds:.1f}/s of {result.sent / seconds:.1f}/s in time"
                        )
    return goodput_table([Goodput(*key, seconds, found) for key, found in answers.items()])


def _servers(triton: TritonPeer | None, folder: Path) -> Iterator[ServerProcess]:
    repository = folder / "repository"
    for model in MODELS:
        model.write(repository)
    yield rocserve_server(repository, free_port(), folder / "rocserve.log")
    if triton is not None:
        yield triton.server("triton", repository, free_port(), folder / "triton.log")


def goodput_table(results: Sequence[Goodput]) -> str:
    """A server's peak is the most that it reached at any load."""
    peaks: dict[tuple[PacedModel, str], float] = {}
    for result in results:
        key = result.model, result.server
        peaks[key] = max(peaks.get(key, 0.0), result.per_second)
    rows = []
    for result in results:
        peak = peaks[result.model, result.server]
        rows.append(
            [
                result.model.title,
                f"{result.load:g}",
                result.server,
                f"{result.sent_per_second:.1f}",
                f"{result.per_second:.1f}",
                f"{result.per_second / peak:.2f}" if peak else "-",
                f"{result.middle(lambda answers: answers.p50_ms):.1f}",
                f"{result.middle(lambda answers: answers.p99_ms):.1f}",
                f"{result.middle(lambda answers: answers.lag_ms):.1f}",
            ]
        )
    head = [
        "what",
        "load",
        "server",
        "sent/s",
        "in time/s",
        "of its peak",
        "p50 of those, ms",
        "p99",
        "clients late by, ms",
    ]
    return f"## Answers within deadlines of {_DEADLINE_SECONDS * 1e3:.0f} ms\n\n{markdown_table(head, rows)}\n"
