import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Decoupled: as many responses as IN says, numbered; below zero an error behind as many responses."""

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().flatten()[0])
            for index in range(abs(count)):
                output = pb_utils.Tensor("OUT", np.array([index], dtype=np.int32))
                sender.send(pb_utils.InferenceResponse([output]))
            if count < 0:
                error = pb_utils.TritonError(f"no more after {abs(count)}")
                sender.send(pb_utils.InferenceResponse(error=error))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
