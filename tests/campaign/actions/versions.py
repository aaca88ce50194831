"""Loads and unloads of one version by the parameter `version`: the others go on."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from support.http_requests import ask
from support.infer_inputs import infer_input
from support.waiting import PATIENCE_SECONDS

from campaign import models
from campaign.action import Kind
from campaign.requests import call, channel
from campaign.stage import Stage
from rocserve.protocol import grpc_service_pb2 as messages


def one_version(stage: Stage, random: random.Random) -> None:
    """Unload one or two of the versions but the first, which honest clients ask, and load them again."""
    with stage.locks[models.VERSIONED]:
        chosen = random.sample([version for version in models.VERSIONS if version > 1], random.randint(1, 2))
        loaded = set(models.VERSIONS)
        for version in chosen:
            _control(stage, random, "unload", version)
            loaded.remove(version)
            _check(stage, loaded)
        for version in chosen:
            _control(stage, random, "load", version)
            loaded.add(version)
            _check(stage, loaded)


def _control(stage: Stage, random: random.Random, verb: str, version: int) -> None:
    server = stage.explicit
    if random.random() < 0.5:
        body: dict[str, Any] = {"parameters": {"version": random.choice((version, str(version)))}}
        status, answer = ask(server, "POST", f"/v2/repository/models/{models.VERSIONED}/{verb}", body)
        assert status == 200, f"{verb} of version {version}: {status} {answer}"
        return
    request = getattr(messages, f"RepositoryModel{verb.capitalize()}Request")(model_name=models.VERSIONED)
    request.parameters["version"].string_param = str(version)
    with channel(server.address) as opened:
        status_name, text, _ = call(opened, f"RepositoryModel{verb.capitalize()}", request.SerializeToString())
    assert status_name == "OK", f"{verb} of version {version}: {status_name} {text}"


def _check(stage: Stage, loaded: set[int]) -> None:
    """Check that these versions answer, others do not, and requests without a version go to the highest."""
    entry = infer_input("X", np.zeros((1, 2), np.float32))
    with stage.explicit.client() as client:
        for version in (*models.VERSIONS, 0):
            wanted = version or max(loaded)
            try:
                result = client.infer(
                    models.VERSIONED, [entry], str(version or ""), client_timeout=PATIENCE_SECONDS
                ).as_numpy("Y")
            except triton.InferenceServerException as error:
                assert wanted not in loaded, f"version {wanted} of {loaded}: {error}"
                continue
            assert wanted in loaded, f"version {wanted} answers, and only {loaded} are loaded"
            assert (result == models.FIRST * wanted).all(), f"version {wanted} answered {result}"


KINDS = (Kind("version.one", one_version, 4),)
