import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Decoupled: TEXT as often as COUNT says; the text `error` is an error behind as many answers."""

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy().flatten()[0]
            count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy().flatten()[0])
            for _ in range(count):
                output = pb_utils.Tensor("OUT", np.array([text], dtype=object))
                sender.send(pb_utils.InferenceResponse([output]))
            if text == b"error":
                error = pb_utils.TritonError("an error on purpose")
                sender.send(pb_utils.InferenceResponse(error=error))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
