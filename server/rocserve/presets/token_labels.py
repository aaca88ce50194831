"""Names the classes of a text's tokens, as a Python model. The tokens that the tokenizer has added are left out. A
request holds one text."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from rocserve.presets.activation import ACTIVATIONS
from rocserve.presets.class_names import class_names_of
from rocserve.presets.parameters import parameters_of


class TritonPythonModel:
    READS_INPUTS_IN_PLACE = True

    def initialize(self, args: dict[str, str]) -> None:
        """Raises ValueError if the configuration names no label file."""
        self._labels = class_names_of(args, "LABELS")
        self._activation = ACTIVATIONS[parameters_of(args)["activation"]]

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        scores, tokens, offsets, special = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy()[0]
            for name in ("SCORES", "TOKENS", "OFFSETS", "SPECIAL")
        )
        if scores.shape[-1] != len(self._labels):
            text = f"there are {len(self._labels)} labels, but SCORES has shape {list(scores.shape)}"
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(text, pb_utils.TritonError.INVALID_ARG))
        own = ~special
        rows = self._activation(scores[own].astype(np.float32, copy=False))
        best = rows.argmax(axis=1)
        outputs = {
            "TOKENS": tokens[own],
            "LABELS": self._labels[best],
            "PROBABILITIES": np.take_along_axis(rows, best[:, np.newaxis], axis=1)[:, 0],
            "OFFSETS": offsets[own],
        }
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array[np.newaxis]) for name, array in outputs.items()])
