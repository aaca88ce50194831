import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Tells what it sees of all the rows of a batch; a request whose input is above 0 is wanted as often again."""

    def initialize(self, args):
        self.left = {}
        self.iterative = json.loads(args["model_config"])["sequence_batching"].get("iterative_sequence", False)

    def execute(self, requests):
        rows = [self.look_at(request) for request in requests]
        return [self.respond(request, rows) for request in requests]

    def respond(self, request, rows):
        value = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().reshape(-1)[0])
        if value < 0:
            return pb_utils.InferenceResponse([], pb_utils.TritonError("this one fails"))
        if self.iterative and value:
            left = self.left.setdefault(request.request_id(), value)
            self.left[request.request_id()] = left - 1
            if left:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                return None
        text = json.dumps(rows, sort_keys=True)
        shape = (1, 1) if len(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().shape) > 1 else (1,)
        return pb_utils.InferenceResponse([pb_utils.Tensor("SEEN", np.array([text], dtype=object).reshape(shape))])

    def look_at(self, request):
        inputs = {}
        for tensor in request.inputs():
            array = tensor.as_numpy()
            values = [value.decode() if isinstance(value, bytes) else float(value) for value in array.reshape(-1)]
            # Of a row that is of no request Triton leaves the other inputs as its memory was.
            inputs[tensor.name()] = [str(array.dtype), list(array.shape), values if tensor.name() != "IN" else "?"]
        return {
            "inputs": inputs,
            "id": request.correlation_id(),
            "flags": request.flags(),
            "name": request.request_id(),
        }
