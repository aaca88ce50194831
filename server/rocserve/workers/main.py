"""A worker process: one version of a model on one device.

Should the server die it stays, with its model: what was under way is dropped, and the next server hands it a new
control socket and new sockets of instances over its take-over socket, where the zygote holds the other end meanwhile.

The main thread holds the talk on the control socket and loads and warms up the model; then each instance has a thread
of its own that takes batches and answers them (engines release the GIL while they compute, or have one instance only).
With a model that sees each request for itself it is the other way round, see `request_service.py`.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

from rocserve.core.custom_metrics import MetricChanges
from rocserve.core.errors import ServeError, StatusCode, invalid_argument
from rocserve.core.lifeline import die_with_holder
from rocserve.core.passed_descriptors import receive_with_descriptors
from rocserve.core.request_prefix import current_prefix
from rocserve.observability.logs import LinesWithLevels
from rocserve.workers.isolation import hide_memory
from rocserve.workers.messages import (
    FRAME_LENGTH,
    ControlMessage,
    Load,
    Loaded,
    LoadFailed,
    Progress,
    Verbosity,
    WarmedUp,
    WarmUp,
    decode_message,
    encode_frame,
)
from rocserve.workers.model_service import ModelService
from rocserve.workers.request_service import RequestService
from rocserve.workers.tensor_service import TensorService
from rocserve.workers.worker_end import error_text

_SERVER_LOG = "rocserve"
"""The logger above all of the server's own."""
_PASSED_OVER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MOST_DESCRIPTORS = 253
"""That Linux lets pass in one message."""
_LONGEST_REPORT = 500
"""Characters: it is one line of the index."""
_OOM_SCORE = 300
"""When memory is short, the kernel is to end a worker rather than the server (proc(5), oom_score_adj)."""


def main(arguments: Sequence[str]) -> int:
    """Entry of a worker that was started by exec: the title, the lifeline, the control and the take-over socket, the
    sockets of instances."""
    title, lifeline, control, takeover, *instances = arguments[0], *map(int, arguments[1:])
    for descriptor in (lifeline, control, takeover, *instances):
        os.set_inheritable(descriptor, False)
    return run(title, lifeline, control, takeover, instances)


def run(title: str, lifeline: int, control: int, takeover: int, instances: Sequence[int]) -> int:
    """Be a worker on these descriptors until the server says so, or is gone and no other comes; the exit status."""
    _become(title)
    kept = die_with_holder(lifeline)
    _open_output()
    _open_log()
    log = logging.getLogger("rocserve.worker")
    try:
        connection = ControlSocket(socket.socket(fileno=control))
        return Worker(connection, socket.socket(fileno=takeover), _sockets(instances), log).run()
    except (EOFError, ConnectionError):
        return 0
    finally:
        os.close(kept)


