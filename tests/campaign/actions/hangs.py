"""Hangs: Python models that never return, from their import or from a request. Their clients get an error in time,
other models are not affected, and nothing is left of them once their folder is removed."""

from __future__ import annotations

import random

import numpy as np
import tritonclient.grpc as triton
from support.infer_inputs import infer_input
from support.models import drop
from support.repository_index import index_of
from support.waiting import PATIENCE_SECONDS, wait_until

from campaign import models
from campaign.action import Kind
from campaign.actions.floods import remove_model
from campaign.stage import Stage

CONFIG = """
backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] }
"""
MODEL = """
import time
import triton_python_backend_utils as pb_utils

def sleep():
    time.sleep(1000)

def spin():
    end = time.monotonic() + 20
    while time.monotonic() < end:
        pass

def nothing():
    pass

{imported}()

class TritonPythonModel:
    def execute(self, requests):
        {executed}()
        values = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", value)]) for value in values]
"""
DEADLINE_SECONDS = 1.0
NOTICED_SECONDS = PATIENCE_SECONDS
WAYS = ("sleep", "spin")


def _drop(stage: Stage, name: str, imported: str, executed: str) -> None:
    source = MODEL.format(imported=imported, executed=executed)
    drop(stage.staging, name, source, CONFIG).rename(stage.copied / name)


def imported(stage: Stage, random: random.Random) -> None:
    """Models hang at import, at most as many as may load concurrently: a model dropped then is served all the same."""
    count = random.randint(1, 4)
    names = [f"{random.getrandbits(24):06x}_import" for _ in range(count)]
    for name in names:
        _drop(stage, name, random.choice(WAYS), "nothing")
    good = f"good_{random.getrandbits(24):06x}"
    models.drop_constant(stage.staging, good).rename(stage.copied / good)
    with stage.poll.client() as client:
        wait_until(lambda: client.is_model_ready(good), f"{good} beside {count} hung loads", seconds=NOTICED_SECONDS)
    for name in (good, *names):
        remove_hung(stage, name)


def executed(stage: Stage, random: random.Random) -> None:
    name = f"{random.getrandbits(24):06x}_hung"
    _drop(stage, name, "nothing", random.choice(WAYS))
    entry = infer_input("X", np.ones(2, np.float32))
    with stage.poll.client() as client:
        wait_until(lambda: client.is_model_ready(name), f"{name} ready", seconds=NOTICED_SECONDS)
        for _ in range(random.randint(1, 3)):
            try:
                client.infer(name, [entry], client_timeout=DEADLINE_SECONDS)
            except triton.InferenceServerException as error:
                stage.tally.count("hung model", str(error.status()))
                assert str(error.status()) == "StatusCode.DEADLINE_EXCEEDED", error
            else:
                raise AssertionError("a model that hangs has answered")
    assert ("READY", "") in index_of(stage.poll, models.STEADY).values()
    remove_hung(stage, name)


def remove_hung(stage: Stage, name: str) -> None:
    """Remove the model: its worker ends after the drain timeout at the latest."""
    remove_model(stage, name)
    wait_until(lambda: not stage.poll.workers(name), f"the end of {name}'s worker", seconds=NOTICED_SECONDS)


KINDS = (Kind("hang.imported", imported, 2), Kind("hang.executed", executed, 3))
