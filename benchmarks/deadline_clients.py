"""Clients that send requests with deadlines at a given rate, whatever the server answers: an open loop, in a separate
process.

Each line of standard input is a run as JSON, see `Run`; each gets a line of JSON, see `Answers`. Requests are sent at
random times (a Poisson process) over some connections. An answer is in time if it arrived, with right values, before
its client's own clock ended the call.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from dataclasses import asdict, dataclass

import grpc
import grpc.aio
import numpy
from tritonclient.grpc import service_pb2

from benchmarks.cases import infer_request
from benchmarks.load_generator import INFER_PATH

_CONNECTIONS = 4
_NUMBERS = 64
"""Different requests, so that the answer to another request is noticed."""


@dataclass(frozen=True, slots=True)
class Run:
    address: str
    model: str
    """A model that adds one to the INT32 in INPUT0 and returns it in OUTPUT0."""
    per_second: float
    seconds: float
    deadline_seconds: float
    """0: none."""
    seed: int


@dataclass(slots=True)
class Answers:
    sent: int = 0
    in_time: int = 0
    wrong: int = 0
    """In time, with wrong values."""
    late: int = 0
    """The deadline has passed."""
    refused: int = 0
    """Any other error."""
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    """Of the answers in time."""
    lag_ms: float = 0.0
    """How late the latest request was sent, because the clients got too little CPU time."""


class _Clients:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._messages = [
            infer_request(run.model, {"INPUT0": numpy.array([[number]], numpy.int32)}) for number in range(_NUMBERS)
        ]
        self._right = [numpy.array([number + 1], numpy.int32).tobytes() for number in range(_NUMBERS)]
        self._times: list[float] = []
        self._answers = Answers()

    async def send_all(self) -> Answers:
        run, clock = self._run, asyncio.get_running_loop().time
        random_numbers = random.Random(run.seed)
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.aio.insecure_channel(run.address, options=options) for _ in range(_CONNECTIONS)]
        calls = [channel.unary_unary(INFER_PATH) for channel in channels]
        for channel in channels:
            await channel.channel_ready()
        tasks: set[asyncio.Task[None]] = set()
        begun = due = clock()
        while (due := due + random_numbers.expovariate(run.per_second)) < begun + run.seconds:
            if (ahead := due - clock()) > 0:
                await asyncio.sleep(ahead)
            self._answers.lag_ms = max(self._answers.lag_ms, 1e3 * (clock() - due))
            task = asyncio.create_task(self._send(calls[self._answers.sent % _CONNECTIONS]))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            self._answers.sent += 1
        while tasks:
            await asyncio.wait(tasks)
        for channel in channels:
            await channel.close()
        return self._counted()

    async def _send(self, call: grpc.aio.UnaryUnaryMultiCallable) -> None:
        answers, clock = self._answers, asyncio.get_running_loop().time
        number = random.randrange(_NUMBERS)
        begun = clock()
        try:
            message = await call(self._messages[number], timeout=self._run.deadline_seconds or None)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                answers.late += 1
            else:
                answers.refused += 1
            return
        response = service_pb2.ModelInferResponse.FromString(message)
        if response.raw_output_contents[0] == self._right[number]:
            answers.in_time += 1
            self._times.append(clock() - begun)
        else:
            answers.wrong += 1

    def _counted(self) -> Answers:
        times = sorted(self._times)
        if times:
            self._answers.p50_ms = 1e3 * times[len(times) // 2]
            self._answers.p99_ms = 1e3 * times[len(times) * 99 // 100]
        return self._answers


def main() -> None:
    for line in sys.stdin:
        answers = asyncio.run(_Clients(Run(**json.loads(line))).send_all())
        print(json.dumps(asdict(answers)), flush=True)


if __name__ == "__main__":
    main()
