"""Samples of `model_warmup` as batches: every datatype, from zeros, random numbers and files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.model_config import ModelConfig, OutputConfig, WarmupInput, WarmupSample
from rocserve.core.tensors import Tensor
from rocserve.workers.warmup import warm_up_batches


def config(source: str, datatype: DataType, max_batch_size: int, batch_size: int = 2, count: int = 1) -> ModelConfig:
    sample = WarmupSample("s", batch_size, {"X": WarmupInput(datatype, (3,), source)}, count)
    outputs = (OutputConfig("Y", datatype, (3,)),)
    return ModelConfig("m", max_batch_size=max_batch_size, outputs=outputs, model_warmup=(sample,))


def tensor_of(folder: Path, source: str, datatype: DataType, max_batch_size: int = 4) -> Tensor:
    (batch,) = warm_up_batches(config(source, datatype, max_batch_size), folder)
    return batch.inputs["X"]


@pytest.mark.parametrize("datatype", list(DataType))
@pytest.mark.parametrize("source", ["zero", "random"])
def test_every_datatype(tmp_path: Path, source: str, datatype: DataType) -> None:
    tensor = tensor_of(tmp_path, source, datatype)
    assert (tensor.datatype, tensor.shape) == (datatype, (2, 3))
    rows = tensor.numpy()
    assert rows.shape == (2, 3)
    assert rows[0].tolist() == rows[1].tolist(), "each row has the same data"
    again = tensor_of(tmp_path, source, datatype).numpy()
    assert rows.tolist() == again.tolist(), "a model that fails on them fails each time"
    if source == "zero":
        assert not any(rows[0].tolist())


def test_a_model_without_batches(tmp_path: Path) -> None:
    (batch,) = warm_up_batches(config("zero", DataType.FP32, 0, batch_size=1), tmp_path)
    assert batch.inputs["X"].shape == (3,) and batch.request_sizes == (1,)
    assert batch.requested_outputs == ("Y",)


def test_how_often(tmp_path: Path) -> None:
    assert len(warm_up_batches(config("zero", DataType.FP32, 4, count=5), tmp_path)) == 5


def test_files_may_hold_more_than_is_needed(tmp_path: Path) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "raw").write_bytes(np.arange(5, dtype=np.float32).tobytes())
    assert tensor_of(tmp_path, "file:raw", DataType.FP32).numpy().tolist() == [[0, 1, 2], [0, 1, 2]]
    with pytest.raises(ServeError) as raised:
        tensor_of(tmp_path, "file:raw", DataType.FP64)
    assert raised.value.text == (
        "warmup setting expects 24 bytes, but the data provided from raw only has 20 bytes (input 'X')"
    )


def test_files_of_strings_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "text").write_bytes(
        b"".join(len(word).to_bytes(4, "little") + word for word in (b"a", b"", b"ccc"))
    )
    assert tensor_of(tmp_path, "file:text", DataType.BYTES).numpy().tolist() == [[b"a", b"", b"ccc"]] * 2