class Worker:
    """The worker's side of its control socket."""

    def __init__(
        self, control: ControlSocket, takeover: socket.socket, instances: Sequence[socket.socket], log: logging.Logger
    ) -> None:
        self._control = control
        self._takeover = takeover
        self._instances = instances
        self._log = log
        self._quiet_levels: dict[str, int] = {}
        """By logger, while the log is verbose: what it was before."""

    def run(self) -> int:
        """Raises: EOFError, OSError: the server is gone, and no other has come."""
        load = self._receive()
        if not isinstance(load, Load):
            raise ValueError(f"expected Load, got {type(load).__name__}")
        self._set_verbose(load.verbose)
        started = time.monotonic_ns()
        reports = Reports(self._control)
        service: ModelService
        try:
            if load.plan.cores:
                # Before the engine starts its threads, which inherit it.
                os.sched_setaffinity(0, load.plan.cores)
            if load.answers_requests:
                service = RequestService(load, self._instances[0], reports.report, self._send_metrics, self._log)
            else:
                service = TensorService(load, self._instances, reports.report, self._log)
            load_ns = time.monotonic_ns() - started
            loaded = Loaded(service.signature, load_ns, dict(service.properties), service.batches_at_once)
        except BaseException as error:
            return self._fail("load", error, load)
        self._control.send(loaded)
        reports.describe = lambda: service.properties
        request = self._receive()
        if isinstance(request, WarmUp):
            started = time.monotonic_ns()
            try:
                service.warm_up(request)
            except BaseException as error:
                return self._fail("warm up", error, load)
            while not service.serve(lambda: self._control.send(WarmedUp(time.monotonic_ns() - started)), self._wait):
                self._wait_for_server(service, loaded)
                reports.repeat()
        service.close()
        return 0

    def _wait(self) -> bool:
        """Until the end. False: the server is gone."""
        try:
            self._receive(ends_without=False)
        except (EOFError, ConnectionError):
            return False
        return True

    def _wait_for_server(self, service: ModelService, loaded: Loaded) -> None:
        """Have what a new server shares with its workers, and tell it what was told to the one before.

        Raises: EOFError, OSError.
        """
        data, descriptors = receive_with_descriptors(self._takeover, 1, _MOST_DESCRIPTORS)
        if not data:
            _end_group()
            raise EOFError("no other server has come")
        control, *instances = _sockets(descriptors)
        self._control.renew(control)
        load = self._receive()
        assert isinstance(load, Load)
        self._set_verbose(load.verbose)
        service.renew(instances)
        self._control.send(replace(loaded, properties=dict(service.properties)))
        self._receive()  # WarmUp: it is warm.

    def _send_metrics(self, changes: MetricChanges) -> None:
        """While there is no server they are for nobody."""
        with suppress(OSError):
            self._control.send(changes)

    def _receive(self, ends_without: bool = True) -> ControlMessage:
        """The next message that is not about the log. `ends_without`: the worker ends where the server is gone. Raises:
        EOFError, OSError."""
        try:
            while isinstance(message := self._control.receive(), Verbosity):
                self._set_verbose(message.verbose)
        except (EOFError, ConnectionError):
            if ends_without:
                _end_group()
            raise
        return message

    def _set_verbose(self, verbose: bool) -> None:
        for name in ("", _SERVER_LOG):
            logger = logging.getLogger(name)
            if verbose:
                # A model may have set a level of its own, which is to come back.
                self._quiet_levels.setdefault(name, logger.level)
                logger.setLevel(logging.DEBUG)
            else:
                logger.setLevel(self._quiet_levels.pop(name, logger.level))

    def _fail(self, action: str, error: BaseException, load: Load) -> int:
        error = _file_fault(error, load.model_folder) or error
        if isinstance(error, ServeError):
            # Its text is the reason, which the server logs. Where an exception of the engine's or the model's led to
            # it, that has the places.
            level = logging.ERROR if error.__cause__ is not None else logging.DEBUG
            self._log.log(level, "the model failed to %s: %s", action, error.text, exc_info=error.__cause__)
            self._control.send(LoadFailed(int(error.code), error.text))
        else:
            self._log.error("the model failed to %s", action, exc_info=error)
            self._control.send(LoadFailed(int(StatusCode.INTERNAL), error_text(error)))
        return 1


