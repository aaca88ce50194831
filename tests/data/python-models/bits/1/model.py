import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Passes tensors through DLPack: half precision through numpy, BF16 unread."""

    def execute(self, requests):
        responses = []
        for request in requests:
            half = pb_utils.get_input_tensor_by_name(request, "HALF")
            brain = pb_utils.get_input_tensor_by_name(request, "BRAIN")
            doubled = np.from_dlpack(half) * np.float16(2)
            responses.append(
                pb_utils.InferenceResponse(
                    [
                        pb_utils.Tensor.from_dlpack("DOUBLED", doubled),
                        pb_utils.Tensor.from_dlpack("SAME", brain.to_dlpack()),
                    ]
                )
            )
        return responses
