"""The honest clients of each server."""

from __future__ import annotations

import random

from support.server import RocserveProcess

from campaign import models
from campaign.honest.client import Asker, HonestClient
from campaign.honest.constants import FEW_VALUES, ByRocserveStream, ByTritonGrpc, ByTritonHttp, steady, swapped
from campaign.honest.others import Decoupled, Photos, PythonModel, Sequences, SharedTensors, Version
from campaign.honest.texts import TextVectors
from campaign.stage import Stage


def population(stage: Stage, pace_seconds: float, seed: int) -> list[HonestClient]:
    seeds = random.Random(seed)
    return [
        HonestClient(name, server, asker, stage, pace_seconds, seeds.getrandbits(32))
        for server, askers in (("poll", _of_poll(stage)), ("explicit", _of_explicit(stage.explicit)))
        for name, asker in askers.items()
    ]


def _of_poll(stage: Stage) -> dict[str, Asker]:
    poll, changing = stage.poll, swapped(stage.constants)
    return {
        "swapped, gRPC": ByTritonGrpc(poll.address, changing),
        "swapped, HTTP": ByTritonHttp(poll.http_address, changing),
        "swapped, stream": ByRocserveStream(poll.address, changing),
        "steady, gRPC": ByTritonGrpc(poll.address, [steady(models.STEADY)]),
        "steady, HTTP": ByTritonHttp(poll.http_address, [steady(models.STEADY)]),
        "steady, shared memory": SharedTensors(poll.address),
        "cached, gRPC": ByTritonGrpc(poll.address, [steady(models.CACHED)], FEW_VALUES),
        "Python model, HTTP": PythonModel(poll.http_address),
        "decoupled, stream": Decoupled(poll.address),
        "sequences, gRPC": Sequences(poll.address),
        "photos, rocserve_client": Photos(poll.address),
        "texts, rocserve_client": TextVectors(poll.address, stage.folder, stage.encoders),
    }


def _of_explicit(explicit: RocserveProcess) -> dict[str, Asker]:
    return {
        "explicit steady, gRPC": ByTritonGrpc(explicit.address, [steady(models.STEADY), steady(models.CALLED)]),
        "explicit steady, stream": ByRocserveStream(explicit.address, [steady(models.STEADY)]),
        "explicit versions, gRPC": Version(explicit.address),
        "explicit Python model, HTTP": PythonModel(explicit.http_address),
    }
