"""The command of the benchmarks: `python -m benchmarks [--only GROUP,...] ...`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from benchmarks.cases import Case, add_sub_cases, http_cases, identity_cases, shared_memory_cases
from benchmarks.comparison import Comparison, compare
from benchmarks.contenders import Contender, ServedContender
from benchmarks.digits import load_digits
from benchmarks.environments import PeerUnavailable
from benchmarks.http_peers import HTTP_PEERS_GROUP, http_peer_facts, measure_http_peers
from benchmarks.load_generator import LoadFailed, h2load_program
from benchmarks.machine import machine_facts
from benchmarks.migraphx import MIGRAPHX_FACTS, MIGRAPHX_GROUP, installation_to_measure, measure_migraphx
from benchmarks.models import add_sub, identity
from benchmarks.overload import OVERLOAD_FACTS, OVERLOAD_GROUP, measure_overload
from benchmarks.probe import WrongAnswer
from benchmarks.resnet50 import load_resnet50
from benchmarks.rocal_engine import ROCAL_FACTS, ROCAL_GROUP, measure_rocal
from benchmarks.rocserve_peer import rocserve_server
from benchmarks.sample_ensemble import BareContender, SampleEnsemble
from benchmarks.server_process import ServerFailed, ServerProcess, free_port, http_flags
from benchmarks.table import render
from benchmarks.triton_peer import MEASURED_FLAGS, TritonPeer, default_cache_folder, provision
from rocserve.core.errors import ServeError

GROUPS = (
    "add_sub",
    "python",
    "identity",
    "shared_memory",
    "http",
    "digits",
    "resnet50",
    OVERLOAD_GROUP,
    ROCAL_GROUP,
    MIGRAPHX_GROUP,
    HTTP_PEERS_GROUP,
)
ENSEMBLE_GROUPS = frozenset({"digits", "resnet50"})
GROUPS_WITHOUT_TRITON = frozenset({ROCAL_GROUP, MIGRAPHX_GROUP, HTTP_PEERS_GROUP})
UNCOMPARED_GROUPS = GROUPS_WITHOUT_TRITON | {OVERLOAD_GROUP}
"""Groups with their own way of measuring."""
RESULTS = Path(__file__).resolve().parent / "results"
SUBJECT = "rocserve"
NOISE_SUBJECT = "triton again"
PYTHON_FACTS = ("python: the same model.py in both servers, each on its Python backend",)
ENSEMBLE_FACTS = (
    "digits and resnet50 in Triton: one Python model that makes the same engine calls (rocserve's rocAL CPU engine,"
    " ONNX Runtime) in one process on what the dynamic batcher gathers; in rocserve: an ensemble of its models",
    "bare: the same engine calls in one process, in batches as large as the concurrency; it has all cores to itself,"
    " while a server shares them with the load generator",
)


class Model(Protocol):
    """A model, or an ensemble with its members, in its form for each server."""

    def write_for_rocserve(self, repository: Path) -> None: ...

    def write_for_triton(self, repository: Path) -> None: ...


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", default=",".join(GROUPS), help="groups, by commas (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds a case (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds a contender and round (default: 3)")
    parser.add_argument("--no-triton", action="store_true", help="measure without the real Triton")
    parser.add_argument(
        "--noise", action="store_true", help="put a second Triton in rocserve's place: ratios that noise alone gives"
    )
    parser.add_argument("--write", metavar="NAME", help="also write benchmarks/results/NAME.md")
    parser.add_argument(
        "--triton-cache",
        type=Path,
        default=default_cache_folder(),
        help="folder that the real Triton is installed in (default: %(default)s)",
    )
    parsed = parser.parse_args(arguments)
    parsed.groups = parsed.only.split(",")
    unknown = [group for group in parsed.groups if group not in GROUPS]
    if unknown:
        parser.error(f"--only takes {', '.join(GROUPS)}, not {', '.join(unknown)}")
    if parsed.rounds < 1 or parsed.seconds <= 0:
        parser.error("--rounds and --seconds must be above 0")
    if parsed.noise and parsed.no_triton:
        parser.error("--noise needs Triton")
    if parsed.noise:
        parsed.groups = [group for group in parsed.groups if group not in UNCOMPARED_GROUPS]
        if not parsed.groups:
            parser.error("--noise needs a group in which Triton is compared by rates")
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison and print it; exit status 2 if something is missing or a server answers wrongly."""
    options = parse_arguments(arguments)
    try:
        leave_out_migraphx(options.groups)
        h2load_program()
        serves = not UNCOMPARED_GROUPS.issuperset(options.groups)
        needs_triton = not GROUPS_WITHOUT_TRITON.issuperset(options.groups) and not options.no_triton
        triton = provision(options.triton_cache) if needs_triton else None
        facts = machine_facts(triton)
        sections: list[str] = []
        with tempfile.TemporaryDirectory(prefix="rocserve-benchmark-") as folder:
            comparisons = measure(options, triton, Path(folder)) if serves else []
        if OVERLOAD_GROUP in options.groups:
            with tempfile.TemporaryDirectory(prefix="rocserve-benchmark-") as folder:
                sections.append(measure_overload(triton, options.rounds, options.seconds, Path(folder), progress))
        if ROCAL_GROUP in options.groups:
            comparisons += measure_rocal(options.rounds, options.seconds, progress)
        if MIGRAPHX_GROUP in options.groups:
            with tempfile.TemporaryDirectory(prefix="rocserve-benchmark-") as folder:
                comparisons += measure_migraphx(options.rounds, options.seconds, Path(folder), progress)
        if HTTP_PEERS_GROUP in options.groups:
            with tempfile.TemporaryDirectory(prefix="rocserve-benchmark-") as folder:
                comparisons += measure_http_peers(options.rounds, options.seconds, Path(folder), progress)
    except (LoadFailed, ServeError, ServerFailed, PeerUnavailable, WrongAnswer) as problem:
        print(f"benchmarks: {problem}", file=sys.stderr)
        if isinstance(problem, PeerUnavailable):
            print("benchmarks: --no-triton measures without Triton, --only without a group", file=sys.stderr)
        return 2
    facts.append(
        f"{options.rounds} interleaved rounds of {options.seconds:g} s; medians over the rounds, ratios paired in them"
    )
    if "python" in options.groups:
        facts += PYTHON_FACTS
    if not ENSEMBLE_GROUPS.isdisjoint(options.groups):
        facts += ENSEMBLE_FACTS
    if OVERLOAD_GROUP in options.groups:
        facts += OVERLOAD_FACTS
    if ROCAL_GROUP in options.groups:
        facts += ROCAL_FACTS
    if MIGRAPHX_GROUP in options.groups:
        facts += MIGRAPHX_FACTS
    if HTTP_PEERS_GROUP in options.groups:
        facts += http_peer_facts()
    subject = NOISE_SUBJECT if options.noise else SUBJECT
    page = render(comparisons, subject, "rocserve against its peers", facts, sections)
    print(page)
    if options.write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{options.write}.md").write_text(page)
    return 0


