"""A front end's process: serves clients on a port that it shares with others of its kind, and asks the server.

It has one thread, its loop's. Inference goes to the server by a link, all other calls by the control socket. It has no
models and no repository; what it is to do the server's own command line tells it.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocserve.backends.parameters import usable_cpus
from rocserve.core.heap_trim import HeapTrim, keep_freed_memory
from rocserve.core.lifeline import die_with_holder
from rocserve.core.private_paths import PrivatePaths
from rocserve.core.request_memory import RequestMemory
from rocserve.flags import settings_again
from rocserve.frontends.processes.control_socket import (
    NOBODYS,
    ControlSocket,
    Listening,
    NotListening,
    PlaneWatch,
    Stop,
)
from rocserve.frontends.processes.forwarding import Forwarding
from rocserve.frontends.processes.front_end import RemoteInference
from rocserve.observability.logs import ROOT, LinesWithLevels
from rocserve.plane import anonymous_file
from rocserve.plane.loop import PlaneLoop, default_spin
from rocserve.settings import ServerSettings

_PASSED_OVER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""They may go to the whole process group (Ctrl-C, systemd); the server says when its front ends are to end."""
_CHECK_SECONDS = 1.0
"""Between two looks whether memory can be given back."""


def main(arguments: Sequence[str]) -> int:
    """What its clients speak, "grpc" or "http"; the descriptors of the lifeline, of the control socket, of the link, of
    the serving table's edition and of the table that says what is used of the memory for requests; the number of this
    front end, its row in that table, the port, and the bytes that all may use; then the server's own flags."""
    protocol = arguments[0]
    lifeline, control, link, edition, uses, number, row, port, memory_bytes = map(int, arguments[1:10])
    for each in _PASSED_OVER:
        signal.signal(each, signal.SIG_IGN)
    for descriptor in (lifeline, control, link, edition, uses):
        os.set_inheritable(descriptor, False)
    with suppress(OSError):
        Path("/proc/self/comm").write_text(f"rocserve:{protocol}:{number}")
    kept = die_with_holder(lifeline)
    memory = RequestMemory(memory_bytes)
    memory.share(anonymous_file.map_to_write(uses), row)
    os.close(uses)
    task = FrontEndTask(
        settings_again(arguments[10:]),
        port,
        memory,
        _open_log().getChild(protocol),
        socket.socket(fileno=control),
        socket.socket(fileno=link),
        edition,
    )
    # Each is spared the other's modules.
    if protocol == "grpc":
        from rocserve.frontends.processes.grpc_front_end import serve
    else:
        from rocserve.frontends.processes.http_front_end import serve
    try:
        serve(task)
    except (EOFError, ConnectionError):
        pass  # The server has ended meanwhile.
    finally:
        os.close(kept)
    return 0


@dataclass(frozen=True, slots=True)
class FrontEndTask:
    """What a front end is started with."""

    settings: ServerSettings
    port: int
    memory: RequestMemory
    log: logging.Logger
    control: socket.socket
    link: socket.socket
    edition: int
    """See edition.py."""


class WayToServer:
    """What front ends of all protocols have: their link, their control socket, and what they tell of themselves."""

    def __init__(
        self,
        task: FrontEndTask,
        stop: Callable[[float], object],
        begin_exit: Callable[[], None],
    ) -> None:
        """
        Args:
            stop: called when it is to refuse new calls, to answer those in flight within so many seconds, and then to
                end its process.
            begin_exit: called when clients are to be told that the server ends.

        Raises:
            EOFError, ConnectionError: the server is gone.
        """
        settings, memory = task.settings, task.memory
        spin = default_spin(usable_cpus()) if settings.spin is None else settings.spin
        self.plane = plane = PlaneLoop(task.log.getChild("plane"), spin)
        """Runs on the process's one thread."""
        self._stop = stop
        self._trim = HeapTrim(lambda: memory.request_bytes + memory.answer_bytes, keep_freed_memory())
        self._control = ControlSocket(
            task.control,
            PlaneWatch(task.control, plane),
            settings.grpc.max_message_bytes,
            self._on_message,
            lambda reason: os._exit(0),
        )
        self.forwarding = Forwarding(memory, self._control)
        paths = PrivatePaths((*settings.repository.roots, *settings.repository.worker_load_folders))
        self.inference = RemoteInference(
            task.link, plane, paths, task.log, on_gone=lambda: os._exit(0), on_exit=begin_exit
        )
        plane.add_source(self.inference)

    def tell_listening(self) -> None:
        self._control.send(NOBODYS, Listening())
        self.plane.call_soon(self._check)

    def tell_refusal(self, error: Exception) -> None:
        """The port cannot be listened on; the process is to end."""
        if isinstance(error, OSError) and not error.filename:
            self._control.send(NOBODYS, NotListening(error.errno or 0, error.strerror or str(error)))
        else:
            self._control.send(NOBODYS, NotListening(0, str(error)))

    def _on_message(self, call: int, head: Any, body: bytes) -> None:
        if call != NOBODYS:
            self.forwarding.on_message(call, head, body)
        elif isinstance(head, Stop):
            self._stop(head.grace_seconds)

    def _check(self) -> None:
        self.plane.call_at(time.monotonic() + _CHECK_SECONDS, self._check)
        # Nothing is under way when it is time to.
        if self._trim.check():
            self._trim.trim()


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
