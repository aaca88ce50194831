"""A Python model that takes as long as each request asks for, and returns the time at which it ran."""

from __future__ import annotations

from pathlib import Path

from support.models import drop

TENSORS = """
backend: "python"
input { name: "MS" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "SPAN" data_type: TYPE_INT64 dims: [ 2 ] }
instance_group { kind: KIND_CPU count: 1 }
"""

SCRIPT = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        began = time.monotonic_ns()
        wanted = [int(pb_utils.get_input_tensor_by_name(request, "MS").as_numpy().flat[0]) for request in requests]
        if max(wanted):
            time.sleep(max(wanted) / 1000)
        ended = time.monotonic_ns()
        span = pb_utils.Tensor("SPAN", np.array([began, ended], np.int64))
        return [pb_utils.InferenceResponse([span]) for _ in requests]
"""

REPEATING_TENSORS = """
backend: "python"
max_batch_size: 1
input { name: "MS" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "NUMBER" data_type: TYPE_INT32 dims: [ 1 ] }
model_transaction_policy { decoupled: true }
"""

REPEATING_SCRIPT = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            wanted = int(pb_utils.get_input_tensor_by_name(request, "MS").as_numpy().flat[0])
            sender = request.get_response_sender()
            for number in range(2):
                time.sleep(wanted / 1000)
                tensor = pb_utils.Tensor("NUMBER", np.array([[number]], np.int32))
                sender.send(pb_utils.InferenceResponse([tensor]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def drop_paced(repository: Path, name: str, config: str = "", tensors: str = TENSORS, script: str = SCRIPT) -> None:
    drop(repository, name, script, tensors + config)
