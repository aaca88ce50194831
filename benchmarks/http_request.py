"""An infer request over HTTP, as tritonclient writes it: JSON, and the tensors as raw bytes behind it."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray
from tritonclient.http import InferenceServerClient, InferInput
from tritonclient.utils import np_to_triton_dtype

from benchmarks.load_generator import Call

HEADER_LENGTH = "Inference-Header-Content-Length"
CALL_SECONDS = 30.0


class HttpRequestFailed(RuntimeError):
    """A server answered with another status than 200."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """What is posted."""

    path: str
    body: bytes
    json_length: int
    """Bytes of the body that are its JSON."""

    @property
    def headers(self) -> dict[str, str]:
        return {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(self.json_length)}

    @property
    def call(self) -> Call:
        """As h2load sends it, one request at a time on each connection."""
        return Call(self.path, tuple(f"{name}: {value}" for name, value in self.headers.items()), ("--h1",))

    def send(self, address: str) -> tuple[dict[str, NDArray[numpy.generic]], int]:
        """Ask the server at host:port once: its outputs by name, and the bytes of its answer's body.

        Raises:
            HttpRequestFailed: it answered with an error.
            OSError: it did not answer.
        """
        connection = http.client.HTTPConnection(address, timeout=CALL_SECONDS)
        try:
            connection.request("POST", self.path, self.body, self.headers)
            response = connection.getresponse()
            body = response.read()
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK:
            raise HttpRequestFailed(f"HTTP status {response.status}: {body.decode(errors='replace')}")
        json_length = response.headers.get(HEADER_LENGTH)
        result = InferenceServerClient.parse_response_body(body, header_length=json_length and int(json_length))
        names = [output["name"] for output in result.get_response()["outputs"]]
        return {name: result.as_numpy(name) for name in names}, len(body)


def http_request(model: str, inputs: Mapping[str, NDArray[numpy.generic]]) -> HttpRequest:
    """A request for all outputs of a model in binary form."""
    tensors = []
    for name, array in inputs.items():
        tensor = InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    body, json_length = InferenceServerClient.generate_request_body(tensors)
    return HttpRequest(f"/v2/models/{model}/infer", bytes(body), json_length)
