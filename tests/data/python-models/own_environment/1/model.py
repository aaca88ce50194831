import sys

import numpy as np
import only_in_this_environment
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Imports a module that only its own environment has."""

    def execute(self, requests):
        told = [only_in_this_environment.GREETING, sys.executable, sys.prefix]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("TOLD", np.array(told, dtype=object))]) for _ in requests]
