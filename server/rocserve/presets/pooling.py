"""Makes a text's vector from an encoder's output, as a Python model: the mean, the first or the last of its tokens'
vectors (input HIDDEN), or a finished vector (input POOLED), normalised or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from rocserve.presets.parameters import parameters_of

Array = np.ndarray[Any, Any]

_LEAST_NORM = 1e-12
"""PyTorch's and sentence-transformers' bound, below which a vector is not made longer."""
# Each row is pooled separately, so that its vector is bit-identical beside any other rows.
_POOLINGS: Mapping[str, Callable[[Array], Array]] = {
    "mean": lambda tokens: np.asarray(tokens.mean(axis=0)),
    "cls": lambda tokens: tokens[0],
    "last": lambda tokens: tokens[-1],
}


class TritonPythonModel:
    READS_INPUTS_IN_PLACE = True

    def initialize(self, args: dict[str, str]) -> None:
        parameters = parameters_of(args)
        self._pool = _POOLINGS.get(parameters.get("pooling", ""))
        self._normalises = parameters.get("normalise") == "true"

    def execute(self, requests: list[Any]) -> list[Any]:
        return [pb_utils.InferenceResponse([pb_utils.Tensor("EMBEDDING", self._vectors(one))]) for one in requests]

    def _vectors(self, request: Any) -> Array:
        if self._pool is None:
            vectors = _numbers(request, "POOLED")
        else:
            hidden = _numbers(request, "HIDDEN")
            counts = pb_utils.get_input_tensor_by_name(request, "TOKEN_COUNT").as_numpy().ravel().tolist()
            vectors = np.stack([self._pool(row[:count]) for row, count in zip(hidden, counts, strict=True)])
        if self._normalises:
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), _LEAST_NORM)
        return vectors


def _numbers(request: Any, name: str) -> Array:
    array: Array = pb_utils.get_input_tensor_by_name(request, name).as_numpy()
    return array.astype(np.float32, copy=False)
