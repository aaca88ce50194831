"""Parses large bodies in processes of their own: in this one they would keep the interpreter's lock for seconds.

Smaller ones take less time than the way there. A process is started when it is needed, serves one body at a time, and
ends when it has had none for a while; what it meets there (no memory, say) is one request's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.exit_with_parent import exit_with_parent
from rocserve.core.tensors import Buffer

LARGE_JSON = 256 << 10
"""Bytes; the worst of this size takes 30 ms."""
_MOST_PROCESSES = 2
"""Each may take some 30 times as much memory as the largest body."""
_IDLE_SECONDS = 60.0
_NICENESS = 10
"""Small requests go before."""


class LargeBodies:
    """All calls are made on the loop."""

    def __init__(self, most_processes: int = _MOST_PROCESSES) -> None:
        self._places = asyncio.Semaphore(most_processes)
        self._idle: dict[_Process, asyncio.TimerHandle] = {}

    async def parse(self, function: Callable[[Buffer], Any], body: Buffer) -> Any:
        """The function's result for the body; both can be pickled. Raises: ServeError: the function's; UNAVAILABLE
        where the process has ended."""
        async with self._places:
            if self._idle:
                process, ending = self._idle.popitem()
                ending.cancel()
            else:
                process = _Process()
            try:
                outcome = await asyncio.to_thread(process.call, function, body)
            except (OSError, EOFError, pickle.UnpicklingError):
                process.end()
                raise ServeError(
                    StatusCode.UNAVAILABLE,
                    f"the process that parses large bodies has ended, the system may have no memory for {len(body)}"
                    " bytes of JSON; send less at once, or tensors in binary form",
                ) from None
            except BaseException:
                process.end()  # It may be in the middle of this body.
                raise
            self._idle[process] = asyncio.get_running_loop().call_later(_IDLE_SECONDS, self._end, process)
        if isinstance(outcome, _Refusal):
            raise ServeError(outcome.code, outcome.text)
        return outcome

    def _end(self, process: _Process) -> None:
        del self._idle[process]
        process.end()


class _Refusal:
    """A ServeError on its way: exceptions are not pickled with what they were made of."""

    def __init__(self, error: ServeError) -> None:
        self.code, self.text = error.code, error.text


class _Process:
    def __init__(self) -> None:
        parent_pipe, self._parent_pipe = os.pipe2(os.O_CLOEXEC)
        # A process group of its own: Ctrl-C reaches the server alone.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from {__name__} import serve; serve({parent_pipe})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(parent_pipe,),
            process_group=0,
        )
        os.close(parent_pipe)

    def call(self, function: Callable[[Buffer], Any], body: Buffer) -> Any:
        """Blocks. Raises: OSError, EOFError, pickle.UnpicklingError: it has ended."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None and answers is not None
        pickle.dump((function, pickle.PickleBuffer(body)), requests, pickle.HIGHEST_PROTOCOL)
        requests.flush()
        return pickle.load(answers)

    def end(self) -> None:
        self._process.kill()
        os.close(self._parent_pipe)
        # A large one takes a while to go.
        asyncio.get_running_loop().run_in_executor(None, self._reap)

    def _reap(self) -> None:
        # What has not been written goes nowhere.
        with contextlib.suppress(BrokenPipeError), self._process:
            pass


def serve(parent_pipe: int) -> None:
    """What such a process does: parse what comes until the server is gone."""
    exit_with_parent(parent_pipe)
    os.nice(_NICENESS)
    with contextlib.suppress(OSError):
        # Where memory is short the system ends this process before others.
        Path("/proc/self/oom_score_adj").write_text("1000")
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.suppress(OSError, EOFError):
        while True:
            pickle.dump(_outcome(*pickle.load(requests)), answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()


def _outcome(function: Callable[[Buffer], Any], body: Buffer) -> Any:
    try:
        return function(body)
    except ServeError as error:
        return _Refusal(error)
