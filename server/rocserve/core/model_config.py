"""A model's configuration as plain data: what the server and the workers act on.

The whole of Triton's ModelConfig message, as clients see it, lives in `rocserve.config`; these are the parts with a
meaning here, checked and completed. Durations are microseconds, as in config.pbtxt.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from rocserve.core.datatypes import DataType


@dataclass(frozen=True, slots=True)
class InputConfig:
    name: str
    datatype: DataType
    dims: tuple[int, ...]
    """Without the batch dimension when the model batches; -1 for a dimension of any size."""
    reshape: tuple[int, ...] | None = None
    """The shape that the model itself sees (config.pbtxt's `reshape`); None = `dims`."""
    optional: bool = False
    format: str = "FORMAT_NONE"
    """FORMAT_NONE, FORMAT_NHWC or FORMAT_NCHW."""


@dataclass(frozen=True, slots=True)
class OutputConfig:
    name: str
    datatype: DataType
    dims: tuple[int, ...]
    reshape: tuple[int, ...] | None = None
    label_filename: str = ""
    labels: tuple[str, ...] = ()
    """The lines of `label_filename`."""


class InstanceKind(enum.Enum):
    AUTO = "KIND_AUTO"
    GPU = "KIND_GPU"
    CPU = "KIND_CPU"
    MODEL = "KIND_MODEL"


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    name: str
    kind: InstanceKind
    count: int
    gpus: tuple[int, ...] = ()
    passive: bool = False


class TimeoutAction(enum.Enum):
    REJECT = "REJECT"
    DELAY = "DELAY"


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """How long and how many requests may wait (ModelQueuePolicy)."""

    timeout_action: TimeoutAction = TimeoutAction.REJECT
    default_timeout_microseconds: int = 0
    """0 = no limit."""
    allow_timeout_override: bool = False
    max_queue_size: int = 0
    """0 = the server's own bound."""


@dataclass(frozen=True, slots=True)
class DynamicBatching:
    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_microseconds: int = 0
    preserve_ordering: bool = False
    priority_levels: int = 0
    """0 = no priorities; else 1 is the highest."""
    default_priority_level: int = 0
    default_queue_policy: QueuePolicy = QueuePolicy()
    priority_queue_policy: Mapping[int, QueuePolicy] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    model_name: str
    model_version: int
    """-1 = the highest ready version."""
    input_map: Mapping[str, str]
    """The member's input name -> the ensemble tensor's name."""
    output_map: Mapping[str, str]
    """The member's output name -> the ensemble tensor's name."""


@dataclass(frozen=True, slots=True)
class WarmupInput:
    datatype: DataType
    dims: tuple[int, ...]
    source: str
    """"zero", "random", or "file:<name>" in the model's warmup folder."""


@dataclass(frozen=True, slots=True)
class WarmupSample:
    name: str
    batch_size: int
    inputs: Mapping[str, WarmupInput]
    count: int = 1


@dataclass(frozen=True, slots=True)
class ExecutionAccelerator:
    """An entry of `optimization.execution_accelerators`."""

    name: str
    """E.g. "migraphx", "openvino"."""
    parameters: Mapping[str, str] = field(default_factory=dict)


class VersionPolicyKind(enum.Enum):
    LATEST = "latest"
    ALL = "all"
    SPECIFIC = "specific"


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    kind: VersionPolicyKind = VersionPolicyKind.LATEST
    latest: int = 1
    """How many of the highest versions are served (LATEST)."""
    specific: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    name: str
    platform: str = ""
    backend: str = ""
    """The canonical name of the backend that serves it ("onnx", "rocal", ...; "ensemble" for ensembles)."""
    max_batch_size: int = 0
    """0 = the model does not batch: shapes are the full shapes."""
    inputs: tuple[InputConfig, ...] = ()
    outputs: tuple[OutputConfig, ...] = ()
    version_policy: VersionPolicy = VersionPolicy()
    instance_groups: tuple[InstanceGroup, ...] = ()
    dynamic_batching: DynamicBatching | None = None
    ensemble_steps: tuple[EnsembleStep, ...] = ()
    model_warmup: tuple[WarmupSample, ...] = ()
    default_model_filename: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    gpu_accelerators: tuple[ExecutionAccelerator, ...] = ()
    """optimization.execution_accelerators.gpu_execution_accelerator, in its order."""
    cpu_accelerators: tuple[ExecutionAccelerator, ...] = ()
    decoupled: bool = False
    """A request may get any number of responses (model_transaction_policy)."""

    @property
    def is_ensemble(self) -> bool:
        return bool(self.ensemble_steps)
