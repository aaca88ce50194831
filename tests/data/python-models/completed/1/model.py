import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Needs no config.pbtxt but its backend: the model itself declares its inputs and outputs."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        inputs = [
            {"name": "DATA", "data_type": "TYPE_FP32", "dims": [-1]},
            {"name": "SCALE", "data_type": "TYPE_FP32", "dims": [1], "optional": True},
        ]
        outputs = [{"name": "SCALED", "data_type": "TYPE_FP32", "dims": [-1]}]
        config = auto_complete_model_config.as_dict()
        input_names = [each["name"] for each in config["input"]]
        output_names = [each["name"] for each in config["output"]]
        for each in inputs:
            if each["name"] not in input_names:
                auto_complete_model_config.add_input(each)
        for each in outputs:
            if each["name"] not in output_names:
                auto_complete_model_config.add_output(each)
        auto_complete_model_config.set_max_batch_size(16)
        auto_complete_model_config.set_dynamic_batching()
        return auto_complete_model_config

    def execute(self, requests):
        responses = []
        for request in requests:
            data = pb_utils.get_input_tensor_by_name(request, "DATA").as_numpy()
            scale = pb_utils.get_input_tensor_by_name(request, "SCALE")
            data *= 2 if scale is None else scale.as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("SCALED", data)]))
        return responses
