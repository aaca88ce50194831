"""An engine that pads: it answers with its inputs, their shapes, and the last value of each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rocserve.backends.base import Batch, BatchResult, ModelSource, SequentialExecution
from rocserve.core.datatypes import DataType
from rocserve.core.padding import Lengths, PaddedDimension, Padding
from rocserve.core.requests import Signature, TensorSpec
from rocserve.core.tensors import Tensor

INPUTS = (
    TensorSpec("IMAGE", DataType.UINT8, (-1, 3, -1, -1)),
    TensorSpec("HALF", DataType.FP16, (-1, -1)),
    TensorSpec("BITS", DataType.BF16, (-1, -1)),
    TensorSpec("SCALE", DataType.FP32, (-1, 2)),
)
PADDING = Padding(
    (
        PaddedDimension("H", (4, 8), {"IMAGE": (2,)}, {"IMAGE": (2,)}),
        PaddedDimension("W", (4, 8), {"IMAGE": (3,), "HALF": (1,), "BITS": (1,)}, {
            "IMAGE": (3,), "HALF": (1,), "BITS": (1,), "TEXTS": (1,)
        }),
    ),
    {"HALF": float("-inf"), "BITS": 1.5, "IMAGE": 7},
)  # fmt: skip


def load(model: ModelSource) -> Model:
    return Model(model.config.parameters)


class Model:
    signature = Signature(
        INPUTS,
        (
            *INPUTS,
            TensorSpec("TEXTS", DataType.BYTES, (-1, -1)),
            TensorSpec("SEEN", DataType.INT64, (-1, 2)),
            TensorSpec("LAST", DataType.FP32, (-1, 3)),
        ),
        True,
        padding=PADDING,
    )

    def __init__(self, parameters: Mapping[str, str]) -> None:
        self._is_short = parameters["behaviour"] == "short"
        if parameters["behaviour"] == "lends":
            self.executions = [Lending(self)]

    def warm_up(self, samples: Sequence[Batch]) -> None: ...

    def execute(self, batch: Batch) -> BatchResult:
        image, half, bits = (batch.arrays[name] for name in ("IMAGE", "HALF", "BITS"))
        last = np.stack([image[:, 0, -1, -1], half[:, -1], bits[:, -1]], axis=1).astype(np.float32)
        outputs = {
            **batch.arrays,
            "BITS": Tensor("BITS", DataType.BF16, bits.shape, bits.tobytes()),
            "TEXTS": bits.astype(np.str_).astype(np.object_),
            "SEEN": np.full((len(image), 2), image.shape[2:], np.int64),
            "LAST": last,
        }
        if self._is_short:
            outputs["HALF"] = half[:, :-1]
        return BatchResult(outputs)

    def close(self) -> None: ...


class Lending(SequentialExecution):
    """Lends memory for the inputs, in which batches must then lie."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._memory = {spec.name: memoryview(bytearray(4096)) for spec in INPUTS}
        self._lent: tuple[int, Lengths] = (0, ())

    def input_memory(self, rows: int, sizes: Lengths) -> Mapping[str, memoryview]:
        self._lent = (rows, sizes)
        return self._memory

    def start(self, batch: Batch) -> None:
        half = batch.arrays["HALF"]
        rows, sizes = self._lent
        assert half.shape == (rows, sizes[1]), "memory is asked for with the size of the batch"
        for name, array in batch.arrays.items():
            assert np.shares_memory(array, np.frombuffer(self._memory[name], np.uint8)), name
        super().start(batch)
