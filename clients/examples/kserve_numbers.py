"""Asks a model for numbers with KServe's own client, over REST and over gRPC. Needs `pip install kserve`, and a server:

python clients/examples/kserve_numbers.py MODEL INPUT --http-address localhost:8000 --grpc-address localhost:8001
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig


def request(model: str, name: str, numbers: np.ndarray[Any, Any]) -> InferRequest:
    entry = InferInput(name=name, shape=list(numbers.shape), datatype="FP32")
    entry.set_data_from_numpy(numbers, binary_data=False)
    return InferRequest(model_name=model, infer_inputs=[entry])


async def over_rest(address: str, asked: InferRequest) -> Any:
    async with InferenceRESTClient(RESTConfig(protocol="v2")) as client:
        return await client.infer(f"http://{address}", asked, model_name=asked.model_name)


async def over_grpc(address: str, asked: InferRequest) -> Any:
    async with InferenceGRPCClient(address) as client:
        return await client.infer(asked)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("input", help="an input of FP32")
    parser.add_argument("--shape", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--http-address", default="localhost:8000")
    parser.add_argument("--grpc-address", default="localhost:8001")
    # Importing kserve has read the command line too, and would take --http for --http_port.
    given = parser.parse_args()
    numbers = np.arange(np.prod(given.shape), dtype=np.float32).reshape(given.shape)
    asked = request(given.model, given.input, numbers)
    for way, answer in (
        ("REST", await over_rest(given.http_address, asked)),
        ("gRPC", await over_grpc(given.grpc_address, asked)),
    ):
        for output in answer.outputs:
            print(way, output.name, output.as_numpy().tolist())


if __name__ == "__main__":
    asyncio.run(main())
