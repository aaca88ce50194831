import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Does what MODE says, most of it wrong."""

    def execute(self, requests):
        modes = [pb_utils.get_input_tensor_by_name(request, "MODE").as_numpy().flatten()[0] for request in requests]
        if b"raise" in modes:
            raise ValueError("raised on purpose")
        if b"none" in modes:
            return None
        if b"few" in modes:
            return []
        if b"many" in modes:
            return [self.answer(b"") for _ in range(len(requests) + 1)]
        if b"foreign" in modes:
            return ["no response" for _ in requests]
        return [self.answer(mode) for mode in modes]

    def answer(self, mode):
        right = pb_utils.Tensor("OUT", np.array([1.5], dtype=np.float32))
        if mode == b"error":
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("an error on purpose"))
        if mode == b"not_found":
            error = pb_utils.TritonError("not found on purpose", pb_utils.TritonError.NOT_FOUND)
            return pb_utils.InferenceResponse(error=error)
        if mode == b"unavailable":
            error = pb_utils.TritonError("unavailable on purpose", pb_utils.TritonError.UNAVAILABLE)
            return pb_utils.InferenceResponse(error=error)
        if mode == b"both":
            return pb_utils.InferenceResponse([right], error=pb_utils.TritonError("both on purpose"))
        if mode == b"no_outputs":
            return pb_utils.InferenceResponse([])
        if mode == b"other_name":
            return pb_utils.InferenceResponse([pb_utils.Tensor("OTHER", np.array([1.5], dtype=np.float32))])
        if mode == b"other_type":
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([1], dtype=np.int64))])
        if mode == b"other_shape":
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros((2, 3), dtype=np.float32))])
        if mode == b"twice":
            return pb_utils.InferenceResponse([right, right])
        return pb_utils.InferenceResponse([right])
