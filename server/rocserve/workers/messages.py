"""The messages between the server, the zygote and the workers, but for batches and their results (`entries.py`).

Control messages go over the control socket of a session, one at a time: Load -> Loaded | LoadFailed,
WarmUp -> WarmedUp | LoadFailed, Unload -> (the session ends). Progress and MetricChanges come from the worker in
between. Spawn and TakeOver go to the zygote, and their answers come from it in the same order; so do Keep, NewServer
and EndLeft. Exited comes from it at any time.

Each is its name and JSON; on a control socket, a stream, it stands behind its length. No pickle: nothing is executed or
imported because of what a message says.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from rocserve.core.custom_metrics import MetricChanges
from rocserve.core.errors import StatusCode
from rocserve.core.model_config import NO_LIMITS, InstanceKind, InstanceRateLimiter, ModelConfig
from rocserve.core.plain import from_json, to_json
from rocserve.core.requests import Signature
from rocserve.settings import EngineSettings
from rocserve.workers.isolation import Confinement, gpu_devices

ALONE, SHARED, LEFT_END = b"1", b"+", b"-"
"""What a server says over a worker's reception. The first two come with the sockets of a session: a control socket, and
one for each instance. The process has one session alone, or those of other models beside it: then the session's key
follows. LEFT_END comes without: sessions that are still left from the server before are to end."""
LONGEST_RECEPTION = 64
"""Bytes."""
MOST_SOCKETS = 253
"""Of a session: Linux passes no more descriptors in one message."""
LONGEST_TEXT = 8192
"""Characters of one text in a message: an error, or a fault of what came."""
FRAME_LENGTH = struct.Struct("<I")
LONGEST_FRAME = 4 * 1024 * 1024
"""Bytes of what a worker says: room for some ten thousand tensors' names, and little enough to be parsed between two
requests."""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker of a model version."""

    kind: InstanceKind
    """CPU or GPU; MODEL where its model says itself what is where."""
    device: int | None
    """The GPU's number, or None on the CPU, and of KIND_MODEL."""
    instance_count: int
    """How many instances it has, each with a thread of its own."""
    instance_name: str = ""
    """Triton's: <group>_<instance>; of a worker with one instance."""
    rate_limiter: InstanceRateLimiter = NO_LIMITS
    """What each of its instances holds while it runs."""
    cores: tuple[int, ...] = ()
    """The CPU cores that it is kept to; empty = any."""
    architecture: str = ""
    """Of its GPU, e.g. "gfx90a"; "" where it is not known."""
    model_file: str = ""
    """Where this worker loads another file than the others."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load a model version. The config may lack inputs and outputs, to be completed from the signature."""

    model_name: str
    version: int
    model_folder: str
    version_folder: str
    model_file: str
    engine: str
    """The engine's module."""
    config: ModelConfig
    plan: WorkerPlan = field(default_factory=lambda: WorkerPlan(InstanceKind.CPU, None, 1))
    answers_requests: bool = False
    """The engine is of the kind of `backends/request_model.py`; the fields that follow are for it."""
    config_json: str = ""
    """The configuration as it is before completion, as Triton writes it in JSON."""
    settings: EngineSettings = field(default_factory=EngineSettings)
    memory_bytes: int = 0
    """That the worker may have; 0 = no bound."""
    shares_process: bool = False
    """Whether other models are in the worker's process."""


@dataclass(frozen=True, slots=True)
class Loaded:
    signature: Signature
    properties: Mapping[str, str] = field(default_factory=dict)
    """How the engine runs the model, for its metadata."""
    batches_at_once: int = 1
    """That an instance may have in its engine."""
    was_kept: bool = False
    """Since a server before."""


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """Loading or warming up failed; the session ends by itself."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Progress:
    """What the engine is at; comes at any time after Load, and after Loaded of what goes on beside the model."""

    text: str
    """One line; "" = nothing any more."""
    properties: Mapping[str, str] = field(default_factory=dict)
    """Those of Loaded as they are now; empty before it."""


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Run the config's warm-up samples (or, without any, what the engine chooses); the config is now complete."""

    config: ModelConfig
    config_json: str = ""
    """All of it, as Triton writes it, where the engine wants that."""


