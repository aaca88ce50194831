"""The engine that replaces rocserve_reporting_engine; the parameter `plain` may make it fail, too."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rocserve.backends.base import Batch, BatchResult, ModelSource
from rocserve.core.datatypes import DataType
from rocserve.core.requests import Signature, TensorSpec


def load(model: ModelSource) -> Model:
    if model.config.parameters.get("plain") == "fails":
        raise RuntimeError("nor can this one")
    return Model()


class Model:
    signature = Signature(
        (TensorSpec("IN", DataType.FP32, (-1, 2)),), (TensorSpec("OUT", DataType.FP32, (-1, 2)),), True
    )

    def warm_up(self, samples: Sequence[Batch]) -> None: ...

    def execute(self, batch: Batch) -> BatchResult:
        return BatchResult({"OUT": np.array(batch.inputs["IN"].numpy())})

    def close(self) -> None: ...
