import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Calls add_sub for all rows concurrently, and a model that does not exist, and waits for all calls."""

    async def execute(self, requests):
        responses = []
        for request in requests:
            left = pb_utils.get_input_tensor_by_name(request, "LEFT").as_numpy()
            right = pb_utils.get_input_tensor_by_name(request, "RIGHT").as_numpy()
            awaits = [
                pb_utils.InferenceRequest(
                    model_name="add_sub",
                    requested_output_names=["OUTPUT0"],
                    inputs=[
                        pb_utils.Tensor("INPUT0", left[row : row + 1]),
                        pb_utils.Tensor("INPUT1", right[row : row + 1]),
                    ],
                ).async_exec()
                for row in range(left.shape[0])
            ]
            missing = pb_utils.InferenceRequest(
                model_name="not_there", requested_output_names=["X"], inputs=[pb_utils.Tensor("X", left)]
            ).async_exec()
            *sums, refused = await asyncio.gather(*awaits, missing)
            for inference_response in sums:
                if inference_response.has_error():
                    raise pb_utils.TritonModelException(inference_response.error().message())
            rows = [pb_utils.get_output_tensor_by_name(each, "OUTPUT0").as_numpy() for each in sums]
            reason = np.array([refused.error().message()], dtype=object)
            responses.append(
                pb_utils.InferenceResponse(
                    [pb_utils.Tensor("SUMS", np.concatenate(rows)), pb_utils.Tensor("REFUSAL", reason)]
                )
            )
        return responses
