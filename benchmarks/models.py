"""The synthetic models: an ONNX graph or a Python model for rocserve, and a Python model with the same answers for
Triton."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # Python models are measured without onnx, too.
    import onnx

ADD_SUB_LENGTH = 16
IDENTITY_LENGTH = 1 << 20
"""FP32 elements of the identity: 4 MiB."""
ADD_SUB_MAX_BATCH_SIZE = 64

# Old enough for every ONNX Runtime from 1.18 on.
OPSET_VERSION = 17
IR_VERSION = 8

PYTHON_ADD_SUB = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            left = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            right = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
            outputs = [pb_utils.Tensor("OUTPUT0", left + right), pb_utils.Tensor("OUTPUT1", left - right)]
            responses.append(pb_utils.InferenceResponse(output_tensors=outputs))
        return responses
"""

PYTHON_IDENTITY = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            responses.append(pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("OUTPUT0", tensor)]))
        return responses
"""


@dataclass(frozen=True, slots=True)
class TwinModel:
    """One model in both forms, with the same names, datatypes and shapes."""

    name: str
    tensors: str
    """The input, output and max_batch_size part of config.pbtxt."""
    dynamic_batching: bool
    graph: onnx.ModelProto | None
    """The graph for rocserve; None: it serves the same Python model as Triton."""
    source: str
    """model.py"""
    instances: int = 1

    def write_for_rocserve(self, repository: Path) -> None:
        if self.graph is None:
            self.write_for_triton(repository)
            return
        import onnx

        version = self._write_config(repository, 'backend: "onnxruntime"')
        onnx.save(self.graph, version / "model.onnx")

    def write_for_triton(self, repository: Path) -> None:
        version = self._write_config(repository, 'backend: "python"')
        (version / "model.py").write_text(self.source)

    def _write_config(self, repository: Path, backend: str) -> Path:
        """Write config.pbtxt and return the folder of version 1."""
        group = f"instance_group {{ kind: KIND_CPU count: {self.instances} }}"
        parts = [f'name: "{self.name}"', backend, self.tensors, group]
        if self.dynamic_batching:
            parts.append("dynamic_batching { }")
        version = repository / self.name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text("\n".join(parts) + "\n")
        return version


def add_sub(name: str, dynamic_batching: bool, python: bool = False, instances: int = 1) -> TwinModel:
    """OUTPUT0 = INPUT0 + INPUT1, OUTPUT1 = INPUT0 - INPUT1, on [batch, 16] INT32; `python`: in rocserve too."""
    tensors = [f"max_batch_size: {ADD_SUB_MAX_BATCH_SIZE}"]
    for kind in ("input", "output"):
        for index in (0, 1):
            full_name = f"{kind.upper()}{index}"
            tensors.append(f'{kind} {{ name: "{full_name}" data_type: TYPE_INT32 dims: [ {ADD_SUB_LENGTH} ] }}')
    graph = None if python else _add_sub_graph()
    return TwinModel(name, "\n".join(tensors), dynamic_batching, graph, PYTHON_ADD_SUB, instances)


def identity(name: str, python: bool = False) -> TwinModel:
    """OUTPUT0 = INPUT0, on [1048576] FP32 (4 MiB) without batching; `python`: in rocserve too."""
    tensors = [
        "max_batch_size: 0",
        f'input {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ {IDENTITY_LENGTH} ] }}',
        f'output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ {IDENTITY_LENGTH} ] }}',
    ]
    return TwinModel(name, "\n".join(tensors), False, None if python else _identity_graph(), PYTHON_IDENTITY)


def _add_sub_graph() -> onnx.ModelProto:
    from onnx import TensorProto, helper

    return _build_graph(
        nodes=[
            helper.make_node("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"]),
            helper.make_node("Sub", ["INPUT0", "INPUT1"], ["OUTPUT1"]),
        ],
        element_type=TensorProto.INT32,
        shape=["batch", ADD_SUB_LENGTH],
        inputs=("INPUT0", "INPUT1"),
        outputs=("OUTPUT0", "OUTPUT1"),
    )


def _identity_graph() -> onnx.ModelProto:
    from onnx import TensorProto, helper

    return _build_graph(
        nodes=[helper.make_node("Identity", ["INPUT0"], ["OUTPUT0"])],
        element_type=TensorProto.FLOAT,
        shape=[IDENTITY_LENGTH],
        inputs=("INPUT0",),
        outputs=("OUTPUT0",),
    )


def _build_graph(
    nodes: list[onnx.NodeProto],
    element_type: int,
    shape: list[str | int] | list[int],
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
) -> onnx.ModelProto:
    """A checked model whose inputs and outputs all have one datatype and shape."""
    import onnx
    from onnx import helper

    graph = helper.make_graph(
        nodes,
        "benchmark",
        [helper.make_tensor_value_info(name, element_type, shape) for name in inputs],
        [helper.make_tensor_value_info(name, element_type, shape) for name in outputs],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET_VERSION)], ir_version=IR_VERSION)
    onnx.checker.check_model(model, full_check=True)
    return model
