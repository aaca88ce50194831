"""Post-processes a classifier's scores as a Python model: probabilities, and the best class with its name. The
parameter `activation` names the function from scores to probabilities; without it, rows that are already probabilities
are kept."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from rocserve.presets.activation import ACTIVATIONS, softmax
from rocserve.presets.class_names import class_names_of
from rocserve.presets.parameters import parameters_of


class TritonPythonModel:
    READS_INPUTS_IN_PLACE = True

    def initialize(self, args: dict[str, str]) -> None:
        """Raises ValueError if the configuration names no label file."""
        self._batches = json.loads(args["model_config"])["max_batch_size"] > 0
        self._labels = class_names_of(args, "PROBABILITIES")
        activation = parameters_of(args).get("activation")
        self._probabilities = ACTIVATIONS[activation] if activation else probabilities

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(pb_utils.get_input_tensor_by_name(request, "SCORES").as_numpy()) for request in requests]

    def _answer(self, scores: np.ndarray[Any, Any]) -> Any:
        count = len(scores) if self._batches else 1
        if scores.size != count * len(self._labels):
            text = f"there are {len(self._labels)} labels, but SCORES has shape {list(scores.shape)}"
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(text, pb_utils.TritonError.INVALID_ARG))
        rows = self._probabilities(scores.reshape(count, -1).astype(np.float32, copy=False))
        best = rows.argmax(axis=1)[:, np.newaxis]
        outputs = {
            "PROBABILITIES": rows,
            "LABEL": self._labels[best],
            "PROBABILITY": np.take_along_axis(rows, best, axis=1),
        }
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, rows if self._batches else rows[0]) for name, rows in outputs.items()]
        )


def probabilities(scores: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the softmax of each row of scores. Rows that are already probabilities are returned unchanged."""
    # The sum of a thousand FP16 probabilities differs from 1 by less.
    is_done = (scores >= 0).all(axis=1) & (np.abs(scores.sum(axis=1) - 1) < 1e-2)
    result: np.ndarray[Any, Any] = np.where(is_done[:, np.newaxis], scores, softmax(scores))
    return result
