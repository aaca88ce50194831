import json
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Answers each request with as many responses as IN has elements, from a separate thread."""

    def initialize(self, args):
        model_config = json.loads(args["model_config"])
        if not pb_utils.using_decoupled_model_transaction_policy(model_config):
            raise pb_utils.TritonModelException(f"model {args['model_name']} needs the decoupled transaction policy")
        self.inflight_thread_count = 0
        self.inflight_thread_count_lck = threading.Lock()

    def execute(self, requests):
        for request in requests:
            values = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            with self.inflight_thread_count_lck:
                self.inflight_thread_count += 1
            thread = threading.Thread(target=self.respond, args=(request.get_response_sender(), values))
            thread.daemon = True
            thread.start()

    def respond(self, response_sender, values):
        for index, value in enumerate(values):
            out_output = pb_utils.Tensor("OUT", np.array([value], np.int32))
            idx_output = pb_utils.Tensor("IDX", np.array([index], np.uint32))
            if value < 0:
                response_sender.send(
                    pb_utils.InferenceResponse(
                        error=pb_utils.TritonError("only what is not negative", pb_utils.TritonError.INVALID_ARG)
                    )
                )
                continue
            response_sender.send(pb_utils.InferenceResponse(output_tensors=[idx_output, out_output]))
        response_sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        with self.inflight_thread_count_lck:
            self.inflight_thread_count -= 1

    def finalize(self):
        while self.inflight_thread_count:
            time.sleep(0.01)
