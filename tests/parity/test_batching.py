"""Queues and batches: the same requests at the same times form the same batches, and the same ones are refused."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from socket import create_server
from typing import Any

import numpy as np
import pytest
from support.paced_models import REPEATING_SCRIPT, REPEATING_TENSORS, drop_paced
from support.parity.counters import Counters
from support.parity.exchange import Asked, Exchange, Outcome, Stream, digest_of
from support.parity.inference import infer, raw_input
from support.parity.models import ParityModel, python, tensor, write_model
from support.parity.pair import ANSWER_SECONDS, Pair
from support.parity.repository import load, unload


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to a model whose script is `paced`."""

    rows: int = 1
    run_ms: int = 1
    """How long the model takes for it; `HELD`: until all requests that follow without a pause are in the server's
    queue."""
    width: int = 1
    after_ms: int = 0
    """The time after the previous request, or after the end of the held run."""
    parameters: Mapping[str, Any] = field(default_factory=dict)


HELD = 0
HELD_SECONDS = 0.35
"""How long a run is held after all requests behind it have arrived. Shorter timeouts have passed then."""


@dataclass(frozen=True, slots=True)
class PacedStream:
    """Sends all requests on one stream, so that they arrive in order. Those behind a held run are sent once the model
    runs it."""

    model: str
    arrivals: Sequence[Arrival]

    def digest(self) -> str:
        return digest_of(*self._messages(HELD), repr([arrival.after_ms for arrival in self.arrivals]).encode())

    def ask(self, server: Asked) -> Outcome:
        outcome = server.stream(self._sent(server))
        return Outcome(outcome.status, outcome.text, [_run_or_error(answer) for answer in outcome.answer])

    def _messages(self, held_run: int) -> list[bytes]:
        return [
            infer(
                self.model,
                raw_input("IN", [[arrival.run_ms or held_run] * arrival.width] * arrival.rows),
                request_id=str(index),
                parameters=arrival.parameters,
            ).SerializeToString(deterministic=True)
            for index, arrival in enumerate(self.arrivals)
        ]

    def _sent(self, server: Asked) -> Iterator[bytes]:
        with create_server(("127.0.0.1", 0)) as gate, ExitStack() as held:
            gate.settimeout(ANSWER_SECONDS)
            messages = self._messages(-gate.getsockname()[1])
            for message, arrival in zip(messages, self.arrivals, strict=True):
                if arrival.after_ms:
                    held.close()
                    time.sleep(arrival.after_ms / 1000)
                yield message
                if arrival.run_ms == HELD:
                    run, _ = gate.accept()
                    held.enter_context(run)
                    held.callback(time.sleep, HELD_SECONDS)
                    # A call after the messages on the same connection: its answer comes when the server has read them.
                    held.callback(Counters(self.model).ask, server)
            held.close()


def _run_or_error(answer: Mapping[str, Any]) -> Any:
    """The error; or the number of the request's run, and the number of requests in that run."""
    if answer.get("error_message"):
        return answer["error_message"]
    data = answer["infer_response"]["raw_output_contents"][0]
    run, together = np.frombuffer(data, np.int32)[:2].tolist()
    return {"run": run, "together": together}


TENSORS = tensor("input", "IN", "INT32", [-1]) + tensor("output", "OUT", "INT32", [2])
PRESERVE_ORDERING = ("true", "false")
RUNNING = Arrival(run_ms=HELD)
NO_PREFETCH = "default_queue_policy { max_queue_size: 100 }"
"""Makes Triton form a batch only when an instance is free. Otherwise it fills the next batches while all instances are
busy, and a request that comes when two wait may miss the second."""


