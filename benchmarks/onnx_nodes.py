"""Serves the models of ONNX's own node tests on MIGraphX (target ref) with the load check, and compares the answers to
the tests' inputs with ONNX Runtime's: `python -m benchmarks.onnx_nodes [--only TEXT] [--verbose]`.

right      READY, and the answers are right
caught     refused by the load check; "harmless" if the answers to the test's own inputs are right
refused    refused before: MIGraphX does not read the model, or its process ends
missed     READY, and an answer is wrong or fails
outside    ONNX Runtime does not run the model, or the protocol does not have its tensors
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rocserve.backends.base import Batch, LoadedModel, ModelSource
from rocserve.backends.migraphx.binding import Binding, MigraphxError
from rocserve.backends.migraphx.compiling.compiler import ProgramCompiler
from rocserve.backends.migraphx.compiling.context import CompileContext, open_compile_context
from rocserve.backends.migraphx.compiling.program_cache import ProgramCache
from rocserve.backends.migraphx.installation import ROOT_VARIABLE, find_installation, python_command
from rocserve.backends.migraphx.model import load_compiled
from rocserve.backends.onnx.reference_job import OnnxReferenceJob
from rocserve.core.errors import ServeError, unavailable
from rocserve.core.load_check import LoadCheckFailed
from rocserve.core.model_config import InstanceKind, ModelConfig
from rocserve.core.tensors import tensor_from_numpy
from rocserve.settings import EngineSettings, engine_settings

RIGHT, CAUGHT, HARMLESS, REFUSED, MISSED, OUTSIDE = OUTCOMES = (
    "right",
    "caught",
    "caught, harmless",
    "refused",
    "missed",
    "outside",
)
_ROOT = Path(__file__).resolve().parents[1]
_CHECKOUT_ROOT = _ROOT / ".migraphx-root"
_CACHE_BYTES = 1 << 30
_TOLERANCE = 2e-3
"""Relative and absolute: kernels round differently."""
_LONGEST = 300


@dataclass(frozen=True)
class NodeTest:
    name: str
    model: bytes
    inputs: Sequence[Any]
    """Of the first data set."""


@dataclass(frozen=True)
class NodeCase:
    name: str
    model: bytes
    inputs: Mapping[str, Any]
    expected: Mapping[str, Any]
    """ONNX Runtime's answer; empty = it has none."""


def node_tests(only: str = "", is_sample: bool = False) -> Sequence[NodeTest]:
    """Return ONNX's node tests whose names contain `only`. `is_sample`: of each operator the first one."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [test for test in collect_testcases(None) if test.model is not None and only in test.name]
    if is_sample:
        found = list({test.model.graph.node[0].op_type: test for test in reversed(found)}.values())
    return [
        NodeTest(test.name, test.model.SerializeToString(), [np.asarray(value) for value in test.data_sets[0][0]])
        for test in found
        if all(isinstance(value, np.ndarray | np.generic) for value in test.data_sets[0][0])
    ]


def node_case(test: NodeTest) -> NodeCase:
    """Return a node test with ONNX Runtime's answer."""
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)
    inputs, expected = {}, {}
    try:
        session = onnxruntime.InferenceSession(test.model, providers=["CPUExecutionProvider"])
        inputs = dict(zip([tensor.name for tensor in session.get_inputs()], test.inputs, strict=True))
        outputs = session.run(None, inputs)
        if all(isinstance(output, np.ndarray | np.generic) and output.dtype.kind in "fiub" for output in outputs):
            expected = dict(zip([tensor.name for tensor in session.get_outputs()], outputs, strict=True))
    except Exception:
        # The binding's exceptions have no common base class.
        expected = {}
    return NodeCase(test.name, test.model, inputs, expected)


class _HereRunner:
    """Runs jobs in this process: a child for each would take an hour."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding

    def report(self, text: str) -> None:
        """Ignores progress."""

    def run(self, job: Any, result_type: type[Any], **_: object) -> Any:
        if isinstance(job, OnnxReferenceJob):
            return job.perform(self.report)
        try:
            return job.perform(self._binding, self.report)
        except MigraphxError as error:
            raise unavailable(str(error)) from None

    def run_check(self, job: Any, result_type: type[Any], seconds: float) -> Any:
        return self.run(job, result_type)

    def call_off(self) -> None:
        """Cancels nothing, because jobs run in the caller's thread."""

    def check_called_off(self, title: str) -> None:
        """Nobody calls jobs off."""


