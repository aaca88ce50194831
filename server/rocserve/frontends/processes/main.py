"""A front end's process: serves clients on a port that it shares with others of its kind, and asks the server.

It has one thread, the data plane's. Inference goes to the server by a link, all other calls by the control socket. It
has no models, no repository and no asyncio loop; what it is to do the server's own command line tells it.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

from rocserve.backends.parameters import usable_cpus
from rocserve.core.heap_trim import HeapTrim, keep_freed_memory
from rocserve.core.lifeline import die_with_holder
from rocserve.core.private_paths import PrivatePaths
from rocserve.core.request_memory import MemoryUse, RequestMemory
from rocserve.flags import settings_again
from rocserve.frontends.grpc.codec import InferCodec
from rocserve.frontends.grpc.inference import InferenceHandlers
from rocserve.frontends.grpc.reactor import ReactorTransport
from rocserve.frontends.grpc.transport import transport_options
from rocserve.frontends.processes.control_socket import (
    NOBODYS,
    ControlSocket,
    Listening,
    MemoryReport,
    NotListening,
    PlaneWatch,
    Stop,
)
from rocserve.frontends.processes.forwarding import Forwarding
from rocserve.frontends.processes.front_end import RemoteInference
from rocserve.observability.logs import ROOT, LinesWithLevels
from rocserve.plane.loop import PlaneLoop, default_spin
from rocserve.services.forwarded_headers import header_forwarding
from rocserve.services.restrictions import GRPC_HEADER_PREFIX, restrictions
from rocserve.settings import ServerSettings

_PASSED_OVER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""They may go to the whole process group (Ctrl-C, systemd); the server says when its front ends are to end."""
_CHECK_SECONDS = 1.0
"""Between two looks at the memory that is used."""


def main(arguments: Sequence[str]) -> int:
    """The descriptors of the lifeline, of the control socket and of the link; the number of this front end and how many
    there are; the port; the bytes that all may use for requests; then the server's own flags."""
    lifeline, control, link, number, count, port, memory_bytes = map(int, arguments[:7])
    for each in _PASSED_OVER:
        signal.signal(each, signal.SIG_IGN)
    for descriptor in (lifeline, control, link):
        os.set_inheritable(descriptor, False)
    with suppress(OSError):
        Path("/proc/self/comm").write_text(f"rocserve:grpc:{number}")
    kept = die_with_holder(lifeline)
    settings = settings_again(arguments[7:])
    memory = RequestMemory(memory_bytes, count)
    try:
        FrontEnd(settings, port, memory, _open_log()).run(socket.socket(fileno=control), socket.socket(fileno=link))
    except (EOFError, ConnectionError):
        pass  # The server has ended meanwhile.
    finally:
        os.close(kept)
    return 0


class FrontEnd:
    """gRPC's."""

    def __init__(self, settings: ServerSettings, port: int, memory: RequestMemory, log: logging.Logger) -> None:
        self._settings = settings
        self._port = port
        self._memory = memory
        self._log = log
        spin = default_spin(usable_cpus()) if settings.spin is None else settings.spin
        self._plane = PlaneLoop(log.getChild("plane"), spin)
        self._forwarding = Forwarding(memory)
        self._trim = HeapTrim(lambda: memory.used_bytes, keep_freed_memory())
        self._reported = MemoryUse()
        self._control: ControlSocket
        self._handlers: InferenceHandlers
        self._transport: ReactorTransport

    def run(self, control: socket.socket, link: socket.socket) -> None:
        """Until the server says so or is gone. Raises: EOFError, ConnectionError: the server is gone."""
        settings, plane, log = self._settings, self._plane, self._log.getChild("grpc")
        self._control = ControlSocket(
            control,
            PlaneWatch(control, plane),
            settings.grpc.max_message_bytes,
            self._on_message,
            lambda reason: os._exit(0),
        )
        self._forwarding.begin(self._control)
        paths = PrivatePaths((*settings.model_repositories, *settings.worker_load_folders))
        inference = RemoteInference(link, plane, paths, log, on_gone=lambda: os._exit(0), on_exit=self._begin_exit)
        plane.add_source(inference)
        forwarded = header_forwarding(settings.grpc.header_forward_pattern)
        handlers = self._handlers = InferenceHandlers(inference, InferCodec(), self._memory, forwarded)
        restricted = restrictions(settings.grpc.restricted, log, GRPC_HEADER_PREFIX)
        routes = {**handlers.routes(restricted), **self._forwarding.routes()}
        options = transport_options(settings.grpc, settings.write_timeout_seconds)
        options = replace(options, port=self._port, reuse_port=True)
        self._transport = ReactorTransport(options, routes, log, plane, self._memory)
        try:
            self._transport.start()
        except (OSError, RuntimeError, ValueError) as error:
            self._control.send(NOBODYS, _not_listening(error))
            return
        self._control.send(NOBODYS, Listening())
        plane.call_soon(self._check)
        plane.run()

    def _on_message(self, call: int, head: Any, body: bytes) -> None:
        if call != NOBODYS:
            self._forwarding.on_message(call, head, body)
        elif isinstance(head, Stop):
            # All has been sent by then, and what Python and gRPC would tidy up the system does.
            self._transport.stop_soon(head.grace_seconds, partial(os._exit, 0))

    def _begin_exit(self) -> None:
        self._handlers.begin_exit()

    def _check(self) -> None:
        self._plane.call_at(time.monotonic() + _CHECK_SECONDS, self._check)
        use = self._memory.own_use()
        if use != self._reported:
            self._reported = use
            self._control.send(NOBODYS, MemoryReport(*astuple(use)))
        # Nothing is under way when it is time to.
        if self._trim.check():
            self._trim.trim()


def _not_listening(error: Exception) -> NotListening:
    if isinstance(error, OSError) and not error.filename:
        return NotListening(error.errno or 0, error.strerror or str(error))
    return NotListening(0, str(error))


def _open_log() -> logging.Logger:
    """Lines with levels, by which the server's log sorts them; they are lost rather than waited for."""
    os.set_blocking(sys.stderr.fileno(), False)
    faulthandler.enable(all_threads=False)
    handler = logging.StreamHandler()
    handler.setFormatter(LinesWithLevels())
    log = logging.getLogger(ROOT)
    log.handlers = [handler]
    log.propagate = False
    log.setLevel(logging.INFO)
    return log
