"""Defines the messages between the server, the zygote and the workers, except for batches and results (`entries.py`).

Through the control socket of a session go, one at a time: Load -> Loaded | LoadFailed, WarmUp -> WarmedUp | LoadFailed,
CheckReadiness -> ModelReadiness, Unload -> (the session ends); Progress and MetricChanges come from the worker in
between. The zygote answers Spawn by Spawned or SpawnFailed, in their order, and sends Exited at any time. A message is
its name and JSON, on a control socket with its length in front. Pickle is not used, because it would let a message run
or import code.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from rocserve.core.custom_metrics import MetricChanges
from rocserve.core.load_check import NOT_CHECKED, LoadCheckReport
from rocserve.core.model_config import NO_LIMITS, InstanceKind, InstanceRateLimiter, ModelConfig
from rocserve.core.plain import from_json, to_json
from rocserve.core.requests import Signature
from rocserve.settings import EngineSettings
from rocserve.workers.isolation import Confinement, gpu_devices

ALONE, SHARED = b"1", b"+"
"""The messages of a worker's reception. They come with a model version's control socket and its instances' sockets.
ALONE: the process serves only this version. SHARED: it may serve others, too."""
MOST_SOCKETS = 253
"""Bound for one version: Linux passes no more descriptors in one message."""
FRAME_LENGTH = struct.Struct("<I")
LONGEST_FRAME = 4 * 1024 * 1024
"""Bytes of a worker's message: room for some ten thousand tensors' names, and parsed between two requests."""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """What one worker of a version runs."""

    kind: InstanceKind
    """CPU or GPU; MODEL if the model itself chooses its devices."""
    device: int | None
    """The GPU's number; None = CPU or KIND_MODEL."""
    instance_count: int
    instance_name: str = ""
    """Triton's name, <group>_<instance>; only for a worker with one instance."""
    rate_limiter: InstanceRateLimiter = NO_LIMITS
    cores: tuple[int, ...] = ()
    """The CPU cores that the worker is bound to; empty = any."""
    architecture: str = ""
    """The GPU's architecture, such as "gfx90a"; "" = not known."""
    group_name: str = ""
    """The instance group of a worker with all instances of the group; "" = it has one, `instance_name`."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return Triton's names of the worker's instances."""
        if not self.group_name:
            return (self.instance_name,) * self.instance_count
        return tuple(f"{self.group_name}_{number}" for number in range(self.instance_count))


@dataclass(frozen=True, slots=True)
class Load:
    """Load a model version. The config may lack inputs and outputs, which the signature then completes."""

    model_name: str
    version: int
    model_folder: str
    version_folder: str
    model_file: str
    engine: str
    config: ModelConfig
    plan: WorkerPlan = field(default_factory=lambda: WorkerPlan(InstanceKind.CPU, None, 1))
    answers_requests: bool = False
    """The engine implements `backends/request_model.py`. Only then config_json has a value."""
    config_json: str = ""
    """The configuration before completion, in Triton's JSON."""
    settings: EngineSettings = field(default_factory=EngineSettings)
    memory_bytes: int = 0
    """The worker's bound; 0 = none."""
    shares_process: bool = False


@dataclass(frozen=True, slots=True)
class Loaded:
    """The worker has loaded the model."""

    signature: Signature
    properties: Mapping[str, str] = field(default_factory=dict)
    """How the engine runs the model; shown in the model's metadata."""
    batches_at_once: int = 1
    """Batches that an instance may have in its engine at the same time."""
    load_check: LoadCheckReport = NOT_CHECKED


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """Loading or warming up failed; the session ends by itself."""

    code: int
    reason: str
    can_pass: bool = True
    """The same load may succeed later."""
    check: str = ""
    """The kind of the load check that refused the model (core/load_check.py); "" = another reason."""
    trace: str = ""
    """The traceback, starting in the model's own code; "" = the reason is complete without it."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Reports the engine's current work. Sent at any time after Load; after Loaded, it reports background work."""

    text: str
    properties: Mapping[str, str] = field(default_factory=dict)
    """The current value of Loaded.properties; empty before Loaded."""
    is_check: bool = False
    """The engine checks the model (ModelSource.report_check)."""


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Run the config's warm-up samples, or the engine's choice if there are none. The config is now complete."""

    config: ModelConfig
    config_json: str = ""
    """The complete configuration in Triton's JSON, if the engine needs it."""
    recorded_answers: str = ""
    """The file with the recorded answers (load_check/recorded.py); "" = none."""


