"""Makes a text's vector from an encoder's output, as a Python model: the mean, the first or the last of its tokens'
vectors (input HIDDEN), or a finished vector (input POOLED), normalised or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from rocserve.presets.parameters import parameters_of

Array = np.ndarray[Any, Any]


def _means(hidden: Array, counts: Array) -> Array:
    sums = np.empty((len(hidden), hidden.shape[2]), np.float32)
    # Each row is added up separately, so that its vector is bit-identical beside any other rows.
    for tokens, count, own in zip(hidden, counts.tolist(), sums, strict=True):
        np.add.reduce(tokens[:count], axis=0, out=own)
    # In float64, as ndarray.mean divides.
    np.true_divide(sums, counts[:, np.newaxis], out=sums, casting="unsafe")
    return sums


def _firsts(hidden: Array, counts: Array) -> Array:
    return hidden[:, 0].copy()


def _lasts(hidden: Array, counts: Array) -> Array:
    lasts: Array = hidden[np.arange(len(hidden)), counts - 1]
    return lasts


class TritonPythonModel:
    READS_INPUTS_IN_PLACE = True

    def initialize(self, args: dict[str, str]) -> None:
        parameters = parameters_of(args)
        poolings = {"mean": _means, "cls": _firsts, "last": _lasts}
        self._pool = poolings.get(parameters.get("pooling", ""))
        self._normalises = parameters.get("normalise") == "true"

    def execute(self, requests: list[Any]) -> list[Any]:
        return [pb_utils.InferenceResponse([pb_utils.Tensor("EMBEDDING", self._vectors(one))]) for one in requests]

    def _vectors(self, request: Any) -> Array:
        if self._pool is None:
            vectors = _numbers(request, "POOLED")
        else:
            counts = pb_utils.get_input_tensor_by_name(request, "TOKEN_COUNT").as_numpy().ravel()
            vectors = self._pool(_numbers(request, "HIDDEN"), counts)
        if self._normalises:
            # As numpy.linalg.norm computes it.
            norms = np.sqrt(np.add.reduce(vectors * vectors, axis=1, keepdims=True))
            # As in PyTorch and sentence-transformers, a shorter vector is not made longer.
            vectors = vectors / np.maximum(norms, 1e-12)
        return vectors


def _numbers(request: Any, name: str) -> Array:
    array: Array = pb_utils.get_input_tensor_by_name(request, name).as_numpy()
    return array.astype(np.float32, copy=False)
