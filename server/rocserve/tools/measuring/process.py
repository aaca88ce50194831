"""A measuring process as the tool holds it: told what to measure, asked for the answer, ended with all it started."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Self

from rocserve.core.errors import unavailable
from rocserve.core.plain import from_json, to_json
from rocserve.jobs.ends import describe_end
from rocserve.jobs.output import JobOutput
from rocserve.tools.measuring.messages import (
    Answer,
    AnswerLine,
    Failed,
    Measure,
    Measured,
    Opened,
    OpenEngine,
    Order,
    OrderLine,
)

_CHILD = "rocserve.tools.measuring.child"
_READ_BYTES = 1 << 20


class MeasuringProcess:
    """A context: the process is gone when it is left. Orders are answered one after the other."""

    def __init__(
        self, title: str, python: Sequence[str], environment: Mapping[str, str], *, timeout_seconds: float = 0.0
    ) -> None:
        """
        `title`: what errors begin with. `python`: the words that start the interpreter. `environment`: set on top of
        this process's. `timeout_seconds`: of one answer, 0 = no limit.
        """
        self.title = title
        self._timeout_seconds = timeout_seconds
        self._begun = b""
        self._output = JobOutput()
        orders, self._orders = os.pipe2(os.O_CLOEXEC)
        self._answers, answers = os.pipe2(os.O_CLOEXEC)
        lifeline, self._lifeline = os.pipe2(os.O_CLOEXEC)
        given = (orders, answers, lifeline)
        try:
            # A process group of its own: Ctrl-C reaches the tool alone, which then ends this.
            self._process = subprocess.Popen(
                [*python, "-P", "-m", _CHILD, *map(str, given)],
                stdin=subprocess.DEVNULL,
                stdout=self._output.descriptor,
                stderr=self._output.descriptor,
                pass_fds=given,
                env={**os.environ, **environment},
                process_group=0,
            )
        except BaseException:
            self._close()
            raise
        finally:
            for descriptor in given:
                os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._close()

    def open(self, order: OpenEngine) -> Opened:
        """Load the model.

        Raises:
            ServeError: it cannot be had or cannot load the model, with the reason.
        """
        self.send(order)
        answer = self.answer()
        assert isinstance(answer, Opened)
        return answer

    def measure(self, order: Measure) -> Measured:
        """
        Raises:
            ServeError: a run failed.
        """
        self.send(order)
        return self.measured()

    def measured(self) -> Measured:
        """The answer to a Measure that was sent before. Raises: ServeError."""
        answer = self.answer()
        assert isinstance(answer, Measured)
        return answer

    def send(self, order: Order) -> None:
        """Send an order without waiting for its answer."""
        data = to_json(OrderLine(order)) + b"\n"
        try:
            while data:
                data = data[os.write(self._orders, data) :]
        except BrokenPipeError:
            raise unavailable(f"{self.title}: {self._end()}") from None

    def answer(self) -> Answer:
        """The next answer. Raises: ServeError: it is that something failed, or there will be none."""
        answer = from_json(AnswerLine, self._line()).answer
        if isinstance(answer, Failed):
            raise unavailable(f"{self.title}: {answer.reason}")
        return answer

    def _line(self) -> bytes:
        deadline = time.monotonic() + self._timeout_seconds if self._timeout_seconds else float("inf")
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        while b"\n" not in self._begun:
            left = deadline - time.monotonic()
            if left <= 0:
                raise unavailable(f"{self.title}: took longer than {self._timeout_seconds:g} s and was stopped")
            if not poll.poll(None if left == float("inf") else left * 1000):
                continue
            data = os.read(self._answers, _READ_BYTES)
            if not data:
                raise unavailable(f"{self.title}: {self._end()}")
            self._begun += data
        # What engines write is in memory until it is taken, and they may write much.
        self._output.take_lines()
        line, _, self._begun = self._begun.partition(b"\n")
        return line

    def _end(self) -> str:
        status = self._process.wait()
        self._output.take_lines(ended=True)
        return describe_end(status, self._output.last_lines, 0, "the process")

    def _close(self) -> None:
        for descriptor in (self._orders, self._answers, self._lifeline):
            os.close(descriptor)
        self._output.close()