def waiting(*rows: int, **more: object) -> list[Arrival]:
    """Requests that arrive while one runs."""
    return [Arrival(rows=count, **more) for count in rows]


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    batching: str
    """The text of dynamic_batching; "-" = there is none."""
    arrivals: Sequence[Arrival]
    max_batch_size: int = 8

    @property
    def model(self) -> ParityModel:
        batching = "" if self.batching == "-" else f"dynamic_batching {{ {self.batching} }}\n"
        config = python(TENSORS, self.max_batch_size, batching + "instance_group { count: 1 kind: KIND_CPU }\n")
        return ParityModel("paced_" + "_".join(self.name.replace(",", "").split()), config, "paced")

    @property
    def exchange(self) -> Exchange:
        name = self.model.name
        steps = [PacedStream(name, self.arrivals), Counters(name)]
        return Exchange(f"batching: {self.name}", steps, at_once=True, timed=True)

    @property
    def loading(self) -> Exchange:
        return Exchange(f"batching: load for {self.name}", [load(self.model.name)])

    @property
    def unloading(self) -> Exchange:
        return Exchange(f"batching: unload after {self.name}", [unload(self.model.name)])


REQUEST = {"timeout": 50_000}
# Triton may check its queue half a second after the model is free; under load a second after.
LATE_POLICY = "timeout_action: DELAY default_timeout_microseconds: 5000000 allow_timeout_override: true"
LATE = f"default_queue_policy {{ {LATE_POLICY} }}"

CASES = [
    Case("no batching", "-", [RUNNING, *waiting(1, 2, 1)]),
    Case("all that waits", "", [RUNNING, *waiting(1, 1, 1)]),
    Case("up to the largest batch", NO_PREFETCH, [RUNNING, *waiting(*[1] * 10)]),
    Case("a request is not split", NO_PREFETCH, [RUNNING, *waiting(5, 5, 2)]),
    Case("other shapes", "", [RUNNING, *waiting(1, 1), Arrival(width=2), Arrival(), Arrival()]),
    Case("a preferred size", f"preferred_batch_size: [ 4 ] {NO_PREFETCH}", [RUNNING, *waiting(*[1] * 10)]),
    Case("a preferred size, filled ahead", "preferred_batch_size: [ 4 ]", [RUNNING, *waiting(*[1] * 10)]),
    Case("a preferred size passed over", f"preferred_batch_size: [ 4 ] {NO_PREFETCH}", [RUNNING, *waiting(3, 3, 2)]),
    Case("two preferred sizes", f"preferred_batch_size: [ 2, 4 ] {NO_PREFETCH}", [RUNNING, *waiting(*[1] * 7)]),
    Case(
        "a delay that waits for a preferred size",
        f"preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 500000 {NO_PREFETCH}",
        [Arrival() for _ in range(4)],
    ),
    Case(
        "a delay that passes",
        f"preferred_batch_size: [ 8 ] max_queue_delay_microseconds: 300000 {NO_PREFETCH}",
        [Arrival(), Arrival(), Arrival()],
    ),
    Case(
        "a delay that passes while the model runs",
        f"preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 50000 {NO_PREFETCH}",
        [Arrival(4, run_ms=HELD), *waiting(*[1] * 6)],
    ),
    Case(
        "a delay that has not passed when the model is free",
        # However late Triton checks, this time has not passed; the last two requests complete a preferred size.
        f"preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 20000000 {NO_PREFETCH}",
        [Arrival(4, run_ms=HELD), *waiting(*[1] * 6), Arrival(after_ms=850), Arrival()],
    ),
    Case(
        "another shape ends the delay",
        f"preferred_batch_size: [ 8 ] max_queue_delay_microseconds: 400000 {NO_PREFETCH}",
        [Arrival(), Arrival(), Arrival(width=3, after_ms=50)],
    ),
    Case(
        "a full queue", "default_queue_policy { max_queue_size: 2 }", [RUNNING, *waiting(1, 1, 1, 1)], max_batch_size=1
    ),
    Case(
        "priorities",
        "priority_levels: 3 default_priority_level: 2",
        [
            RUNNING,
            Arrival(),
            Arrival(parameters={"priority": 3}),
            Arrival(parameters={"priority": 1}),
            Arrival(parameters={"priority": 9}),
            Arrival(parameters={"priority": 0}),
            Arrival(parameters={"priority": 1}),
        ],
        max_batch_size=1,
    ),
    Case(
        "the queue of one level is full",
        "priority_levels: 2 default_priority_level: 2 priority_queue_policy { key: 1 value { max_queue_size: 1 } }",
        [RUNNING, Arrival(parameters={"priority": 1}), Arrival(parameters={"priority": 1}), Arrival(), Arrival()],
        max_batch_size=1,
    ),
    Case(
        "time-outs of the policy",
        "default_queue_policy { default_timeout_microseconds: 200000 }",
        # The last request comes after Triton has checked again and waits for requests.
        [RUNNING, *waiting(1, 1), Arrival(after_ms=1200)],
    ),
    Case(
        "time-outs that requests may not shorten",
        "default_queue_policy { default_timeout_microseconds: 5000000 }",
        [RUNNING, *waiting(1, parameters=REQUEST)],
    ),
    Case(
        "time-outs that requests shorten",
        "default_queue_policy { default_timeout_microseconds: 5000000 allow_timeout_override: true }",
        [RUNNING, *waiting(1, 1, parameters=REQUEST), Arrival()],
    ),
    Case(
        "late requests run after the others",
        LATE,
        [RUNNING, *waiting(1, 1, parameters=REQUEST), Arrival(), Arrival()],
        max_batch_size=1,
    ),
    Case(
        "a late request of a high level goes before a low level",
        f"priority_levels: 2 default_priority_level: 2 priority_queue_policy {{ key: 1 value {{ {LATE_POLICY} }} }}",
        [RUNNING, Arrival(parameters={"priority": 1, **REQUEST}), Arrival(), Arrival(parameters={"priority": 1})],
        max_batch_size=1,
    ),
    Case("answers in order", "preserve_ordering: true", [RUNNING, *waiting(1, 2, 1)]),
]


