import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Takes as many milliseconds as its inputs begin with; tells which run a request was in, and with how many."""

    def initialize(self, args):
        self.runs = 0

    def execute(self, requests):
        self.runs += 1
        inputs = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        time.sleep(max(array.flat[0] for array in inputs) / 1000)
        told = [self.runs, len(requests)]
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([told] * len(array), dtype=np.int32))])
            for array in inputs
        ]