class NodeModels:
    """Serves node tests as a worker does, in a process that has loaded MIGraphX."""

    def __init__(self, folder: Path, engine: str, on_ready: Callable[[], None]) -> None:
        """`on_ready` is called when a model is ready, before its request."""
        self._folder = folder
        self._on_ready = on_ready
        self._parameters = {"target": "ref", **({"engine": engine} if engine else {})}
        root = engine_settings().migraphx_root or os.environ.get(ROOT_VARIABLE) or str(_CHECKOUT_ROOT)
        self._settings = EngineSettings(cache_directory=str(folder / "cache"), migraphx_root=root)
        self._context: CompileContext | None = None

    def load(self, case: NodeCase, load_check: str = "on") -> LoadedModel:
        """Raises ServeError as the engine does."""
        folder = self._folder / case.name / "1"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "model.onnx"
        path.write_bytes(case.model)
        parameters = {**self._parameters, "load_check": load_check}
        config = ModelConfig(name=case.name, backend="onnx", max_batch_size=0, parameters=parameters)
        source = ModelSource(
            case.name, 1, folder.parent, folder, path, config, InstanceKind.CPU, None, 1, settings=self._settings
        )
        self._context = self._context or open_compile_context(source, logging.getLogger("onnx_nodes"))
        runner: Any = _HereRunner(self._context.binding)
        cache = ProgramCache(folder / "cache", _CACHE_BYTES)
        compiler = ProgramCompiler(runner, cache, model_name=source.name, model_folder=source.model_folder)
        return load_compiled(replace(self._context, model=source, compiler=compiler, onnxruntime=runner))

    def outcome(self, case: NodeCase) -> tuple[str, str]:
        """Return one of OUTCOMES, and why."""
        if not case.expected:
            return OUTSIDE, ""
        try:
            model = self.load(case)
        except LoadCheckFailed as error:
            try:
                harmless = not difference(self.load(case, "warn"), case)
            except ServeError:
                harmless = False
            return HARMLESS if harmless else CAUGHT, error.text
        except ServeError as error:
            return REFUSED, error.text
        self._on_ready()
        fault = difference(model, case)
        return (MISSED, fault) if fault else (RIGHT, "")


def difference(model: LoadedModel, case: NodeCase) -> str:
    """Return how the model's answer to the test's inputs differs from ONNX Runtime's; "" = it does not."""
    tensors = {name: tensor_from_numpy(name, values) for name, values in case.inputs.items()}
    try:
        found = model.execute(Batch(tensors, tuple(case.expected), (1,))).outputs
    except ServeError as error:
        return error.text
    for name, values in case.expected.items():
        got, values = np.asarray(found[name]), np.asarray(values)
        if got.shape != values.shape:
            return f"{name} has the shape {got.shape} instead of {values.shape}"
        if not np.allclose(got.astype("f8"), values.astype("f8"), _TOLERANCE, _TOLERANCE, equal_nan=True):
            return f"{name} is {got.ravel()[:6]} instead of {values.ravel()[:6]}"
    return ""


def _run(file: Path, engine: str, start: int) -> None:
    """Print a line of JSON when a test begins, when its model is ready, and when it ends."""
    tests: Sequence[NodeTest] = pickle.loads(file.read_bytes())  # Written by the parent process.
    with tempfile.TemporaryDirectory(prefix="onnx-nodes-") as folder:
        models = NodeModels(Path(folder), engine, lambda: print('["ready"]', flush=True))
        for test in tests[start:]:
            print('["begin"]', flush=True)
            print(json.dumps(["end", *models.outcome(node_case(test))]), flush=True)


def outcomes(only: str = "", engine: str = "", is_sample: bool = False) -> Iterator[tuple[str, str, str]]:
    """Yield each test's name, one of OUTCOMES, and why. A process that a test ends is replaced for the next test."""
    root = engine_settings().migraphx_root or os.environ.get(ROOT_VARIABLE) or str(_CHECKOUT_ROOT)
    command = [*python_command(find_installation(EngineSettings(migraphx_root=root))), "-m", "benchmarks.onnx_nodes"]
    tests, done = node_tests(only, is_sample), 0
    with tempfile.NamedTemporaryFile(prefix="onnx-nodes-", suffix=".pickle") as file:
        file.write(pickle.dumps(tests))
        file.flush()
        while done < len(tests):
            state = ""
            with subprocess.Popen(
                [*command, f"--engine={engine}", f"--run={file.name}", f"--start={done}"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd=_ROOT,
            ) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    if not line.startswith('["'):
                        continue
                    state, *result = json.loads(line)
                    if state == "end":
                        done += 1
                        yield tests[done - 1].name, result[0], result[1]
            if done < len(tests) and not state:
                raise SystemExit(
                    f"the process of the tests ended with status {process.returncode} before its first test"
                )
            if state in ("begin", "ready"):
                done += 1
                what = "MIGraphX's process ended"
                yield tests[done - 1].name, REFUSED if state == "begin" else MISSED, what


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="tests whose names contain TEXT")
    parser.add_argument("--engine", default="", help='the parameter engine: "" (auto) or migraphx')
    parser.add_argument("--sample", action="store_true", help="of each operator the first test")
    parser.add_argument("--verbose", action="store_true", help="show every test that is not right")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run is not None:
        return _run(given.run, given.engine, given.start)
    counts: Counter[str] = Counter()
    for name, outcome, why in outcomes(given.only, given.engine, given.sample):
        counts[outcome] += 1
        if outcome == MISSED or (given.verbose and outcome not in (RIGHT, OUTSIDE)):
            print(f"{outcome}: {name}: {' '.join(why.split())[:_LONGEST]}", flush=True)
    print(f"{sum(counts.values())} tests: " + ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES))
    sys.exit(1 if counts[MISSED] else 0)


if __name__ == "__main__":
    main()
