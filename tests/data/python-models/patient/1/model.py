import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Waits for a request's client to give up, if the request asks for it; the next answer has the number of clients
    that did."""

    def initialize(self, args):
        self.cancelled = 0

    def execute(self, requests):
        responses = []
        for request in requests:
            wait = bool(pb_utils.get_input_tensor_by_name(request, "WAIT").as_numpy()[0])
            if wait:
                print("waiting for a client to give up")
            end = time.monotonic() + 90
            while wait and time.monotonic() < end:
                if request.is_cancelled():
                    self.cancelled += 1
                    break
                time.sleep(0.01)
            if wait:
                error = pb_utils.TritonError("given up", pb_utils.TritonError.CANCELLED)
                responses.append(pb_utils.InferenceResponse(error=error))
            else:
                count = pb_utils.Tensor("CANCELLED", np.array([self.cancelled], np.int32))
                responses.append(pb_utils.InferenceResponse([count]))
        return responses
