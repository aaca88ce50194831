import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """OUTPUT_x = INPUT_x for each input that is there and wanted back; BF16 too, which numpy does not know."""

    def execute(self, requests):
        return [pb_utils.InferenceResponse(self.outputs(request)) for request in requests]

    def outputs(self, request):
        outputs = []
        for tensor in request.inputs():
            name = tensor.name().replace("INPUT", "OUTPUT")
            if name not in request.requested_output_names():
                continue
            if name.endswith("BF16"):
                outputs.append(pb_utils.Tensor.from_dlpack(name, tensor.to_dlpack()))
            else:
                outputs.append(pb_utils.Tensor(name, tensor.as_numpy()))
        return outputs
