"""ONNX Runtime with as little code as possible, to measure the worker around it."""

from __future__ import annotations

import onnxruntime

from rocserve.backends.base import Batch, BatchResult, ModelSource
from rocserve.core.datatypes import DataType
from rocserve.core.requests import Signature, TensorSpec


def load(model: ModelSource) -> Model:
    return Model(str(model.model_file))


class Model:
    def __init__(self, path: str) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.signature = Signature(
            tuple(TensorSpec(entry.name, DataType.INT32, (-1, 16)) for entry in self._session.get_inputs()),
            tuple(TensorSpec(entry.name, DataType.INT32, (-1, 16)) for entry in self._session.get_outputs()),
            True,
        )

    def warm_up(self, samples: list[Batch]) -> None:
        pass

    def execute(self, batch: Batch) -> BatchResult:
        names = list(batch.requested_outputs)
        feed = {name: tensor.numpy() for name, tensor in batch.inputs.items()}
        return BatchResult(dict(zip(names, self._session.run(names, feed), strict=True)))

    def close(self) -> None:
        pass