def leave_out_migraphx(groups: list[str]) -> None:
    """Leave the group out, and say so, if there is no MIGraphX; raises ServeError if nothing else is measured."""
    if MIGRAPHX_GROUP not in groups:
        return
    try:
        installation_to_measure()
    except ServeError as problem:
        if groups == [MIGRAPHX_GROUP]:
            raise
        groups.remove(MIGRAPHX_GROUP)
        progress(f"benchmarks: {MIGRAPHX_GROUP} is left out: {problem.text}")


def measure(options: argparse.Namespace, triton: TritonPeer | None, folder: Path) -> list[Comparison]:
    """Start the contenders in `folder`, measure every case of the chosen groups, end them."""
    models, cases = choose(options.groups, folder)
    if options.noise:
        cases = [replace(case, targets=()) for case in cases]
    with ExitStack() as stack:
        for region in {case.region.name: case.region for case in cases if case.region is not None}.values():
            stack.enter_context(region.created())
        contenders: list[Contender] = []
        for server in build_servers(options, triton, models, folder):
            served = ServedContender(stack.enter_context(server), folder)
            stack.callback(served.close)
            contenders.append(served)
        bare = {
            model.group: stack.enter_context(BareContender(model, folder))
            for model in models
            if isinstance(model, SampleEnsemble)
        }
        return [
            compare(
                case,
                [*contenders, bare[case.group]] if case.group in bare else contenders,
                options.rounds,
                options.seconds,
                progress,
            )
            for case in cases
        ]


def choose(groups: Sequence[str], folder: Path) -> tuple[list[Model], list[Case]]:
    """The models and cases of some groups; `folder` is for their files."""
    models: list[Model] = []
    cases: list[Case] = []
    if "add_sub" in groups:
        models += [add_sub("add_sub", dynamic_batching=False), add_sub("add_sub_batched", dynamic_batching=True)]
        cases += add_sub_cases("add_sub")
    if "python" in groups:
        models += [
            add_sub(f"python_{name}", dynamic_batching, python=True)
            for name, dynamic_batching in (("add_sub", False), ("add_sub_batched", True))
        ]
        cases += add_sub_cases("python", model_prefix="python_")
    if "identity" in groups:
        models.append(identity("identity"))
        cases += identity_cases()
    if "shared_memory" in groups:
        models.append(identity("shared_identity"))
        cases += shared_memory_cases()
    if "http" in groups:
        models += [add_sub("http_add_sub", dynamic_batching=False), identity("http_identity")]
        cases += http_cases()
    if "digits" in groups:
        digits = load_digits()
        models.append(digits)
        cases += digits.cases()
    if "resnet50" in groups:
        made = folder / "resnet50-made"
        made.mkdir()
        classifier = load_resnet50(made)
        models.append(classifier)
        cases += classifier.cases()
    return models, cases


def build_servers(
    options: argparse.Namespace, triton: TritonPeer | None, models: Sequence[Model], folder: Path
) -> Iterator[ServerProcess]:
    """The servers that take part, each on its own repository; none is started yet."""
    if not options.noise:
        repository = folder / "rocserve"
        for model in models:
            model.write_for_rocserve(repository)
        log, http_port = folder / "rocserve.log", choose_http_port(options.groups)
        yield rocserve_server(repository, free_port(), log, http_port=http_port)
    if triton is not None:
        repository = folder / "triton"
        for model in models:
            model.write_for_triton(repository)
        for name in [NOISE_SUBJECT, "triton"] if options.noise else ["triton"]:
            http_port = choose_http_port(options.groups)
            flags = (*http_flags(http_port), *MEASURED_FLAGS)
            yield triton.server(name, repository, free_port(), folder / f"{name}.log", flags, http_port)


def choose_http_port(groups: Sequence[str]) -> int | None:
    """None if nothing over HTTP is measured."""
    return free_port() if "http" in groups else None


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
