"""A model's configuration as plain data, for the server and the workers. `rocserve.config` keeps Triton's whole
ModelConfig message, as clients see it. Here are the parts that rocserve acts on, checked and completed. Durations are
microseconds, as in config.pbtxt."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rocserve.core.datatypes import DataType
from rocserve.core.model_names import ModelKey, qualified


@dataclass(frozen=True, slots=True)
class Purpose:
    """The model's purpose by its file, in metadata as Ultralytics writes them."""

    task: str = ""
    """Such as "detect", "segment", "pose", "classify"; "" = unknown."""
    class_names: tuple[str, ...] = ()


NO_PURPOSE = Purpose()


@dataclass(frozen=True, slots=True)
class TensorConfig:
    """An input or output in the configuration."""

    name: str
    datatype: DataType
    dims: tuple[int, ...]
    """Without the batch dimension if the model batches; -1 = any size."""
    reshape: tuple[int, ...] | None = None
    """The dims that the model sees (config.pbtxt's `reshape`); None = `dims`."""
    any_rank: bool = field(default=False, kw_only=True)
    """The dims are unknown, even their number; `dims` is then (-1,)."""

    @property
    def model_dims(self) -> tuple[int, ...]:
        return self.dims if self.reshape is None else self.reshape


@dataclass(frozen=True, slots=True)
class InputConfig(TensorConfig):
    """An input in the configuration."""

    optional: bool = False
    format: str = "FORMAT_NONE"
    """FORMAT_NONE, FORMAT_NHWC or FORMAT_NCHW."""
    allow_ragged_batch: bool = False
    """Requests of different shapes may share a batch; the engine gets their elements concatenated."""


@dataclass(frozen=True, slots=True)
class OutputConfig(TensorConfig):
    """An output in the configuration."""

    label_filename: str = ""
    labels: tuple[str, ...] = ()
    """The lines of the file `label_filename`."""


class BatchInputKind(enum.Enum):
    """The meaning of a batch input's values (ModelConfig's BatchInput.Kind)."""

    ELEMENT_COUNT = "BATCH_ELEMENT_COUNT"
    ACCUMULATED_ELEMENT_COUNT = "BATCH_ACCUMULATED_ELEMENT_COUNT"
    ACCUMULATED_ELEMENT_COUNT_WITH_ZERO = "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO"
    MAX_ELEMENT_COUNT_AS_SHAPE = "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE"
    ITEM_SHAPE = "BATCH_ITEM_SHAPE"
    ITEM_SHAPE_FLATTEN = "BATCH_ITEM_SHAPE_FLATTEN"


@dataclass(frozen=True, slots=True)
class BatchInput:
    """An input that the server computes for each batch."""

    kind: BatchInputKind
    target_names: tuple[str, ...]
    """The model's inputs that get the values."""
    datatype: DataType
    source_inputs: tuple[str, ...]
    """The requests' inputs that the values describe."""


class InstanceKind(enum.Enum):
    AUTO = "KIND_AUTO"
    GPU = "KIND_GPU"
    CPU = "KIND_CPU"
    MODEL = "KIND_MODEL"


@dataclass(frozen=True, slots=True)
class RateLimiterResource:
    """An amount of a resource that an instance must hold while it runs a batch."""

    name: str
    count: int
    is_global: bool = False
    """The resource has one pool for the whole machine; otherwise each device has a pool."""


@dataclass(frozen=True, slots=True)
class InstanceRateLimiter:
    """The resources that an execution of an instance needs, and its priority."""

    resources: tuple[RateLimiterResource, ...] = ()
    priority: int = 0
    """Instances with lower numbers get more executions; 0 counts as 1."""


NO_LIMITS = InstanceRateLimiter()


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """Instances of a model that run on the same devices."""

    name: str
    kind: InstanceKind
    count: int
    gpus: tuple[int, ...] = ()
    passive: bool = False
    rate_limiter: InstanceRateLimiter = NO_LIMITS
    host_policy: str = ""


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """How many requests may wait, and how long (ModelQueuePolicy)."""

    delays_timed_out: bool = False
    """A request whose timeout has passed runs after the others (DELAY), and is not refused (REJECT)."""
    default_timeout_microseconds: int = 0
    """0 = no timeout."""
    allow_timeout_override: bool = False
    max_queue_size: int = 0
    """0 = the server's limit."""


