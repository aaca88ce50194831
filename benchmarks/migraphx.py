"""The group migraphx: small networks on MIGraphX, served, compared with the bare engine in a separate process. There is
no peer, because Triton's wheel has no MIGraphX. The target is MIGraphX's reference implementation, which every
installation has."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy
import onnxruntime
from tritonclient.grpc import InferenceServerClient

from benchmarks.cases import Case, Quantity, Target, infer_request
from benchmarks.comparison import Comparison, compare
from benchmarks.contenders import ServedContender
from benchmarks.line_process import LineProcess
from benchmarks.migraphx_models import INPUT, MAX_BATCH_SIZE, OUTPUT, Network, networks
from benchmarks.probe import Outputs
from benchmarks.ratios import BARE, Measurement
from benchmarks.rocserve_peer import rocserve_server
from benchmarks.server_process import ServerFailed, free_port
from rocserve.backends.migraphx.installation import MigraphxInstallation, find_installation, python_command
from rocserve.settings import EngineSettings, engine_settings

MIGRAPHX_GROUP = "migraphx"
MIGRAPHX_FACTS = (
    "migraphx: MIGraphX's reference target, which computes slowly, on threads that it starts anew in each run; bare:"
    " the program of the same file run over and over in one process through rocserve's binding, one request at a time"
    " without dynamic batching, with it in batches of as many as are in flight; it has all cores to itself, while the"
    " server shares them with the load generator. Who waits for all answers before the next requests, as the load"
    " generator does, has batches of 1 and of the rest in turns: the first to come finds the engine idle; the bare"
    " engine's batches are always full",
)

_CHECKOUT_ROOT = Path(__file__).resolve().parents[1] / ".migraphx-root"
_COMPILE_SECONDS = 120.0
_WARM_UP_SECONDS = 0.5
_TOLERANCE = 1e-4
_CONCURRENCIES = (1, 8, 32)
_TARGETS = {("mini_resnet", 8): 0.85, ("mini_resnet", 32): 0.85}
"""Ratios to the bare engine, for networks whose runs take milliseconds and are the same for both."""


class BarePrograms(LineProcess):
    """MIGraphX without a server: a contender, and a context manager in whose block its process runs."""

    name = BARE

    def __init__(self, installation: MigraphxInstallation, repository: Path, folder: Path) -> None:
        """`folder`: for the process's files."""
        command = [*python_command(installation), "-m", "benchmarks.bare_programs", installation.library]
        super().__init__("the bare engine", command)
        self._repository = repository
        self._input = folder / "bare-input.npy"
        self._output = folder / "bare-output.npy"
        self._requests = {
            network.served_name(batching): network.request() for network in networks() for batching in (False, True)
        }

    def prepare(self, case: Case) -> None:
        numpy.save(self._input, self._requests[case.model])
        self.measure(case, _WARM_UP_SECONDS)

    def measure(self, case: Case, seconds: float) -> Measurement:
        """Raises WrongAnswer if the process ended, AssertionError if it computes something else."""
        rows = min(case.streams, MAX_BATCH_SIZE) if case.dynamic_batching else 1
        order = {
            "model": str(self._repository / case.model / "1" / "model.onnx"),
            "rows": rows,
            "name": INPUT,
            "input": str(self._input),
            "output": str(self._output),
            "seconds": seconds,
        }
        result = self.ask(json.dumps(order))
        case.check({OUTPUT: numpy.load(self._output)})
        return Measurement(result["runs"] * rows / result["seconds"] * case.units_per_request)


def installation_to_measure() -> tuple[MigraphxInstallation, str]:
    """MIGraphX and its root ("" = this system): $ROCSERVE_MIGRAPHX_ROOT, the checkout's, or the system's. Raises
    ServeError (UNAVAILABLE) if there is none."""
    root = engine_settings().migraphx_root or (str(_CHECKOUT_ROOT) if _CHECKOUT_ROOT.is_dir() else "")
    return find_installation(EngineSettings(migraphx_root=root)), root


def measure_migraphx(rounds: int, seconds: float, folder: Path, report: Callable[[str], None]) -> list[Comparison]:
    """Measure all cases, in `folder`. Raises ServeError (UNAVAILABLE) if there is no MIGraphX."""
    installation, root = installation_to_measure()
    repository = folder / "repository"
    for network in networks():
        network.write(repository)
    flags = [f"--cache-directory={folder / 'cache'}", *([f"--migraphx-root={root}"] if root else [])]
    with ExitStack() as stack:
        server = stack.enter_context(rocserve_server(repository, free_port(), folder / "rocserve.log", *flags))
        wait_for_programs(server.address)
        served = ServedContender(server, folder)
        stack.callback(served.close)
        bare = stack.enter_context(BarePrograms(installation, repository, folder))
        return [compare(case, [served, bare], rounds, seconds, report) for case in migraphx_cases()]


def wait_for_programs(address: str) -> None:
    """Wait until all batch sizes of all models are compiled and in service."""
    deadline = time.monotonic() + _COMPILE_SECONDS
    with InferenceServerClient(address) as client:
        while reasons := {
            model.name: model.reason for model in client.get_model_repository_index().models if model.reason
        }:
            if time.monotonic() > deadline:
                raise ServerFailed(f"not all programs are in service after {_COMPILE_SECONDS:.0f} s: {reasons}")
            time.sleep(0.2)


def migraphx_cases() -> Sequence[Case]:
    """Each network without and with dynamic batching, at 1, 8 and 32 requests in flight; large rows at 1 and 8."""
    return [
        _case(network, batching, streams)
        for network in networks()
        for batching in (False, True)
        for streams in (_CONCURRENCIES if network.request().nbytes < 1 << 20 else _CONCURRENCIES[:2])
    ]


def _case(network: Network, batching: bool, streams: int) -> Case:
    request = network.request()
    (expected,) = onnxruntime.InferenceSession(network.model.SerializeToString()).run([OUTPUT], {INPUT: request})

    def check(outputs: Outputs) -> None:
        # MIGraphX sums in another order.
        numpy.testing.assert_allclose(outputs[OUTPUT].astype(numpy.float32), expected, rtol=_TOLERANCE, atol=_TOLERANCE)

    target = _TARGETS.get((network.served_name(batching), streams))
    return Case(
        group=MIGRAPHX_GROUP,
        title=f"{network.title}, {'dynamic batching' if batching else 'no batching'}, concurrency {streams}",
        model=network.served_name(batching),
        dynamic_batching=batching,
        unit="requests/s",
        units_per_request=1.0,
        connections=1,
        streams=streams,
        message=infer_request(network.served_name(batching), {INPUT: request}),
        check=check,
        targets=() if target is None else (Target(Quantity.RATE, BARE, target),),
    )
