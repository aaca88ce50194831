"""Clients of models that add a constant, some of which are swapped all the time."""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from support.infer_inputs import infer_input
from support.load import RETURNS_SOON

import rocserve_client
from campaign import models
from campaign.honest.client import ANSWER_SECONDS, WrongAnswer
from campaign.truth import Constants

MOST_ROWS = 3
FEW_VALUES = 4
"""Number of different values for the cached model: so few that it has seen them before."""
PIPELINED = 5


def draw_values(random: random.Random, highest: int = 1000) -> np.ndarray:
    """Draw rows of whole numbers, so that FP32 adds constants below 2^23 exactly."""
    rows = random.randint(1, MOST_ROWS)
    return np.array([[random.randrange(highest) for _ in range(2)] for _ in range(rows)], np.float32)


class Model:
    """A model Y = X + c, and its right answers."""

    def __init__(self, name: str, constants: Constants) -> None:
        self.name = name
        self._constants = constants

    def check(self, given: np.ndarray, answered: np.ndarray | None, begun: float) -> None:
        if answered is None or answered.shape != given.shape:
            raise WrongAnswer(f"{self.name} answered {given.tolist()} by {answered}")
        differences = set((answered - given).ravel().tolist())
        allowed = self._constants.allowed(begun, time.monotonic())
        if len(differences) != 1 or not differences <= allowed:
            raise WrongAnswer(f"{self.name} added {sorted(differences)}, expected one of {sorted(allowed)}")


def steady(name: str) -> Model:
    return Model(name, Constants(models.FIRST))


def swapped(constants: Mapping[str, Constants]) -> list[Model]:
    return [Model(name, kept) for name, kept in constants.items()]


class _Asker(ABC):
    """Draws a model and values, sends the request, checks the answer."""

    highest = 1000

    def __init__(self, models: Sequence[Model]) -> None:
        self._models = models

    def ask(self, random: random.Random) -> None:
        model = random.choice(self._models)
        values = draw_values(random, self.highest)
        begun = time.monotonic()
        model.check(values, self.infer(model.name, values, random), begun)

    @abstractmethod
    def infer(self, model: str, values: np.ndarray, random: random.Random) -> np.ndarray | None:
        """The model's answer to the values."""

    def reopen(self) -> None:  # noqa: B027 - nothing is open between two requests
        ...


class ByTritonGrpc(_Asker):
    def __init__(self, address: str, models: Sequence[Model], highest: int = 1000) -> None:
        super().__init__(models)
        self.highest = highest
        self._client = triton.InferenceServerClient(address, channel_args=RETURNS_SOON)

    def infer(self, model: str, values: np.ndarray, random: random.Random) -> np.ndarray | None:
        return self._client.infer(model, [infer_input("X", values)], client_timeout=ANSWER_SECONDS).as_numpy("Y")

    def close(self) -> None:
        self._client.close()


class ByTritonHttp(_Asker):
    """Sends tensors as bytes or as JSON."""

    def __init__(self, address: str, models: Sequence[Model]) -> None:
        super().__init__(models)
        self._client = triton_http.InferenceServerClient(
            address, connection_timeout=ANSWER_SECONDS, network_timeout=ANSWER_SECONDS
        )

    def infer(self, model: str, values: np.ndarray, random: random.Random) -> np.ndarray | None:
        entry = triton_http.InferInput("X", list(values.shape), "FP32")
        entry.set_data_from_numpy(values, binary_data=random.random() < 0.5)
        wanted = triton_http.InferRequestedOutput("Y", binary_data=random.random() < 0.5)
        return self._client.infer(model, [entry], outputs=[wanted]).as_numpy("Y")

    def close(self) -> None:
        self._client.close()


class ByRocserveStream:
    """Sends several concurrent requests on one stream; the answers come in the order of the requests."""

    def __init__(self, address: str, models: Sequence[Model]) -> None:
        self._models = models
        self._client = rocserve_client.Client(address, channel_options=tuple(RETURNS_SOON))
        self._stream = self._client.stream()

    def ask(self, random: random.Random) -> None:
        asked = [(random.choice(self._models), draw_values(random)) for _ in range(random.randint(1, PIPELINED))]
        begun = time.monotonic()
        for model, values in asked:
            self._stream.send(model.name, {"X": values})
        for model, values in asked:
            model.check(values, self._stream.receive()["Y"], begun)

    def reopen(self) -> None:
        self._stream.close()
        self._stream = self._client.stream()

    def close(self) -> None:
        self._stream.close()
        self._client.close()
