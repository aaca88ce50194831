import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Tells what it sees of a request."""

    def initialize(self, args):
        self.version = args["model_version"]

    def execute(self, requests):
        return [self.look_at(request) for request in requests]

    def look_at(self, request):
        seen = {
            "version": self.version,
            "request_id": request.request_id(),
            "correlation_id": request.correlation_id(),
            "flags": request.flags(),
            "timeout": request.timeout(),
            "parameters": json.loads(request.parameters() or "{}"),
            "requested": sorted(request.requested_output_names()),
            "inputs": [[tensor.name(), list(tensor.as_numpy().shape)] for tensor in request.inputs()],
        }
        text = json.dumps(seen, sort_keys=True)
        return pb_utils.InferenceResponse([pb_utils.Tensor("SEEN", np.array([text], dtype=object))])
