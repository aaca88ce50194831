"""Runs a worker process, which serves a version of a model on one device, or small models that share the process.

Through its reception the process gets the sockets of a session for each version: one to control it, and one for each
instance. A session's thread reads the control socket, and loads and warms up the model. Then each instance has a thread
that runs its batches, because engines release the GIL while they compute, or have only one instance. See RequestService
for models that see each request separately.

A single session runs on the main thread, and the process ends with it. In a shared process the main thread waits for
further sessions until the process is ended. When the server's process dies, the kernel ends the worker, whatever it is
doing, with the processes that its models have started (core/exit_with_parent.py).
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from rocserve.backends.base import model_load_check, model_properties, model_unchanged
from rocserve.backends.request_model import readiness_check
from rocserve.core.custom_metrics import MetricChanges
from rocserve.core.exit_with_parent import exit_with_parent
from rocserve.core.passed_descriptors import receive_with_descriptors
from rocserve.core.request_prefix import begin_model, current_prefix
from rocserve.observability.logs import LinesWithLevels
from rocserve.plane.freed_memory import FreedMemory
from rocserve.plane.guarded_mapping import FaultGuard
from rocserve.workers import messages
from rocserve.workers.isolation import hide_memory
from rocserve.workers.load_fault import load_failed
from rocserve.workers.model_service import ModelService, RequestService, TensorService
from rocserve.workers.recorded_answers import check_recorded_answers
from rocserve.workers.worker_end import error_text

_LOG = logging.getLogger("rocserve.worker")
_SERVER_LOG = "rocserve"
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str]) -> int:
    """Serve until the server ends the worker, or is gone. Returns the exit status. Arguments: the title, the server's
    pipe, the reception."""
    title, parent_pipe, reception = arguments[0], *map(int, arguments[1:])
    for descriptor in (parent_pipe, reception):
        os.set_inheritable(descriptor, False)
    _set_up_process(title)
    kept = exit_with_parent(parent_pipe)
    # Python's standard streams lead to the server's log, line by line.
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    _open_log()
    try:
        return Worker(socket.socket(fileno=reception)).run()
    except (EOFError, ConnectionError):
        return 0
    finally:
        os.close(kept)


class Worker:
    """Runs the sessions of this process."""

    def __init__(self, reception: socket.socket) -> None:
        self._reception = reception
        self.guard = FaultGuard()
        self._normal_levels: dict[str, int] = {}
        """The level of each logger before the log became verbose; empty while it is not."""

    def run(self) -> int:
        """Return the exit status. Raises EOFError or OSError if the server is gone."""
        kind, sockets = self._receive()
        if kind == messages.ALONE:
            session = Session(self, sockets, is_shared=False)
            status = session.run()
            if status == 0:
                session.close()
            return status
        _, most_open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_open_files, most_open_files))
        while True:
            threading.Thread(target=self._run_shared, args=(sockets,), name="session", daemon=True).start()
            _, sockets = self._receive()

    def _run_shared(self, sockets: Sequence[socket.socket]) -> None:
        session = Session(self, sockets, is_shared=True)
        try:
            # The control socket closes when the server ends the session.
            with suppress(EOFError, ConnectionError):
                session.run()
        finally:
            session.close()
            # Freed memory goes back to the system immediately, because the process goes on.
            del session
            gc.collect()
            deque(FreedMemory.give_back(), 0)

    def _receive(self) -> tuple[bytes, list[socket.socket]]:
        """Return a message, and the sockets of a session. Raises EOFError or OSError."""
        kind, descriptors = receive_with_descriptors(self._reception, len(messages.ALONE), messages.MOST_SOCKETS)
        if not kind:
            end_group()
            raise EOFError("the server closed the reception")
        return kind, [socket.socket(fileno=descriptor) for descriptor in descriptors]

    def set_verbose(self, verbose: bool) -> None:
        for name in ("", _SERVER_LOG):
            logger = logging.getLogger(name)
            if verbose:
                # A model may have set its own level, which must be restored later.
                self._normal_levels.setdefault(name, logger.level)
                logger.setLevel(logging.DEBUG)
            else:
                logger.setLevel(self._normal_levels.pop(name, logger.level))


class Session:
    """Loads and serves one model version."""

    def __init__(self, worker: Worker, sockets: Sequence[socket.socket], is_shared: bool) -> None:
        """`sockets`: to control the session, and one for each instance. `is_shared`: the process has other sessions."""
        self._worker = worker
        self._is_shared = is_shared
        self._control = ControlSocket(sockets[0])
        self._instances = sockets[1:]
        self._service: ModelService | None = None
        self._reported: messages.Progress | None = None

    def run(self) -> int:
        """Serve until the end; return the exit status. Raises EOFError or OSError if the server closes the control
        socket before the model serves."""
        load = self._receive()
        if not isinstance(load, messages.Load):
            raise ValueError(f"expected messages.Load, got {type(load).__name__}")
        if self._is_shared:
            begin_model(f"{load.model_name}:{load.version}: ")
        check = partial(self._report, is_check=True)
        try:
            if load.plan.cores:
                # Set before the engine starts its threads, which inherit it.
                os.sched_setaffinity(0, load.plan.cores)
            kind = RequestService if load.answers_requests else TensorService
            service = kind(load, self._instances, self._report, check, _LOG, self._worker.guard, self._send_metrics)
            self._service = service
            model = service.model
            loaded = messages.Loaded(
                model.signature, self._properties(), service.batches_at_once, load_check=model_load_check(model)
            )
        except BaseException as error:
            return self._fail("load", error, load)
        self._control.send(loaded)
        request = self._receive()
        if isinstance(request, messages.WarmUp):
            try:
                with model_unchanged(service.model):
                    found = service.warm_up(request)
                if request.recorded_answers:
                    # They show that the model takes inputs.
                    with model_unchanged(service.model):
                        found = check_recorded_answers(
                            service.model, request.recorded_answers, request.config, load.answers_requests, check
                        )
            except BaseException as error:
                return self._fail("warm up", error, load)
            warmed_up = messages.WarmedUp(readiness_check(service.model) is not None, found)
            service.serve(lambda: self._control.send(warmed_up), self._wait)
        return 0

    def _properties(self) -> dict[str, str]:
        if self._service is None:
            return {}
        model = self._service.model
        return {**model.signature.padding.properties, **model_properties(model)}

    def _report(self, text: str, is_check: bool = False) -> None:
        """Send an engine's report to the server."""
        line = " ".join(text.split())
        # A report is one line of the repository index.
        if len(line) > 500:
            line = line[:497] + "..."
        progress = messages.Progress(line, self._properties(), is_check and bool(line))
        if progress != self._reported:
            self._reported = progress
            self._control.send_later(progress)

    def close(self) -> None:
        try:
            if self._service is not None:
                self._service.model.close()
        finally:
            for connection in self._instances:
                connection.close()
            self._control.close()

    def _wait(self) -> bool:
        """Wait for Unload. Returns False if the server has killed the session, which closes its control socket."""
        try:
            self._receive()
        except (EOFError, ConnectionError):
            return False
        return True

    def _send_metrics(self, changes: MetricChanges) -> None:
        """Send changes of metrics; they are dropped if the session has been killed."""
        with suppress(OSError):
            self._control.send(changes)

    def _begin_check(self) -> None:
        """Check the model's readiness on a separate thread: the check may take any time, and this thread must still
        receive Unload."""
        try:
            threading.Thread(target=self._check_readiness, name="is_ready", daemon=True).start()
        except RuntimeError as error:  # The process has no room for a thread.
            self._send_readiness(messages.ModelReadiness(False, error_text(error)))

    def _check_readiness(self) -> None:
        check = readiness_check(self._service.model) if self._service is not None else None
        try:
            answer = messages.ModelReadiness(check is None or check())
        except BaseException as error:
            # Also SystemExit: sys.exit() in a model does not end the worker.
            name, text = type(error).__name__, error_text(error)
            answer = messages.ModelReadiness(False, f"is_ready() raised {text if name in text else f'{name}: {text}'}")
        self._send_readiness(answer)

    def _send_readiness(self, answer: messages.ModelReadiness) -> None:
        """Send the answer; it is dropped if the session has been killed."""
        with suppress(OSError):
            self._control.send(answer)

    def _receive(self) -> messages.Message:
        """Return the next message except Verbosity and CheckReadiness. Raises EOFError or OSError if the control socket
        is closed, in a shared process; any other process ends then."""
        try:
            while isinstance(message := self._control.receive(), messages.Verbosity | messages.CheckReadiness):
                if isinstance(message, messages.Verbosity):
                    self._worker.set_verbose(message.verbose)
                else:
                    self._begin_check()
        except (EOFError, ConnectionError):
            if not self._is_shared:
                end_group()
            raise
        return message

    def _fail(self, action: str, error: BaseException, load: messages.Load) -> int:
        # The server logs the reason and the traceback.
        _LOG.debug("the model failed to %s", action, exc_info=error)
        self._control.send(load_failed(error, load))
        return 1


