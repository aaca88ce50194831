"""An infer request over HTTP: as tritonclient writes it, with raw tensors after the JSON, or all in JSON."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray
from tritonclient.http import InferenceServerClient, InferInput
from tritonclient.utils import np_to_triton_dtype

from benchmarks.load_generator import Call
from benchmarks.server_process import UNIX

HEADER_LENGTH = "Inference-Header-Content-Length"
JSON_HEADERS = {"Content-Type": "application/json"}
CALL_SECONDS = 30.0

Arrays = dict[str, NDArray[numpy.generic]]


class HttpRequestFailed(RuntimeError):
    """A server answered with another status than 200."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A body to post, and the reader of its answer."""

    path: str
    body: bytes
    headers: Mapping[str, str]
    read: Callable[[bytes, Mapping[str, str]], Arrays]
    """Makes the outputs, by name, from an answer's body and headers."""

    @property
    def call(self) -> Call:
        """The request for h2load, one at a time on each connection."""
        return Call(self.path, tuple(f"{name}: {value}" for name, value in self.headers.items()), ("--h1",))

    def send(self, address: str) -> tuple[Arrays, int]:
        """Send one request to host:port or unix:path; return its outputs by name, and the size of the answer's body.
        Raises HttpRequestFailed if the server answers with an error, OSError if it does not answer."""
        connection = http.client.HTTPConnection(
            "localhost" if address.startswith(UNIX) else address, timeout=CALL_SECONDS
        )
        try:
            if address.startswith(UNIX):
                connection.sock = socket.socket(socket.AF_UNIX)
                connection.sock.settimeout(CALL_SECONDS)
                connection.sock.connect(address.removeprefix(UNIX))
            connection.request("POST", self.path, self.body, self.headers)
            response = connection.getresponse()
            body = response.read()
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK:
            raise HttpRequestFailed(f"HTTP status {response.status}: {body.decode(errors='replace')}")
        return self.read(body, response.headers), len(body)


def http_request(model: str, inputs: Mapping[str, NDArray[numpy.generic]]) -> HttpRequest:
    """A request for all outputs of a model in binary form."""
    tensors = []
    for name, array in inputs.items():
        tensor = InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    body, json_length = InferenceServerClient.generate_request_body(tensors)
    headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(json_length)}
    return HttpRequest(f"/v2/models/{model}/infer", bytes(body), headers, _read_tensors)


def json_request(model: str, inputs: Mapping[str, NDArray[numpy.generic]]) -> HttpRequest:
    """A KServe v2 request with all tensors in JSON."""
    tensors = [
        {
            "name": name,
            "shape": array.shape,
            "datatype": np_to_triton_dtype(array.dtype),
            "data": array.ravel().tolist(),
        }
        for name, array in inputs.items()
    ]
    body = json.dumps({"inputs": tensors}).encode()
    return HttpRequest(f"/v2/models/{model}/infer", body, JSON_HEADERS, _read_tensors)


def plain_json_request(path: str, inputs: Mapping[str, NDArray[numpy.generic]]) -> HttpRequest:
    """A request and answer that are one JSON object each, with the tensors as members by name."""
    body = json.dumps({name: array.tolist() for name, array in inputs.items()}).encode()
    return HttpRequest(path, body, JSON_HEADERS, _read_members)


def _read_tensors(body: bytes, headers: Mapping[str, str]) -> Arrays:
    json_length = headers.get(HEADER_LENGTH)
    result = InferenceServerClient.parse_response_body(body, header_length=json_length and int(json_length))
    names = [output["name"] for output in result.get_response()["outputs"]]
    return {name: result.as_numpy(name) for name in names}


def _read_members(body: bytes, headers: Mapping[str, str]) -> Arrays:
    return {name: numpy.array(data) for name, data in json.loads(body).items()}
