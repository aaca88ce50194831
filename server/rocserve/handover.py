"""What a server's process leaves to the one that takes its place, and what it has of the supervisor (supervisor.py)."""

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
from rocserve.supervisor import Post
from rocserve.workers.launcher import ZygoteProcess

_SIGNALS_AT_ONCE = 16
_MOST_LOADED_BYTES = 64 << 20
"""Of the names of loaded models."""


@dataclass(frozen=True, slots=True)
class Handover:
    ports: Mapping[str, int] = field(default_factory=dict)
    """Where clients were served, by the parts of the settings: where any free port was asked for, it stays the same."""
    zygote: int = 0
    """Its process id; its connection comes along."""
    control_groups: str = ""
    """The folder of the cgroups of workers."""


class SupervisorLink:
    """The server's side. After `watch` all calls are made on the asyncio loop."""

    def __init__(self, post: Post) -> None:
        self.parent_pipe = post.parent_pipe
        self._kept = exit_with_parent(post.parent_pipe)
        self._connection = post.connection
        self._connection.setblocking(False)
        self.takes_place_of = post.end
        """How the server before has ended; "" = there was none."""
        self.handover = from_json(Handover, post.left) if post.left else Handover()
        self._zygote: int | None
        """Its connection."""
        self._loaded: int
        """A file with the names of the models that are loaded under explicit control."""
        self._zygote, self._loaded = post.descriptors or (None, os.memfd_create("rocserve:loaded", os.MFD_CLOEXEC))
        self._serves = False

    @property
    def zygote(self) -> ZygoteProcess | None:
        """That of the server before; None: there was none."""
        if self._zygote is None:
            return None
        return ZygoteProcess(self.handover.zygote, socket.socket(fileno=os.dup(self._zygote)))

    def keep_zygote(self, zygote: ZygoteProcess) -> None:
        """Have the next server know this one."""
        if self._zygote is not None:
            os.close(self._zygote)
        self._zygote = os.dup(zygote.connection.fileno())
        self.handover = replace(self.handover, zygote=zygote.pid)
        if self._serves:
            self.leave()

    def settings(self, settings: ServerSettings) -> ServerSettings:
        """The settings as they are for this server: in the place of another it serves where that did, loads what that
        had loaded when asked to, and a model that has been broken since does not keep it from serving the others."""
        if not self.takes_place_of:
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
        """Have the next server load these, where models are loaded when somebody asks for it."""
        os.pwrite(self._loaded, json.dumps(models).encode() + b"\n", 0)

    def watch(self, on_signal: Callable[[int], None]) -> None:
        """Have the signals reported that the supervisor gets."""
        asyncio.get_running_loop().add_reader(self._connection, self._on_readable, on_signal)

    def leave(self, **changes: Any) -> None:
        """Have the next server know this; the first time says that this one serves."""
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
        # The supervisor has ended, and this process is about to.
        asyncio.get_running_loop().remove_reader(self._connection)
