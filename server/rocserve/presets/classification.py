"""The end of a classifier as a Python model: scores of classes -> probabilities, and the best class by its name.

The names are those of the file of labels of output PROBABILITIES.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from rocserve.presets.class_names import read_class_names

_ROUNDING = 1e-2
"""By how much the sum of a row of probabilities may differ from 1: a thousand of them in FP16 are off by less."""


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        filename = pb_utils.get_output_config_by_name(config, "PROBABILITIES")["label_filename"]
        self._labels = read_class_names(Path(args["model_repository"]) / filename)
        self._batches = config["max_batch_size"] > 0

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(pb_utils.get_input_tensor_by_name(request, "SCORES").as_numpy()) for request in requests]

    def _answer(self, scores: np.ndarray[Any, Any]) -> Any:
        rows = probabilities(scores.reshape(-1, len(self._labels)).astype(np.float32, copy=False))
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
    """The softmax of each row of scores; rows that are probabilities already, none below 0 and 1 together, stay."""
    exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
    softmax = exponentials / exponentials.sum(axis=1, keepdims=True)
    is_done = (scores >= 0).all(axis=1) & (np.abs(scores.sum(axis=1) - 1) < _ROUNDING)
    result: np.ndarray[Any, Any] = np.where(is_done[:, np.newaxis], scores, softmax)
    return result
