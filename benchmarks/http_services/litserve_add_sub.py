"""add/sub as LitServe serves it: the program that LitServe's environment runs, with the port to listen on."""

import sys

import litserve
import numpy


class AddSub(litserve.LitAPI):
    def setup(self, device: str) -> None: ...

    def decode_request(self, request: dict[str, list[list[int]]]) -> list[numpy.ndarray]:
        return [numpy.array(request[name], numpy.int32) for name in ("INPUT0", "INPUT1")]

    def predict(self, inputs: list[numpy.ndarray]) -> list[numpy.ndarray]:
        left, right = inputs
        return [left + right, left - right]

    def encode_response(self, outputs: list[numpy.ndarray]) -> dict[str, list[list[int]]]:
        return {f"OUTPUT{index}": array.tolist() for index, array in enumerate(outputs)}


if __name__ == "__main__":
    server = litserve.LitServer(AddSub(), accelerator="cpu", workers_per_device=1, fast_queue=True)
    server.run(
        host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", generate_client_file=False, access_log=False
    )
