"""Run by the Python of an environment that has `kserve`: asks a server by KServe's own clients, and prints as JSON what
came. Arguments: the server's gRPC address, its HTTP address."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

MODEL = "add_sub"


def request() -> InferRequest:
    inputs = [InferInput(name=name, shape=[1, 4], datatype="INT32") for name in ("INPUT0", "INPUT1")]
    for entry in inputs:
        entry.set_data_from_numpy(np.array([[1, 2, 3, 4]], np.int32), binary_data=False)
    return InferRequest(model_name=MODEL, infer_inputs=inputs)


def sums(answer: Any) -> list[int]:
    output = next(entry for entry in answer.outputs if entry.name == "OUTPUT0")
    return [int(value) for value in output.as_numpy().flatten()]


async def over_rest(address: str) -> dict[str, Any]:
    async with InferenceRESTClient(RESTConfig(protocol="v2")) as client:
        return {
            "live": await client.is_server_live(address),
            "ready": await client.is_server_ready(address),
            "model": await client.is_model_ready(address, MODEL),
            "unknown model": await client.is_model_ready(address, "nowhere"),
            "sums": sums(await client.infer(address, request(), model_name=MODEL)),
        }


async def over_grpc(address: str) -> dict[str, Any]:
    async with InferenceGRPCClient(address) as client:
        return {
            "live": await client.is_server_live(),
            "ready": await client.is_server_ready(),
            "model": await client.is_model_ready(MODEL),
            "unknown model": await client.is_model_ready("nowhere"),
            "sums": sums(await client.infer(request())),
        }


async def main(grpc_address: str, http_address: str) -> None:
    print(json.dumps([await over_rest(f"http://{http_address}"), await over_grpc(grpc_address)]))


asyncio.run(main(*sys.argv[1:]))