@pytest.fixture(scope="module", autouse=True)
def dropped(pair: Pair) -> None:
    for case in CASES:
        pair.dropped(write_model(pair.scratch, case.model))
    for preserve_ordering in PRESERVE_ORDERING:
        name = f"repeating_{preserve_ordering}"
        batching = f"dynamic_batching {{ preserve_ordering: {preserve_ordering} }}"
        config = f"{batching} instance_group {{ kind: KIND_CPU count: 2 }}"
        drop_paced(pair.scratch, name, config, REPEATING_TENSORS, REPEATING_SCRIPT)
        pair.dropped(pair.scratch / name)


@pytest.fixture(scope="module")
def loaded(pair: Pair) -> Iterator[None]:
    """All models are loaded before the first request: starting a model takes processor time, which would move the other
    requests."""
    with pair.asking_ahead(*([case.loading] for case in CASES)):
        for case in CASES:
            pair.compare(case.loading)
    with pair.asking_ahead(*([case.exchange] for case in CASES)):
        yield
    with pair.asking_ahead(*([case.unloading] for case in CASES)):
        for case in CASES:
            pair.compare(case.unloading)


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_same_batches(pair: Pair, case: Case) -> None:
    pair.compare(case.exchange, anew=[case.unloading, case.loading])


@pytest.mark.parametrize("preserve_ordering", PRESERVE_ORDERING)
def test_decoupled_models_keep_the_order_where_they_are_to(pair: Pair, preserve_ordering: str) -> None:
    name = f"repeating_{preserve_ordering}"
    requests = [infer(name, raw_input("MS", [[pause]]), request_id=f"pause {pause}") for pause in (300, 0)]
    steps = [load(name), Stream(requests), unload(name)]
    pair.compare(Exchange(f"decoupled, preserve_ordering: {preserve_ordering}", steps, at_once=True, timed=True))
