import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """OUTPUT0 = INPUT0 + INPUT1, OUTPUT1 = INPUT0 - INPUT1; an input that is left out counts as zero."""

    def execute(self, requests):
        responses = []
        for request in requests:
            found = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            zeros = np.zeros((1, 4), dtype=np.int32)
            first = found.get("INPUT0", zeros)
            second = found.get("INPUT1", zeros)
            outputs = [pb_utils.Tensor("OUTPUT0", first + second), pb_utils.Tensor("OUTPUT1", first - second)]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
