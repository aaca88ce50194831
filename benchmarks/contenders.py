"""Contenders: a server behind gRPC, or a bare loop in a separate process."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from benchmarks.cases import Case
from benchmarks.http_request import HttpRequest
from benchmarks.load_generator import INFER_CALL, Load, frame, run_load
from benchmarks.probe import Probe, WrongAnswer, answer_over_http, run_problem
from benchmarks.ratios import Measurement
from benchmarks.server_process import ServerProcess

WARM_UP_SECONDS = 0.5


class Contender(Protocol):
    """Something that can be measured on a case. It runs, idle, while others are measured."""

    @property
    def name(self) -> str: ...

    def prepare(self, case: Case) -> None:
        """Check the case's answer, and warm up."""

    def measure(self, case: Case, seconds: float) -> Measurement: ...

    def cpu_seconds(self) -> float:
        """CPU time used so far; an idle contender's must not grow."""


class ServedContender:
    """A running server, loaded by h2load; every run is checked."""

    def __init__(self, server: ServerProcess, folder: Path, request: HttpRequest | None = None) -> None:
        """`folder`: for the bodies and logs of h2load. `request`: the request for a server without statistics, whatever
        a case says; for its runs only h2load sees each answer's status."""
        self._server = server
        self._folder = folder
        self._request = request
        self._probe = Probe(server.name, server.address) if request is None else None

    @property
    def name(self) -> str:
        return self._server.name

    def close(self) -> None:
        if self._probe is not None:
            self._probe.close()

    def cpu_seconds(self) -> float:
        return self._server.cpu_seconds()

    def prepare(self, case: Case) -> None:
        """Raises WrongAnswer, also if the server batches and the case says that it does not, or the reverse."""
        if self._probe is not None:
            expected = case.dynamic_batching
            if expected is not None and self._probe.has_dynamic_batching(case.model) != expected:
                raise WrongAnswer(
                    f"{self.name}: model {case.model} must have dynamic batching {'on' if expected else 'off'}"
                )
            if case.region is not None:
                self._probe.register(case.region)
        self.measure(case, WARM_UP_SECONDS)

    def measure(self, case: Case, seconds: float) -> Measurement:
        http = self._request or case.http
        load = Load(case.connections, case.streams, seconds, case.load_threads)
        body = self._folder / "request.bin"
        body.write_bytes(frame(case.message) if http is None else http.body)
        address = self._server.address if http is None else self._server.http_address
        call = INFER_CALL if http is None else http.call
        answer_bytes = self._answer(case, http)
        before = None if self._probe is None else self._probe.counts(case.model)
        result = run_load(address, body, load, self._folder / f"{self.name}.tsv", call)
        if self._probe is not None and before is not None:
            self._probe.check_run(case.model, before, load, result, answer_bytes)
        else:
            done = result.report.succeeded
            if problem := run_problem(done, 0, result.report.body_bytes, done, load.in_flight, answer_bytes):
                raise WrongAnswer(f"{self.name}: {problem}")
        self._answer(case, http)
        return Measurement(result.requests_per_second * case.units_per_request, result.p50, result.p99)

    def _answer(self, case: Case, http: HttpRequest | None) -> int:
        """Send one request and check its outputs; return the size of the answer's body in bytes."""
        if http is not None:
            return answer_over_http(self.name, self._server.http_address, http, case.check)
        assert self._probe is not None
        return self._probe.answer(case.message, case.check)
