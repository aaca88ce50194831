"""Clients of every other kind of model: Python models, decoupled models, an ensemble for photos, sequences; and a
client with its tensors in shared memory."""

from __future__ import annotations

import os
import queue
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from support.infer_inputs import infer_input
from support.load import RETURNS_SOON
from support.sequences import ask as ask_of_sequence
from support.shared_memory import SharedFile
from tritonclient.utils import InferenceServerException

import rocserve_client
from campaign import models
from campaign.honest.client import ANSWER_SECONDS, WrongAnswer

PHOTOS = Path(__file__).parents[2] / "data" / "digits"
MOST_PHOTOS = 3
LONGEST_SEQUENCE = 6
MOST_RESPONSES = 20
TOLERANCE = 1e-4
"""Tolerance of probabilities: the batch size may change their last bits."""


class PythonModel:
    """Asks for sums and differences with Triton's HTTP client."""

    def __init__(self, address: str) -> None:
        self._client = triton_http.InferenceServerClient(
            address, connection_timeout=ANSWER_SECONDS, network_timeout=ANSWER_SECONDS
        )

    def ask(self, random: random.Random) -> None:
        values = [np.array([[random.randrange(1000) for _ in range(4)]], np.float32) for _ in range(2)]
        entries = [triton_http.InferInput(f"INPUT{index}", [1, 4], "FP32") for index in range(2)]
        for entry, array in zip(entries, values, strict=True):
            entry.set_data_from_numpy(array, binary_data=random.random() < 0.5)
        result = self._client.infer(models.PYTHON, entries)
        expected = {"OUTPUT0": values[0] + values[1], "OUTPUT1": values[0] - values[1]}
        for name, array in expected.items():
            if not np.array_equal(result.as_numpy(name), array):
                raise WrongAnswer(f"{models.PYTHON} answered {result.as_numpy(name)}, expected {array}")

    def reopen(self) -> None: ...

    def close(self) -> None:
        self._client.close()


class Version:
    """Asks the first of several versions, while others are unloaded and loaded."""

    def __init__(self, address: str) -> None:
        self._client = triton.InferenceServerClient(address, channel_args=RETURNS_SOON)

    def ask(self, random: random.Random) -> None:
        values = np.array([[random.randrange(1000) for _ in range(2)]], np.float32)
        entries = [infer_input("X", values)]
        answer = self._client.infer(models.VERSIONED, entries, "1", client_timeout=ANSWER_SECONDS).as_numpy("Y")
        if not np.array_equal(answer, values + np.float32(models.FIRST)):
            raise WrongAnswer(f"{models.VERSIONED} version 1 answered {answer} to {values}")

    def reopen(self) -> None: ...

    def close(self) -> None:
        self._client.close()


class Photos:
    """Sends digits in JPEGs to the sample's ensemble. The right answers were recorded before any action."""

    def __init__(self, address: str) -> None:
        self._client = rocserve_client.Client(address, channel_options=tuple(RETURNS_SOON))
        paths = sorted(PHOTOS.glob("*.jpg"))[:32]
        self._photos = [path.read_bytes() for path in paths]
        answer = self._classify(self._photos)
        self._expected = answer["PROBABILITIES"].copy()
        labels = [label.decode() for label in answer["LABEL"].ravel()]
        right = sum(path.stem.endswith(label) for path, label in zip(paths, labels, strict=True))
        assert right >= 0.9 * len(paths), f"the ensemble knows {right} of {len(paths)} digits before anything happened"

    def _classify(self, photos: list[bytes]) -> rocserve_client.InferResult:
        encoded = np.array([[photo] for photo in photos], dtype=object)
        return self._client.infer(models.DIGITS, {"ENCODED": encoded}, timeout=ANSWER_SECONDS)

    def ask(self, random: random.Random) -> None:
        chosen = [random.randrange(len(self._photos)) for _ in range(random.randint(1, MOST_PHOTOS))]
        answer = self._classify([self._photos[index] for index in chosen])["PROBABILITIES"]
        expected = self._expected[chosen]
        if answer.shape != expected.shape or not np.allclose(answer, expected, atol=TOLERANCE, rtol=0):
            raise WrongAnswer(f"{models.DIGITS} answered {answer.argmax(-1)}, expected {expected.argmax(-1)}")

    def reopen(self) -> None: ...

    def close(self) -> None:
        self._client.close()


