"""ONNX's own tests of its operators, the first of each: MIGraphX serves the model with ONNX Runtime's answer, or
refuses it at load, and ONNX Runtime takes over. None fails at a request."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from support.cached_programs import cache_at
from support.migraphx_engine import Engine, answers

from rocserve.backends.base import LoadedModel
from rocserve.backends.migraphx.binding.interface import Binding, MigraphxError
from rocserve.backends.migraphx.compiler import ProgramCompiler
from rocserve.backends.migraphx.serving.context import open_compile_context
from rocserve.backends.migraphx.serving.model import load_compiled
from rocserve.backends.onnx.backend import load as load_on_onnxruntime
from rocserve.core.errors import ServeError, unavailable

pytestmark = [pytest.mark.in_migraphx_process, pytest.mark.long]

WRONG = {"test_convinteger_without_padding": "the zero point, an input of the model, counts for nothing"}
"""Operators that MIGraphX 2.14 silently computes wrongly, which a load cannot find."""
UNSERVABLE = {"test_split_to_sequence_1": "its output is a sequence, which KServe does not have"}


@dataclass(frozen=True)
class Case:
    name: str
    model: bytes
    inputs: Mapping[str, Any]
    expected: Mapping[str, Any]
    """ONNX Runtime's answer."""


def cases() -> Iterator[Case]:
    """The first test of each operator that ONNX Runtime runs."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = collect_testcases(None)
    operators: set[str] = set()
    for case in found:
        if case.model is None or case.model.graph.node[0].op_type in operators:
            continue
        model = case.model.SerializeToString()
        try:
            session = onnxruntime.InferenceSession(model)
            names = [tensor.name for tensor in session.get_inputs()]
            inputs = {name: np.asarray(value) for name, value in zip(names, case.data_sets[0][0], strict=True)}
            outputs = session.run(None, inputs)
        except Exception:
            # The binding's exceptions have no base class of their own.
            continue
        operators.add(case.model.graph.node[0].op_type)
        expected = zip([tensor.name for tensor in session.get_outputs()], outputs, strict=True)
        yield Case(case.name, model, inputs, dict(expected))


class HereRunner:
    """Runs jobs in this process: a child for each would take minutes."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding

    def report(self, text: str) -> None:
        """Ignores progress."""

    def run(self, job: Any, result_type: type[Any], **_: object) -> Any:
        try:
            return job.perform(self._binding, self.report)
        except MigraphxError as error:
            raise unavailable(str(error)) from None

    def call_off(self) -> None:
        """Cancels nothing, because jobs run in the caller's thread."""


class Nodes:
    """Loads cases as a worker does."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        first = Engine(folder, folder / "cache").source(onnx.ModelProto().SerializeToString())
        self._context = open_compile_context(first, logging.getLogger("test"))

    def fault(self, case: Case) -> str:
        """ "" if MIGraphX serves the case, "refused" if ONNX Runtime does, else the fault."""
        folder = self._folder / case.name
        source = Engine(folder, folder / "cache").source(case.model)
        runner: Any = HereRunner(self._context.binding)
        cache = cache_at(folder / "cache")
        compiler = ProgramCompiler(runner, cache, model_name=source.name, model_folder=source.model_folder)
        context = replace(self._context, model=source, compiler=compiler)
        try:
            loaded: LoadedModel = load_compiled(context)
        except ServeError:
            if case.name in UNSERVABLE:
                return "refused"
            config = replace(source.config, parameters={"engine": "onnxruntime"})
            return difference(load_on_onnxruntime(replace(source, config=config)), case) or "refused"
        return difference(loaded, case)


def difference(model: Any, case: Case) -> str:
    try:
        found = answers(model, case.inputs, *case.expected)
    except ServeError as error:
        return error.text
    for name, values in case.expected.items():
        if found[name].shape != values.shape:
            return f"{name} has the shape {found[name].shape} instead of {values.shape}"
        if values.dtype == np.object_:
            values = np.array([str(value).encode() for value in values.flat], np.object_).reshape(values.shape)
        same = np.array_equal if values.dtype == np.object_ else np.allclose
        # Kernels round differently.
        options = {} if values.dtype == np.object_ else {"rtol": 1e-3, "atol": 1e-3, "equal_nan": True}
        if not same(found[name], values, **options):
            return f"{name} is {found[name]} instead of {values}"
    return ""


def test_every_operator_is_served_or_refused_at_its_load(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    faults = {case.name: nodes.fault(case) for case in cases() if case.name not in WRONG}
    assert {name: fault for name, fault in faults.items() if fault not in ("", "refused")} == {}
    assert len(faults) >= 150
    assert list(faults.values()).count("") >= 90
