"""rocserve beside itself and Triton on many cores: other code or other flags, in one run.

usage: python -m benchmarks.front_ends --server 'NAME=TREE [FLAG ...]' --server ... (see --help)

All servers are up, and loaded in turn by h2load over gRPC, in the group http over HTTP/1.1. The first one is what the
others are compared with; with --triton that is a real Triton, which serves all models by its Python backend.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import math
import shlex
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import grpc
import numpy
from numpy.typing import NDArray

from benchmarks.cases import SEED, Case, infer_request
from benchmarks.comparison import round_order
from benchmarks.contenders import ServedContender
from benchmarks.environments import PeerUnavailable
from benchmarks.http_request import HttpRequest, http_request
from benchmarks.load_generator import LoadFailed, h2load_program
from benchmarks.machine import machine_facts
from benchmarks.models import ADD_SUB_LENGTH, IDENTITY_LENGTH, TwinModel, add_sub, identity
from benchmarks.probe import Outputs, WrongAnswer
from benchmarks.ratios import Measurement, Spread
from benchmarks.rocserve_peer import rocserve_server
from benchmarks.server_process import ServerFailed, ServerProcess, free_port, http_flags
from benchmarks.table import markdown_table, scaled
from benchmarks.triton_peer import MEASURED_FLAGS, TritonPeer, default_cache_folder, provision

TRITON = "triton"
HTTP_GROUP = "http"
GROUPS = ("add_sub", "add_sub_batched", "python", HTTP_GROUP, "image", "identity")
IN_FLIGHT = (1, 8, 32, 128, 256)
LARGE_IN_FLIGHT = (1, 8)
"""For the identity, whatever is asked for: 256 of its requests are 2 GiB."""
INSTANCES = (1, 4)
MOST_CONNECTIONS = 32
"""More requests in flight share these connections."""
LOAD_THREADS = 4
SETTLE_SECONDS = 3.0
"""Seconds from the last server's readiness until all are idle."""
IDLE_SECONDS = 3.0
SHOWN_CORES = 0.02
"""Processes that used less of a core are left out of the table."""