@dataclass(frozen=True, slots=True)
class DynamicBatching:
    """How the scheduler joins requests to batches."""

    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_microseconds: int = 0
    preserve_ordering: bool = False
    priority_levels: int = 0
    """0 = no priorities; otherwise 1 is the highest level."""
    default_priority_level: int = 0
    default_queue_policy: QueuePolicy = QueuePolicy()
    priority_queue_policy: Mapping[int, QueuePolicy] = field(default_factory=dict)


class ControlKind(enum.Enum):
    """The meaning of a control input."""

    START = "CONTROL_SEQUENCE_START"
    READY = "CONTROL_SEQUENCE_READY"
    END = "CONTROL_SEQUENCE_END"
    CORRELATION_ID = "CONTROL_SEQUENCE_CORRID"


@dataclass(frozen=True, slots=True)
class SequenceControl:
    """An input that the server adds to the requests of a sequence."""

    name: str
    kind: ControlKind
    datatype: DataType
    """INT32, FP32 or BOOL, depending on which list of values the control has; CORRELATION_ID states its datatype."""
    no: float = 0
    yes: float = 1


@dataclass(frozen=True, slots=True)
class InitialState:
    """The value of a sequence's state before its first request."""

    name: str
    datatype: DataType
    dims: tuple[int, ...]
    data_file: str = ""
    """A file in the folder `initial_state` of the model; "" = zeros."""


@dataclass(frozen=True, slots=True)
class SequenceState:
    """An output that the server stores and sends as an input with the sequence's next request."""

    input_name: str
    output_name: str
    datatype: DataType
    dims: tuple[int, ...]
    initial_states: tuple[InitialState, ...] = ()


@dataclass(frozen=True, slots=True)
class OldestStrategy:
    """Sequences share batches; their oldest requests go first."""

    max_candidate_sequences: int = 0
    """0 = the server's default."""
    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_microseconds: int = 0
    preserve_ordering: bool = False


@dataclass(frozen=True, slots=True)
class SequenceBatching:
    """How the scheduler gives the requests of sequences to instances."""

    oldest: OldestStrategy | None = None
    """None = the strategy "direct": each sequence keeps a slot in the batches of one instance until it ends."""
    slot_delay_microseconds: int = 0
    """How long a "direct" batch waits until the share `slot_utilization` of its slots has requests."""
    slot_utilization: float = 0.0
    max_sequence_idle_microseconds: int = 1_000_000
    controls: tuple[SequenceControl, ...] = ()
    states: tuple[SequenceState, ...] = ()
    iterative: bool = False


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """A member of an ensemble, and where its tensors come from and go to."""

    model_name: str
    model_version: int
    """-1 = the highest ready version."""
    input_map: Mapping[str, str]
    """The member's input name -> the ensemble tensor's name."""
    output_map: Mapping[str, str]
    """The member's output name -> the ensemble tensor's name."""
    model_namespace: str = ""
    """The ensemble's namespace, whose models are preferred over those of other namespaces; "" without namespaces."""

    @property
    def member(self) -> ModelKey:
        """Return the member's key in the serving table."""
        return qualified(self.model_namespace, self.model_name)


@dataclass(frozen=True, slots=True)
class WarmupInput:
    """An input of a warm-up sample."""

    datatype: DataType
    dims: tuple[int, ...]
    source: str
    """"zero", "random", or "file:<name>" for a file in the model's warmup folder."""


@dataclass(frozen=True, slots=True)
class WarmupSample:
    """A request that a model runs before it is READY."""

    name: str
    batch_size: int
    inputs: Mapping[str, WarmupInput]
    count: int = 1