class ControlSocket:
    """Messages to the server from any thread, messages from it on one."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._rest = b""
        """Of a frame whose beginning has been sent."""
        self._waiting = b""
        """The newest Progress that found no room; older ones are of no interest any more."""

    def send(self, message: ControlMessage) -> None:
        """Wait until it is on its way, behind all that was told before. Raises: OSError: the server is gone."""
        with self._lock:
            self._connection.sendall(self._rest + self._waiting + encode_frame(message))
            self._rest = self._waiting = b""

    def tell(self, progress: Progress) -> None:
        """Never waits for the server: what there is no room for goes with the next message, unless that is a newer
        Progress. Without a server it is for nobody."""
        frame = encode_frame(progress)
        with self._lock:
            try:
                if self._rest:
                    self._rest = self._send_at_once(self._rest)
                if self._rest:
                    self._waiting = frame
                else:
                    self._waiting = b""
                    self._rest = self._send_at_once(frame)
            except OSError:
                pass

    def _send_at_once(self, data: bytes) -> bytes:
        """What there was no room for."""
        try:
            return data[self._connection.send(data, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return data

    def renew(self, connection: socket.socket) -> None:
        """Talk to another server."""
        with self._lock:
            self._connection.close()
            self._connection = connection
            self._rest = self._waiting = b""

    def receive(self) -> ControlMessage:
        """The next message. Raises: EOFError, ConnectionError: the server is gone."""
        (length,) = FRAME_LENGTH.unpack(self._receive_exactly(FRAME_LENGTH.size))
        return cast(ControlMessage, decode_message(self._receive_exactly(length)))

    def _receive_exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self._connection.recv(size - len(data))
            if not piece:
                raise EOFError("the server closed the control socket")
            data += piece
        return bytes(data)


class Reports:
    """What an engine says while it works, on its way to the server."""

    def __init__(self, control: ControlSocket) -> None:
        self._control = control
        self._last: Progress | None = None
        self.describe: Callable[[], Mapping[str, str]] = dict
        """The properties of the loaded model."""

    def report(self, text: str) -> None:
        """See backends.base.ModelSource."""
        line = " ".join(text.split())
        if len(line) > _LONGEST_REPORT:
            line = f"{line[: _LONGEST_REPORT - 3]}..."
        progress = Progress(line, dict(self.describe()))
        if progress != self._last:
            self._last = progress
            self._control.tell(progress)

    def repeat(self) -> None:
        """For a server that has not heard it."""
        if self._last is not None:
            self._control.tell(self._last)


def _sockets(descriptors: Sequence[int]) -> list[socket.socket]:
    return [socket.socket(fileno=descriptor) for descriptor in descriptors]


def _file_fault(error: BaseException, model_folder: str) -> ServeError | None:
    """Why a file of the model could not be read: that it goes while it is loaded is no fault of the engine's code."""
    if not isinstance(error, OSError) or not isinstance(error.filename, str):
        return None
    if not Path(error.filename).is_relative_to(model_folder):
        return None
    return invalid_argument(f"{error.filename} cannot be read: {error.strerror}")


def _end_group() -> None:
    """The server is gone. The lifeline ends this group, with all that a model has started; but who leaves it before the
    signal comes would leave the others behind."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)


def _become(title: str) -> None:
    # They may go to the whole process group (Ctrl-C, systemd); the server ends its workers itself, after their batches.
    # Not SIG_IGN: what a model starts would ignore them as well, and could not be terminated.
    for number in _PASSED_OVER:
        signal.signal(number, _pass_over)
        signal.siginterrupt(number, False)
    # Held back in a fork, so that none is lost before the child takes them.
    os.register_at_fork(before=_hold_signals, after_in_parent=_release_signals, after_in_child=_take_signals)
    _write("/proc/self/comm", title)
    _write("/proc/self/oom_score_adj", str(_OOM_SCORE))
    hide_memory()


def _pass_over(number: int, frame: object) -> None:
    """A signal that is not for workers."""


def _take_signals() -> None:
    """In a process that a model has forked, where the model has no handlers of its own."""
    for number in _PASSED_OVER:
        if signal.getsignal(number) is _pass_over:
            signal.signal(number, signal.SIG_DFL)
    _release_signals()


def _hold_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_OVER)


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_OVER)


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError:
        pass  # Neither the name nor the score is needed to serve.


def _open_log() -> None:
    """Lines with levels, by which the server's log sorts them.

    The server's own lines go by a stream, a handler and a level of their own: models close the standard streams and
    configure logging for themselves. There, too, Python tells the line of a crash (a signal such as SIGSEGV).
    """
    stream = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    faulthandler.enable(stream, all_threads=False)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)
    logging.getLogger().handlers[0].setFormatter(LinesWithLevels(current_prefix))
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LinesWithLevels(current_prefix))
    log = logging.getLogger(_SERVER_LOG)
    log.handlers = [handler]
    log.propagate = False
    log.setLevel(logging.INFO)


def _open_output() -> None:
    """Python's own standard streams on descriptors 1 and 2, which lead to the server's log; written line by line."""
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