class ControlSocket:
    """Sends messages to the server from any thread, and receives on one."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._rest = b""
        """The rest of a frame whose beginning has been sent."""
        self._waiting = b""
        """The newest Progress that has not been sent; older ones no longer matter."""

    def send(self, message: messages.Message) -> None:
        """Send a message, waiting until it is in the socket. Raises OSError if the server is gone."""
        with self._lock:
            self._connection.sendall(self._rest + self._waiting + messages.encode_frame(message))
            self._rest = self._waiting = b""

    def send_later(self, progress: messages.Progress) -> None:
        """Send a report without waiting: if the socket is full, the report goes with the next message, or is replaced
        by a newer one. It is dropped if the session has been killed."""
        with self._lock, suppress(OSError):
            self._waiting = messages.encode_frame(progress)
            self._rest = self._rest[self._connection.send(self._rest, socket.MSG_DONTWAIT) :]
            if not self._rest:
                self._rest, self._waiting = self._waiting, b""
                self._rest = self._rest[self._connection.send(self._rest, socket.MSG_DONTWAIT) :]

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def receive(self) -> messages.Message:
        """Raises EOFError or ConnectionError if the server is gone."""
        (length,) = messages.FRAME_LENGTH.unpack(self._receive_exactly(messages.FRAME_LENGTH.size))
        return messages.decode_message(self._receive_exactly(length))

    def _receive_exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self._connection.recv(size - len(data))
            if not piece:
                raise EOFError("the server closed the control socket")
            data += piece
        return bytes(data)


def end_group() -> None:
    """End this process group, because the server is gone. The broken pipe ends it too, but if this process left before
    that signal came, processes that the model has started would stay."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)


