"""Asks servers with KServe's own clients and prints the answers as JSON. Runs in the Python of an environment that has
`kserve`. Four arguments for each server: its gRPC address, its HTTP address, a model, and a file that holds an array
(.npy) or one BYTES element for each input."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.grpc.grpc_predict_v2_pb2 import ModelMetadataRequest


def request(model: str, inputs: Sequence[tuple[str, str]], data: Path) -> InferRequest:
    """`inputs`: name and datatype of each."""
    array = np.load(data) if data.suffix == ".npy" else np.array([[data.read_bytes()]], np.object_)
    entries = [InferInput(name=name, shape=list(array.shape), datatype=datatype) for name, datatype in inputs]
    for entry in entries:
        entry.set_data_from_numpy(array, binary_data=data.suffix != ".npy")
    return InferRequest(model_name=model, infer_inputs=entries)


def outputs(answer: Any) -> dict[str, Any]:
    arrays = {entry.name: entry.as_numpy().ravel() for entry in answer.outputs}
    # KServe's gRPC client returns strings as bytes.
    return {
        name: (array if array.dtype != np.object_ else array.astype(str)).tolist() for name, array in arrays.items()
    }


async def over_rest(address: str, model: str, data: Path) -> dict[str, Any]:
    async with InferenceRESTClient(RESTConfig(protocol="v2")) as client:
        # KServe's client lacks this call.
        async with httpx.AsyncClient(timeout=90) as plain:
            metadata = (await plain.get(f"{address}/v2/models/{model}")).json()
        inputs = [(entry["name"], entry["datatype"]) for entry in metadata["inputs"]]
        return {
            "live": await client.is_server_live(address),
            "ready": await client.is_server_ready(address),
            "model": await client.is_model_ready(address, model),
            "unknown model": await client.is_model_ready(address, "nowhere"),
            "name": metadata["name"],
            "outputs": outputs(await client.infer(address, request(model, inputs, data), model_name=model)),
        }


async def over_grpc(address: str, model: str, data: Path) -> dict[str, Any]:
    async with InferenceGRPCClient(address) as client:
        metadata = await client._client_stub.ModelMetadata(ModelMetadataRequest(name=model))
        inputs = [(entry.name, entry.datatype) for entry in metadata.inputs]
        return {
            "live": await client.is_server_live(),
            "ready": await client.is_server_ready(),
            "model": await client.is_model_ready(model),
            "unknown model": await client.is_model_ready("nowhere"),
            "name": metadata.name,
            "outputs": outputs(await client.infer(request(model, inputs, data))),
        }


async def main(arguments: Sequence[str]) -> None:
    for grpc_address, http_address, model, data in batched(arguments, 4):
        rest = await over_rest(f"http://{http_address}", model, Path(data))
        print(json.dumps([rest, await over_grpc(grpc_address, model, Path(data))]))


def batched(words: Sequence[str], size: int) -> list[Sequence[str]]:
    return [words[start : start + size] for start in range(0, len(words), size)]


asyncio.run(main(sys.argv[1:]))
