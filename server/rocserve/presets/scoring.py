"""Makes a score from a reranker's output, as a Python model."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from rocserve.presets.activation import ACTIVATIONS
from rocserve.presets.parameters import parameters_of


class TritonPythonModel:
    READS_INPUTS_IN_PLACE = True

    def initialize(self, args: dict[str, str]) -> None:
        self._activation = ACTIVATIONS[parameters_of(args)["activation"]]

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(pb_utils.get_input_tensor_by_name(request, "SCORES").as_numpy()) for request in requests]

    def _answer(self, scores: np.ndarray[Any, Any]) -> Any:
        rows = self._activation(scores.astype(np.float32, copy=False).reshape(len(scores), -1))
        if rows.shape[1] != 1:
            text = f"expected one score for each pair of texts, but SCORES has shape {list(scores.shape)}"
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(text, pb_utils.TritonError.INVALID_ARG))
        return pb_utils.InferenceResponse([pb_utils.Tensor("SCORE", rows)])
