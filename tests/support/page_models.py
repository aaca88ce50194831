"""The models of the tests of the page in a browser: pictures, texts, answers in parts, and markup everywhere."""

from __future__ import annotations

import shutil
from pathlib import Path

from support.models import drop
from support.text_models import drop_text_model

_SAMPLE_REPOSITORY = Path(__file__).parents[2] / "model_repository"
MARKUP = "<img src=x onerror=\"document.body.dataset.hacked='yes'\">"
HOSTILE = """
import numpy as np
import triton_python_backend_utils as pb_utils

MARKUP = %r


class TritonPythonModel:
    def execute(self, requests):
        texts = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().ravel()[0] for request in requests]
        return [
            pb_utils.InferenceResponse(error=pb_utils.TritonError(MARKUP))
            if text == b"fail"
            else pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([MARKUP.encode()], dtype=object))])
            for text in texts
        ]
"""
HOSTILE_CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }
"""
_MOODS = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        texts = [pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy().ravel()[0] for request in requests]
        scores = [np.array([0.25, 0.75] if text.isupper() else [0.75, 0.25], np.float32) for text in texts]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("PROBABILITIES", score)]) for score in scores]
"""
_MOODS_CONFIG = """
backend: "python"
input { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "PROBABILITIES" data_type: TYPE_FP32 dims: [ 2 ] label_filename: "labels.txt" }
"""
MOODS_OF_AN_ENSEMBLE = """
platform: "ensemble"
input { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "PROBABILITIES" data_type: TYPE_FP32 dims: [ 2 ] }
ensemble_scheduling { step {
  model_name: "moods" model_version: -1
  input_map { key: "TEXT" value: "TEXT" } output_map { key: "PROBABILITIES" value: "PROBABILITIES" }
} }
"""
_STORIES = """
import os
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            text = pb_utils.get_input_tensor_by_name(request, "prompt").as_numpy().ravel()[0].decode()
            for word in text.split():
                if word == "fail":
                    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("no <b>more")))
                    break
                while word == "wait" and not os.path.exists(%r):
                    time.sleep(0.01)
                token = np.array([f"{word} ".encode()], dtype=object)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("token", token)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
_STORIES_CONFIG = """
backend: "python"
input { name: "prompt" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "token" data_type: TYPE_STRING dims: [ 1 ] }
model_transaction_policy { decoupled: true }
"""
_STORIES_OF_AN_ENSEMBLE = """
platform: "ensemble"
input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }
ensemble_scheduling { step {
  model_name: "stories" model_version: -1
  input_map { key: "prompt" value: "text_input" } output_map { key: "token" value: "text_output" }
} }
"""


def drop_page_models(repository: Path, gate: Path) -> None:
    """`gate`: a file; the stories wait for it."""
    for model in _SAMPLE_REPOSITORY.iterdir():
        if model.name.startswith(("digits", "detect_shapes")):
            shutil.copytree(model, repository / model.name)
    labelled = HOSTILE_CONFIG.replace('name: "OUT"', 'name: "OUT" label_filename: "labels.txt"')
    drop(repository, MARKUP, HOSTILE % MARKUP, labelled)
    (repository / MARKUP / "labels.txt").write_text("one\n")
    drop_text_model(repository, "sentences", "TEXT or IDS", rows=4)
    drop_text_model(repository, "judge", "QUERY")
    drop(repository, "moods", _MOODS, _MOODS_CONFIG)
    (repository / "moods" / "labels.txt").write_text("calm\nloud\n")
    drop(repository, "stories", _STORIES % str(gate), _STORIES_CONFIG)
    for name, config in (("moods_text", MOODS_OF_AN_ENSEMBLE), ("stories_text", _STORIES_OF_AN_ENSEMBLE)):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(config)
