"""Clients that send one request after another, and record each answer that was wrong or missing."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection
from types import TracebackType
from typing import Self

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from support.infer_inputs import infer_input
from support.waiting import PATIENCE_SECONDS, wait_until

RETURNS_SOON = [(f"grpc.{which}_reconnect_backoff_ms", 100) for which in ("initial", "max")]
"""Channel options for a server that was gone for a moment: without them a client waits for seconds before it
reconnects."""
_PAUSE_AFTER_FAILURE_SECONDS = 0.05
"""A channel without a connection fails thousands of requests a second, which would slow the server's restart on the
same machine."""
_RETRY_PAUSES_SECONDS = (0.1, 5.0)
"""The first and the longest pause between two attempts of a request; they double."""


class ConstantLoad:
    """Threads that each send one request after another to a model Y = X + c, where `c` must be one of the allowed
    constants. `failures` holds (status, text) of each failed request, `wrong` the difference Y - X of each wrong
    answer, and `answered` the number of answers by constant."""

    def __init__(
        self,
        address: str,
        model: str,
        constants: set[float],
        threads: int = 8,
        retried: Collection[str] = (),
        pause_seconds: float = 0.02,
    ) -> None:
        """`retried`: statuses after which a request is sent again, for PATIENCE_SECONDS at most. `pause_seconds`: the
        pause after each answer; without one, the load takes the processors that the awaited work needs. 0 = a request
        is under way at each moment."""
        self.failures: list[tuple[str, str]] = []
        self.wrong: list[list[float]] = []
        self.answered: Counter[float] = Counter()
        self._address = address
        self._model = model
        self._constants = constants
        self._retried = retried
        self._pause_seconds = pause_seconds
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(index,)) for index in range(threads)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def wait_until_answered_by(self, constant: float, times: int = 1) -> None:
        wanted = self.answered[constant] + times
        wait_until(lambda: self.answered[constant] >= wanted, f"an answer of the version that adds {constant}")

    def _ask(self, seed: int) -> None:
        client = triton.InferenceServerClient(self._address, channel_args=RETURNS_SOON)
        random = np.random.default_rng(seed)
        while not self._stopping.is_set():
            values = random.integers(0, 1000, (1, 2)).astype(np.float32)
            entry = infer_input("X", values)
            try:
                result = self._infer(client, entry)
            except InferenceServerException as error:
                self.failures.append((str(error.status()), str(error.message())))
                time.sleep(_PAUSE_AFTER_FAILURE_SECONDS)
                continue
            difference = (result.as_numpy("Y") - values).ravel().tolist()
            if difference[0] == difference[1] and difference[0] in self._constants:
                self.answered[difference[0]] += 1
            else:
                self.wrong.append(difference)
            if self._pause_seconds:
                self._stopping.wait(self._pause_seconds)
        client.close()

    def _infer(self, client: triton.InferenceServerClient, entry: triton.InferInput) -> triton.InferResult:
        begun = time.monotonic()
        pause, longest = _RETRY_PAUSES_SECONDS
        while True:
            try:
                return client.infer(self._model, [entry])
            except InferenceServerException as error:
                is_late = time.monotonic() - begun > PATIENCE_SECONDS
                if is_late or str(error.status()) not in self._retried:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, longest)
