"""ONNX Runtime on a GPU: concurrent batches on captured graphs, as in the pytorch backend."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from support.encoders import VOCABULARY, encoder
from support.models import add_sub

from rocserve.backends.base import Batch, LoadedModel, ModelSource, model_executions, model_load_check, model_properties
from rocserve.core.datatypes import DataType
from rocserve.core.device_references import DEVICE_PROPERTY
from rocserve.core.model_config import InstanceKind
from rocserve.core.padding import Buckets
from rocserve.core.tensors import Tensor, tensor_from_numpy


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import onnxruntime
    import torch

    providers = {"CUDAExecutionProvider", "ROCMExecutionProvider"}
    return torch.cuda.is_available() and not providers.isdisjoint(onnxruntime.get_available_providers())


pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif("not _has_gpu()", reason="no GPU here that both PyTorch and ONNX Runtime can use"),
]

LARGEST = 4


@pytest.fixture
def model(model_source: Callable[..., ModelSource]) -> Iterator[LoadedModel]:
    from rocserve.backends.onnx import backend

    source = model_source("model.onnx", add_sub(), max_batch_size=LARGEST, kind=InstanceKind.GPU)
    model = backend.load(replace(source, device=0))
    model.warm_up([])
    yield model
    model.close()


def batch(left: np.ndarray, right: np.ndarray, stays: tuple[str, ...] = ()) -> Batch:
    tensors = {name: tensor_from_numpy(name, x, DataType.INT32) for name, x in (("INPUT0", left), ("INPUT1", right))}
    return Batch(tensors, ("OUTPUT0", "OUTPUT1"), (len(left),), reference_outputs=stays)


def test_two_batches_in_flight_have_their_own_results(model: LoadedModel) -> None:
    assert model_properties(model)["graphs"] == "captured"
    one, other = model_executions(model)
    for rows in (1, 2, 3, LARGEST, 2 * LARGEST + 1):
        x = np.arange(rows * 16, dtype=np.int32).reshape(rows, 16)
        for turn in range(20):
            one.start(batch(x, x + turn))
            other.start(batch(x, x[::-1].copy()))
            first, second = one.result().outputs, other.result().outputs
            np.testing.assert_array_equal(first["OUTPUT0"], 2 * x + turn)
            np.testing.assert_array_equal(first["OUTPUT1"], np.full_like(x, -turn))
            np.testing.assert_array_equal(second["OUTPUT1"], x - x[::-1])


def test_what_is_put_into_the_engines_memory_runs_from_there(model: LoadedModel) -> None:
    x = np.arange(48, dtype=np.int32).reshape(3, 16)
    for execution in model_executions(model):
        memory = execution.input_memory(3, ())
        tensors = {}
        for name in ("INPUT0", "INPUT1"):
            octets = memory[name][: x.nbytes]
            octets[:] = x.tobytes()
            tensors[name] = Tensor(name, DataType.INT32, x.shape, octets)
        execution.start(Batch(tensors, ("OUTPUT0",), (1, 2)))
        np.testing.assert_array_equal(execution.result().outputs["OUTPUT0"], 2 * x)


def test_outputs_that_may_stay_are_references(model: LoadedModel) -> None:
    assert model_properties(model)[DEVICE_PROPERTY]
    x = np.ones((2, 16), np.int32)
    one, _ = model_executions(model)
    one.start(batch(x, x, stays=("OUTPUT1",)))
    result = one.result()
    np.testing.assert_array_equal(result.outputs["OUTPUT0"], 2 * x)
    assert isinstance(result.outputs["OUTPUT1"], Tensor)
    assert result.outputs["OUTPUT1"].datatype is DataType.BYTES
    assert len(result.kept) == 1


def test_texts_of_unlike_lengths_are_padded_to_default_sizes(model_source: Callable[..., ModelSource]) -> None:
    import onnxruntime

    from rocserve.backends.onnx import backend
    from rocserve.backends.warmup import as_served

    content = encoder(longest=64).SerializeToString()
    source = model_source("model.onnx", content, max_batch_size=LARGEST, kind=InstanceKind.GPU)
    loaded = backend.load(replace(source, device=0))
    padding, properties = loaded.signature.padding, model_properties(loaded)
    assert [one.sizes for one in padding.dimensions] == [(16, 24, 32, 48, 64)]
    assert (properties["graphs"], properties["batch_sizes"]) == ("none", "1, 2, 4")
    assert DEVICE_PROPERTY not in properties
    assert "dimension 'sequence' may be padded" in model_load_check(loaded).parts
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    executions = model_executions(loaded)
    assert len(executions) == 2
    # Values are around 1; the provider computes with TF32, which has three digits.
    draw = np.random.default_rng(0)
    for _ in range(30):
        served, expected = [], []
        for execution in executions:
            # 5 rows run in two pieces; as many as a size has, in the engine's own memory.
            rows, length = int(draw.integers(1, LARGEST + 2)), int(draw.integers(1, 65))
            ids = draw.integers(0, VOCABULARY, (rows, length))
            mask = np.ones_like(ids)
            feed = {"input_ids": ids, "attention_mask": mask}
            expected.append(dict(zip(("tokens", "pooled"), session.run(("tokens", "pooled"), feed), strict=True)))
            tensors = {name: tensor_from_numpy(name, values, DataType.INT64) for name, values in feed.items()}
            one = Batch(tensors, ("tokens", "pooled"), (rows,))
            served.append(as_served(one, source.config, padding))
            execution.start(served[-1])
        for execution, batch, wanted in zip(executions, served, expected, strict=True):
            found = execution.result().outputs
            for name, values in wanted.items():
                own = found[name]
                assert isinstance(own, np.ndarray)
                cut = batch.padded.get(name)
                np.testing.assert_allclose(own if cut is None else own[tuple(cut.own(0, own.shape))], values, atol=2e-2)
    unlisted = [tensor_from_numpy(name, np.ones((3, 20), np.int64), DataType.INT64) for name in feed]
    executions[0].start(Batch({tensor.name: tensor for tensor in unlisted}, ("pooled",), (3,)))
    (pooled,) = session.run(("pooled",), {tensor.name: tensor.numpy() for tensor in unlisted})
    assert Buckets(padding).lengths((tensor.name, tensor.shape) for tensor in unlisted) == (20,)
    np.testing.assert_allclose(executions[0].result().outputs["pooled"], pooled, atol=2e-2)
    loaded.close()
