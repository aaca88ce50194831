"""Serves clients in a front end process: over both protocols, on ports that it shares with other processes, by asking
the server.

The process has one thread, on which the data plane's loop runs with asyncio as its guest. All calls go to the server
through a link. The process has no models and no repository; its settings come from the server's own command line.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rocserve.backends.parameters import usable_cpus
from rocserve.core.exit_with_parent import exit_with_parent
from rocserve.core.private_paths import PrivatePaths
from rocserve.core.request_memory import RequestMemory
from rocserve.flags import settings_again
from rocserve.frontends.listen_address import ListenAddress
from rocserve.frontends.processes.forwarding import Forwarding
from rocserve.frontends.processes.front_end import RemoteInference
from rocserve.frontends.transports import Answering, Transports
from rocserve.links import entries
from rocserve.observability.logs import ROOT, LinesWithLevels
from rocserve.plane import anonymous_file
from rocserve.plane.freed_memory import FreedMemory
from rocserve.plane.guest_loop import GuestLoop
from rocserve.plane.loop import PlaneLoop, default_spin
from rocserve.settings import ServerSettings

if TYPE_CHECKING:
    # A front end without HTTP does not import its modules.
    from rocserve.frontends.http.inference import HttpParts

_REPORT_SECONDS = 1.0
_RETIREMENT_SECONDS = 5.0
"""A connection's handshake has ended by then, even if packets of it were lost."""


def main(arguments: Sequence[str]) -> int:
    """Run the front end that the arguments describe, and return the exit status.

    The arguments are: the descriptors of the parent's pipe, of the link, of the serving table's edition and of the
    table of request memory; the number of this front end; its row in that table; the bytes that the requests of all
    processes may use; the age in milliseconds at which gRPC's connections are renewed, 0 = not at all; the ports of
    HTTP and of gRPC, 0 if the protocol is off; then the server's own flags.
    """
    parent_pipe, link, edition, uses, number, row, memory_bytes, renewal_ms, *ports = map(int, arguments[:10])
    # The whole process group may get these (Ctrl-C, systemd). The server decides when its front ends end.
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)
    for descriptor in (parent_pipe, link, edition, uses):
        os.set_inheritable(descriptor, False)
    with suppress(OSError):
        Path("/proc/self/comm").write_text(f"rocserve:front:{number}")
    parent_watch = exit_with_parent(parent_pipe)
    memory = RequestMemory(memory_bytes)
    memory.share(anonymous_file.map_file(uses, to_write=True), row)
    os.close(uses)
    settings = settings_again(arguments[10:])
    http, grpc = settings.http, settings.grpc
    addresses = (
        ListenAddress("HTTP", "http", http.address, ports[0], reuse_port=True),
        ListenAddress("gRPC", "grpc", grpc.address, ports[1], reuse_port=True),
    )
    with suppress(EOFError, ConnectionError):  # The server has ended meanwhile.
        front_end = FrontEnd(settings, memory, _open_log(), socket.socket(fileno=link), edition, renewal_ms)
        front_end.run([where for where in addresses if where.port])
    os.close(parent_watch)
    return 0


