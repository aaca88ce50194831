import os
import signal
import sys

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Refuses negative numbers one by one, and fails on some words."""

    def execute(self, requests):
        responses = []
        for request in requests:
            word = pb_utils.get_input_tensor_by_name(request, "WORD").as_numpy().flatten()[0].decode()
            if word == "raise":
                raise ValueError(f"cannot bear {word!r}")
            if word == "exit":
                sys.exit(3)
            if word == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if word == "short":
                return []
            if word.startswith("code "):
                error = pb_utils.TritonError("as you wish", getattr(pb_utils.TritonError, word[5:]))
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            print("heard", word)
            output = pb_utils.Tensor("ECHO", np.array([[word]], dtype=object))
            responses.append(pb_utils.InferenceResponse(output_tensors=[output]))
        return responses