@dataclass(frozen=True, slots=True)
class WarmedUp:
    """The worker has run the warm-up samples."""

    checks_readiness: bool = False
    """The model answers CheckReadiness."""
    load_check: LoadCheckReport = NOT_CHECKED
    """The result of the comparison with the recorded answers."""


@dataclass(frozen=True, slots=True)
class CheckReadiness:
    """Ask the model itself whether it is ready. Comes after WarmedUp, at most one at a time."""


@dataclass(frozen=True, slots=True)
class ModelReadiness:
    """The answer to CheckReadiness."""

    is_ready: bool
    fault: str = ""
    """Why the model gave no answer; "" = it answered."""


@dataclass(frozen=True, slots=True)
class Unload:
    """End after the batches in flight."""


@dataclass(frozen=True, slots=True)
class Verbosity:
    """Switch the details in the worker's log on or off. Comes at any time, and is not answered."""

    verbose: bool


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How the zygote starts a worker."""

    title: str
    """Shown by ps; Linux keeps 15 bytes."""
    forked: bool
    """Fork the zygote; else start a new Python."""
    preload: tuple[str, ...] = ()
    """Modules that the zygote imports before it forks, if they are installed."""
    interpreter: str = ""
    """The Python of a worker that is not forked; "" = the server's."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the variables that all workers get."""
    loader: tuple[str, ...] = ()
    """Arguments before the interpreter in the command: the program loader of another C library."""
    output_prefix: str = ""
    """Printed in the log before each line that the worker writes."""
    log_fields: Mapping[str, str] = field(default_factory=dict)
    """The subject of these lines, as arguments of `observability.log_fields.about`."""
    readable: tuple[str, ...] = ()
    """Files and folders that the worker reads, in addition to its program."""
    writable: tuple[str, ...] = ()
    """Folders and devices that the worker writes to."""
    model_name: str = ""
    shared_worker: str = ""
    """The group of models in the process, which starts with the first model's options; "" = it has one model."""
    bounds: Mapping[str, int] = field(default_factory=dict)
    """The model's own bounds, by fields of WorkerSettings. All other bounds come from the settings."""

    def of(self, plan: WorkerPlan) -> LaunchOptions:
        """Return the options of this worker. One that may use GPUs is never forked."""
        if plan.device is None and plan.kind is not InstanceKind.MODEL:
            return self
        # A GPU library reads the variable when it is loaded, so the device is chosen before the process starts.
        own = {} if plan.device is None else {"HIP_VISIBLE_DEVICES": str(plan.device)}
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
    """The worker runs. Comes with the server's end of its reception, the reading end of its output pipe and, since
    Linux 5.3, a pidfd."""

    pid: int
    user_problem: str = ""
    """Why the worker does not run as the preferred user; "" = it does."""


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    """The zygote could not start the worker."""

    reason: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A worker has ended."""

    pid: int
    wait_status: int
    """As os.waitpid returns it."""


Message = (
    Load | Loaded | LoadFailed | Progress | MetricChanges | WarmUp | WarmedUp | CheckReadiness | ModelReadiness
    | Unload | Verbosity | Spawn | Spawned | SpawnFailed | Exited
)  # fmt: skip

_NAMED: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Message)}


def encode_message(message: Message) -> bytes:
    return type(message).__name__.encode() + b" " + to_json(message)


def decode_message(data: bytes) -> Message:
    """Raises ValueError."""
    name, _, body = data.partition(b" ")
    kind = _NAMED.get(name.decode("ascii", "replace"))
    if kind is None:
        raise ValueError(f"unknown message {name[:40]!r}")
    message: Message = from_json(kind, body)
    return message


def encode_frame(message: Message) -> bytes:
    data = encode_message(message)
    return FRAME_LENGTH.pack(len(data)) + data
