"""Serves clients in a front end process: on a port that it shares with the protocol's other processes, by asking the
server.

The process has one thread, on which the data plane's loop runs with asyncio as its guest. All calls go to the server
through a link. The process has no models and no repository; its settings come from the server's own command line.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rocserve.backends.parameters import usable_cpus
from rocserve.core.exit_with_parent import exit_with_parent
from rocserve.core.private_paths import PrivatePaths
from rocserve.core.request_memory import RequestMemory
from rocserve.flags import settings_again
from rocserve.frontends.processes import entries
from rocserve.frontends.processes.forwarding import Forwarding
from rocserve.frontends.processes.front_end import RemoteInference
from rocserve.observability.logs import ROOT, LinesWithLevels
from rocserve.plane import anonymous_file
from rocserve.plane.freed_memory import FreedMemory
from rocserve.plane.guest_loop import GuestLoop
from rocserve.plane.loop import PlaneLoop, default_spin
from rocserve.services.access import GRPC_HEADER_PREFIX, restrictions
from rocserve.services.inference import header_forwarding
from rocserve.settings import ServerSettings

if TYPE_CHECKING:
    # A front end of one protocol does not load the modules of the other protocol.
    from rocserve.frontends.processes.http_front_end import HttpFrontEnd

_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The whole process group may get these signals (Ctrl-C, systemd). The server decides when its front ends end."""


def main(arguments: Sequence[str]) -> int:
    """Run the front end that the arguments describe, and return the exit status.

    The arguments are: the protocol, "grpc" or "http"; the descriptors of the parent's pipe, of the link, of the serving
    table's edition and of the table of request memory; the number of this front end; its row in that table; the port;
    the bytes that the requests of all processes may use; then the server's own flags.
    """
    protocol = arguments[0]
    parent_pipe, link, edition, uses, number, row, port, memory_bytes = map(int, arguments[1:9])
    for each in _IGNORED_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    for descriptor in (parent_pipe, link, edition, uses):
        os.set_inheritable(descriptor, False)
    with suppress(OSError):
        Path("/proc/self/comm").write_text(f"rocserve:{protocol}:{number}")
    parent_watch = exit_with_parent(parent_pipe)
    memory = RequestMemory(memory_bytes)
    memory.share(anonymous_file.map_file(uses, to_write=True), row)
    os.close(uses)
    log = _open_log().getChild(protocol)
    settings = settings_again(arguments[9:])
    with suppress(EOFError, ConnectionError):  # The server has ended meanwhile.
        server = ServerLink(settings, memory, log, socket.socket(fileno=link), edition)
        if protocol == "grpc":
            server.run_front_end(GrpcFrontEnd(settings, port, server))
        else:
            from rocserve.frontends.processes.http_front_end import HttpFrontEnd

            server.run_front_end(HttpFrontEnd(settings, port, server))
    os.close(parent_watch)
    return 0


@dataclass(eq=False)
class ServerLink:
    """Connects a front end of any protocol to the server, and tells the server whether the front end listens."""

    settings: ServerSettings
    memory: RequestMemory
    log: logging.Logger
    link: InitVar[socket.socket]
    edition_file: InitVar[int]
    """Descriptor of a file with a number (u64) that changes with each serving table, before the server answers a load.
    While the number stays the same, the server's earlier answers about its models are true."""

    def __post_init__(self, link: socket.socket, edition_file: int) -> None:
        """Raises EOFError or ConnectionError if the server has ended."""
        settings, memory, log = self.settings, self.memory, self.log
        spin = default_spin(usable_cpus()) if settings.spin is None else settings.spin
        self.plane = plane = PlaneLoop(log.getChild("plane"), spin)
        self.loop = GuestLoop(plane)
        self.edition = anonymous_file.map_file(edition_file, to_write=False).cast("Q")
        os.close(edition_file)
        self._listening: GrpcFrontEnd | HttpFrontEnd | None = None
        """None until the front end listens."""
        paths = PrivatePaths((*settings.repository.roots, *settings.repository.worker_load_folders))
        self.inference = RemoteInference(link, plane, paths, log, self._on_message, lambda: os._exit(0))
        self.forwarding = Forwarding(memory, self.inference.end)
        self.inference.end.trimmer.trim_process(
            FreedMemory(), lambda: memory.requests.own_bytes + memory.answers.own_bytes
        )
        plane.add_source(self.inference)

    def run_front_end(self, front_end: GrpcFrontEnd | HttpFrontEnd) -> None:
        """Serve clients until the server stops this front end, or ends."""
        serving = self.loop.create_task(self._run(front_end))
        self.plane.run()
        serving.cancel()

    async def _run(self, front_end: GrpcFrontEnd | HttpFrontEnd) -> None:
        end = self.inference.end
        try:
            await front_end.start()
        except (OSError, RuntimeError, ValueError) as error:
            number, text = 0, str(error) or repr(error)
            if isinstance(error, OSError) and not error.filename:
                number, text = error.errno or 0, error.strerror or text
            end.post_text(entries.LISTENING, text.encode(), count=number)
            # Exit after the message has been posted.
            self.plane.at_end_of_turn(partial(os._exit, 0))
            return
        self._listening = front_end
        end.post_text(entries.LISTENING, b"")

    def _on_message(self, kind: int, number: int, count: int, content: bytes) -> None:
        if kind == entries.EXIT:
            if self._listening is not None:
                self._listening.begin_exit()
        elif kind != entries.STOP:
            self.forwarding.on_message(kind, number, count, content)
        elif self._listening is not None:
            self._listening.stop(number / 1000)
        else:
            os._exit(0)


class GrpcFrontEnd:
    """Serves gRPC with the transport and handlers of a server without front end processes. On the loop's thread."""

    def __init__(self, settings: ServerSettings, port: int, server: ServerLink) -> None:
        from rocserve.frontends.grpc.inference import InferenceHandlers
        from rocserve.frontends.grpc.server import GrpcServer
        from rocserve.frontends.grpc.transport import TransportLimits, transport_settings

        self._handlers = InferenceHandlers(
            server.inference, server.memory, header_forwarding(settings.grpc.header_forward_pattern)
        )
        restricted = restrictions(settings.grpc.restricted, server.log, GRPC_HEADER_PREFIX)
        routes = {**self._handlers.routes(restricted), **server.forwarding.routes()}
        own = replace(transport_settings(settings), port=port, reuse_port=True)
        self._transport = GrpcServer(
            own, routes, server.log, server.plane, server.memory, TransportLimits.of(settings, server.memory)
        )

    async def start(self) -> None:
        """Raises OSError, RuntimeError or ValueError if the front end cannot listen."""
        self._transport.start()

    def begin_exit(self) -> None:
        self._handlers.begin_exit()

    def stop(self, grace_seconds: float) -> None:
        """Refuse new calls, answer the calls in flight within the grace time, then end the process."""
        # All answers have been sent by then. The system cleans up what Python and gRPC would clean up.
        self._transport.stop_soon(grace_seconds, partial(os._exit, 0))


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