@dataclass(frozen=True, slots=True)
class ExecutionAccelerator:
    """An entry of `optimization.execution_accelerators`."""

    name: str
    """For example "migraphx" or "openvino"."""
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """Which versions are served; all versions if both fields are None."""

    latest: int | None = None
    """How many of the highest versions."""
    specific: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of a model, with Triton's fields."""

    name: str
    platform: str = ""
    backend: str = ""
    """Canonical name of the backend ("onnx", "rocal", ...; "ensemble" for ensembles)."""
    max_batch_size: int = 0
    """0 = the model does not batch: shapes are full shapes."""
    is_batch_size_written: bool = False
    """The configuration sets max_batch_size, perhaps to 0."""
    is_batch_size_chosen: bool = False
    """The server chose max_batch_size, because the configuration does not set it."""
    inputs: tuple[InputConfig, ...] = ()
    outputs: tuple[OutputConfig, ...] = ()
    version_policy: VersionPolicy = VersionPolicy(latest=1)
    instance_groups: tuple[InstanceGroup, ...] = ()
    dynamic_batching: DynamicBatching | None = None
    ensemble_steps: tuple[EnsembleStep, ...] = ()
    model_warmup: tuple[WarmupSample, ...] = ()
    default_model_filename: str = ""
    graph_level: int = 0
    """optimization.graph.level: how much the engine may optimize the graph; 0 = the engine's default."""
    operator_libraries: tuple[str, ...] = ()
    """Shared libraries with custom operators, in the model's folder (model_operations)."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    gpu_accelerators: tuple[ExecutionAccelerator, ...] = ()
    """optimization.execution_accelerators.gpu_execution_accelerator, in its order."""
    cpu_accelerators: tuple[ExecutionAccelerator, ...] = ()
    decoupled: bool = False
    """A request may get any number of responses (model_transaction_policy)."""
    batch_inputs: tuple[BatchInput, ...] = ()
    scattered_outputs: Mapping[str, str] = field(default_factory=dict)
    """Output -> the input by whose shape it is split among requests (BATCH_SCATTER_WITH_INPUT_SHAPE)."""
    sequence_batching: SequenceBatching | None = None
    ensemble_max_inflight_requests: int = 0
    """Limit of a decoupled step's responses that one ensemble request processes at a time; 0 = no limit."""
    response_cache: bool = False
    cc_model_filenames: Mapping[str, str] = field(default_factory=dict)
    """GPU architecture (e.g. "gfx942") -> the model file for it."""
    metric_tags: Mapping[str, str] = field(default_factory=dict)
    histogram_buckets: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Bucket bounds by metric family (model_metrics.metric_control)."""
    purpose: Purpose = NO_PURPOSE
    """Known from the loaded model only."""

    @property
    def has_open_batch(self) -> bool:
        """Return whether it is still open whether the model batches: max_batch_size is not set, and the tensors are not
        known yet."""
        is_open = self.max_batch_size == 0 and not self.is_batch_size_written
        return is_open and not (self.inputs and self.outputs)

    @property
    def is_ensemble(self) -> bool:
        return bool(self.ensemble_steps)


def control_inputs(batching: SequenceBatching) -> tuple[InputConfig, ...]:
    """Return the control inputs: each has one value per row."""
    return tuple(InputConfig(control.name, control.datatype, (1,)) for control in batching.controls)


def state_inputs(batching: SequenceBatching) -> tuple[InputConfig, ...]:
    return tuple(InputConfig(state.input_name, state.datatype, state.dims) for state in batching.states)


def with_sequence_tensors(config: ModelConfig) -> ModelConfig:
    """Return the configuration as the model sees it: controls and states are ordinary inputs and outputs. Empty inputs
    or outputs, which come from the model later, stay empty."""
    batching = config.sequence_batching
    if batching is None:
        return config
    added = (*control_inputs(batching), *state_inputs(batching)) if config.inputs else ()
    named = {output.name for output in config.outputs}
    states = batching.states if config.outputs else ()
    kept = (OutputConfig(one.output_name, one.datatype, one.dims) for one in states if one.output_name not in named)
    return replace(config, inputs=(*config.inputs, *added), outputs=(*config.outputs, *kept))
