import json
import os
import sys

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Returns what it sees: of itself, of each request, and the number of requests in the batch."""

    def initialize(self, args):
        self.args = args
        self.parameters = json.loads(args["model_config"]).get("parameters", {})

    def execute(self, requests):
        return [self.look_at(request, len(requests)) for request in requests]

    def look_at(self, request, together):
        seen = {
            "pid": os.getpid(),
            "executable": sys.executable,
            "args": {key: value for key, value in self.args.items() if key != "model_config"},
            "model_parameters": self.parameters,
            "model_dir": pb_utils.get_model_dir(),
            "request_id": request.request_id(),
            "correlation_id": request.correlation_id(),
            "flags": request.flags(),
            "timeout": request.timeout(),
            "parameters": json.loads(request.parameters()),
            "requested": sorted(request.requested_output_names()),
            "together": together,
        }
        outputs = [
            pb_utils.Tensor("SEEN", np.array([[json.dumps(seen)]], dtype=object)),
            pb_utils.Tensor("PID", np.array([[os.getpid()]], dtype=np.int64)),
        ]
        return pb_utils.InferenceResponse(outputs, parameters={"together": together, "kind": "mirror", "whole": True})