class Decoupled:
    """Asks a decoupled model, on a stream of tritonclient, for as many responses as the request has numbers."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._open()

    def _open(self) -> None:
        told: queue.Queue[tuple[Any, InferenceServerException | None]] = queue.Queue()
        self._told = told
        self._client = triton.InferenceServerClient(self._address, channel_args=RETURNS_SOON)
        self._client.start_stream(lambda result, error: told.put((result, error)))

    def ask(self, random: random.Random) -> None:
        values = np.array([random.randrange(1 << 30) for _ in range(random.randint(0, MOST_RESPONSES))], np.int32)
        entry = infer_input("IN", values)
        with suppress(InferenceServerException):  # The callback has received the reason why a stream ended.
            self._client.async_stream_infer(models.DECOUPLED, [entry], enable_empty_final_response=True)
        answered = []
        while not (result := self._receive()).get_response().parameters["triton_final_response"].bool_param:
            answered.append((int(result.as_numpy("IDX")[0]), int(result.as_numpy("OUT")[0])))
        if answered != list(enumerate(values.tolist())):
            raise WrongAnswer(f"{models.DECOUPLED} answered {answered} to {values.tolist()}")

    def _receive(self) -> triton.InferResult:
        try:
            result, error = self._told.get(timeout=ANSWER_SECONDS)
        except queue.Empty:
            raise InferenceServerException(f"no response on the stream for {ANSWER_SECONDS} s") from None
        if error is not None:
            raise error
        return result

    def reopen(self) -> None:
        self.close()
        self._open()

    def close(self) -> None:
        self._client.stop_stream(cancel_requests=True)
        self._client.close()


class Sequences:
    """Asks for the sums of a sequence, which the server keeps between requests."""

    def __init__(self, address: str) -> None:
        self._client = triton.InferenceServerClient(address, channel_args=RETURNS_SOON)

    def ask(self, random: random.Random) -> None:
        identity = random.randrange(1 << 62) + 1
        last = random.randint(1, LONGEST_SEQUENCE) - 1
        expected = 0
        for place in range(last + 1):
            value = random.randrange(1000)
            expected += value
            result = ask_of_sequence(
                self._client,
                models.SUMS,
                value,
                identity,
                start=place == 0,
                end=place == last,
                client_timeout=ANSWER_SECONDS,
            )
            total = result.as_numpy("SUM").reshape(2).tolist()
            seen = result.as_numpy("SEEN").reshape(4).tolist()
            if total != [expected, 2 * expected] or seen != [place == 0, place == last, 1, identity]:
                raise WrongAnswer(f"sequence {identity} answered {total}, {seen}, expected the sum {expected}")

    def reopen(self) -> None: ...

    def close(self) -> None:
        self._client.close()


class SharedTensors:
    """Has X and Y of a steady model in one region of the machine's shared memory."""

    NBYTES = 8

    def __init__(self, address: str) -> None:
        self._client = triton.InferenceServerClient(address, channel_args=RETURNS_SOON)
        self._file = SharedFile(f"/rocserve_campaign_{os.getpid()}")
        self._file.path.write_bytes(bytes(2 * self.NBYTES))
        self._register()

    def _register(self) -> None:
        self._client.register_system_shared_memory("honest", self._file.key, 2 * self.NBYTES)

    def ask(self, random: random.Random) -> None:
        values = np.array([random.randrange(1000) for _ in range(2)], np.float32)
        self._file.put(0, values.tobytes() + bytes(self.NBYTES))
        entry = triton.InferInput("X", [1, 2], "FP32")
        entry.set_shared_memory("honest", self.NBYTES)
        wanted = triton.InferRequestedOutput("Y")
        wanted.set_shared_memory("honest", self.NBYTES, self.NBYTES)
        self._client.infer(models.STEADY, [entry], outputs=[wanted], client_timeout=ANSWER_SECONDS)
        answer = np.frombuffer(self._file.get(self.NBYTES, self.NBYTES), np.float32)
        if not np.array_equal(answer, values + np.float32(models.FIRST)):
            raise WrongAnswer(f"{models.STEADY} left {answer} in shared memory for {values}")

    def reopen(self) -> None:
        self._client.unregister_system_shared_memory("honest")
        self._register()

    def close(self) -> None:
        self._client.unregister_system_shared_memory("honest")
        self._file.path.unlink(missing_ok=True)
        self._client.close()