IMAGE_SHAPE = (224, 224, 3)
IMAGE_TENSORS = """\
max_batch_size: 64
input { name: "IMAGE" data_type: TYPE_UINT8 dims: [ 224, 224, 3 ] }
output { name: "LOGITS" data_type: TYPE_FP32 dims: [ 1000 ] }"""
IMAGE_SOURCE = """\
import time

import numpy
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        images = [pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy() for request in requests]
        batch = numpy.concatenate(images).reshape(-1, 224 * 224 * 3)
        # In place of a GPU's 0.1 ms, which its process waits for without sleeping.
        end = time.perf_counter() + 100e-6
        logits = batch[:, :4000].copy().view(numpy.float32)
        while time.perf_counter() < end:
            pass
        responses, first = [], 0
        for image in images:
            rows = logits[first : first + len(image)]
            first += len(image)
            responses.append(pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("LOGITS", rows)]))
        return responses
"""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and its request."""

    group: str
    title: str
    model: TwinModel
    message: bytes
    check: Callable[[Outputs], None]
    in_flight: tuple[int, ...]
    http: HttpRequest | None = None

    def case(self, in_flight: int) -> Case:
        connections = min(in_flight, MOST_CONNECTIONS) if self.http is None else in_flight
        return Case(
            group=self.group,
            title=f"{self.title}, {in_flight} in flight",
            model=self.model.name,
            dynamic_batching=self.model.dynamic_batching,
            unit="requests/s",
            units_per_request=1.0,
            connections=connections,
            streams=math.ceil(in_flight / connections),
            message=self.message,
            check=self.check,
            http=self.http,
            load_threads=LOAD_THREADS,
        )


@dataclass(frozen=True, slots=True)
class Result:
    """One measurement of one server; `measurement` is None if it failed."""

    case: str
    round: int
    server: str
    measurement: Measurement | None
    cores: dict[str, list[float]]
    """The cores that the processes of each name used."""


class Contender(ServedContender):
    """A server, measured by process."""

    def __init__(self, server: ServerProcess, folder: Path) -> None:
        super().__init__(server, folder)
        self.server = server

    def result(self, case: Case, number: int, seconds: float) -> Result:
        """Warm up and measure.

        Raises:
            LoadFailed: requests failed.
            WrongAnswer: an answer was wrong.
            grpc.RpcError: the server gave no statistics.
            subprocess.TimeoutExpired: the load generator did not end.
        """
        self.prepare(case)
        before = self.server.cpu_seconds_by_process()
        measurement = self.measure(case, seconds)
        cores: dict[str, list[float]] = defaultdict(list)
        for process, used in self.server.cpu_seconds_by_process().items():
            cores[process[1]].append((used - before.get(process, 0.0)) / seconds)
        cpu = sum(map(sum, cores.values())) / measurement.rate
        return Result(case.title, number, self.name, replace(measurement, cpu=cpu), cores)


def main() -> int:
    options = parse_arguments()
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
    try:
        h2load_program()
        triton = provision(default_cache_folder()) if options.triton else None
    except (LoadFailed, PeerUnavailable) as error:
        print(f"front_ends: {error}", file=sys.stderr)
        return 1
    servers = [*([TRITON] if triton else []), *(name for name, _, _ in options.servers)]
    results = measure(options, triton)
    print("\n".join(f"- {fact}" for fact in machine_facts(triton)))
    print(f"- {options.seconds} s a measurement after a warm-up; ratios to the first server, within each round\n")
    print(table(results, servers))
    whole = all(result.measurement for result in results) and {result.server for result in results} == {*servers}
    return 0 if whole else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.front_ends", description=__doc__)
    parser.add_argument(
        "--server",
        dest="servers",
        action="append",
        type=parse_server,
        required=True,
        metavar="'NAME=TREE [FLAG ...]'",
        help="a checkout to serve from, and flags of `rocserve serve`; repeatable, the first is compared with",
    )
    parser.add_argument("--triton", action="store_true", help="a real Triton too, with which the others are compared")
    parser.add_argument("--only", type=names(GROUPS), default=GROUPS, help=f"of {','.join(GROUPS)} (default all)")
    parser.add_argument("--in-flight", type=numbers, default=IN_FLIGHT, help="requests (default 1,8,32,128,256)")
    parser.add_argument("--instances", type=numbers, default=INSTANCES, help="of each model (default 1,4)")
    parser.add_argument("--rounds", type=int, default=5, help="the most rounds (default 5)")
    parser.add_argument("--seconds", type=float, default=1.5, help="of a measurement (default 1.5)")
    parser.add_argument(
        "--time-limit", type=float, default=450.0, help="seconds after which no case is begun any more (default 450)"
    )
    parser.add_argument("--python", action="store_true", help="Python models also where ONNX Runtime is installed")
    parser.add_argument("--folder", type=Path, help="where the servers' logs stay (default: nowhere)")
    return parser.parse_args()


def parse_server(text: str) -> tuple[str, Path, list[str]]:
    name, _, rest = text.partition("=")
    words = shlex.split(rest) or ["/"]
    tree = Path(words[0]).resolve()
    if not (tree / "server" / "rocserve").is_dir():
        raise argparse.ArgumentTypeError(f"expected NAME=TREE [FLAG ...], TREE with server/rocserve, got {text!r}")
    return name, tree, words[1:]


def names(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        if unknown := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(f"expected some of {','.join(known)}, got {unknown[0]!r}")
        return chosen

    return parse


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def measure(options: argparse.Namespace, triton: TritonPeer | None = None) -> list[Result]:
    """Start the servers, measure the cases in turns until the rounds or the time are over, end the servers."""
    deadline = time.monotonic() + options.time_limit
    python = options.python or importlib.util.find_spec("onnxruntime") is None
    chosen = [subject for subject in subjects(options.instances, python) if subject.group in options.only]
    results: list[Result] = []
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        contenders: list[Contender] = []
        for name, tree, flags in [*([(TRITON, None, [])] if triton else []), *options.servers]:
            repository = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "models"
            http_port = free_port() if HTTP_GROUP in options.only else None
            port, log = free_port(), folder / f"{name}.log"
            for subject in chosen:
                model = subject.model
                (model.write_for_rocserve if tree else model.write_for_triton)(repository)
            if tree:
                server = rocserve_server(repository, port, log, *flags, http_port=http_port, name=name, tree=tree)
            else:
                assert triton is not None
                measured = (*http_flags(http_port), *MEASURED_FLAGS)
                server = triton.server(name, repository, port, log, measured, http_port)
            try:
                contenders.append(Contender(stack.enter_context(server), folder))
            except ServerFailed as error:
                progress(f"{name} is left out: {error}")
                continue
            stack.callback(contenders[-1].close)
            progress(f"{name} is ready")
        if not contenders:
            return results
        report_idle(contenders)
        for number, subject in itertools.product(range(options.rounds), chosen):
            in_turn = round_order(contenders, number)
            for in_flight in subject.in_flight or options.in_flight:
                if time.monotonic() > deadline:
                    progress("the time is over")
                    return results
                found = [one_result(one, subject.case(in_flight), number, options.seconds) for one in in_turn]
                results += found
                # It is not asked again before the next model, because each failure may take a minute.
                in_turn = [one for one, result in zip(in_turn, found, strict=True) if result.measurement]
    return results


def report_idle(contenders: Sequence[Contender]) -> None:
    """Report what each server uses while all are idle."""
    time.sleep(SETTLE_SECONDS)
    before = [contender.cpu_seconds() for contender in contenders]
    time.sleep(IDLE_SECONDS)
    for contender, used in zip(contenders, before, strict=True):
        progress(f"{contender.name} idle: {(contender.cpu_seconds() - used) / IDLE_SECONDS:.4f} of a core")


def one_result(contender: Contender, case: Case, number: int, seconds: float) -> Result:
    try:
        result = contender.result(case, number, seconds)
    except (LoadFailed, WrongAnswer, grpc.RpcError, subprocess.TimeoutExpired) as error:
        progress(f"{case.title}, round {number + 1}: {contender.name} FAILED: {error}")
        return Result(case.title, number, contender.name, None, {})
    assert result.measurement is not None
    progress(f"{case.title}, round {number + 1}: {contender.name} {result.measurement.rate:,.0f} requests/s")
    return result


def subjects(instances: Sequence[int], python: bool) -> list[Subject]:
    """What can be measured. `python`: without ONNX Runtime."""
    generator = numpy.random.default_rng(SEED)
    left, right = generator.integers(-1000, 1000, (2, 1, ADD_SUB_LENGTH), dtype=numpy.int32)
    found: list[Subject] = []
    for group, batching, in_python in (
        ("add_sub", False, python),
        ("add_sub_batched", True, python),
        ("python", True, True),
        (HTTP_GROUP, True, python),
    ):
        for count in instances:
            model = add_sub(f"{group}_{count}", batching, python=in_python, instances=count)
            title = f"{'Python' if in_python else 'ONNX'} add/sub, {'batching' if batching else 'no batching'}"
            inputs = {"INPUT0": left, "INPUT1": right}
            check = expect({"OUTPUT0": left + right, "OUTPUT1": left - right})
            http = http_request(model.name, inputs) if group == HTTP_GROUP else None
            title += ", over HTTP" if http else ""
            message = infer_request(model.name, inputs)
            found.append(Subject(group, f"{title}, {plural(count)}", model, message, check, (), http))
    # Four bytes this small are never a NaN.
    image = generator.integers(0, 64, (1, *IMAGE_SHAPE), dtype=numpy.uint8)
    logits = image.reshape(1, -1)[:, :4000].copy().view(numpy.float32)
    for count in instances:
        model = TwinModel(f"image_{count}", IMAGE_TENSORS, True, None, IMAGE_SOURCE, count)
        message = infer_request(model.name, {"IMAGE": image})
        title = f"image, batching, {plural(count)}"
        found.append(Subject("image", title, model, message, expect({"LOGITS": logits}), ()))
    floats = generator.random(IDENTITY_LENGTH, dtype=numpy.float32)
    message = infer_request("identity", {"INPUT0": floats})
    large = identity("identity", python)
    check = expect({"OUTPUT0": floats})
    found.append(Subject("identity", "identity of 4 MiB", large, message, check, LARGE_IN_FLIGHT))
    return found


def expect(arrays: dict[str, NDArray[numpy.generic]]) -> Callable[[Outputs], None]:
    """Make a check that the outputs are these."""

    def check(outputs: Outputs) -> None:
        for name, array in arrays.items():
            numpy.testing.assert_array_equal(outputs[name], array)

    return check


def plural(count: int) -> str:
    return f"{count} instance{'s' if count > 1 else ''}"


def table(results: Sequence[Result], servers: Sequence[str]) -> str:
    """A row for each case and server: medians over the rounds, and ratios to the first server."""
    header = ["case", "server", "requests/s", "least to most", "ratio", "CPU us", "ratio", "p50 ms", "cores"]
    by_case: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        by_case.setdefault((result.case, result.server), []).append(result)
    rows = [
        [case, server, *cells(by_case[case, server], by_case.get((case, servers[0]), ()))]
        for case in dict.fromkeys(result.case for result in results)
        for server in servers
        if (case, server) in by_case
    ]
    return markdown_table([*header, "of each process, last round"], rows)


def cells(mine: Sequence[Result], first: Sequence[Result]) -> list[str]:
    """A server's results on a case, compared with the first server's."""
    measured = {result.round: result.measurement for result in mine if result.measurement}
    if not measured:
        return ["failed", *["-"] * 7]
    base = {result.round: result.measurement for result in first if result.measurement}
    pairs = [(measured[number], base[number]) for number in measured if number in base]
    rates = Spread.of([measurement.rate for measurement in measured.values()])
    busy = [result.cores for result in mine if result.measurement]
    return [
        f"{rates.median:,.0f}" + (" (failed)" if len(measured) < len(mine) else ""),
        f"{rates.least:,.0f} to {rates.most:,.0f}",
        ratio([one.rate / other.rate for one, other in pairs]),
        scaled([one.cpu for one in measured.values()], 1e6, 0),
        ratio([one.cpu / other.cpu for one, other in pairs if one.cpu and other.cpu]),
        scaled([one.p50 for one in measured.values()], 1e3, 2),
        f"{median(sum(map(sum, cores.values())) for cores in busy):.2f}",
        process_cores(busy[-1]),
    ]


def ratio(values: Sequence[float]) -> str:
    return f"{median(values):.2f}" if values else "-"


def process_cores(cores: dict[str, list[float]]) -> str:
    """The busy processes, the busiest of each name first."""
    shown = {name: sorted((used for used in one if used >= SHOWN_CORES), reverse=True) for name, one in cores.items()}
    return "; ".join(f"{name} " + " ".join(f"{used:.2f}" for used in one) for name, one in shown.items() if one)


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
