"""The pytorch backend on a GPU: batches in flight beside each other, at fixed sizes by captured graphs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from support.pytorch import TorchFiles

from rocserve.backends.base import Batch, Execution, LoadedModel, ModelSource, model_executions
from rocserve.core.datatypes import DataType
from rocserve.core.model_config import InputConfig, InstanceKind
from rocserve.core.tensors import Tensor, tensor_from_numpy


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


pytestmark = [pytest.mark.long, pytest.mark.skipif("not _has_gpu()", reason="no GPU here that PyTorch can use")]

LARGEST = 8


@pytest.fixture
def model(model_source: Callable[..., ModelSource], torch_files: TorchFiles) -> Iterator[LoadedModel]:
    from rocserve.backends.pytorch import eager

    source = model_source(
        "model.pt2",
        torch_files.data("classifier"),
        inputs=[InputConfig("x", DataType.FP32, (4,))],
        max_batch_size=LARGEST,
        kind=InstanceKind.GPU,
    )
    model = eager.load(replace(source, device=0))
    model.warm_up([])
    yield model
    model.close()


def start(execution: Execution, x: np.ndarray) -> None:
    execution.start(Batch({"x": tensor_from_numpy("x", x, DataType.FP32)}, ("scores", "best"), (len(x),)))


def check(execution: Execution, x: np.ndarray, expected: dict[str, np.ndarray]) -> None:
    outputs = execution.result().outputs
    np.testing.assert_allclose(outputs["scores"], expected["scores"][: len(x)], atol=1e-5)
    np.testing.assert_array_equal(np.ravel(outputs["best"]), np.ravel(expected["best"][: len(x)]))


def test_two_batches_in_flight_have_their_own_results(model: LoadedModel, torch_files: TorchFiles) -> None:
    inputs, expected = torch_files.values("classifier")
    first, second = model_executions(model)
    rows = len(inputs["x"])
    turned = {name: value[::-1] for name, value in expected.items()}
    for count in (1, 2, 3, rows):
        for _ in range(20):
            x, y = inputs["x"][:count], inputs["x"][::-1][:count]
            start(first, x)
            start(second, y)
            check(first, x, expected)
            start(first, x)
            check(second, y, turned)
            check(first, x, expected)
            assert first.is_done and second.is_done


def test_a_batch_above_the_largest_size_runs_in_pieces(model: LoadedModel, torch_files: TorchFiles) -> None:
    inputs, expected = torch_files.values("classifier")
    execution = model_executions(model)[0]
    times = 1 + 2 * LARGEST // len(inputs["x"])
    x = np.concatenate([inputs["x"]] * times)
    start(execution, x)
    check(execution, x, {name: np.concatenate([value] * times) for name, value in expected.items()})
    assert execution.input_memory(len(x)) == {}


def test_what_is_put_into_the_engines_memory_runs_from_there(model: LoadedModel, torch_files: TorchFiles) -> None:
    inputs, expected = torch_files.values("classifier")
    for execution in model_executions(model):
        x = inputs["x"][:3]
        memory = execution.input_memory(3)["x"][: x.nbytes]
        memory[:] = x.tobytes()
        execution.start(Batch({"x": Tensor("x", DataType.FP32, x.shape, memory)}, ("scores", "best"), (1, 2)))
        check(execution, x, expected)
