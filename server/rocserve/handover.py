"""Hands a server's ports, zygote and loaded models to the process that replaces it, through the supervisor."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rocserve.core.exit_with_parent import exit_with_parent
from rocserve.core.passed_descriptors import send_with_descriptors
from rocserve.core.plain import from_json, to_json
from rocserve.settings import ControlMode, ServerSettings
from rocserve.supervisor import ServerStart
from rocserve.workers.launcher import ZygoteProcess

_SIGNALS_AT_ONCE = 16
_MOST_LOADED_BYTES = 64 << 20
"""Limit of the JSON of loaded models' names."""


@dataclass(frozen=True, slots=True)
class Handover:
    ports: Mapping[str, int] = field(default_factory=dict)
    """Part of the settings -> its port, so that a replacement keeps a port that the kernel chose."""
    zygote: int = 0
    """Process id; the zygote's connection is passed as a descriptor."""
    control_groups: str = ""
    """Folder of the workers' cgroups."""


class SupervisorLink:
    """The server's end of the connection to the supervisor. After `watch` all calls come on the asyncio loop."""

    def __init__(self, start: ServerStart) -> None:
        self.parent_pipe = start.parent_pipe
        self._kept = exit_with_parent(start.parent_pipe)
        self._connection = start.connection
        self._connection.setblocking(False)
        self.previous_end = start.previous_end
        """How the previous server process ended; "" = this is the first."""
        self.handover = from_json(Handover, start.handover) if start.handover else Handover()
        self._zygote: int | None
        """Descriptor of the zygote's connection; None until there is a zygote."""
        self._loaded: int
        """File with the names of models that clients have loaded, under explicit control."""
        self._zygote, self._loaded = start.descriptors or (None, os.memfd_create("rocserve:loaded", os.MFD_CLOEXEC))
        self._serves = False

    @property
    def zygote(self) -> ZygoteProcess | None:
        """Return the previous server's zygote; None if there was none."""
        if self._zygote is None:
            return None
        return ZygoteProcess(self.handover.zygote, socket.socket(fileno=os.dup(self._zygote)))

    def keep_zygote(self, zygote: ZygoteProcess) -> None:
        if self._zygote is not None:
            os.close(self._zygote)
        self._zygote = os.dup(zygote.connection.fileno())
        self.handover = replace(self.handover, zygote=zygote.pid)
        if self._serves:
            self.keep_for_next()

    def settings(self, settings: ServerSettings) -> ServerSettings:
        """Adapt the settings for a replacement: same ports and loaded models; broken models do not end it."""
        if not self.previous_end:
            return settings
        parts: dict[str, Any] = {
            name: replace(getattr(settings, name), port=port) for name, port in self.handover.ports.items()
        }
        repository = replace(settings.repository, ends_on_failure=False, may_lack_models=True)
        is_explicit = repository.control_mode is ControlMode.EXPLICIT
        if is_explicit and (loaded := os.pread(self._loaded, _MOST_LOADED_BYTES, 0)):
            repository = replace(repository, loaded_before=tuple(json.loads(loaded.partition(b"\n")[0])))
        return replace(settings, exit_on_error=False, repository=repository, **parts)

    def note_loaded(self, models: Sequence[str]) -> None:
        """Keep the names of models that the next server must load under explicit control."""
        os.pwrite(self._loaded, json.dumps(models).encode() + b"\n", 0)

    def watch(self, on_signal: Callable[[int], None]) -> None:
        """Report the supervisor's signals to `on_signal`."""
        asyncio.get_running_loop().add_reader(self._connection, self._on_readable, on_signal)

    def keep_for_next(self, **changes: Any) -> None:
        """Keep fields of Handover for the next server. The first call reports that this server serves."""
        self._serves = True
        self.handover = replace(self.handover, **changes)
        assert self._zygote is not None, "workers are started by it"
        send_with_descriptors(self._connection, to_json(self.handover), (self._zygote, self._loaded))

    def _on_readable(self, on_signal: Callable[[int], None]) -> None:
        try:
            for _ in range(_SIGNALS_AT_ONCE):
                number = self._connection.recv(1)
                if not number:
                    break
                on_signal(number[0])
            else:
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        # The supervisor has ended, so the kernel is about to end this process too.
        asyncio.get_running_loop().remove_reader(self._connection)