class FrontEnd:
    """Connects the transports of this process to the server, and tells the server whether they listen. On the loop's
    thread."""

    def __init__(
        self,
        settings: ServerSettings,
        memory: RequestMemory,
        log: logging.Logger,
        link: socket.socket,
        edition_file: int,
        renewal_ms: int,
    ) -> None:
        """`edition_file`: descriptor of the serving table's edition, see `remote_parts`. Raises EOFError or
        ConnectionError if the server has ended."""
        spin = default_spin(usable_cpus()) if settings.spin is None else settings.spin
        self._plane = plane = PlaneLoop(log.getChild("plane"), spin)
        self._loop = GuestLoop(plane)
        edition = anonymous_file.map_file(edition_file, to_write=False).cast("Q")
        os.close(edition_file)
        paths = PrivatePaths((*settings.repository.roots, *settings.repository.worker_load_folders))
        self._inference = RemoteInference(link, plane, paths, log, self._on_message, lambda: os._exit(0))
        self._forwarding = Forwarding(memory, self._inference.end, self._inference.exchanges)
        self._inference.end.trimmer.trim_process(
            FreedMemory(), lambda: memory.requests.own_bytes + memory.answers.own_bytes
        )
        plane.add_source(self._inference)

        def http_parts() -> HttpParts:
            from rocserve.frontends.processes.remote_methods import remote_parts

            return remote_parts(self._inference, self._forwarding, self._loop, memory, edition, settings.http)

        answering = Answering(self._inference, memory, self._forwarding.routes(), http_parts)
        self._transports = Transports(settings, plane, self._loop, answering, log, renewal_ms)
        self._log = log
        self._reports_work = bool(renewal_ms)
        self._listens = False
        self._retirement: asyncio.Task[None] | None = None
        """Waits until there is no client."""
        self._reported_seconds = 0.0
        self._ending: asyncio.Task[None] | None = None

    def run(self, addresses: Sequence[ListenAddress]) -> None:
        """Serve clients until the server stops this front end, or ends."""
        serving = self._loop.create_task(self._start(addresses))
        self._plane.run()
        serving.cancel()

    async def _start(self, addresses: Sequence[ListenAddress]) -> None:
        end = self._inference.end
        errors: list[Exception] = []
        for where in addresses:
            try:
                await self._transports.start(where)
            except (OSError, RuntimeError, ValueError) as error:
                errors.append(error)
        if errors:
            number, text = 0, "; ".join(map(_text_of, errors))
            if isinstance(errors[0], OSError) and not errors[0].filename:
                number = errors[0].errno or 0
            end.post_text(entries.LISTENING, text.encode(), count=number)
            # Exit after the message has been posted.
            self._plane.at_end_of_turn(partial(os._exit, 0))
            return
        self._listens = True
        end.post_text(entries.LISTENING, b"")
        if self._reports_work:
            self._report_work()

    def _report_work(self) -> None:
        worked = int((self._plane.worked_seconds - self._reported_seconds) * 1e6)
        # Less, a thousandth of a CPU, is reported later.
        if worked >= 1000:
            self._reported_seconds += worked / 1e6
            self._inference.end.post_entry(entries.WORKED, worked)
        self._loop.call_later(_REPORT_SECONDS, self._report_work)

    async def _retire(self) -> None:
        # Handshakes that have begun are completed meanwhile.
        await asyncio.sleep(_RETIREMENT_SECONDS)
        while self._transports.has_clients():  # noqa: ASYNC110 - the kernel does not signal that the last has gone
            await asyncio.sleep(_REPORT_SECONDS)
        self._stop(_RETIREMENT_SECONDS)

    def _stop(self, grace_seconds: float) -> None:
        self._ending = self._loop.create_task(self._transports.stop(grace_seconds))
        # All answers have been sent by then. The system cleans up what Python and gRPC would clean up.
        self._ending.add_done_callback(lambda ended: os._exit(0))

    def _on_message(self, kind: int, number: int) -> None:
        if kind == entries.EXIT:
            self._transports.close_after_answers(number != entries.STAY)
            if number == entries.END_STREAMS:
                self._transports.end_streams()
            if self._retirement is not None:
                self._retirement.cancel()
            self._retirement = self._loop.create_task(self._retire()) if number == entries.RETIRE else None
        elif kind != entries.STOP:
            self._log.error("the server sent a message of kind %d", kind)
        elif self._listens:
            self._stop(number / 1000)
        else:
            os._exit(0)


def _text_of(error: Exception) -> str:
    """Return the error as users read it: without a number, but with the name of a file."""
    if isinstance(error, OSError) and not error.filename and error.strerror:
        return error.strerror
    return str(error) or repr(error)


def _open_log() -> logging.Logger:
    """Return a log that writes lines with levels, by which the server's log sorts them. Lines are lost if the pipe is
    full, because a write must not block the loop."""
    os.set_blocking(sys.stderr.fileno(), False)
    faulthandler.enable(all_threads=False)
    handler = logging.StreamHandler()
    handler.setFormatter(LinesWithLevels())
    log = logging.getLogger(ROOT)
    log.handlers = [handler]
    log.propagate = False
    log.setLevel(logging.INFO)
    return log