def _set_up_process(title: str) -> None:
    # Ctrl-C or systemd may send these to the whole process group, but the server ends its workers after their batches.
    # Processes that a model starts would inherit SIG_IGN, and could not be terminated.
    for number in _IGNORED_SIGNALS:
        signal.signal(number, _ignore_signal)
        signal.siginterrupt(number, False)
    # Blocked during a fork, so that a signal that comes before the child restores its handlers is not lost.
    hold, release = (
        partial(signal.pthread_sigmask, how, _IGNORED_SIGNALS) for how in (signal.SIG_BLOCK, signal.SIG_UNBLOCK)
    )
    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=_restore_signals)
    # If memory is short, the kernel should end a worker rather than the server (proc(5), oom_score_adj).
    for path, text in (("/proc/self/comm", title), ("/proc/self/oom_score_adj", "300")):
        with suppress(OSError):  # The process can serve without the name and the score.
            Path(path).write_text(text)
    hide_memory()


def _ignore_signal(number: int, frame: object) -> None:
    pass


def _restore_signals() -> None:
    """Restore the default signals in a process that a model has forked, except for the model's handlers."""
    for number in _IGNORED_SIGNALS:
        if signal.getsignal(number) is _ignore_signal:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED_SIGNALS)


def _open_log() -> None:
    """Write log lines with levels, which the server's log reads. The server's own lines, and Python's crash
    reports, have a separate stream, handler and level, because models close the standard streams and configure
    logging."""
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
