import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Sums all the responses that the decoupled model `repeat` gives to one call."""

    def execute(self, requests):
        responses = []
        for request in requests:
            inference_request = pb_utils.InferenceRequest(
                model_name="repeat",
                requested_output_names=["OUT"],
                inputs=[pb_utils.get_input_tensor_by_name(request, "IN")],
            )
            total = 0
            for inference_response in inference_request.exec(decoupled=True):
                if inference_response.has_error():
                    raise pb_utils.TritonModelException(inference_response.error().message())
                if len(inference_response.output_tensors()) > 0:
                    total += int(pb_utils.get_output_tensor_by_name(inference_response, "OUT").as_numpy()[0])
            single = inference_request.exec()
            responses.append(
                pb_utils.InferenceResponse(
                    [
                        pb_utils.Tensor("SUM", np.array([total], np.int32)),
                        pb_utils.Tensor("SINGLE", np.array([single.error().message()], dtype=np.object_)),
                    ]
                )
            )
        return responses
