import numpy as np
import triton_python_backend_utils as pb_utils
from lengths import lengths_of

from .casing import shout


class TritonPythonModel:
    """Returns a text in capitals, and its length in bytes."""

    def execute(self, requests):
        logger = pb_utils.Logger
        responses = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
            logger.log_info(f"{text.size} texts")
            shouted = np.array([shout(element.decode("utf-8")) for element in text.flatten()], dtype=object)
            responses.append(
                pb_utils.InferenceResponse(
                    [
                        pb_utils.Tensor("SHOUTED", shouted.reshape(text.shape)),
                        pb_utils.Tensor("LENGTHS", lengths_of(text)),
                    ]
                )
            )
        return responses
