"""A stand-in for torch_migraphx, which needs an AMD GPU: the steps of its release 1.1 (dynamo/backends.py), with
PyTorch in place of MIGraphX's programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._guards import TracingContext
from torch.fx.experimental.proxy_tensor import PythonKeyTracer


@dataclass
class Shape:
    """MIGraphX's shape, as far as the code under test uses it."""

    own: tuple[int, ...]

    def strides(self) -> tuple[int, ...]:
        return self.own


class LoweredProgram(torch.nn.Module):
    """Stands in for torch_migraphx's MGXModule: it is saved whole, cannot be traced, and assumes the memory layout of
    the inputs with which it was made."""

    def __init__(self, program: Any, factor: float, inputs: Sequence[Any]) -> None:
        super().__init__()
        self.program = program
        self.factor = factor
        self.input_mgx_shapes = [Shape(tuple(value.stride())) for value in inputs]

    def forward(self, *inputs: Any) -> Any:
        assert not any(isinstance(value, torch.fx.Proxy) for value in inputs), "traced"
        laid = [
            value.as_strided(value.shape, shape.strides())
            for value, shape in zip(inputs, self.input_mgx_shapes, strict=True)
        ]
        return [value * self.factor if value.is_floating_point() else value for value in self.program(*laid)]


@dataclass
class Lowerings:
    """Records what the stand-in was asked to lower."""

    options: list[Mapping[str, Any]] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    """For each lowered program, the shape of the last input."""
    constants: list[int] = field(default_factory=list)
    """For each lowered program, how many of its inputs are weights; 0 if weights are constants."""
    factor: float = 1.0
    """Multiplies the outputs."""

    def compile_graph(self, graph: Any, inputs: Sequence[Any], options: Mapping[str, Any]) -> Any:
        self.options.append(options)
        self.shapes.append(tuple(inputs[-1].shape))
        self.constants.append(sum(isinstance(value, torch.nn.Parameter) for value in inputs))
        TracingContext.get().fake_mode.allow_non_fake_inputs = True
        program = aot_export_joint_simple(graph, inputs, trace_joint=False)
        program._tracer_cls = None
        outputs = len(next(iter(reversed(program.graph.nodes))).args[0])
        whole = torch.fx.Graph(tracer_cls=PythonKeyTracer)
        given = [whole.placeholder(f"arg{place}_1") for place in range(len(inputs))]
        results = whole.call_module("lowered", tuple(given))
        whole.output(tuple(whole.call_method("__getitem__", (results, place)) for place in range(outputs)))
        return torch.fx.GraphModule({"lowered": LoweredProgram(program, self.factor, inputs)}, whole)
