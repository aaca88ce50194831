"""ONNX models as text, run by ONNX Runtime's CPU provider as an engine runs them for a load check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import numpy_helper
from onnx.parser import parse_model

from rocserve.core.datatypes import DataType
from rocserve.load_check.budget import Budget
from rocserve.load_check.facts import GraphFacts
from rocserve.load_check.onnx_facts import expose, onnx_facts
from rocserve.load_check.rows import RowsVerdict, check_rows
from rocserve.load_check.tensors import ROWS, Array, CheckedInput, Feed

_HEADER = '<ir_version: 8, opset_import: ["": {opset}, "ai.onnx.ml": 3, "com.microsoft": 1]>\n'
_TYPES = {"float": "FP32", "double": "FP64", "float16": "FP16", "string": "BYTES"}


def model(text: str, opset: int = 17, **weights: Array) -> onnx.ModelProto:
    """Read a graph in ONNX' textual syntax, with weights by name."""
    parsed = parse_model(_HEADER.format(opset=opset) + text)
    parsed.graph.initializer.extend(numpy_helper.from_array(values, name) for name, values in weights.items())
    return parsed


def normal(*shape: int, seed: int = 0) -> Array:
    """Return float32 weights."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@dataclass
class Loaded:
    """A session with what a check wants to know of it."""

    session: Any
    inputs: Sequence[CheckedInput]
    outputs: Sequence[str]
    facts: GraphFacts

    def run(self, feed: Feed) -> Mapping[str, Array]:
        return dict(zip(self.outputs, self.session.run(list(self.outputs), dict(feed)), strict=True))

    def check(self, seed: int = 0, **options: Any) -> RowsVerdict:
        return check_rows(self.run, self.inputs, self.outputs, self.facts, unhurried(), seed, **options)


def unhurried() -> Budget:
    """A budget whose clock stands still, so that how fast the machine is decides nothing."""
    return Budget(60, lambda: 0.0)


def load(proto: onnx.ModelProto, facts: GraphFacts | None = None) -> Loaded:
    """Load a model whose first dimensions may be rows, with the inner tensors that its facts expose."""
    facts = onnx_facts(proto) if facts is None else facts
    expose(proto, facts.exposed)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return Loaded(session, checked_inputs(session), [node.name for node in session.get_outputs()], facts)


def checked_inputs(session: Any) -> Sequence[CheckedInput]:
    nodes = session.get_inputs()
    rows = {node.shape[0] for node in nodes if node.shape and not isinstance(node.shape[0], int)}
    inputs = []
    for node in nodes:
        kind = node.type.removeprefix("tensor(").rstrip(")")
        shape = tuple(ROWS if size in rows else size or "" for size in node.shape)
        inputs.append(CheckedInput(node.name, DataType(_TYPES.get(kind, kind.upper())), shape))
    return inputs
