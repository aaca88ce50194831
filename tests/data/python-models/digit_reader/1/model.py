import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Asks for the digit on an image in two ways: two models one after the other, and the ensemble of the same two."""

    def execute(self, requests):
        responses = []
        for request in requests:
            encoded = pb_utils.get_input_tensor_by_name(request, "ENCODED")
            image = self.call("digits_preprocess", [encoded], "IMAGE", request)
            label = self.call("digits_classifier", [pb_utils.Tensor("IMAGE", image.as_numpy())], "LABEL", request)
            same = self.call("digits", [encoded], "LABEL", request)
            responses.append(
                pb_utils.InferenceResponse(
                    output_tensors=[
                        pb_utils.Tensor("CHAINED", label.as_numpy()),
                        pb_utils.Tensor("TOGETHER", same.as_numpy()),
                    ]
                )
            )
        return responses

    def call(self, model_name, inputs, output, request):
        inference_request = pb_utils.InferenceRequest(
            model_name=model_name,
            requested_output_names=[output],
            inputs=inputs,
            request_id=request.request_id(),
        )
        inference_response = inference_request.exec()
        if inference_response.has_error():
            raise pb_utils.TritonModelException(inference_response.error().message())
        return pb_utils.get_output_tensor_by_name(inference_response, output)
