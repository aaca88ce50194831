import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Answers a request for n with n responses of n * n, awaiting each; other requests run meanwhile."""

    async def execute(self, requests):
        await asyncio.gather(*[self.respond(request) for request in requests])

    async def respond(self, request):
        number = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])
        if number == 13:
            raise ValueError("thirteen is out of the question")
        sender = request.get_response_sender()
        for _ in range(number):
            await asyncio.sleep(0)
            output = pb_utils.Tensor("OUT", np.array([number * number], np.int32))
            sender.send(pb_utils.InferenceResponse([output]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
