"""Requests that come at given times, to compare how two servers queue and batch them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from support.parity.exchange import Asked, Outcome, digest_of
from support.parity.inference import infer, raw_input


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to a model whose script is `paced`."""

    rows: int = 1
    run_ms: int = 1
    """How long the model takes for it."""
    width: int = 1
    after_ms: int = 0
    """How long after the request before it."""
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PacedStream:
    """All requests on one stream, so that they come in their order."""

    model: str
    arrivals: Sequence[Arrival]

    def digest(self) -> str:
        return digest_of(*self._messages(), repr([arrival.after_ms for arrival in self.arrivals]).encode())

    def ask(self, server: Asked) -> Outcome:
        outcome = server.stream(_Paced(self._messages(), [arrival.after_ms for arrival in self.arrivals]))
        return Outcome(outcome.status, outcome.text, [_run_or_error(answer) for answer in outcome.answer])

    def _messages(self) -> list[bytes]:
        return [
            infer(
                self.model,
                raw_input("IN", [[arrival.run_ms] * arrival.width] * arrival.rows),
                request_id=str(index),
                parameters=arrival.parameters,
            ).SerializeToString(deterministic=True)
            for index, arrival in enumerate(self.arrivals)
        ]


class _Paced(Sequence[bytes]):
    """Messages, each given out when its time has come."""

    def __init__(self, messages: Sequence[bytes], pauses_ms: Sequence[int]) -> None:
        self._messages = messages
        self._pauses_ms = pauses_ms

    def __iter__(self) -> Iterator[bytes]:
        for message, pause_ms in zip(self._messages, self._pauses_ms, strict=True):
            time.sleep(pause_ms / 1000)
            yield message

    def __len__(self) -> int:
        return len(self._messages)

    def __getitem__(self, index: Any) -> Any:
        return self._messages[index]


def _run_or_error(answer: Mapping[str, Any]) -> Any:
    """The error; or in which run the request was, and how many were in it."""
    if answer.get("error_message"):
        return answer["error_message"]
    data = answer["infer_response"]["raw_output_contents"][0]
    run, together = np.frombuffer(data, np.int32)[:2].tolist()
    return {"run": run, "together": together}
