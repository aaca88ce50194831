"""add/sub as MLServer serves it; run in MLServer's environment."""

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class AddSub(MLModel):
    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        left, right = (NumpyCodec.decode_input(tensor) for tensor in payload.inputs)
        outputs = {"OUTPUT0": left + right, "OUTPUT1": left - right}
        return InferenceResponse(
            model_name=self.name,
            outputs=[NumpyCodec.encode_output(name, array) for name, array in outputs.items()],
        )