@dataclass(frozen=True, slots=True)
class WarmedUp:
    """Its instances take batches."""


@dataclass(frozen=True, slots=True)
class Unload:
    """End, after the batches in flight."""


@dataclass(frozen=True, slots=True)
class Verbosity:
    """Write details to the log from now on, or none. May come at any time; nothing answers it."""

    verbose: bool


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How a worker is started."""

    title: str
    """What ps shows; Linux keeps 15 bytes."""
    forked: bool
    """Fork the zygote, with the CPU engines that it has imported; else start Python afresh."""
    interpreter: str = ""
    """The Python of a worker that is not forked; empty = the server's own."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Set on top of what all workers get."""
    loader: tuple[str, ...] = ()
    """The words of the command that stand before the interpreter: another C library's program loader."""
    output_prefix: str = ""
    """Stands in the log before each line that the worker writes."""
    readable: tuple[str, ...] = ()
    """The files and folders that the worker reads beside its program."""
    writable: tuple[str, ...] = ()
    """The folders and devices that it writes to."""
    model_name: str = ""
    shared_worker: str = ""
    """The group of models that are in one process; "" = a process of its own. The first of them that is launched says
    all else."""
    bounds: Mapping[str, int] = field(default_factory=dict)
    """The model's own, by the fields of WorkerSettings; the settings' hold for the others."""

    def on_gpus(self, device: int | None) -> LaunchOptions:
        """Those of a worker on a GPU, or for None on all that the server may use; it is never forked."""
        own = {} if device is None else {"HIP_VISIBLE_DEVICES": str(device)}
        return replace(
            self,
            forked=False,
            environment={**self.environment, **own},
            writable=(*self.writable, *gpu_devices()),
        )


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a worker."""

    options: LaunchOptions
    confinement: Confinement = field(default_factory=Confinement)


@dataclass(frozen=True, slots=True)
class Spawned:
    """The worker runs. The server's end of its reception and the reading end of its output pipe come along, and a
    pidfd where the kernel has them (Linux 5.3)."""

    pid: int
    user_problem: str = ""
    """Why it does not run as the user that comes first; "" = it does."""
    control_group: str = ""
    """The folder of its cgroup; "" = it has none of its own."""


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    reason: str


@dataclass(frozen=True, slots=True)
class Exited:
    pid: int
    wait_status: int
    """As os.waitpid gives it."""


@dataclass(frozen=True, slots=True)
class Keep:
    """This worker serves: should the server die, hold it for the next one."""

    pid: int
    key: str
    """Equal for workers that have loaded the same in the same way; of one that models share the group's name."""


@dataclass(frozen=True, slots=True)
class NewServer:
    """Another server is there, and this comes back to it: what came before was for the server before. Workers that are
    not held for it are ended."""


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Have a worker that is held from the server before."""

    key: str


@dataclass(frozen=True, slots=True)
class EndLeft:
    """End the workers that are still held from the server before."""


Message = (
    Load | Loaded | LoadFailed | Progress | MetricChanges | WarmUp | WarmedUp | Unload | Verbosity
    | Spawn | Spawned | SpawnFailed | Exited | Keep | NewServer | TakeOver | EndLeft
)  # fmt: skip

_NAMED: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Message)}


def encode_message(message: Message) -> bytes:
    return type(message).__name__.encode() + b" " + to_json(message)


def decode_message(data: bytes) -> Message:
    """Raises: ValueError."""
    name, _, body = data.partition(b" ")
    kind = _NAMED.get(name.decode("ascii", "replace"))
    if kind is None:
        raise ValueError(f"unknown message {name[:40]!r}")
    message: Message = from_json(kind, body)
    return message


def status_code(code: int) -> StatusCode:
    """A code as a worker sends it; one that does not exist is INTERNAL."""
    try:
        return StatusCode(code)
    except ValueError:
        return StatusCode.INTERNAL


def encode_frame(message: Message) -> bytes:
    """A control message behind its length, as it stands on the stream."""
    data = encode_message(message)
    return FRAME_LENGTH.pack(len(data)) + data
