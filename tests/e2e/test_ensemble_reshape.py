"""Ensembles with `reshape`, as NVIDIA's generated configurations have them. The shapes are those of a real
Triton 2.51 answers with for the same repository."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.infer_inputs import infer_input
from support.server import RocserveProcess, Start

MEMBER = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            values = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            seen = np.array([list(values.shape)] * (len(values) if self.batches else 1), np.int64)
            outputs = [pb_utils.Tensor("OUT", values), pb_utils.Tensor("SEEN", seen if self.batches else seen[0])]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses

    def initialize(self, args):
        self.batches = '"max_batch_size":8' in args["model_config"]
"""


def tensor(what: str, name: str, dims: list[int], shape: list[int] | None, kind: str = "FP32") -> str:
    reshape = "" if shape is None else f"reshape {{ shape: {shape} }}"
    return f'{what} {{ name: "{name}" data_type: TYPE_{kind} dims: {dims} {reshape} }}\n'


def member(dims: list[int], batch: int, inner: list[int] | None = None) -> str:
    tensors = (
        tensor("input", "IN", dims, inner),
        tensor("output", "OUT", dims, inner),
        tensor("output", "SEEN", [-1], None, "INT64"),
    )
    return f'backend: "python" max_batch_size: {batch}\n{"".join(tensors)}'


def ensemble(step: str, batch: int, ins: tuple, outs: tuple) -> str:
    seen = tensor("output", "SEEN", [-1], None, "INT64")
    return f"""
platform: "ensemble" max_batch_size: {batch}
{tensor("input", "X", *ins)}{tensor("output", "Y", *outs)}{seen}
ensemble_scheduling {{ step {{
  model_name: "{step}" model_version: -1
  input_map {{ key: "IN" value: "X" }}
  output_map {{ key: "OUT" value: "Y" }}
  output_map {{ key: "SEEN" value: "SEEN" }}
}} }}
"""


MEMBERS = {
    "square": member([2, 2], 8),
    "square_alone": member([2, 2], 0),
    "folds": member([4], 8, [2, 2]),
    "open": member([8, -1, 1, 6], 8),
}
CASES = {
    "both": (ensemble("square", 8, ([4], [2, 2]), ([4], [2, 2])), (2, 4), (2, 2, 2), (2, 4)),
    "input": (ensemble("square", 8, ([4], [2, 2]), ([2, 2], None)), (3, 4), (3, 2, 2), (3, 2, 2)),
    "output": (ensemble("square", 8, ([2, 2], None), ([1, 4], [2, 2])), (3, 2, 2), (3, 2, 2), (3, 1, 4)),
    "alone": (ensemble("square_alone", 0, ([4], [2, 2]), ([4], [2, 2])), (4,), (2, 2), (4,)),
    "member_batches": (ensemble("square", 0, ([4], [2, 2]), ([4], [2, 2])), (4,), (1, 2, 2), (4,)),
    "ensemble_batches": (ensemble("square_alone", 8, ([4], [2, 2]), ([4], [2, 2])), (1, 4), (2, 2), (1, 4)),
    "member_reshapes_too": (ensemble("folds", 8, ([2, 2], [4]), ([2, 2], [4])), (2, 2, 2), (2, 2, 2), (2, 2, 2)),
    "open_sizes": (
        ensemble("open", 8, ([2, 4, -1, 6], [8, -1, 1, 6]), ([2, 4, -1, 6], [8, -1, 1, 6])),
        (2, 2, 4, 3, 6),
        (2, 8, 3, 1, 6),
        (2, 2, 4, 3, 6),
    ),
}
"""Configuration, the request's shape, the shape that the member sees, the answer's shape."""


@pytest.fixture(scope="module")
def server(start: Start, tmp_path_factory: pytest.TempPathFactory) -> RocserveProcess:
    repository: Path = tmp_path_factory.mktemp("reshape") / "models"
    for name, text in {**MEMBERS, **{name: case[0] for name, case in CASES.items()}}.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(text)
        if name in MEMBERS:
            (repository / name / "1" / "model.py").write_text(MEMBER)
    return start(repository)


@pytest.mark.parametrize("name", CASES)
def test_an_ensemble_reshapes_its_inputs_and_outputs(server: RocserveProcess, name: str) -> None:
    _, shape, seen, answered = CASES[name]
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    with server.client() as client:
        result = client.infer(name, [infer_input("X", values)])
    assert tuple(result.as_numpy("SEEN").reshape(-1, len(seen))[0]) == seen
    assert result.as_numpy("Y").shape == answered
    assert result.as_numpy("Y").ravel().tolist() == values.ravel().tolist()
